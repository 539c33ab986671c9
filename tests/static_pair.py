"""What the tests of the static pair share: random weights for a config, and both forms of a model opened for running.

Knows: names and shapes of a llama's weights. Does not know: how any lowering works.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from appliance.runtime.providers import SessionChoice, cpu
from appliance.runtime.static_decoder import StaticDecoder
from appliance.targets.capabilities import Flags, Target, WeightForms
from export import lower
from tests import checkpoints

CHUNK, CONTEXT = 8, 48

STATIC = Target(
    name="static",
    summary="the static pair in float",
    provider="cpu",
    flags=Flags(form="static", contrib_ops=False, attention="decomposed", activations=("float",), state_update="append"),
    weights=WeightForms(operator="DequantizeLinear"),
)
REFERENCE = STATIC.model_copy(
    update={
        "name": "reference",
        "flags": Flags(form="dynamic", contrib_ops=False, attention="standard", activations=("float",), state_update="append"),
    }
)


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint (see `export.checkpoint.source.Checkpoint`) of random weights."""

    config: Mapping[str, Any]
    weights: Mapping[str, NDArray[np.float32]]
    path: Path = Path("memory")
    format: str = "safetensors"
    license: str = "unknown"

    def names(self) -> Sequence[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape

    def stored_type(self, name: str) -> str:
        return "F32"

    def stored_grid(self, name: str) -> None:
        return None

    def read(self, name: str) -> NDArray[np.float32]:
        return self.weights[name]

    def files(self) -> Sequence[Path]:
        return []

    def sidecar(self, name: str) -> Path | None:
        return None


def random_checkpoint(config: Mapping[str, Any], seed: int) -> MemoryCheckpoint:
    """Weights that keep hidden states near unit size, and logits spread over several units as a trained model's are."""
    rng = np.random.default_rng(seed)
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    size = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"] * size
    linears = {
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * size), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    spread = 3 / np.sqrt(hidden)
    made: dict[str, NDArray[np.float64]] = {"model.embed_tokens.weight": rng.normal(0, spread, (config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in linears.items():
            made[f"{at}.{name}.weight"] = rng.normal(0, 1.5 / np.sqrt(shape[1]), shape)
            if config.get("attention_bias" if "attn" in name else "mlp_bias"):
                made[f"{at}.{name}.bias"] = rng.normal(0, 0.3, shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}.{name}.weight"] = rng.normal(1, 0.1, hidden)
    made["model.norm.weight"] = rng.normal(1, 0.1, hidden)
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = rng.normal(0, spread, (config["vocab_size"], hidden))
    return MemoryCheckpoint(config, {name: array.astype(np.float32) for name, array in made.items()})


def confident_checkpoint(config: Mapping[str, Any], seed: int) -> MemoryCheckpoint:
    """Weights of a model that is as sure of its next token as a trained one: logits lead by several units.

    Every token has a successor, whose row of the (untied) head points along the token's own embedding; what layers add to
    the stream is of about the embedding's size, so the context decides too.
    """
    assert not config["tie_word_embeddings"]
    plain = random_checkpoint(config, seed)
    rng = np.random.default_rng([seed, 1])
    count, hidden = plain.weights["model.embed_tokens.weight"].shape
    table = rng.normal(0, 3, (count, hidden)).astype(np.float32)
    head = np.empty_like(table)
    head[rng.permutation(count)] = table * np.float32(2 / 3 / np.sqrt(hidden))
    return replace(plain, weights={**plain.weights, "model.embed_tokens.weight": table, "lm_head.weight": head})


def write_checkpoint(folder: Path, checkpoint: MemoryCheckpoint) -> Path:
    """The checkpoint as a folder of safetensors with a byte tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    checkpoints.save(folder / "model.safetensors", checkpoint.weights)
    checkpoints.write_tokenizer(folder / "tokenizer.json", checkpoint.config["vocab_size"])
    return folder


def open_pair(build: Callable[[], ir.Model], folder: Path, chunk: int = CHUNK, context: int = CONTEXT) -> StaticDecoder:
    """Lower, save and open the static pair in float on the CPU provider."""
    lowered = lower.lower(build, STATIC, context, chunk)
    sessions = []
    for kind in ("prefill", "decode"):
        path = folder / f"{kind}.onnx"
        ir.save(lowered.graphs[kind], path)
        sessions.append(cpu.open_session(path, STATIC, SessionChoice(threads=1)))
    return StaticDecoder(sessions[0], sessions[1], lowered.state, chunk, context)


def reference_logits(
    build: Callable[[], ir.Model], ids: NDArray[np.int64], folder: Path, context: int = CONTEXT
) -> NDArray[np.float32]:
    """Logits [len(ids), V] of the float graph of growing state, all tokens in one step."""
    lowered = lower.lower(build, REFERENCE, context, 0)
    path = folder / "reference.onnx"
    ir.save(lowered.graphs["model"], path)
    session = cpu.open_session(path, REFERENCE, SessionChoice(threads=1)).session
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": ids[None],
        "attention_mask": np.ones((1, len(ids)), np.int64),
        "logits_to_keep": np.array([len(ids)], np.int64),
    }
    for tensor in lowered.state:
        words = {"batch": 1, "context": 0}
        shape = [size if isinstance(size, int) else words[size] for size in tensor.shape]
        feeds[tensor.input] = np.zeros(shape, np.float32)
    logits: NDArray[np.float32] = session.run(["logits"], feeds)[0][0]
    return logits


def take_all(decoder: StaticDecoder, ids: NDArray[np.int64], pieces: Sequence[int]) -> NDArray[np.float32]:
    """Logits after each piece of `ids`, [len(pieces), V]."""
    state = decoder.new_state(len(ids))
    rows, at = [], 0
    for piece in pieces:
        rows.append(decoder.run(state, ids[at : at + piece], 1)[0].copy())
        at += piece
    assert at == len(ids)
    return np.stack(rows)


def fresh_seed() -> int:
    """A seed of its own for every run; assertions name it."""
    return int(np.random.SeedSequence().generate_state(1)[0])
