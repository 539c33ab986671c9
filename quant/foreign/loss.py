"""What another exporter's model lost: logits of the float file against those of the written one, on random token ids.

Knows: how decoders of several exporters are fed with an empty past. Does not know: who wrote the files, which loss is too much.
Random ids are no text: the figures say that the file computes what the model did, not how well it will write.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from appliance.errors import LossError
from quant.arrays import Floats
from quant.foreign.infer import Inference

TOKENS, SEED = 64, 1
_IDS, _LOGITS = "input_ids", "logits"
_TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32, "tensor(float16)": np.float16}

Feeds = Mapping[str, np.ndarray]


class Unmeasured(Exception):
    """Why the float file cannot be run here, in words for the record: no path of this machine."""


@dataclass(frozen=True)
class Facts:
    """What was found out about a decoder that one must know to feed it.

    Attributes:
        ids: its input of token ids.
        words: how many ids it has.
        places: how many positions it has a table for, None where it has no table.
        rows: of the product that makes "key" and "value"; 0 where it cannot be told.
    """

    ids: str
    words: int
    places: int | None
    rows: Mapping[str, int]


def facts(inference: Inference, places: int | None) -> Facts:
    """Read them off what was inferred; call it before the graph is changed."""
    by_role = {role: one for one in reversed(inference.matrices) for role in one.roles}
    table = by_role.get("embed") or by_role.get("head")
    rows = {}
    for kind, role in (("key", "attn.k"), ("value", "attn.v")):
        one = by_role.get(role)
        first, end = (0, 0) if one is None else one.rows[role] if one.rows else (0, one.matrix.shape[0] * (len(one.roles) == 1))
        rows[kind] = end - first
    entering = by_role["embed"].matrix.entering if "embed" in by_role else None
    ids = str(entering.name) if entering is not None and entering.is_graph_input() else _IDS
    return Facts(ids, table.matrix.shape[0] if table is not None else 0, places, rows)


def measure(source: Path, written: Path, known: Facts, threads: int, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """For the record: how far the logits are apart; or why that could not be measured.

    One of the two files is open at a time.

    Raises:
        LossError: the written file does not run, or its logits are no numbers where the float file's are.
    """
    progress(0, 2)
    try:
        feeds, wanted = _reference(source, known, threads)
    except Unmeasured as why:
        progress(2, 2)
        return {"why_not": str(why)}
    progress(1, 2)
    try:
        found = _run(written, lambda session: _fitted(feeds, session), known, threads)[1]
    except Exception as failure:  # onnxruntime's own errors have no common class
        text = " ".join(str(failure).split())
        raise LossError(f"{written.name} was written, and does not run: {text}", "quantize it with another scheme") from failure
    progress(2, 2)
    if not np.isfinite(found).all():
        raise LossError(f"{written.name} gives logits that are no numbers", "quantize it with another scheme")
    return {"why_not": "", "tokens": len(wanted), "seed": SEED, **losses(wanted, found)}


def losses(wanted: Floats, found: Floats) -> dict[str, float]:
    """Of logits [S,V]: their relative difference, mean KL in nats a token, share of tokens where both put the same first."""
    kl = np.mean([_kl(one, other) for one, other in zip(wanted, found, strict=True)])
    relative = np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-30)
    same = np.mean(wanted.argmax(axis=1) == found.argmax(axis=1))
    return {"relative_difference": _short(relative), "kl_mean": _short(kl), "same_top": _short(same)}


def _kl(wanted: Floats, found: Floats) -> float:
    p, q = (_log_softmax(row.astype(np.float64)) for row in (wanted, found))
    return float(np.sum(np.exp(p) * (p - q)))


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = row - row.max()
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return found


def _short(value: Any) -> float:
    return float(f"{float(value):.6g}")


def _reference(source: Path, known: Facts, threads: int) -> tuple[Feeds, Floats]:
    try:
        feeds, logits = _run(source, lambda session: feed(session.get_inputs(), known), known, threads)
    except Unmeasured:
        raise
    except Exception as failure:  # whatever the float file needs that is not here
        raise Unmeasured(f"the float file does not run here ({type(failure).__name__})") from failure
    if not np.isfinite(logits).all():
        raise Unmeasured("the float file's own logits are no numbers")
    return feeds, logits


def _run(path: Path, fed: Callable[[Any], Feeds], known: Facts, threads: int) -> tuple[Feeds, Floats]:
    """What was fed, and logits [S,V] of the first row of the batch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is told by the exception
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = fed(session)
    names = [one.name for one in session.get_outputs()]
    outputs = [np.asarray(one) for one in session.run([_LOGITS] if _LOGITS in names else names, feeds)]
    found = next((one for one in outputs if one.ndim == 3 and one.shape[2] == known.words), None)
    if found is None:
        raise Unmeasured("none of the graph's outputs is logits [batch, tokens, words]")
    return feeds, found[0].astype(np.float32)


def _fitted(feeds: Feeds, session: Any) -> Feeds:
    """The same numbers in the types that another file of the model takes: a cache of float16 is one of float32 there."""
    return {one.name: feeds[one.name].astype(_TYPES[one.type]) for one in session.get_inputs()}


def feed(inputs: list[Any], known: Facts) -> Feeds:
    """An array for each of a session's inputs: random ids, and nothing before them.

    Raises:
        Unmeasured: an input is of a kind that is not known.
    """
    ids = next((one for one in inputs if one.name == known.ids and len(one.shape) == 2), None)
    if ids is None or not known.words:
        raise Unmeasured("it cannot be told which input takes token ids")
    batch, tokens = (size if isinstance(size, int) else free for size, free in zip(ids.shape, (1, TOKENS), strict=True))
    tokens = tokens if known.places is None or isinstance(ids.shape[1], int) else min(tokens, known.places)
    drawn = np.random.default_rng(SEED).integers(0, known.words, (batch, tokens))
    found = {}
    for one in inputs:
        array = drawn if one is ids else _other(one, batch, tokens, known)
        fits = one.type in _TYPES and len(one.shape) == array.ndim
        if not fits or any(isinstance(size, int) and size != have for size, have in zip(one.shape, array.shape, strict=True)):
            raise Unmeasured(f"its input {one.name} {list(one.shape)} is of a kind that is not known")
        found[one.name] = np.ascontiguousarray(array, _TYPES[one.type])
    return found


def _other(one: Any, batch: int, tokens: int, known: Facts) -> np.ndarray:
    """A mask, positions, or an empty past [batch, heads, 0, size]; an empty array with no dimension for anything else."""
    rank = len(one.shape)
    if "mask" in one.name and rank == 2:
        return np.ones((batch, tokens))
    if "position" in one.name and rank in (1, 2):
        return np.arange(tokens) if rank == 1 else np.tile(np.arange(tokens), (batch, 1))
    if rank == 4 and "float" in one.type:
        heads, size = one.shape[1], one.shape[3]
        if isinstance(heads, int) and not isinstance(size, int):
            kind = "value" if "value" in one.name.replace("key_values", "") else "key"  # past_key_values.0.key
            size = known.rows[kind] // heads
        if isinstance(heads, int) and size:
            return np.zeros((batch, heads, 0, size))
    return np.zeros(())
