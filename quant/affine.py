"""Scale and zero point of asymmetric groups. Pure functions on numpy arrays.

Knows: arrays. Does not know: graphs, roles or targets.

value = (q - z) * scale with integer z in -2^(bits-1) .. 2^(bits-1)-1, stored as the unsigned zero point z + 2^(bits-1).
"""

import numpy as np

from quant.arrays import Bytes, FitError, Floats, Halves, Int8s, dequantize, fit, group_size, groups_of, limits

_PIECE = 1 << 18
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""How much of the group's range the integers span: clipping both ends a little lowers the squared error."""


def fit_affine(weight: np.ndarray, bits: int, group: int, *, threads: int = 2) -> tuple[Int8s, Halves, Bytes, FitError]:
    """Integers, scales and zero points of least squared error, never worse than the symmetric `fit`.

    Per group: the symmetric fit is one candidate (zero point in the middle); the others span the group's own range, shrunk a
    little, with the zero point rounded, and get their least-squares scale (w.u)/(u.u), u = q - z.

    Args:
        weight: [N,K], any float type.

    Raises:
        ValueError: NaN or infinity among the weights, or weights too large for a float16 scale.
    """
    rows, columns = weight.shape
    q, scales = np.empty(weight.shape, np.int8), np.empty((rows, groups_of(columns, group)), np.float16)
    symmetric = fit(weight, bits, group, q, scales, threads=threads)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    noise, saturated = 0.0, 0
    step = max(1, _PIECE // max(columns, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        lost, clipped = _improve(np.asarray(weight[part], np.float32), bits, group, q[part], scales[part], zeros[part])
        noise, saturated = noise + lost, saturated + clipped
    return q, scales, zeros, FitError(symmetric.signal, noise, saturated, weight.size)


def dequantize_affine(q: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None, bits: int, group: int) -> Floats:
    """(q - z) * scale as float32 [N,K]; without zero points q * scale."""
    if zero_points is None:
        return dequantize(q, scales, group)
    columns = q.shape[1]
    z = np.repeat(zero_points.astype(np.int16) - (1 << (bits - 1)), group_size(columns, group), axis=1)[:, :columns]
    return dequantize(q.astype(np.int16) - z, scales, group)


def _improve(weight: Floats, bits: int, group: int, q: Int8s, scales: Halves, zeros: Bytes) -> tuple[float, int]:
    """Take what is better than the symmetric result, in place; (squared error, clipped weights) of the piece."""
    blocks, real = _blocks(weight, group)
    before = _blocks(dequantize(q, scales, group), group)[0]
    best = ((blocks - before) ** 2 * real).sum(-1)
    chosen = _blocks(q.astype(np.float32), group)[0]
    low, high = limits(bits)
    least = np.minimum(np.where(real, blocks, np.inf).min(-1), 0)
    most = np.maximum(np.where(real, blocks, -np.inf).max(-1), 0)
    for shrink in _SHRINKS:
        width = (most - least) * np.float32(shrink / (high - low))
        inverse = np.divide(1, width, out=np.zeros_like(width), where=width > 0)
        z = np.clip(np.rint(low - least * np.float32(shrink) * inverse), low, high)
        steps = np.clip(np.rint(blocks * inverse[..., None]) + z[..., None], low, high)
        about = (steps - z[..., None]) * real
        length = (about * about).sum(-1)
        refitted = (blocks * about).sum(-1) / np.where(length == 0, 1, length)
        half = np.clip(refitted, -65504, 65504).astype(np.float16)
        wide = half.astype(np.float32)
        inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
        steps = np.clip(np.rint(blocks * inverse[..., None]) + z[..., None], low, high)
        error = ((blocks - (steps - z[..., None]) * wide[..., None]) ** 2 * real).sum(-1)
        better = (error < best) & (wide != 0)
        best = np.where(better, error, best)
        chosen = np.where(better[..., None], steps, chosen)
        scales[...] = np.where(better, half, scales)
        zeros[...] = np.where(better, (z - low).astype(np.uint8), zeros)
    q[...] = chosen.reshape(len(weight), -1)[:, : weight.shape[1]].astype(np.int8)
    return float(best.sum(dtype=np.float64)), _clipped(blocks, real, scales, zeros, bits)


def _clipped(blocks: Floats, real: Floats, scales: Halves, zeros: Bytes, bits: int) -> int:
    low, high = limits(bits)
    wide = scales.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
    steps = np.rint(blocks * inverse[..., None]) + (zeros.astype(np.float32) + low)[..., None]
    return int((((steps < low) | (steps > high)) & (real > 0)).sum())


def _blocks(weight: Floats, group: int) -> tuple[Floats, Floats]:
    """[N,G,g] with zeros after the end of a row, and [1,G,g] of ones where there is a weight."""
    rows, columns = weight.shape
    size, count = group_size(columns, group), groups_of(columns, group)
    whole = np.zeros((rows, size * count), np.float32)
    whole[:, :columns] = weight
    real = (np.arange(size * count) < columns).astype(np.float32).reshape(1, count, size)
    return whole.reshape(rows, count, size), real
