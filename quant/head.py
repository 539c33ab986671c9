"""Logits from the last hidden states, where the head's matrix is too large to be opened like a layer.

Knows: a matrix of one row a word, read from disk in pieces of rows. Does not know: where hidden states come from.
Gemma's head has 262144 rows of 640: a session would hold 1.4 GB for it.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from quant.evaluate import Floats

IN_MEMORY = 1 << 28
"""Bytes of a matrix that is kept as it is; a larger one is read in pieces from a file of its own for every few rows of logits."""
_PIECE = 1 << 26


class Head:
    """x [n,K] -> logits [n,V].

    Args:
        read: makes the matrix [V,K], float32; called once.
        bias: [V], or None.
        path: for the file of a large one; it is removed by `close`.
    """

    def __init__(self, read: Callable[[], Floats], bias: Floats | None, path: Path):
        weight = np.ascontiguousarray(read(), np.float32)
        self.words, self._columns = weight.shape
        self._bias, self._path = bias, path
        self._weight: Floats | None = weight
        if weight.nbytes > IN_MEMORY:
            weight.tofile(path)
            self._weight = None

    def logits(self, hidden: Floats) -> Floats:
        """Of rows of hidden states [n,K], already normed."""
        rows = np.ascontiguousarray(hidden.reshape(-1, self._columns), np.float32)
        found = np.empty((len(rows), self.words), np.float32)
        if self._weight is not None:
            np.matmul(rows, self._weight.T, out=found)
        else:
            count = max(1, _PIECE // (4 * self._columns))
            with open(self._path, "rb") as file:
                for start in range(0, self.words, count):
                    piece = np.fromfile(file, np.float32, min(count, self.words - start) * self._columns)
                    found[:, start : start + count] = rows @ piece.reshape(-1, self._columns).T
        return found if self._bias is None else np.add(found, self._bias, out=found)

    def close(self) -> None:
        """Free the memory and the file."""
        self._weight = None
        self._path.unlink(missing_ok=True)
