"""Gemma 3, its text: sliding and full attention in turn, each with rotary angles of its own, and four norms a block.

Knows: config keys of Hugging Face and GGUF, tensor names of both, the order of blocks.
Does not know: operators (`export.blocks`), quantization, targets, images (`export.arch.gemma3`).

Source: Gemma Team 2025 (arXiv 2503.19786); the keys and defaults of Hugging Face's `Gemma3TextConfig`; llama.cpp's reading of
`gemma3.*` keys, for what these files leave out.

    ids -- embed x sqrt(D) -- [ -+- norm - attention - norm -(+)-+- norm - gated mlp - norm -(+)- ] x layers -- norm -- head
                                +-----------------------------+   +-----------------------------+

A checkpoint of Hugging Face keeps each norm's weight less one; a GGUF keeps it whole.
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

GGUF_NAME = "gemma3"

IGNORED = ("*.rotary_emb.*", "lm_head.weight")
"""Not missed: the first is computed from the config, the second a copy where heads are tied."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
}
"""Keys that change what a model computes, with the only values that this architecture is right for."""

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
PERIOD = 6
"""Of so many layers the last sees everything, where the config says nothing else."""
LARGEST_LAYERS = 62
"""Layers of the model (27B) whose queries are scaled by another size than the head's; its GGUF does not say so."""
KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class Config:
    """Everything the graph depends on. `windows`: of each layer, see `vocabulary.ATTENTION`; 0 = full attention.

    Layers with a window turn by `local_theta`, the others by `rope_theta` stretched by `rope_scaling`.
    """

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
    local_theta: float
    windows: tuple[int, ...]
    scale: float
    tied: bool
    attention_bias: bool


def read_config(checkpoint: Checkpoint) -> Config:
    """Read config.json or GGUF metadata.

    Raises:
        CheckpointError: a key is missing, is out of range, or asks for something that is not supported; it is named.
    """
    if checkpoint.format == "gguf":
        return read_gguf(checkpoint)
    return read_json(Keys(checkpoint.config, str(checkpoint.path)))


def read_json(keys: Keys, tied: bool = True) -> Config:
    """Read the keys of a `Gemma3TextConfig`; what published configs leave out has that class's defaults.

    `tied` is the default of "tie_word_embeddings".
    """
    keys.refuse_unless(HARMLESS)
    head_dim = keys.count("head_dim", 256)
    local_theta, rope_theta, rope_scaling = _json_rope(keys)
    config = Config(
        vocab_size=keys.count("vocab_size", 262208),
        hidden_size=keys.count("hidden_size"),
        inner_size=keys.count("intermediate_size"),
        layers=keys.count("num_hidden_layers"),
        heads=keys.count("num_attention_heads", 8),
        kv_heads=keys.count("num_key_value_heads", 4),
        head_dim=head_dim,
        context_length=keys.count("max_position_embeddings", 131072),
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        local_theta=local_theta,
        windows=_json_windows(keys),
        scale=1 / math.sqrt(keys.number("query_pre_attn_scalar", 256)),
        tied=keys.flag("tie_word_embeddings", tied),
        attention_bias=keys.flag("attention_bias", False),
    )
    return _checked(config, keys)


def _json_windows(keys: Keys) -> tuple[int, ...]:
    layers, window = keys.count("num_hidden_layers"), keys.count("sliding_window", 4096)
    kinds = keys.items("layer_types")
    if not kinds:
        return _in_turn(layers, window, keys.count("sliding_window_pattern", PERIOD))
    for kind in kinds:
        if kind not in KINDS:
            raise keys.refused("layer_types", kind, KINDS)
    if len(kinds) != layers:
        raise keys.wrong(f'"layer_types" names {len(kinds)} layers of {layers}')
    return tuple(window if kind == KINDS[0] else 0 for kind in kinds)


def _in_turn(layers: int, window: int, period: int) -> tuple[int, ...]:
    return tuple(window if (layer + 1) % period else 0 for layer in range(layers))


def _json_rope(keys: Keys) -> tuple[float, float, RopeScaling]:
    """(local theta, global theta, global scaling): one object a kind of layer (transformers 5), or the keys before that."""
    if not keys.has("rope_parameters"):
        local, theta = keys.number("rope_local_base_freq", LOCAL_THETA), keys.number("rope_theta", GLOBAL_THETA)
        return local, theta, _scaling(keys.inner("rope_scaling"))
    both = keys.inner("rope_parameters")
    both.refuse_unless({"rope_theta": (None,), "rope_type": (None,)})
    sliding, full = (both.inner(kind) for kind in KINDS)
    sliding.refuse_unless({"rope_type": (None, "default"), "partial_rotary_factor": (None, 1, 1.0)})
    local = sliding.number("rope_theta", keys.number("rope_local_base_freq", LOCAL_THETA))
    return local, full.number("rope_theta", keys.number("rope_theta", GLOBAL_THETA)), _scaling(full)


def _scaling(scaling: Keys) -> RopeScaling:
    scaling.refuse_unless({"partial_rotary_factor": (None, 1, 1.0)})
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "linear"):
        raise scaling.refused("rope_type", kind, ("default", "linear"))
    return RopeScaling("linear", factor=scaling.number("factor")) if kind == "linear" else RopeScaling()


def read_gguf(checkpoint: Checkpoint) -> Config:
    """Read GGUF metadata; what these files leave out is what llama.cpp takes for the whole family."""
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="gemma3.")
    names = set(checkpoint.names())
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim, layers = keys.count("attention.key_length", 256), keys.count("block_count")
    keys.refuse_unless(
        {
            "rope.dimension_count": (None, head_dim),
            "attention.value_length": (None, head_dim),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "expert_count": (None, 0),
        }
    )
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{checkpoint.path}: tensor token_embd.weight is missing", "fetch the checkpoint again")
    entering = hidden // heads if layers == LARGEST_LAYERS else head_dim
    config = Config(
        vocab_size=checkpoint.shape("token_embd.weight")[0],
        hidden_size=hidden,
        inner_size=keys.count("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=keys.count("context_length"),
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", GLOBAL_THETA),
        rope_scaling=_gguf_scaling(keys),
        local_theta=keys.number("rope.freq_base_swa", LOCAL_THETA),
        windows=_gguf_windows(checkpoint, keys, layers),
        scale=keys.number("attention.scale", 1 / math.sqrt(entering)),
        tied="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
    )
    return _checked(config, keys)


def _gguf_scaling(keys: Keys) -> RopeScaling:
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise keys.refused("rope.scaling.type", kind, ("none", "linear"))
    return RopeScaling("linear", factor=keys.number("rope.scaling.factor")) if kind == "linear" else RopeScaling()


def _gguf_windows(checkpoint: Checkpoint, keys: Keys, layers: int) -> tuple[int, ...]:
    """The pattern is a period, or true for each layer with a window; a file without a window has none anywhere."""
    window, pattern = keys.count("attention.sliding_window", 0), "attention.sliding_window_pattern"
    if not isinstance(checkpoint.config.get(f"gemma3.{pattern}"), list):
        return _in_turn(layers, window, keys.count(pattern, PERIOD))
    sliding = keys.items(pattern)
    if len(sliding) != layers or not all(isinstance(one, bool) for one in sliding):
        raise keys.wrong(f'"{pattern}" must say true or false of each of {layers} layers')
    return tuple(window if one else 0 for one in sliding)


def _checked(config: Config, keys: Keys) -> Config:
    """Refuse sizes that do not fit together, before any of them becomes a puzzling shape error."""
    if config.heads % config.kv_heads:
        raise keys.wrong(f"{config.heads} attention heads cannot share {config.kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise keys.wrong(f"a head size of {config.head_dim} is odd; rotary embedding needs pairs")
    return config


def build(config: Config, weights: Weights) -> ir.Model:
    """The canonical graph."""
    made = Builder(weights, "gemma3")
    size, epsilon = config.hidden_size, config.norm_epsilon
    full = made.rope(config.head_dim, config.rope_theta, config.context_length, config.rope_scaling)
    local = full
    if any(config.windows):
        local = made.rope(config.head_dim, config.local_theta, config.context_length, RopeScaling(), "local")
    hidden = made.embedding("model.embed_tokens", config.vocab_size, size, scale=math.sqrt(size))
    for layer, window in enumerate(config.windows):
        attention = AttentionShape(
            size, config.heads, config.kv_heads, config.head_dim, config.scale, bias=config.attention_bias,
            out_bias=config.attention_bias, window=window, qk_epsilon=epsilon,
        )  # fmt: skip
        hidden = _block(made, hidden, layer, config, attention, local if window else full)
    normed = made.norm(made.top.below("norm"), made.keep_last(hidden), "model.norm", size, epsilon, None)
    return made.finish(made.head(normed, "model.embed_tokens" if config.tied else "lm_head", config.vocab_size, size))


def _block(
    made: Builder, hidden: ir.Value, layer: int, config: Config, attention: AttentionShape, rope: tuple[ir.Value, ir.Value]
) -> ir.Value:
    """One layer; each of its two branches is normed when it leaves the hidden state and when it comes back."""
    name, at, size = f"model.layers.{layer}", made.top.below(f"layers.{layer}"), config.hidden_size

    def norm(x: ir.Value, which: str) -> ir.Value:
        return made.norm(at.below(which), x, f"{name}.{which}", size, config.norm_epsilon, layer)

    mixed = made.attention(norm(hidden, "input_layernorm"), f"{name}.self_attn", layer, attention, rope)
    hidden = made.add(at.below("attn"), hidden, norm(mixed, "post_attention_layernorm"))
    entering = norm(hidden, "pre_feedforward_layernorm")
    inner = made.gated_mlp(entering, f"{name}.mlp", layer, size, config.inner_size, activation="gelu_tanh")
    return made.add(at.below("mlp"), hidden, norm(inner, "post_feedforward_layernorm"))


def layout(checkpoint: Checkpoint, config: Config, prefix: str = "model.", head: str = "lm_head") -> Mapping[str, Stored]:
    """Where the file keeps what Hugging Face's names stand for, and which of it lacks the one of (1 + w).

    In a safetensors file `prefix` stands before the names of everything but the head, whose name is `head`.
    """
    gguf = checkpoint.format == "gguf"
    names = {
        "model.embed_tokens.weight": Stored("token_embd.weight" if gguf else f"{prefix}embed_tokens.weight"),
        "model.norm.weight": Stored("output_norm.weight") if gguf else Stored(f"{prefix}norm.weight", add_one),
        "lm_head.weight": Stored("output.weight" if gguf else f"{head}.weight"),
    }
    for layer in range(config.layers):
        for ours, theirs in _GGUF_BLOCK.items():
            for kind in ("weight", "bias"):
                plain = f"layers.{layer}.{ours}.{kind}"
                restore = add_one if ours.endswith("norm") else None
                names[f"model.{plain}"] = Stored(f"blk.{layer}.{theirs}.{kind}") if gguf else Stored(f"{prefix}{plain}", restore)
    return names


_GGUF_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def add_one(array: np.ndarray) -> np.ndarray:
    """What a norm multiplies with, from what a checkpoint of Hugging Face keeps of it."""
    return np.float32(1) + array


_PLAIN: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-3, "query_pre_attn_scalar": 24, "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 500.0, "rope_local_base_freq": 20.0, "tie_word_embeddings": True,
}  # fmt: skip
_BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
}

TINY: dict[str, dict[str, Any]] = {
    "period": {**_PLAIN, "sliding_window_pattern": 2},
    "usual-period": {**_PLAIN, "num_hidden_layers": 6},
    "linear-rope": {**_PLAIN, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "full": {**_PLAIN, "sliding_window_pattern": 1},
    "all": {
        **{key: value for key, value in _PLAIN.items() if not key.startswith("rope_")},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": _BY_KIND,
        "tie_word_embeddings": False, "attention_bias": True, "head_dim": 32, "num_key_value_heads": 1,
    },
}  # fmt: skip
"""Small configs for tests; "all" switches on every optional feature. The large epsilon is there to be seen when it is lost."""
