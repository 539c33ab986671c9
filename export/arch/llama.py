"""Llama: SmolLM2, Llama 2 and 3.x, and the many models trained in their shape.

Knows: config keys of Hugging Face and GGUF, tensor names of both, the order of blocks.
Does not know: operators (`export.blocks`), quantization, targets.

Source: Touvron et al. 2023; the keys of Hugging Face's `LlamaConfig`; GGUF's specification of `llama.*` keys.

    ids -- embed -- [ -+- norm - attention -(+)-+- norm - gated mlp -(+)- ] x layers -- norm -- head --> logits
                       +--------------------+   +--------------------+
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from appliance.errors import CheckpointError
from export.blocks import AttentionShape, Builder, RopeScaling
from export.checkpoint.source import Checkpoint
from export.config import Keys
from export.weights import Stored, Weights

GGUF_NAME = "llama"

IGNORED = ("*.rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")
"""Not missed: the first is computed from the config, the second read with the config, the third a copy where heads are tied."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_act": (None, "silu"),
    "rope_interleaved": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "sliding_window": (None,),
    "layer_types": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
}
"""Keys that change what a model computes, with the only values that this architecture is right for."""


@dataclass(frozen=True)
class Config:
    """Everything the graph depends on. `window`: see `vocabulary.ATTENTION`; 0 = full attention."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    window: int = 0


def read_config(checkpoint: Checkpoint) -> Config:
    """Read config.json or GGUF metadata.

    Raises:
        CheckpointError: a key is missing, is out of range, or asks for something that is not supported; it is named.
    """
    return read_gguf(checkpoint) if checkpoint.format == "gguf" else read_json(checkpoint, HARMLESS)


def read_json(checkpoint: Checkpoint, harmless: Mapping[str, tuple[Any, ...]]) -> Config:
    """Read a config.json of Llama's keys, refusing every key of `harmless` with another value than the ones given."""
    keys = Keys(checkpoint.config, str(checkpoint.path))
    keys.refuse_unless(harmless)
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    config = Config(
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        inner_size=keys.count("intermediate_size"),
        layers=keys.count("num_hidden_layers"),
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=keys.count("head_dim", hidden // heads),
        context_length=keys.count("max_position_embeddings"),
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        rope_theta=keys.number("rope_theta", keys.inner("rope_parameters").number("rope_theta", 10000.0)),
        rope_scaling=_json_scaling(keys),
        tied=keys.flag("tie_word_embeddings", False),
        attention_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )
    return _checked(config, keys)


def _json_scaling(keys: Keys) -> RopeScaling:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before); "type" is the oldest spelling of "rope_type"."""
    scaling = keys.inner("rope_parameters") if keys.has("rope_parameters") else keys.inner("rope_scaling")
    scaling.refuse_unless({"partial_rotary_factor": (None, 1, 1.0)})
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=scaling.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_context=scaling.count("original_max_position_embeddings"),
        )
    raise keys.refused("rope_type", kind, ("default", "linear", "llama3"))


def read_gguf(checkpoint: Checkpoint) -> Config:
    """Read GGUF metadata and, where the file has it, the table of rotary factors that stands for a llama3 scaling."""
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="llama.")
    names = set(checkpoint.names())
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    keys.refuse_unless(
        {
            "rope.dimension_count": (None, head_dim),
            "attention.value_length": (None, head_dim),
            "expert_count": (None, 0),
            "logit_scale": (None, 1.0),
            "rope.scale_linear": (None, 1.0),
        }
    )
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{checkpoint.path}: tensor token_embd.weight is missing", "fetch the checkpoint again")
    config = Config(
        vocab_size=checkpoint.shape("token_embd.weight")[0],
        hidden_size=hidden,
        inner_size=keys.count("feed_forward_length"),
        layers=keys.count("block_count"),
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=keys.count("context_length"),
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(checkpoint, keys),
        tied="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        window=keys.count("attention.sliding_window", 0),
    )
    return _checked(config, keys)


def _gguf_scaling(checkpoint: Checkpoint, keys: Keys) -> RopeScaling:
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise keys.refused("rope.scaling.type", kind, ("none", "linear"))
    if "rope_freqs.weight" in checkpoint.names():
        if kind != "none":
            raise CheckpointError(f"{checkpoint.path}: has both rope_freqs.weight and rope.scaling.type {kind!r}")
        return RopeScaling("factors", factors=tuple(float(one) for one in checkpoint.read("rope_freqs.weight")))
    if kind == "linear":
        return RopeScaling("linear", factor=keys.number("rope.scaling.factor"))
    return RopeScaling()


def _checked(config: Config, keys: Keys) -> Config:
    """Refuse sizes that do not fit together, before any of them becomes a puzzling shape error."""
    if config.heads % config.kv_heads:
        raise keys.wrong(f"{config.heads} attention heads cannot share {config.kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise keys.wrong(f"a head size of {config.head_dim} is odd; rotary embedding needs pairs")
    scaling = config.rope_scaling
    if scaling.kind == "factors" and len(scaling.factors) != config.head_dim // 2:
        raise keys.wrong(f"{len(scaling.factors)} rotary factors for {config.head_dim // 2} frequencies")
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise keys.wrong("high_freq_factor must be greater than low_freq_factor")
    return config


def build(config: Config, weights: Weights) -> ir.Model:
    """The canonical graph."""
    made = Builder(weights, "llama")
    attention = AttentionShape(
        config.hidden_size, config.heads, config.kv_heads, config.head_dim, 1 / math.sqrt(config.head_dim),
        bias=config.attention_bias, out_bias=config.attention_bias, window=config.window,
    )  # fmt: skip
    rope = made.rope(config.head_dim, config.rope_theta, config.context_length, config.rope_scaling)
    size, epsilon = config.hidden_size, config.norm_epsilon
    hidden = made.embedding("model.embed_tokens", config.vocab_size, size)
    for layer in range(config.layers):
        name, at = f"model.layers.{layer}", made.top.below(f"layers.{layer}")
        normed = made.norm(at.below("input_layernorm"), hidden, f"{name}.input_layernorm", size, epsilon, layer)
        hidden = made.add(at.below("attn"), hidden, made.attention(normed, f"{name}.self_attn", layer, attention, rope))
        after = f"{name}.post_attention_layernorm"
        normed = made.norm(at.below("post_attention_layernorm"), hidden, after, size, epsilon, layer)
        inner = made.gated_mlp(normed, f"{name}.mlp", layer, size, config.inner_size, bias=config.mlp_bias)
        hidden = made.add(at.below("mlp"), hidden, inner)
    normed = made.norm(made.top.below("norm"), made.keep_last(hidden), "model.norm", size, epsilon, None)
    return made.finish(made.head(normed, "model.embed_tokens" if config.tied else "lm_head", config.vocab_size, size))


def layout(checkpoint: Checkpoint, config: Config) -> Mapping[str, Stored] | None:
    """Where GGUF keeps what Hugging Face's names stand for; None for safetensors, whose names they are.

    llama.cpp keeps the rows of q and k in another order (see `unpermute`).
    """
    if checkpoint.format != "gguf":
        return None
    names = {
        "model.embed_tokens.weight": Stored("token_embd.weight"),
        "model.norm.weight": Stored("output_norm.weight"),
        "lm_head.weight": Stored("output.weight"),
    }
    for layer in range(config.layers):
        for ours, theirs in _GGUF_BLOCK.items():
            heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(theirs)
            for kind in ("weight", "bias"):
                names[f"model.layers.{layer}.{ours}.{kind}"] = Stored(
                    f"blk.{layer}.{theirs}.{kind}", None if heads is None else _Unpermute(heads), moves_rows=True
                )
    return names


_GGUF_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [H*d, ...] from llama.cpp's order to the checkpoint's.

    Within a head llama.cpp's file alternates the two halves (0, d/2, 1, d/2+1, ...), because it rotates neighbours;
    the checkpoint, and the operators here, rotate halves.
    """
    half = array.shape[0] // heads // 2
    return array.reshape(heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


@dataclass(frozen=True)
class _Unpermute:
    heads: int

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return unpermute(array, self.heads)


_PLAIN: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-3, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "tied": _PLAIN,
    "untied": {**_PLAIN, "tie_word_embeddings": False},
    "llama3-rope": {**_PLAIN, "rope_theta": 500.0, "rope_scaling": _LLAMA3},
    "linear-rope": {**_PLAIN, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "biases": {**_PLAIN, "attention_bias": True, "mlp_bias": True},
    "head-dim": {**_PLAIN, "head_dim": 32, "num_key_value_heads": 1},
    "all": {
        **_PLAIN, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "head_dim": 32,
        "num_key_value_heads": 1, "rope_theta": 500.0, "rope_scaling": _LLAMA3,
    },
}  # fmt: skip
"""Small configs for tests; "all" switches on every optional feature. The large epsilon is there to be seen when it is lost."""
