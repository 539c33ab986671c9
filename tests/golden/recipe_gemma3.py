"""Names and shapes of Gemma 3's tensors, and the file that llama.cpp's converter makes of them.

Knows: Hugging Face's names, worked out here apart from the exporter; llama.cpp's keys and names. Does not know: any code of
ours, or where numbers come from (`tests.golden.recipe`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

PREFIX = {"gemma3_text": "model.", "gemma3": "language_model.model."}


def text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text model, wherever they are."""
    return config.get("text_config", config)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name; of one with images, the old names and something that sees."""
    said, prefix = text(config), PREFIX[config["model_type"]]
    hidden, inner, vocab, size = said["hidden_size"], said["intermediate_size"], said["vocab_size"], said["head_dim"]
    wide, narrow = said["num_attention_heads"] * size, said["num_key_value_heads"] * size
    found: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, hidden), f"{prefix}norm.weight": (hidden,)}
    if not said["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    if config["model_type"] == "gemma3":
        found["vision_tower.vision_model.post_layernorm.weight"] = (48,)
        found["multi_modal_projector.mm_input_projection_weight"] = (48, hidden)
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    linears = {
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(said["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}"
        found |= {f"{at}.{name}.weight": (hidden,) for name in norms}
        found |= {f"{at}.self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
        for name, shape in linears.items():
            found[f"{at}.{name}.weight"] = shape
            if said.get("attention_bias") and name.startswith("self_attn"):
                found[f"{at}.{name}.bias"] = shape[:1]
    return found


def as_gguf(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(metadata, tensors) of a model with the usual period: rows stay where they are, every norm is stored whole."""
    said: dict[str, Any] = {
        "general.architecture": "gemma3",
        "gemma3.block_count": config["num_hidden_layers"],
        "gemma3.context_length": config["max_position_embeddings"],
        "gemma3.embedding_length": config["hidden_size"],
        "gemma3.feed_forward_length": config["intermediate_size"],
        "gemma3.attention.head_count": config["num_attention_heads"],
        "gemma3.attention.head_count_kv": config["num_key_value_heads"],
        "gemma3.attention.key_length": config["head_dim"],
        "gemma3.attention.value_length": config["head_dim"],
        "gemma3.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "gemma3.attention.sliding_window": config["sliding_window"],
        "gemma3.rope.freq_base": config["rope_theta"],
        "gemma3.rope.freq_base_swa": config["rope_local_base_freq"],
        "gemma3.attention.scale": config["query_pre_attn_scalar"] ** -0.5,
    }
    return said, {_gguf_name(name): array + 1 if "norm" in name else array for name, array in weights.items()}


def _gguf_name(name: str) -> str:
    words = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for ours, theirs in words.items():
        name = name.replace(ours, theirs)
    return name
