"""Quantized matrices on disk, one pair of .npy files each, so that a build holds one at a time and can go on after a stop.

Knows: files and keys. Does not know: graphs or how integers are found.

    <key>.q.npy   int8 [N,K]      written under a temporary name, then renamed
    <key>.s.npy   float16 [N,G]   likewise
    <key>.json    what the fit lost; renamed last, so a pair without it is unfinished and is written again
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from quant.arrays import ALGORITHM, FitError, Halves, Int8s, fit, groups_of

_READ = 1 << 22


@dataclass(frozen=True)
class Spilled:
    """One quantized matrix on disk."""

    q_path: Path
    scales_path: Path
    error: FitError

    def q(self) -> Int8s:
        """[N,K], mapped from disk."""
        q: Int8s = np.load(self.q_path, mmap_mode="r")
        return q

    def scales(self) -> Halves:
        """[N,ceil(K/group)], mapped from disk."""
        scales: Halves = np.load(self.scales_path, mmap_mode="r")
        return scales


def key_of(identity: str, shape: tuple[int, ...], bits: int, group: int) -> str:
    """Name of the files: changes with the weights, the form and the algorithm."""
    text = json.dumps([ALGORITHM, identity, list(shape), bits, group])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def content_of(weight: np.ndarray) -> str:
    """sha256 of the values, read in pieces of rows."""
    digest = hashlib.sha256(str(weight.dtype).encode())
    rows = max(1, _READ // max(weight.shape[1] * weight.itemsize, 1))
    for start in range(0, len(weight), rows):
        digest.update(np.ascontiguousarray(weight[start : start + rows]).data.cast("B"))
    return digest.hexdigest()


def find(work: Path, key: str, shape: tuple[int, ...], group: int) -> Spilled | None:
    """The finished matrix called `key`, or None when there is none, or one whose files are not whole."""
    q_path, scales_path, error_path = _paths(work, key)
    try:
        error = FitError(**json.loads(error_path.read_text(encoding="utf-8")))
        found = Spilled(q_path, scales_path, error)
        whole = found.q().shape == shape and found.scales().shape == (shape[0], groups_of(shape[1], group))
    except (OSError, ValueError, TypeError, EOFError):
        return None  # missing, cut short or damaged: the caller writes it again
    return found if whole else None


def write(work: Path, key: str, weight: np.ndarray, bits: int, group: int, threads: int) -> Spilled:
    """Fit `weight` and keep the result; `ValueError` from the fit leaves nothing behind."""
    work.mkdir(parents=True, exist_ok=True)
    q_path, scales_path, error_path = _paths(work, key)
    scales = np.empty((weight.shape[0], groups_of(weight.shape[1], group)), np.float16)
    lost: list[FitError] = []

    def fill(path: Path) -> None:
        q = np.lib.format.open_memmap(path, mode="w+", dtype=np.int8, shape=weight.shape)
        _allocate(path)
        lost.append(fit(weight, bits, group, q, scales, threads=threads))
        q.flush()

    _replace(q_path, fill)
    _replace(scales_path, lambda path: _save(path, scales))
    _replace(error_path, lambda path: _text(path, json.dumps(asdict(lost[0]))))
    return Spilled(q_path, scales_path, lost[0])


def _paths(work: Path, key: str) -> tuple[Path, Path, Path]:
    return work / f"{key}.q.npy", work / f"{key}.s.npy", work / f"{key}.json"


def _allocate(path: Path) -> None:
    """Have the disk say now that it is full: a write through a map of a sparse file would kill the process instead."""
    if hasattr(os, "posix_fallocate"):  # Linux and most Unixes
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array)


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _replace(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary file, then give it its name; it is gone when `fill` fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
