"""Integers and scales that keep a linear's outputs, found from second moments of its inputs. Pure functions on numpy arrays.

Knows: arrays. Does not know: graphs, roles, or where moments come from.

A row w of the weight with quantized row v costs (w - v) H (w - v)^T of its output's mean square, H = mean x x^T [K,K].
v = u * scale, where u = q - z are whole numbers within the group's range, and a group has one scale, kept as float16.
Rows do not touch each other, so all rows of a piece are worked on at once, one column after the other: inside, arrays lie
as [K,n], a column of the weight being one contiguous line.

    search                 scales by the error that is left when all other columns make good what they can
    round_with_feedback    each column rounded once; what it lost is made good by the columns that are still to come
    descend                each integer in turn put to its best value given all others; never worse
    refit                  all scales of a row put to their best values given the integers; never worse

Sources: GPTQ (Frantar and others, 2022) for the feedback; coordinate descent and least squares are textbook methods.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quant.arrays import Bytes, Floats, Halves, Int8s, group_size, groups_of, limits

Doubles = npt.NDArray[np.float64]
Shorts = npt.NDArray[np.int16]

_COLUMNS = 32
"""Columns whose effect on all later ones is gathered into one product of matrices."""
_PIECE = 1024
"""Rows worked on at once. Fewer and numpy's calls cost more than their work; it is fixed so that the number of threads does
not change a result."""
_DAMPINGS = 8
"""How often the damping is made ten times larger before H is given up."""
_RIDGE = 1e-6
"""Pull of `refit` toward the scales it was given, as a share of the mean curvature: keeps groups of zeros where they are."""


@dataclass(frozen=True)
class Feedback:
    """What rounding needs of H; the same for all weights that a stream enters.

    Attributes:
        order: [K], columns in the order of rounding: largest inputs first, while all others can still make good.
        coefficients: [K,K]; row j: what the error of column order[j] adds to the target of each later column.
        importance: [K], cost of a column's squared error when all others make good what they can: 1 / diag(H^-1).
        damping: what was added to H's diagonal, as a share of its mean.
    """

    order: npt.NDArray[np.intp]
    coefficients: Floats
    importance: Floats
    damping: float


@dataclass(frozen=True)
class Grid:
    """A quantized matrix as whole numbers around 0.

    Attributes:
        u: [N,K], q - z.
        scales: [N,G] float16.
        zeros: [N,G] uint8, as `quant.affine` has them; None = all in the middle.
        bits: 4 or 8.
        group: weights of a scale; 0 = the row.
    """

    u: Shorts
    scales: Halves
    zeros: Bytes | None
    bits: int
    group: int

    @property
    def q(self) -> Int8s:
        """[N,K], u + z."""
        return (self.u + self._z()).astype(np.int8)

    @property
    def values(self) -> Floats:
        """[N,K], u * scale."""
        values: Floats = self.u * _spread(self.scales.astype(np.float32), self.group, self.u.shape[1])
        return values

    def clipped(self, weight: Floats) -> int:
        """How many weights lie outside of what their scale reaches."""
        wide = _spread(self.scales.astype(np.float32), self.group, self.u.shape[1])
        steps = np.rint(np.divide(weight, wide, out=np.zeros_like(wide), where=wide != 0))
        low, high = self.range()
        return int(((steps < low) | (steps > high)).sum())

    def range(self) -> tuple[Shorts | int, Shorts | int]:
        """Smallest and largest u, of all weights or [N,K]."""
        low, high = limits(self.bits)
        z = self._z()
        return low - z, high - z

    def _z(self) -> Shorts | int:
        if self.zeros is None:
            return 0
        return _spread(self.zeros.astype(np.int16) + np.int16(limits(self.bits)[0]), self.group, self.u.shape[1])


def grid_of(q: Int8s, scales: Halves, zeros: Bytes | None, bits: int, group: int) -> Grid:
    """A solver's result as whole numbers around 0."""
    middle = Grid(np.zeros(q.shape, np.int16), scales, zeros, bits, group)
    return replace(middle, u=q.astype(np.int16) - middle._z())


def feedback(h: Floats, damping: float) -> Feedback:
    """Order, coefficients and importance of the columns.

    With the columns in order and H = R R^T, R upper triangular, H^-1 = R^-T R^-1: the coefficients are the rows of R^-1
    over their diagonal. A column that never has input counts as one of mean size.

    Raises:
        ValueError: H is not finite, or not positive definite even with a far larger damping.
    """
    if not np.isfinite(h).all():
        raise ValueError("NaN or infinity among the moments")
    diagonal = np.diag(h).astype(np.float64)
    mean = float(diagonal.mean()) if diagonal.any() else 1.0
    diagonal[diagonal <= 0] = mean
    order = np.argsort(-diagonal, kind="stable")
    last_first = order[::-1]
    turned = h[np.ix_(last_first, last_first)].astype(np.float64)
    for _ in range(_DAMPINGS):
        np.fill_diagonal(turned, diagonal[last_first] + damping * mean)
        try:
            upper = np.linalg.cholesky(turned)[::-1, ::-1]
            break
        except np.linalg.LinAlgError:
            damping = max(damping, 1e-8) * 10
    else:
        raise ValueError("the moments are not positive semidefinite")
    inverse = _inverse(np.ascontiguousarray(upper))
    importance = np.empty(len(h), np.float32)
    importance[order] = 1 / (inverse * inverse).sum(0)
    return Feedback(order, (inverse / np.diag(inverse)[:, None]).astype(np.float32), importance, damping)


def search(target: Floats, importance: Floats, bits: int, group: int, *, symmetric: bool = True, threads: int = 2) -> Grid:
    """Scales with the least sum of importance * (w - u * scale)^2, and the nearest integers.

    Symmetric: the group's largest weight is put at several places near either end of the range. With zero points also: the
    range from its least to its largest weight is given several widths in steps, and the zero point follows. Each candidate's
    integers get their least-squares scale, rounded to float16, and are rounded anew; the best candidate stays.

    Args:
        target: [N,K].
        importance: [K].
    """
    size, count, columns = group_size(target.shape[1], group), groups_of(target.shape[1], group), target.shape[1]
    weights = np.zeros(count * size, np.float32)
    weights[:columns] = importance / max(float(importance.max(initial=0)), 1e-30)

    def piece(rows: slice) -> tuple[np.ndarray, ...]:
        whole = np.zeros((rows.stop - rows.start, count * size), np.float32)
        whole[:, :columns] = target[rows]
        u, scales, zeros = _searched(whole.reshape(-1, count, size), weights.reshape(count, size), bits, symmetric)
        return u.reshape(len(whole), -1)[:, :columns], scales, zeros

    u, scales, zeros = _in_pieces(piece, len(target), threads)
    return Grid(u, scales, None if symmetric else zeros, bits, group)


def round_with_feedback(target: Floats, grid: Grid, given: Feedback, *, threads: int = 2) -> Grid:
    """New integers for `target` [N,K] on the scales and zero points of `grid`."""
    columns, order = target.shape[1], given.order

    def piece(rows: slice) -> tuple[np.ndarray, ...]:
        lines = _Lines(grid, rows, order)
        rest = np.ascontiguousarray(target[rows].T[order], np.float32)
        for start in range(0, columns, _COLUMNS):
            stop = min(start + _COLUMNS, columns)
            errors = np.empty((stop - start, rest.shape[1]), np.float32)
            for j in range(start, stop):
                u = lines.round(j, rest[j])
                lines.u[j] = u
                error = np.subtract(rest[j], u * lines.scale[j], out=errors[j - start])
                rest[j + 1 : stop] -= given.coefficients[j, j + 1 : stop, None] * error
            rest[stop:] -= given.coefficients[start:stop, stop:].T @ errors
        return (lines.whole(),)

    return replace(grid, u=_in_pieces(piece, len(target), threads)[0])


def descend(target: Floats, grid: Grid, h: Floats, sweeps: int, *, threads: int = 2) -> Grid:
    """Each integer in turn to its best value given all others, all columns `sweeps` times.

    With the slope R = (w - v) H, column j alone is best at v_j + R_j / H_jj, and the nearest integer to that is its best one.

    Args:
        h: [K,K], positive definite.
    """
    columns = target.shape[1]
    inverse = (1 / np.diag(h)).astype(np.float32)

    def piece(rows: slice) -> tuple[np.ndarray, ...]:
        lines = _Lines(grid, rows)
        values = lines.u * lines.scale
        slope = h @ (target[rows].T - values)
        for start in list(range(0, columns, _COLUMNS)) * sweeps:
            stop = min(start + _COLUMNS, columns)
            moves = np.empty((stop - start, values.shape[1]), np.float32)
            for j in range(start, stop):
                u = lines.round(j, values[j] + slope[j] * inverse[j])
                move = np.multiply(u - lines.u[j], lines.scale[j], out=moves[j - start])
                lines.u[j] = u
                values[j] += move
                slope[start:stop] -= h[start:stop, j, None] * move
            slope[:start] -= h[:start, start:stop] @ moves
            slope[stop:] -= h[stop:, start:stop] @ moves
        return (lines.whole(),)

    return replace(grid, u=_in_pieces(piece, len(target), threads)[0])


def refit(target: Floats, grid: Grid, h: Floats, *, threads: int = 2) -> Grid:
    """All scales of a row to their least-squares values in the norm of H, given the integers; rows that gain keep them.

    With u_g the integers of group g and zeros elsewhere: A s = b, A_gk = u_g H u_k^T, b_g = w H u_g^T.

    Args:
        h: [K,K], positive definite.
    """
    size, count = group_size(target.shape[1], grid.group), groups_of(target.shape[1], grid.group)
    starts = np.arange(count) * size

    def piece(rows: slice) -> tuple[np.ndarray, ...]:
        u = np.ascontiguousarray(grid.u[rows].T, np.float32)
        curve = np.empty((count, count, u.shape[1]), np.float32)
        for index, start in enumerate(starts):
            part = slice(start, start + size)
            curve[index] = np.add.reduceat((h[:, part] @ u[part]) * u, starts, axis=0)
        aim = np.add.reduceat((h @ target[rows].T) * u, starts, axis=0)
        return (_refitted(curve.transpose(2, 0, 1), aim.T, grid.scales[rows]),)

    rows = max(1, min(_PIECE, (1 << 24) // (count * count)))
    return replace(grid, scales=_in_pieces(piece, len(target), threads, rows)[0])


class _Lines:
    """Integers and scales of some rows, column after column: [K,n], in `order`."""

    def __init__(self, grid: Grid, rows: slice, order: npt.NDArray[np.intp] | None = None):
        self._order = np.arange(grid.u.shape[1]) if order is None else order
        part = replace(grid, u=grid.u[rows], scales=grid.scales[rows], zeros=None if grid.zeros is None else grid.zeros[rows])
        self.u: Floats = self._lines(part.u)
        self.scale: Floats = self._lines(_spread(part.scales.astype(np.float32), grid.group, len(self._order)))
        self._inverse = np.divide(1, self.scale, out=np.zeros_like(self.scale), where=self.scale != 0)
        low, high = part.range()
        self._low = np.full((len(self._order), 1), low, np.float32) if isinstance(low, int) else self._lines(low)
        self._high = np.full((len(self._order), 1), high, np.float32) if isinstance(high, int) else self._lines(high)

    def round(self, j: int, wanted: Floats) -> Floats:
        """The nearest u to `wanted` values [n] of column j."""
        u: Floats = wanted * self._inverse[j]
        np.rint(u, out=u)
        np.maximum(u, self._low[j], out=u)
        np.minimum(u, self._high[j], out=u)
        return u

    def whole(self) -> Shorts:
        """[n,K], columns in their own places."""
        back = np.empty(self.u.shape, np.int16)
        back[self._order] = self.u
        return np.ascontiguousarray(back.T)

    def _lines(self, rows: np.ndarray) -> Floats:
        return np.ascontiguousarray(rows.T[self._order], np.float32)


def _searched(blocks: Floats, weights: Floats, bits: int, symmetric: bool) -> tuple[Shorts, Halves, Bytes]:
    """u [n,G,g], scales and zero points [n,G]."""
    low, high = limits(bits)
    most, least = blocks.max(-1), blocks.min(-1)
    extreme = np.where(-least > most, least, most)
    weighted = blocks * weights
    best, scale, zero = (np.full(extreme.shape, start, np.float32) for start in (np.inf, 0, 0))
    tries = [(extreme / np.float32(place), False) for place in _places(bits)]
    if not symmetric:
        # The range always holds 0, so that the zero point is one of the stored integers.
        span = np.maximum(most, 0) - np.minimum(least, 0)
        tries += [(span / np.float32(width), True) for width in _widths(bits)]
    for step, moved in tries:
        z = np.clip(np.rint(low - np.minimum(least, 0) * _inverses(step)), low, high) if moved else np.zeros_like(step)
        u = _nearest(blocks, step, z, bits)
        length = np.einsum("ngk,ngk,gk->ng", u, u, weights)
        fitted = np.einsum("ngk,ngk->ng", weighted, u) / np.where(length > 0, length, 1)
        fitted = np.clip(fitted, -65504, 65504).astype(np.float16).astype(np.float32)
        error = np.einsum("ngk,gk->ng", (blocks - _nearest(blocks, fitted, z, bits) * fitted[..., None]) ** 2, weights)
        better = error < best
        best, scale, zero = np.where(better, error, best), np.where(better, fitted, scale), np.where(better, z, zero)
    u = _nearest(blocks, scale, zero, bits)
    return u.astype(np.int16), scale.astype(np.float16), (zero - low).astype(np.uint8)


def _places(bits: int) -> tuple[float, ...]:
    if bits == 4:
        return (-8, 7, -7, 6, -6, 5, *(-8 - 0.3 * step for step in range(1, 12)), -7.65, -7.35, 7.35, 7.7, 8.1, 8.5, 9, 9.5)
    return (-128, 127, -127, 126, 125, -129, 127.7, -130.5, -133)


def _widths(bits: int) -> tuple[float, ...]:
    steps = (1 << bits) - 1
    return tuple(steps * (0.86 + 0.04 * place) for place in range(14)) if bits == 4 else (steps, steps + 0.7, steps + 3)


def _inverses(steps: Floats) -> Floats:
    """1 / step, 0 where a step is below half the smallest float16."""
    inverse: Floats = np.divide(1, steps, out=np.zeros_like(steps), where=np.abs(steps) >= 2.0**-25)
    return inverse


def _nearest(blocks: Floats, scale: Floats, zero: Floats, bits: int) -> Floats:
    """u [n,G,g] within the range that the zero points [n,G] leave."""
    low, high = limits(bits)
    u: Floats = np.rint(blocks * _inverses(scale)[..., None])
    np.clip(u, (low - zero)[..., None], (high - zero)[..., None], out=u)
    return u


def _refitted(curve: Floats, aim: Floats, scales: Halves) -> Halves:
    """[n,G,G], [n,G] and the scales until now -> scales, row for row never worse."""
    wide, before = curve.astype(np.float64), scales.astype(np.float64)
    ridge = _RIDGE * np.trace(wide, axis1=1, axis2=2)[:, None] / wide.shape[1] + 1e-30
    pulled = wide + ridge[..., None] * np.eye(wide.shape[1])
    found = np.linalg.solve(pulled, (aim + ridge * before)[..., None])[..., 0]
    held = np.where(np.abs(found) < 65504, found, before).astype(np.float16)
    better = _cost(wide, aim, held) < _cost(wide, aim, scales)
    return np.where(better[:, None], held, scales)


def _cost(curve: Doubles, aim: Floats, scales: Halves) -> Doubles:
    wide = scales.astype(np.float64)
    cost: Doubles = np.einsum("ng,ngk,nk->n", wide, curve, wide, optimize=True) - 2 * np.einsum("ng,ng->n", wide, aim)
    return cost


def _inverse(upper: Doubles) -> Doubles:
    """Of an upper triangular matrix, by halves: a third of the work of a general inverse, and all of it products."""
    size = len(upper)
    if size <= 64:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    inverse = np.zeros_like(upper)
    inverse[:half, :half], inverse[half:, half:] = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    inverse[:half, half:] = -(inverse[:half, :half] @ upper[:half, half:]) @ inverse[half:, half:]
    return inverse


def _spread(of_groups: np.ndarray, group: int, columns: int) -> np.ndarray:
    """[N,G] -> [N,K]."""
    return np.repeat(of_groups, group_size(columns, group), axis=1)[:, :columns]


def _in_pieces(piece: Callable[[slice], tuple[np.ndarray, ...]], rows: int, threads: int, step: int = _PIECE) -> list[np.ndarray]:
    """The arrays that `piece` gives for each run of rows, put together."""
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    if len(parts) == 1 or threads <= 1:
        found = [piece(part) for part in parts]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(piece, parts))
    return [np.concatenate(arrays) for arrays in zip(*found, strict=True)]
