"""Weights that lie on a grid already: integers times a float16 scale in every group. Pure functions on numpy arrays.

Knows: arrays. Does not know: graphs, roles, why a weight lies on one (it was quantized before, and its checkpoint holds what came
of that as floats).

A search over scales finds such a grid only where the integers reach one of the places that it tries. Here the group's largest
weight says it: divided by the integer that it is, it gives a float16 number exactly, and the others are multiples of that. No
ordinary weight passes, and the first rows tell: a matrix that lies on no grid costs next to nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.arrays import Bytes, Floats, Halves, Int8s, group_size, groups_of, limits

_FIRST, _ROWS = 8, 1024
"""Rows looked at to begin with, and then at once."""


@dataclass(frozen=True)
class OnGrid:
    """A weight's own integers [N,K], scales [N,G] and zero points [N,G] (None where it needs none)."""

    q: Int8s
    scales: Halves
    zeros: Bytes | None


def on_grid(weight: np.ndarray, bits: int, group: int, *, symmetric: bool) -> OnGrid | None:
    """The grid that all of `weight` [N,K] lies on; None when some group lies on none, or all of it is zeros.

    One scale a row is positive here (`quant.arrays.turn_positive` says why): rows that would need a negative one lie on none.
    """
    rows, columns = weight.shape
    count = groups_of(columns, group)
    q, scales = np.empty(weight.shape, np.int8), np.empty((rows, count), np.float16)
    zeros = None if symmetric else np.empty((rows, count), np.uint8)
    starts = [0, *range(min(_FIRST, rows), rows, _ROWS)]
    for start, stop in zip(starts, [*starts[1:], rows], strict=True):
        found = _of(np.asarray(weight[start:stop], np.float32), bits, group, symmetric)
        if found is None:
            return None
        q[start:stop], scales[start:stop] = found.q, found.scales
        if zeros is not None and found.zeros is not None:
            zeros[start:stop] = found.zeros
    return OnGrid(q, scales, zeros) if scales.any() else None


def _of(weight: Floats, bits: int, group: int, symmetric: bool) -> OnGrid | None:
    rows, columns = weight.shape
    size, count = group_size(columns, group), groups_of(columns, group)
    blocks = np.zeros((rows * count, size), np.float32)
    blocks.reshape(rows, -1)[:, :columns] = weight
    low, high = limits(bits)
    most = np.abs(blocks).max(-1)
    if not np.isfinite(most).all():
        return None
    scale, left = np.zeros_like(most), most > 0
    for place in range(-low if symmetric else high - low, 0, -1):
        with np.errstate(over="ignore"):
            step = (most / np.float32(place)).astype(np.float16).astype(np.float32)
        fits = np.flatnonzero(left & (step * np.float32(place) == most) & np.isfinite(step))
        if len(fits):
            held = fits[_held(blocks[fits], step[fits], bits, symmetric, group != 0)]
            scale[held], left[held] = step[held], False
    if left.any():
        return None
    u = np.rint(blocks * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None])
    zero = np.zeros_like(scale)
    if symmetric:
        sign = np.where((u > high).any(-1), np.float32(-1), np.float32(1))
        u, scale = u * sign[:, None], scale * sign
    else:
        zero = np.clip(low - np.minimum(u.min(-1), 0), low, high)
    stored = (u + zero[:, None]).astype(np.int8).reshape(rows, -1)[:, :columns]
    zeros = None if symmetric else (zero - low).astype(np.uint8).reshape(rows, count)
    return OnGrid(stored, scale.astype(np.float16).reshape(rows, count), zeros)


def _held(blocks: Floats, step: Floats, bits: int, symmetric: bool, negative: bool) -> npt.NDArray[np.bool_]:
    """Which blocks [n,g] are whole multiples of their step [n], and in range."""
    low, high = limits(bits)
    u = np.rint(blocks / step[:, None])
    exact: npt.NDArray[np.bool_] = (u * step[:, None] == blocks).all(-1)
    least, largest = np.minimum(u.min(-1), 0), np.maximum(u.max(-1), 0)
    if symmetric:
        in_range = (least >= low) & (largest <= high)
        if negative:  # scales may be
            in_range |= (-largest >= low) & (-least <= high)
    else:
        in_range = largest - least <= high - low
    held: npt.NDArray[np.bool_] = exact & in_range
    return held
