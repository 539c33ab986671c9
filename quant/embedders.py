"""What an embedding model lost: the shipped graph's vectors against the float graph's, and the neighbours they give.

Knows: passages of a text, cosines, ranks. Does not know: how graphs are opened or written.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.bundle.record import EmbeddingRecord, EvaluationRecord, TokenizerRecord
from appliance.bundle.store import Bundle
from appliance.bundle.vocabulary import ATTENTION_MASK, INPUT_IDS, SENTENCE
from appliance.runtime.encoder import open_encoder
from appliance.targets.capabilities import Target
from quant.evaluate import Floats
from quant.layers import Opener, Runner
from quant.texts import Text

_BATCH = 8
_SHORTEST = 60  # characters of a passage: shorter ones are headings and lines of a table


def verify_embedder(
    bundle: Bundle,
    target: Target,
    model: ir.Model,
    opener: Opener,
    texts: Sequence[Text],
    *,
    passages: int,
    command: str,
    tokenizer: TokenizerRecord | None = None,
    targets: Path | None = None,
    threads: int = 0,
) -> EvaluationRecord:
    """Embed passages of the texts with the shipped graph and with the float `model` (canonical), which is opened whole.

    Args:
        passages: of each text, evenly spread.

    Raises:
        BundleError, DeviceError: the graph is damaged, or cannot run here.
    """
    began = time.monotonic()
    encoder = open_encoder(bundle, target.name, threads, targets=targets)
    provider, context = encoder.placement.provider, encoder.context
    rows, own = {}, {}
    for text in texts:
        rows[text.name] = [ids[:context] for ids in encoder.tokenize(_passages(text.content, passages))]
        own[text.name] = np.concatenate([encoder.run(part) for part in _batches(rows[text.name])])
    encoder.close()
    runner = opener(model)
    found = []
    for text in texts:
        reference = np.concatenate([_float(runner, part) for part in _batches(rows[text.name])])
        found.append(compare_vectors(text, reference, own[text.name]))
    return EvaluationRecord(
        target=target.name,
        provider=provider,
        ran="files",
        window=max(len(ids) for one in rows.values() for ids in one),
        embeddings=tuple(found),
        tokenizer=tokenizer,
        command=command,
        seconds=round(time.monotonic() - began, 1),
    )


def compare_vectors(text: Text, reference: Floats, vectors: Floats) -> EmbeddingRecord:
    """Vectors [n,D] of unit length of the same passages.

    Neighbours: each passage asks for the others by cosine. Spearman's correlation is of all others' ranks.
    """
    broken = int((~np.isfinite(vectors)).any(1).sum())
    empty = EmbeddingRecord(
        text=text.name, sha256=text.sha256, passages=len(vectors), broken=broken, cosine_mean=None, cosine_min=None, top1=None,
        top10=None, rank_correlation=None,
    )  # fmt: skip
    if broken:
        return empty
    one, two = (_unit(np.asarray(array, np.float64)) for array in (reference, vectors))
    cosines = (one * two).sum(1)
    changes: dict[str, object] = {"cosine_mean": _six(cosines.mean()), "cosine_min": _six(cosines.min())}
    if len(vectors) > 2:
        first, second = _order(one), _order(two)
        near = min(10, first.shape[1])
        shared = [len(set(a[:near]) & set(b[:near])) / near for a, b in zip(first.tolist(), second.tolist(), strict=True)]
        ranks = [np.corrcoef(np.argsort(a), np.argsort(b))[0, 1] for a, b in zip(first, second, strict=True)]
        changes |= {
            "top1": _six((first[:, 0] == second[:, 0]).mean()),
            "top10": _six(np.mean(shared)),
            "rank_correlation": _six(np.mean(ranks)),
        }
    return empty.model_copy(update=changes)


def _order(vectors: np.ndarray) -> np.ndarray:
    """The others of each vector, nearest first: [n,n-1]."""
    near = vectors @ vectors.T
    np.fill_diagonal(near, -np.inf)
    return np.asarray(np.argsort(-near, axis=1, kind="stable")[:, :-1])


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1))


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def _passages(content: str, count: int) -> list[str]:
    """Paragraphs of the text, evenly spread over it."""
    found = [part.strip() for part in content.split("\n\n") if len(part.strip()) >= _SHORTEST] or [content.strip()]
    return [found[at * len(found) // count] for at in range(count)] if len(found) > count else found


def _batches(rows: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    return [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]


def _float(runner: Runner, rows: Sequence[Sequence[int]]) -> Floats:
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)], mask[at, : len(row)] = row, 1
    feeds: Mapping[str, np.ndarray] = {INPUT_IDS: ids, ATTENTION_MASK: mask}
    found: Floats = np.asarray(runner(feeds)[SENTENCE], np.float32)
    return found
