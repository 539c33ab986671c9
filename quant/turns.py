"""Hidden states on their way through the layers, on disk: a stopped walk goes on with the layer it was in.

Knows: two files by turns, and a note of how many layers are done and what was found on the way; they are written so that any stop
leaves a pair that belongs together. Does not know: what a walk does with a layer.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quant import spill
from quant.layers import Hidden

Made = TypeVar("Made")


class Turns:
    """The files of one walk.

    Args:
        work: folder; it is made.
        name: of the walk; equal names must mean equal walks.
        shapes: of the hidden states [W,S,D] that go along, by kind.
    """

    def __init__(self, work: Path, name: str, shapes: Mapping[str, tuple[int, int, int]]):
        work.mkdir(parents=True, exist_ok=True)
        self._shapes = shapes
        self._note = work / f"{name}.note.json"
        self._paths = {kind: [work / f"{name}.{kind}.{turn}.npy" for turn in (0, 1)] for kind in shapes}
        self._files: dict[str, list[Hidden]] = {}

    def resume(self) -> tuple[int, Any] | None:
        """How many layers a stopped walk had done, and what it had found; None when there was none or a file of it is missing or
        damaged: then, or where what was found is of no use, `begin`."""
        found = {
            kind: [one for path in paths if (one := Hidden.existing(path, self._shapes[kind])) is not None]
            for kind, paths in self._paths.items()
        }
        told = read_note(self._note)
        layers = told.get("layers") if told else None
        if told and isinstance(layers, int) and layers >= 0 and all(len(pair) == 2 for pair in found.values()):
            self._files = found
            return layers, told.get("found")
        return None

    def begin(self) -> None:
        """New files; nothing is done."""
        self._note.unlink(missing_ok=True)
        self._files = {kind: [Hidden(path, self._shapes[kind]) for path in paths] for kind, paths in self._paths.items()}

    def entering(self, layer: int, kind: str = "") -> Hidden:
        """What goes into the layer with this number."""
        return self._files[kind][layer % 2]

    def leaving(self, layer: int, kind: str = "") -> Hidden:
        """What comes out of it."""
        return self._files[kind][(layer + 1) % 2]

    def finish(self, layers: int, found: Any = None) -> None:
        """So many layers are done: what the last one hands on is on disk, and so is the note that says it.

        Args:
            found: JSON values that `resume` will give back.
        """
        for pair in self._files.values():
            pair[layers % 2].flush()
        told = json.dumps({"layers": layers, "found": found}, allow_nan=False)
        spill.replace_file(self._note, lambda path: spill.write_text(path, told))

    def end(self, note: bool = False) -> None:
        """All is done: nothing stays, or the note alone."""
        self._files = {}
        for path in (path for pair in self._paths.values() for path in pair):
            path.unlink(missing_ok=True)
        if not note:
            self._note.unlink(missing_ok=True)


def digest(ids: npt.NDArray[np.int64], said: str) -> str:
    """Of a text's tokens and all else that a result depends on."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<u4").tobytes() + said.encode()).hexdigest()


def each_of(told: object, make: Callable[[Any], Made]) -> list[Made]:
    """What `make` makes of the entries of a list that a file held; nothing when it is something else."""
    try:
        return [make(one) for one in told] if isinstance(told, list) else []
    except (TypeError, ValueError, KeyError):
        return []


def read_note(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when it is not there or holds something else."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
