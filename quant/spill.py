"""Quantized matrices on disk, a few .npy files each, so that a build holds one at a time and can go on after a stop.

Knows: files and keys. Does not know: graphs or how integers are found.

    <key>.q.npy   int8 [N,K]      written under a temporary name, then renamed
    <key>.s.npy   float16 [N,G]   likewise
    <key>.z.npy   uint8 [N,G]     likewise, only where the form has zero points
    <key>.o.npy   float16 [N,G]   likewise, only where the form has offsets
    <key>.json    what was lost; renamed last, so files without it are unfinished and are written again
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from quant.arrays import Bytes, FitError, Halves, Int8s, groups_of
from quant.scheme import Form
from quant.solvers import Solved

_READ = 1 << 22


@dataclass(frozen=True)
class Spilled:
    """One quantized matrix on disk; meanings as in `quant.solvers.Solved`."""

    folder: Path
    key: str
    error: FitError
    proxy: float | None
    fell_back: str
    plain_proxy: float | None = None

    def q(self) -> Int8s:
        """[N,K], mapped from disk."""
        q: Int8s = np.load(_path(self.folder, self.key, "q"), mmap_mode="r")
        return q

    def scales(self) -> Halves:
        """[N,ceil(K/group)], mapped from disk."""
        scales: Halves = np.load(_path(self.folder, self.key, "s"), mmap_mode="r")
        return scales

    def zero_points(self) -> Bytes:
        """[N,ceil(K/group)], mapped from disk; `OSError` when the form has none."""
        zero_points: Bytes = np.load(_path(self.folder, self.key, "z"), mmap_mode="r")
        return zero_points

    def offsets(self) -> Halves:
        """[N,ceil(K/group)], mapped from disk; `OSError` when the form has none."""
        offsets: Halves = np.load(_path(self.folder, self.key, "o"), mmap_mode="r")
        return offsets


def key_of(identity: str, shape: tuple[int, ...], form: Form, solver: str, calibration: str) -> str:
    """Name of the files: changes with the weights, the form, the solver's version and the calibration text.

    How activations are computed does not change the integers, so it is no part of it.
    """
    text = json.dumps([identity, list(shape), form.bits, form.group, form.symmetric, form.offsets, solver, calibration])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def content_of(weight: np.ndarray) -> str:
    """sha256 of the values, read in pieces of rows."""
    digest = hashlib.sha256(str(weight.dtype).encode())
    rows = max(1, _READ // max(weight.shape[1] * weight.itemsize, 1))
    for start in range(0, len(weight), rows):
        digest.update(np.ascontiguousarray(weight[start : start + rows]).data.cast("B"))
    return digest.hexdigest()


def find(work: Path, key: str, shape: tuple[int, ...], form: Form) -> Spilled | None:
    """The finished matrix called `key`, or None when there is none, or one whose files are not whole."""
    groups = (shape[0], groups_of(shape[1], form.group))
    try:
        told = json.loads(_path(work, key).read_text(encoding="utf-8"))
        found = Spilled(work, key, FitError(**told["error"]), told["proxy"], told["fell_back"], told["plain_proxy"])
        parts = ("q", "s", *(("z",) if not form.symmetric else ()), *(("o",) if form.offsets else ()))
        whole = found.q().shape == shape and found.scales().shape == groups
        whole = whole and all(told["sha256"][part] == _content(_path(work, key, part)) for part in parts)
        if not form.symmetric:
            whole = whole and found.zero_points().shape == groups
        if form.offsets:
            whole = whole and found.offsets().shape == groups
    except (OSError, ValueError, TypeError, KeyError, EOFError):
        return None  # missing, cut short or damaged: the caller writes it again
    return found if whole else None


def write(work: Path, key: str, solved: Solved) -> Spilled:
    """Keep a result; when the disk is full nothing is left of it."""
    work.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {"q": solved.q, "s": solved.scales}
    if solved.zero_points is not None:
        arrays["z"] = solved.zero_points
    if solved.offsets is not None:
        arrays["o"] = solved.offsets
    told = json.dumps(
        {
            "sha256": {part: _sha256(array) for part, array in arrays.items()},
            "error": asdict(solved.error),
            "proxy": solved.proxy,
            "fell_back": solved.fell_back,
            "plain_proxy": solved.plain_proxy,
        }
    )
    try:
        for part, array in arrays.items():
            replace_file(_path(work, key, part), lambda path, array=array: _save(path, array))  # type: ignore[misc]
        replace_file(_path(work, key), lambda path: write_text(path, told))
    except BaseException:
        for part in (*arrays, ""):
            _path(work, key, part).unlink(missing_ok=True)
        raise
    return Spilled(work, key, solved.error, solved.proxy, solved.fell_back, solved.plain_proxy)


def _path(work: Path, key: str, part: str = "") -> Path:
    return work / (f"{key}.{part}.npy" if part else f"{key}.json")


def _save(path: Path, array: np.ndarray) -> None:
    """As numpy.save does, but for its own way of writing: that hides why a disk took no more."""
    array = np.ascontiguousarray(array)  # before the header is made, which says in what order the numbers follow
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def _content(path: Path) -> str:
    """sha256 of the numbers in a .npy file; its header is checked by whoever reads it."""
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B")).hexdigest()


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def replace_file(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary file, then give it its name; it is gone when `fill` fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
