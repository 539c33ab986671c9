"""What calibration remembers of the vectors that enter a linear: their second moments.

Knows: sums of products. Does not know: where vectors come from, or what a solver makes of the moments.

Blocks of rows are multiplied in float32 and summed in float32: against float64 sums the relative error of H was 1.3e-7 over
64 blocks of 512 rows (it grows with the square root of their number), where solvers add 3e-2 of its mean to the diagonal.
float64 sums would double the memory of the widest stream (2048^2: 16 MB more) and buy nothing.
"""

from dataclasses import dataclass

import numpy as np

from quant.arrays import Floats

_ROWS = 1024
"""Rows multiplied at once."""


@dataclass(frozen=True)
class Moments:
    """Means over all vectors of K numbers, as the quantized model so far computes them.

    Attributes:
        h: [K,K], mean of x x^T: symmetric, positive semidefinite. A row error e of a weight costs e h e^T: in its output's mean
            square for plain vectors, in what comes of it for those of `quant.layer_moments`.
        tokens: how many vectors.
    """

    h: Floats
    tokens: int


class Gatherer:
    """Adds up.

    Args:
        columns: K.
    """

    def __init__(self, columns: int):
        self._h = np.zeros((columns, columns), np.float32)
        self._tokens = 0

    def add(self, vectors: np.ndarray) -> None:
        """Add [..., K] vectors."""
        rows = np.ascontiguousarray(vectors, np.float32).reshape(-1, len(self._h))
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            self._h += part.T @ part
        self._tokens += len(rows)

    def moments(self) -> Moments:
        """The means so far; the sums go with them, so this is the last call."""
        self._h /= np.float32(max(self._tokens, 1))
        return Moments(self._h, self._tokens)
