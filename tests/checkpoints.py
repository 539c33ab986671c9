"""Writes small random llama checkpoints of a chosen size, as the tools of others would: safetensors and GGUF.

Knows: Hugging Face's and llama.cpp's names, llama.cpp's permutation of q and k. Does not know: any reader of ours.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that GPT-2's byte-level alphabet shows as themselves; the others become U+0100 and up, in order."""


@dataclass(frozen=True)
class Llama:
    """Sizes of a llama; `extra` goes into config.json as it is."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 96
    vocab: int = 288
    tied: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    context: int = 256
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "bos_token_id": 256,
            "eos_token_id": 257,
            **self.extra,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its Hugging Face name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, shape in linears.items():
                found[f"{prefix}{name}.weight"] = shape
                if self.attention_bias if name.startswith("self_attn") else self.mlp_bias:
                    found[f"{prefix}{name}.bias"] = shape[:1]
            found[f"{prefix}input_layernorm.weight"] = (self.hidden,)
            found[f"{prefix}post_attention_layernorm.weight"] = (self.hidden,)
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        return found

    def weights(self) -> dict[str, np.ndarray]:
        """float32 arrays by Hugging Face name; the same for the same seed."""
        rng = np.random.default_rng(self.seed)
        return {name: self._draw(rng, name, shape) for name, shape in self.shapes().items()}

    def _draw(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if "norm" in name:
            return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def write_safetensors(folder: Path, model: Llama, dtype: str = "float32", shards: int = 1, *, tokenizer: bool = False) -> Path:
    """A folder as Hugging Face has it. `dtype`: float32, float16 or bfloat16. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config(), "torch_dtype": dtype}))
    weights = model.weights()
    names = list(weights)
    groups = [names[number::shards] for number in range(shards)]
    files = (
        [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
        if shards > 1
        else ["model.safetensors"]
    )
    for file, group in zip(files, groups, strict=True):
        save(folder / file, {name: weights[name] for name in group}, dtype)
    if shards > 1:
        where = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": 0}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(folder / "tokenizer.json", model.vocab)
    return folder


def save(path: Path, weights: Mapping[str, np.ndarray], dtype: str = "float32") -> None:
    """Write one safetensors file with the `safetensors` package."""
    import ml_dtypes
    import safetensors.numpy

    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    tensors = {name: np.ascontiguousarray(values).astype(kinds[dtype]) for name, values in weights.items()}
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


def write_gguf(
    path: Path,
    model: Llama,
    kind: str = "F32",
    *,
    license: str = "",
    split_tensors: int = 0,
    others: Mapping[str, str] | None = None,
) -> Path:
    """A GGUF as llama.cpp's converter makes it: its names, q and k permuted, one-dimensional tensors in F32.

    Args:
        path: the file; with `split_tensors` the splits stand beside it under their own names.
        kind: a `gguf.GGMLQuantizationType` name that the package can quantize; rows must be whole blocks.
        license: general.license.
        split_tensors: at most so many tensors in a file; 0 = one file.
        others: other kinds, for matrices with such a part in their Hugging Face name.

    Returns:
        The file, or the first split.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_tensors)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(float(model.config()["rope_theta"]))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_vocab_size(model.vocab)
    if license:
        writer.add_license(license)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(byte_tokens(model.vocab))
    writer.add_token_types([1] * 256 + [3] * 2 + [1] * (model.vocab - 258))
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, values in model.weights().items():
        chosen = next((other for part, other in (others or {}).items() if part in name), kind)
        stored = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else chosen]
        data = gguf.quantize(np.ascontiguousarray(_permuted(name, values, model)), stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    for theirs, ours in {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }.items():  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def _permuted(name: str, values: np.ndarray, model: Llama) -> np.ndarray:
    """Rows of each head from halves (rotate-half) to pairs, as llama.cpp stores q and k."""
    heads = model.heads if "q_proj" in name else model.kv_heads if "k_proj" in name else 0
    if not heads:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def byte_tokens(vocab: int) -> list[str]:
    """A byte-level vocabulary: 256 bytes in GPT-2's alphabet, <s>, </s>, then unused ones."""
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in BYTES else chr(next(others)) for byte in range(256)]
    return [*letters, "<s>", "</s>", *(f"<unused{number}>" for number in range(vocab - 258))]


def write_tokenizer(path: Path, vocab: int) -> None:
    """tokenizer.json over `byte_tokens`."""
    import tokenizers

    tokens = {token: number for number, token in enumerate(byte_tokens(vocab))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))
