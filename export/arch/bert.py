"""BERT as a sentence embedder: all-MiniLM-L6-v2 and the other sentence-transformers in its shape.

Knows: config keys and tensor names of Hugging Face, how sentence-transformers says which pooling. Does not know: operators
(`export.encoder_blocks`), quantization, targets, tokenizers.

Source: Devlin et al. 2019; the keys of Hugging Face's `BertConfig`; sentence-transformers' modules.json.

    ids -- embed (+ position + segment) -- norm -- [ attention -(+)- norm - mlp -(+)- norm ] x layers -- pool --> embedding
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from appliance.errors import CheckpointError
from export.checkpoint.sidecars import read_object
from export.checkpoint.source import Checkpoint
from export.config import Keys
from export.encoder_blocks import EncoderBuilder, Pooling
from export.weights import Stored, Weights

TASK = "embed"

GGUF_NAME = None

IGNORED = ("embeddings.position_ids", "pooler.*")
"""The first can be counted; the second is a layer of BERT's own that sentence-transformers does not use."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_act": (None, "gelu"),
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "embedding_size": (None,),
}
"""Keys that change what a model computes, with the only values that this architecture is right for."""

MODULES = "modules.json"


@dataclass(frozen=True)
class Config:
    """Everything the graph depends on. `context_length` may be less than `positions`, the rows of the position table."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    layers: int
    heads: int
    positions: int
    segments: int
    context_length: int
    norm_epsilon: float
    pooling: Pooling


def read_config(checkpoint: Checkpoint) -> Config:
    """Read config.json, and modules.json with the pooling module's config where there is one.

    Raises:
        CheckpointError: a key is missing, is out of range, or asks for something that is not supported; it is named.
    """
    keys = Keys(checkpoint.config, str(checkpoint.path))
    keys.refuse_unless(HARMLESS)
    positions = keys.count("max_position_embeddings")
    config = Config(
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        inner_size=keys.count("intermediate_size"),
        layers=keys.count("num_hidden_layers"),
        heads=keys.count("num_attention_heads"),
        positions=positions,
        segments=keys.count("type_vocab_size", 2),
        context_length=positions,
        norm_epsilon=keys.number("layer_norm_eps", 1e-12),
        pooling=_pooling(checkpoint),
    )
    if config.hidden_size % config.heads:
        raise keys.wrong(f"{config.heads} heads cannot share a hidden size of {config.hidden_size} evenly")
    return config


def _pooling(checkpoint: Checkpoint) -> Pooling:
    """What modules.json says; the mean where there is none, as sentence-transformers has it. Whether it asks for unit
    length does not matter: embeddings here always have it."""
    path = checkpoint.sidecar(MODULES)
    if path is None:
        return "mean"
    for module in _modules(path):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            place = Path(str(module.get("path", "")))
            if place.is_absolute() or ".." in place.parts:
                raise CheckpointError(f"{path}: the path {str(place)!r} leaves the folder", "do not use this checkpoint")
            return _pooling_mode(path.parent / place / "config.json")
        if kind not in ("Transformer", "Normalize"):
            raise CheckpointError(f"{path}: the module {kind!r} is not supported", "supported: Transformer, Pooling, Normalize")
    raise CheckpointError(f"{path}: it has no pooling module", "fetch the checkpoint again")


def _modules(path: Path) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise CheckpointError(f"{path} cannot be read: {failure}", "fetch the checkpoint again") from None
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise CheckpointError(f"{path} is not a list of modules", "fetch the checkpoint again")
    return found


def _pooling_mode(path: Path) -> Pooling:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: it says how a text's tokens become one vector", "fetch the checkpoint again")
    asked = read_object(path)
    on = sorted(
        key.removeprefix("pooling_mode_") for key, value in asked.items() if key.startswith("pooling_mode_") and value is True
    )
    # The mean and the sum divided by a root differ in length alone, which is made 1 at the end.
    modes: dict[str, Pooling] = {"mean_tokens": "mean", "mean_sqrt_len_tokens": "mean", "cls_token": "cls"}
    if len(on) != 1 or on[0] not in modes:
        raise CheckpointError(
            f"{path}: pooling {' and '.join(on) or 'of no kind'} is not supported", f"supported: {', '.join(modes)}"
        )
    return modes[on[0]]


def build(config: Config, weights: Weights) -> ir.Model:
    """The canonical graph."""
    made = EncoderBuilder(weights, "bert")
    size, epsilon = config.hidden_size, config.norm_epsilon
    hidden = made.embedding("embeddings.word_embeddings", config.vocab_size, size)
    hidden = made.placed(
        hidden, "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight",
        (config.positions, config.segments), size,
    )  # fmt: skip
    hidden = made.layer_norm(made.top.below("embeddings"), hidden, "embeddings.LayerNorm", size, epsilon, None)
    for layer in range(config.layers):
        name, at = f"encoder.layer.{layer}", made.top.below(f"layers.{layer}")
        mixed = made.self_attention(hidden, f"{name}.attention.self", f"{name}.attention.output.dense", layer, size, config.heads)
        hidden = made.add(at.below("attn"), mixed, hidden)
        hidden = made.layer_norm(at.below("attn_norm"), hidden, f"{name}.attention.output.LayerNorm", size, epsilon, layer)
        inner = made.mlp(hidden, f"{name}.intermediate.dense", f"{name}.output.dense", layer, (size, config.inner_size))
        hidden = made.add(at.below("mlp"), inner, hidden)
        hidden = made.layer_norm(at.below("mlp_norm"), hidden, f"{name}.output.LayerNorm", size, epsilon, layer)
    return made.finish_sentence(made.pool(hidden, config.pooling), size)


def layout(checkpoint: Checkpoint, config: Config) -> Mapping[str, Stored] | None:
    """None: names in the file are the names used here."""
    return None


_TINY: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 48, "type_vocab_size": 2,
    "layer_norm_eps": 1e-2, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {"mean": _TINY, "cls": _TINY}
"""Small configs for tests, named after the pooling that modules.json is to ask for. The large epsilon is there to be seen."""
