"""How often each size occurs among the numbers of a stream, and which range of integers loses least of them.

Knows: numbers. Does not know: streams, graphs, calibration text.

Bins are the top bits of a float32: sign, exponent and the first 4 bits of the mantissa, so that a bin is 3-6% wide at every
size, extremes that occur once are counted like the rest, and counts of several batches simply add up.
"""

import numpy as np
import numpy.typing as npt

from quant.static import Range

Doubles = npt.NDArray[np.float64]

_SHIFT = 19
_BINS = 1 << (32 - _SHIFT)

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05)
"""Shares of either extreme that `best` tries as an end of the range."""


def _middles() -> Doubles:
    edges = ((np.arange(_BINS, dtype=np.uint32) << np.uint32(_SHIFT)) | np.uint32(1 << (_SHIFT - 1))).view(np.float32)
    return np.where(np.isfinite(edges), edges, 0).astype(np.float64)


class Histogram:
    """Counts, and the exact extremes."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, np.float64)
        self.low = self.high = 0.0

    def add(self, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Count `values` [..., K]. `weights` [K]: how much the square of an error of each column counts; None = all alike."""
        flat = np.ascontiguousarray(values, np.float32)
        bins = (flat.view(np.uint32) >> np.uint32(_SHIFT)).astype(np.int32).reshape(-1)
        if weights is None:
            self.counts += np.bincount(bins, minlength=_BINS)
        else:
            wide = np.broadcast_to(weights.astype(np.float64), flat.shape).reshape(-1)
            self.counts += np.bincount(bins, wide, _BINS)
        if flat.size:
            self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))

    def extremes(self, bits: int) -> Range:
        """Everything that was seen fits."""
        return Range.over(self.low, self.high, bits)

    def percentile(self, share: float, bits: int) -> Range:
        """All but `share` of the (weighted) numbers at either end fit; zero always does."""
        middles = _middles()
        order = np.argsort(middles, kind="stable")
        reached = np.cumsum(self.counts[order]) / max(self.counts.sum(), 1e-300)
        low = middles[order][int(np.searchsorted(reached, share))]
        high = middles[order][min(int(np.searchsorted(reached, 1 - share)), _BINS - 1)]
        return Range.over(max(float(low), self.low), min(float(high), self.high), bits)

    def best(self, bits: int) -> Range:
        """The range whose squared error over the counted numbers is least: both ends are tried at every `CLIPS`."""
        middles, counts = self._occupied()
        found = [Range.over(self.low * one, self.high * other, bits) for one in CLIPS for other in CLIPS]
        return found[int(np.argmin([_loss(middles, counts, one) for one in found]))]

    def loss(self, taken: Range) -> float:
        """Squared error of a range over all counted numbers, relative to the sum of their squares."""
        middles, counts = self._occupied()
        return _loss(middles, counts, taken) / max(float(counts @ middles**2), 1e-300)

    def _occupied(self) -> tuple[Doubles, Doubles]:
        held = self.counts > 0
        return np.clip(_middles()[held], self.low, self.high), self.counts[held]


def _loss(middles: np.ndarray, counts: np.ndarray, taken: Range) -> float:
    """Rounding costs scale^2/12 a number (all of it where it rounds to zero), saturation the square of what is cut."""
    beyond = np.maximum(np.maximum(middles - taken.high, taken.low - middles), 0)
    rounding = np.minimum(taken.scale**2 / 12, middles**2)
    return float(counts @ (beyond**2 + np.where(beyond > taken.scale / 2, 0, rounding)))
