"""Weights behind the golden embeddings: names and shapes of a BERT, worked out here apart from the exporter.

Knows: Hugging Face's names, sentence-transformers' files. Does not know: any code of ours.
Numbers come as in `tests.golden.recipe`.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.recipe import Memory

LENGTHS = (40, 17, 1)
"""Tokens of the golden texts; the shorter ones are padded on the right."""


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name, BERT's own pooler included."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "pooler.dense.weight": (hidden, hidden),
        "pooler.dense.bias": (hidden,),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        linears = {f"attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        linears |= {
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inner, hidden),
            "output.dense": (hidden, inner),
        }
        for name, shape in linears.items():
            found[f"{at}.{name}.weight"], found[f"{at}.{name}.bias"] = shape, shape[:1]
    for name in norms:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (hidden,)
    return found


def tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The whole checkpoint, by Hugging Face name."""
    return {name: _tensor(name, shape, seed) for name, shape in shapes(config).items()}


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    noise = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32).standard_normal(shape)
    if name.endswith("LayerNorm.weight"):
        return (1 + 0.2 * noise).astype(np.float32)
    if name.endswith(".bias"):
        return (0.3 * noise).astype(np.float32)
    return ((0.3 if "embeddings" in name else 1.5 / np.sqrt(shape[-1])) * noise).astype(np.float32)


def batch(config: Mapping[str, Any], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask) [len(LENGTHS), longest] int64."""
    ids = np.random.RandomState(seed).randint(0, config["vocab_size"], (len(LENGTHS), max(LENGTHS))).astype(np.int64)
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int64)
    return ids, mask


def write_modules(folder: Path, pooling: str, *, normalize: bool = True) -> None:
    """modules.json and the pooling module's config, as sentence-transformers writes them."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    config = {"word_embedding_dimension": 64} | {
        f"pooling_mode_{mode}": mode.startswith(pooling) and "sqrt" not in mode for mode in modes
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Sentence(Memory):
    """A checkpoint in memory whose small files lie in `folder`."""

    folder: Path = Path("nowhere")

    def sidecar(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_file() else None
