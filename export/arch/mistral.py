"""Mistral: Llama's blocks, with attention that may see only a window of the last tokens.

Knows: what differs from Llama. Does not know: the rest (`export.arch.llama`).
Source: Jiang et al. 2023; the keys of Hugging Face's `MistralConfig`. As GGUF these models call themselves llama.
"""

import dataclasses
from typing import Any

from export.arch import llama
from export.arch.llama import IGNORED, Config, build, layout
from export.checkpoint.source import Checkpoint
from export.config import Keys

__all__ = ["GGUF_NAME", "IGNORED", "TINY", "Config", "build", "layout", "read_config"]

GGUF_NAME = None


def read_config(checkpoint: Checkpoint) -> Config:
    """Read config.json; errors as `export.arch.llama.read_config`'s.

    Two keys must be there, if only as null: where they are left out, the reference implementation takes 4096 and 8.
    """
    keys = Keys(checkpoint.config, str(checkpoint.path))
    keys.require("sliding_window", "num_key_value_heads")
    harmless = {key: values for key, values in llama.HARMLESS.items() if key != "sliding_window"}
    config = llama.read_json(checkpoint, harmless)
    return dataclasses.replace(config, window=keys.count("sliding_window", 0))


TINY: dict[str, dict[str, Any]] = {
    "window": {
        **llama.TINY["untied"], "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 16,
        "sliding_window": 8,
    },
    "full": {
        **llama.TINY["untied"], "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 16,
        "sliding_window": None,
    },
}  # fmt: skip
