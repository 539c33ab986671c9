"""Checkpoints made of numbers that anyone can make again: the weights behind the golden logits.

Knows: Hugging Face's names and shapes of a llama, worked out here apart from the exporter; llama.cpp's names and order
of rows; that Gemma has a recipe of its own. Does not know: any code of ours.
Numbers come from numpy's `RandomState`, whose streams are frozen for good, each tensor from a seed of its own.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import recipe_gemma3


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    linears = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in linears.items():
            found[f"{at}.{name}.weight"] = shape
            if config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias"):
                found[f"{at}.{name}.bias"] = shape[:1]
    return found


def tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One tensor, float32: norms around 1, embeddings small, linears that keep a hidden state's size."""
    noise = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32).standard_normal(shape)
    if "norm" in name:
        return (1 + 0.2 * noise).astype(np.float32)
    if name.endswith(".bias"):
        return (0.3 * noise).astype(np.float32)
    scale = 0.3 if name.endswith("embed_tokens.weight") else 1.5 / np.sqrt(shape[-1])
    return (scale * noise).astype(np.float32)


def tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The whole checkpoint, by Hugging Face name."""
    if config["model_type"].startswith("gemma3"):
        made = {name: tensor(name, shape, seed) for name, shape in recipe_gemma3.shapes(config).items()}
        return {name: array - np.float32(1) if "norm" in name else array for name, array in made.items()}
    return {name: tensor(name, shape, seed) for name, shape in shapes(config).items()}


@dataclass(frozen=True)
class Memory:
    """A checkpoint that lies in memory (see `export.checkpoint.source.Checkpoint`)."""

    config: Mapping[str, Any]
    weights: Mapping[str, np.ndarray]
    format: str = "safetensors"
    path: Path = Path("golden")
    license: str = "unknown"

    def names(self) -> Sequence[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape

    def stored_type(self, name: str) -> str:
        return "F32"

    def stored_grid(self, name: str) -> None:
        return None

    def read(self, name: str) -> np.ndarray:
        return self.weights[name].copy()

    def files(self) -> Sequence[Path]:
        return []

    def sidecar(self, name: str) -> Path | None:
        return None


def as_gguf(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Memory:
    """The same model as llama.cpp's converter would write it: its keys, its names, its order of q's and k's rows."""
    if config["model_type"] == "gemma3_text":
        return Memory(*recipe_gemma3.as_gguf(config, weights), format="gguf")
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    said: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": size,
        "llama.vocab_size": config["vocab_size"],
    }
    if config.get("head_dim"):
        said |= {"llama.attention.key_length": size, "llama.attention.value_length": size}
    scaling = config.get("rope_scaling") or {}
    kept = {_gguf_name(name): _gguf_rows(name, array, heads, kv_heads) for name, array in weights.items()}
    if scaling.get("rope_type") == "linear":
        said |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": scaling["factor"]}
    elif scaling.get("rope_type") == "llama3":
        kept["rope_freqs.weight"] = _llama3_factors(size, config["rope_theta"], scaling)
    return Memory(said, kept, format="gguf")


def _gguf_name(name: str) -> str:
    words = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for ours, theirs in words.items():
        name = name.replace(ours, theirs)
    return name


def _gguf_rows(name: str, array: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Row 2j of a head in the file is row j of the checkpoint, row 2j+1 is row j + d/2 (q and k only)."""
    count = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
    if not count:
        return array
    size = array.shape[0] // count
    order = [head * size + half * (size // 2) + pair for head in range(count) for pair in range(size // 2) for half in (0, 1)]
    return array[order]


def _llama3_factors(size: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """What each frequency is divided by, from wave lengths, as llama.cpp's converter states it."""
    factors = []
    longest = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    shortest = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    for index in range(0, size, 2):
        wave = 2 * np.pi * theta ** (index / size)
        if wave < shortest:
            factors.append(1.0)
        elif wave > longest:
            factors.append(scaling["factor"])
        else:
            smooth = (scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
