"""Gemma 3 with images, of which the text is taken: the same model as `gemma3_text`, one level deeper in the checkpoint.

Knows: where that level is. Does not know: the model (`export.arch.gemma3_text`); how images are seen.
Source: the keys of Hugging Face's `Gemma3Config` and the tensor names of published checkpoints, before and since
transformers 4.52. As GGUF the text is a file of its own and calls itself gemma3 too; `gemma3_text` reads it.
"""

from collections.abc import Mapping
from typing import Any

from appliance.errors import CheckpointError
from export.arch import gemma3_text
from export.arch.gemma3_text import Config, build
from export.checkpoint.source import Checkpoint
from export.config import Keys
from export.weights import Stored

__all__ = ["GGUF_NAME", "IGNORED", "TINY", "Config", "build", "layout", "read_config"]

GGUF_NAME = None

IGNORED = (
    *(f"{where}{part}.*" for where in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
    "*.rotary_emb.*", "*lm_head.weight",
)  # fmt: skip
"""Not wanted: what sees images. Not missed: see `gemma3_text.IGNORED`."""

PLACES = {"language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"}
"""Before the names of everything but the head, and the head's."""


def read_config(checkpoint: Checkpoint) -> Config:
    """Read config.json's "text_config"; errors as `export.arch.gemma3_text.read_config`'s."""
    keys = Keys(checkpoint.config, str(checkpoint.path))
    keys.require("text_config")
    keys.refuse_unless({"quantization_config": (None,)})
    return gemma3_text.read_json(keys.inner("text_config"), keys.flag("tie_word_embeddings", True))


def layout(checkpoint: Checkpoint, config: Config) -> Mapping[str, Stored]:
    """See `gemma3_text.layout`; the prefix is whichever the file has."""
    names = checkpoint.names()
    for prefix, head in PLACES.items():
        if f"{prefix}embed_tokens.weight" in names:
            return gemma3_text.layout(checkpoint, config, prefix, head)
    looked = " or ".join(f"{prefix}embed_tokens.weight" for prefix in PLACES)
    raise CheckpointError(f"{checkpoint.path}: there is no tensor {looked}", "fetch the checkpoint again")


TINY: dict[str, dict[str, Any]] = {
    "text": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": gemma3_text.TINY["period"],
    },
}  # fmt: skip
