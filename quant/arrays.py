"""Numbers of quantization: scale search, rounding, packing, error. Pure functions on numpy arrays.

Knows: arrays. Does not know: graphs, roles, files or targets.

A weight matrix has N rows of K weights; `group` neighbours of a row share one scale (0 = the whole row), the last group
of a row may be partial. value = q * scale with q in -2^(bits-1) .. 2^(bits-1)-1: symmetric, full signed range. Scales
are stored as float16, so the search works with the rounded scale and never with one that the file cannot hold.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Int8s = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]

ALGORITHM = 3
"""Raised whenever `fit` would give other integers or scales for the same weights: results kept on disk are then stale."""

_PIECE = 1 << 18
"""Weights handled at once by a thread: 1 MiB of float32. Smaller pieces spend their time waiting for the interpreter
lock (16k: 18, 64k: 48, 256k: 72 M weights/s on 2 cores, 14 candidates), larger ones leave the cache."""

_SMALLEST_SCALE = np.float16(2.0**-24)


@dataclass(frozen=True)
class FitError:
    """What a fit lost: sums over all weights of the matrix."""

    signal: float
    """Sum of squares of the weights."""
    noise: float
    """Sum of squares of weight - q * scale."""
    saturated: int
    """Weights that rounding would have put outside the range of q."""
    weights: int

    @property
    def snr_db(self) -> float | None:
        """10 log10(signal / noise); None when nothing was lost."""
        return None if self.noise == 0 else float(10 * np.log10(max(self.signal, 1e-300) / self.noise))

    @property
    def saturation(self) -> float:
        """Share of weights that were clipped."""
        return self.saturated / max(self.weights, 1)


def limits(bits: int) -> tuple[int, int]:
    """Smallest and largest q: (-8, 7) for 4 bits, (-128, 127) for 8."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def group_size(columns: int, group: int) -> int:
    """Weights of one scale: `group`, or the whole row where that is 0."""
    return group or columns


def groups_of(columns: int, group: int) -> int:
    """Scales of one row, the last partial group included."""
    return -(-columns // group_size(columns, group))


def fit(weight: np.ndarray, bits: int, group: int, q: Int8s, scales: Halves, *, threads: int = 2) -> FitError:
    """Quantize `weight` into `q` and `scales`, searching each group's scale for the least squared error.

    Per group: the weight of largest magnitude is put at several places near either end of the range (so the scale may
    be negative and the longer end, -2^(bits-1), serves whichever sign needs it); each candidate's integers get their
    least-squares scale (w.q)/(q.q), whose squared error is w.w - (w.q)^2/(q.q); the best is rounded to float16, its
    integers rounded anew, and the refit repeated while it lowers the true error.

    Args:
        weight: [N,K], any float type.
        q: [N,K] int8, written (may be a memory map).
        scales: [N,ceil(K/group)] float16, written.
        threads: pieces of rows worked on at once; each needs about 5 MiB.

    Raises:
        ValueError: NaN or infinity among the weights, or weights too large for a float16 scale.
    """
    rows = max(1, _PIECE // max(weight.shape[1], 1))
    starts = range(0, weight.shape[0], rows)

    def piece(start: int) -> FitError:
        part = slice(start, start + rows)
        try:
            return _fit_piece(weight[part], bits, group, q[part], scales[part])
        except ValueError as failure:
            raise ValueError(f"rows {start} to {min(start + rows, weight.shape[0]) - 1}: {failure}") from None

    with ThreadPoolExecutor(threads) as pool:
        errors = list(pool.map(piece, starts))
    return FitError(
        signal=sum(error.signal for error in errors),
        noise=sum(error.noise for error in errors),
        saturated=sum(error.saturated for error in errors),
        weights=weight.size,
    )


def round_to_nearest(weight: np.ndarray, bits: int, group: int) -> tuple[Int8s, Halves]:
    """The plain way that `fit` is measured against: scale = max|w| / (2^(bits-1)-1), one rounding, no search."""
    blocks = _blocks(weight, group)
    _, high = limits(bits)
    scales = (np.abs(blocks).max(-1) / np.float32(high)).astype(np.float16)
    q, _ = _round(blocks, scales, bits)
    return _rows(q, weight.shape[1]).astype(np.int8), scales


def turn_positive(q: np.ndarray, scales: Halves, bits: int) -> tuple[np.ndarray, Halves]:
    """(q, scales) of rows with one scale each, every scale positive: q changes its sign with it, and 2^(bits-1) is cut by one.

    Matrix units that know one scale a row take a negative one for something else, in silence (QNN's HTP does).
    """
    low, high = limits(bits)
    sign = np.where(scales < 0, -1, 1).astype(np.int16)
    return np.clip(q.astype(np.int16) * sign, low, high).astype(q.dtype), np.abs(scales)


def dequantize(q: np.ndarray, scales: np.ndarray, group: int) -> Floats:
    """q * scale as float32: [N,K]."""
    columns = q.shape[1]
    wide = np.repeat(scales.astype(np.float32), group_size(columns, group), axis=1)[:, :columns]
    return q.astype(np.float32) * wide


def pack_rows(q: Int8s, bits: int, group: int) -> Bytes:
    """The layout of MatMulNBits' B and GatherBlockQuantized's data: [N, ceil(K/group), group*bits/8] uint8.

    Values carry the operators' default zero point: q + 2^(bits-1). Two 4-bit values share a byte, the earlier one in
    the low nibble. Padding after K holds the zero point, so it counts as 0.
    Source: com.microsoft MatMulNBits, inputs B and zero_points.
    """
    size, count = group_size(q.shape[1], group), groups_of(q.shape[1], group)
    packed = np.empty((q.shape[0], count * size * bits // 8), np.uint8)
    rows = max(1, _PIECE // (count * size))
    for start in range(0, q.shape[0], rows):
        part = q[start : start + rows]
        whole = np.zeros((len(part), count * size), np.int8)
        whole[:, : q.shape[1]] = part
        unsigned = (whole.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
        packed[start : start + rows] = _nibbles(unsigned) if bits == 4 else unsigned
    return packed.reshape(q.shape[0], count, size * bits // 8)


def unpack_rows(packed: Bytes, bits: int, columns: int) -> Int8s:
    """What `pack_rows` packed: [N,K] int8."""
    flat = packed.reshape(packed.shape[0], -1)
    if bits == 4:
        flat = np.stack([flat & 15, flat >> 4], axis=-1).reshape(packed.shape[0], -1)
    return (flat[:, :columns].astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def pack_zeros(zero_points: Bytes, bits: int) -> Bytes:
    """The layout of MatMulNBits' zero_points: [N,G] -> [N, ceil(G*bits/8)] uint8; an odd last nibble is filled with the default.

    Source: com.microsoft MatMulNBits, input zero_points.
    """
    if bits != 4:
        return zero_points
    even = np.full((len(zero_points), -(-zero_points.shape[1] // 2) * 2), 1 << (bits - 1), np.uint8)
    even[:, : zero_points.shape[1]] = zero_points
    return _nibbles(even)


def pack_columns(q: Int8s, bits: int, group: int) -> np.ndarray:
    """The layout of a MatMul's second input, rows padded to whole groups: values of [Kp,N], Kp = groups * group.

    8 bits: int8 [Kp,N]. 4 bits: the bytes of an INT4 tensor of that shape, [Kp*N/2] uint8, two's complement, the
    earlier value in the low nibble. Source: onnx IR, TensorProto.INT4.
    """
    size, count = group_size(q.shape[1], group), groups_of(q.shape[1], group)
    turned = np.zeros((count * size, q.shape[0]), np.int8)
    turned[: q.shape[1]] = q.T
    return _nibbles(turned.reshape(-1).view(np.uint8) & np.uint8(15)) if bits == 4 else turned


def _nibbles(values: Bytes) -> Bytes:
    return values[..., 0::2] | (values[..., 1::2] << np.uint8(4))


def _candidates(bits: int) -> tuple[float, ...]:
    """Where to put the weight of largest magnitude, as a multiple of the scale, itself counted positive.

    Whole numbers come first: a group that lies on such a grid is met exactly (a whole matrix on any: `quant.grid`). The rest
    follow the error: 4 bits gain from clipping the extreme (beyond -8) as well as from a coarser scale; 8 bits only want a finer
    choice around the ends.
    """
    if bits == 4:
        return (-8, 7, -7, 6, -6, 5, *(-8 - 0.3 * step for step in range(1, 8)), -7.65, -7.35, 7.35, 7.7, 8.1, 8.5)
    low, high = limits(bits)
    return (low, high, low + 1, low + 2, low + 3, low - 1.0, high + 0.7, low - 2.5, low - 5)


def _fit_piece(weight: np.ndarray, bits: int, group: int, q: Int8s, scales: Halves) -> FitError:
    blocks = _blocks(weight, group)
    if not np.isfinite(blocks).all():
        raise ValueError("NaN or infinity among the weights")
    scale = _stored(_search(blocks, bits))
    best, saturated = _round(blocks, scale, bits)
    error = _squares(blocks, best, scale)
    for _ in range(2):
        refitted = _stored(_least_squares(blocks, best), scale)
        rounded, clipped = _round(blocks, refitted, bits)
        new = _squares(blocks, rounded, refitted)
        better = new < error
        if not better.any():
            break
        error = np.where(better, new, error)
        scale = np.where(better, refitted, scale)
        best[better], saturated[better] = rounded[better], clipped[better]
    q[...] = _rows(best, weight.shape[1])
    scales[...] = scale
    signal = float(_dot(blocks, blocks).sum(dtype=np.float64))
    return FitError(signal, float(error.sum(dtype=np.float64)), int(saturated.sum()), weight.size)


def _search(blocks: Floats, bits: int) -> Floats:
    """The least-squares scale of each group's best candidate: [N,G]."""
    low, high = limits(bits)
    most, least = blocks.max(-1), blocks.min(-1)
    extreme = np.where(-least > most, least, most)
    # Below half the smallest float16 nothing but zeros can be stored; leaving such groups at 0 also keeps 1/x finite.
    inverse: Floats = np.divide(1, extreme, out=np.zeros_like(extreme), where=np.abs(extreme) >= float(_SMALLEST_SCALE) / 2)
    steps = np.empty_like(blocks)
    best = np.full_like(extreme, -1)
    scale: Floats = np.zeros_like(extreme)
    for place in _candidates(bits):
        np.multiply(blocks, (inverse * np.float32(place))[..., None], out=steps)
        np.rint(steps, out=steps)
        np.clip(steps, low, high, out=steps)
        along = _dot(blocks, steps)
        length = _dot(steps, steps)
        length[length == 0] = 1
        refitted = along / length
        gain = along * refitted
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better, refitted, scale)
    return scale


def _least_squares(blocks: Floats, q: Floats) -> Floats:
    length = _dot(q, q)
    length[length == 0] = 1
    return _dot(blocks, q) / length


def _dot(one: Floats, other: Floats) -> Floats:
    """Sums over each group: [N,G,g] x [N,G,g] -> [N,G]."""
    sums: Floats = np.einsum("ngk,ngk->ng", one, other)
    return sums


def _stored(scale: Floats, otherwise: Halves | None = None) -> Halves:
    """The scale as the file holds it. A scale too small for float16 becomes the smallest one, one too large is refused."""
    if float(np.abs(scale).max(initial=0)) >= 65520:
        if otherwise is not None:
            return np.where(np.abs(scale) < 65520, scale, otherwise).astype(np.float16)
        raise ValueError(f"a scale of {float(np.abs(scale).max()):.3g} is beyond float16")
    half = scale.astype(np.float16)
    lost = (half == 0) & (scale != 0)
    half[lost] = np.copysign(_SMALLEST_SCALE, scale[lost])
    return half


def _round(blocks: Floats, scales: Halves, bits: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Nearest integers (half to even) as float32 [N,G,g], and how many of each group were clipped [N,G]."""
    low, high = limits(bits)
    wide = scales.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
    steps = np.rint(blocks * inverse[..., None])
    clipped = ((steps < low) | (steps > high)).sum(-1)
    # Adding 0 turns -0.0 to 0.0.
    return np.clip(steps, low, high, out=steps) + np.float32(0), clipped


def _squares(blocks: Floats, q: Floats, scales: Halves) -> Floats:
    rest = q * scales.astype(np.float32)[..., None]
    np.subtract(blocks, rest, out=rest)
    return _dot(rest, rest)


def _blocks(weight: np.ndarray, group: int) -> Floats:
    """[N,G,g] float32, zeros after the end of a row; a view where nothing must be converted or padded."""
    rows, columns = weight.shape
    size, count = group_size(columns, group), groups_of(columns, group)
    if columns == size * count:
        return np.ascontiguousarray(weight, np.float32).reshape(rows, count, size)
    whole = np.zeros((rows, size * count), np.float32)
    whole[:, :columns] = weight
    return whole.reshape(rows, count, size)


def _rows(blocks: Floats, columns: int) -> Floats:
    return blocks.reshape(len(blocks), -1)[:, :columns]
