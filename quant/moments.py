"""What calibration remembers of a stream: the second moments of the vectors that enter a linear.

Knows: sums of products. Does not know: where vectors come from, or what a solver makes of the moments.

Blocks of rows are multiplied in float32 and summed in float32: against float64 sums the relative error of H was 3e-7 over
64 blocks of 512 rows (it grows with the square root of their number), where solvers add 1e-2 of its mean to the diagonal.
float64 sums would double the memory of the widest stream (2048^2: 16 MB more) and buy nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quant.arrays import Floats

_ROWS = 1024
"""Rows multiplied at once."""


@dataclass(frozen=True)
class Moments:
    """Means over all tokens of one stream, x a vector of K numbers as the quantized model so far computes it.

    Attributes:
        h: [K,K], mean of x x^T: symmetric, positive semidefinite. A row error e of a weight costs e h e^T in its output's mean
            square.
        mean: [K], mean of x.
        tokens: how many vectors.
        cross: [K,K], mean of x_float x^T, where x_float is the same token's vector in the float model; None unless the solver
            asked for it (NEEDS_CROSS).
        derived: what a solver has worked out from these moments and wants again for the next weight of the stream.
    """

    h: Floats
    mean: Floats
    tokens: int
    cross: Floats | None = None
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def columns(self) -> int:
        """K."""
        return len(self.mean)


class Gatherer:
    """Adds up one stream.

    Args:
        columns: K.
        cross: whether the float model's vectors come along.
    """

    def __init__(self, columns: int, *, cross: bool = False):
        self._h = np.zeros((columns, columns), np.float32)
        self._sum = np.zeros(columns, np.float64)
        self._cross = np.zeros((columns, columns), np.float32) if cross else None
        self._tokens = 0

    def add(self, vectors: np.ndarray, reference: np.ndarray | None = None) -> None:
        """Add [..., K] vectors, and the float model's for the same tokens where cross moments are gathered."""
        rows = np.ascontiguousarray(vectors, np.float32).reshape(-1, len(self._sum))
        others = None if reference is None else np.ascontiguousarray(reference, np.float32).reshape(rows.shape)
        assert (others is None) == (self._cross is None), "cross moments want both streams"
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            self._h += part.T @ part
            self._sum += part.sum(0, dtype=np.float64)
            if self._cross is not None and others is not None:
                self._cross += others[start : start + _ROWS].T @ part
        self._tokens += len(rows)

    def moments(self) -> Moments:
        """The means so far; the sums go with them, so this is the last call."""
        count = np.float32(max(self._tokens, 1))
        self._h /= count
        if self._cross is not None:
            self._cross /= count
        return Moments(self._h, (self._sum / float(count)).astype(np.float32), self._tokens, self._cross)
