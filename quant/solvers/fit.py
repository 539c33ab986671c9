"""fit: the scale of every group searched for the least squared error of its weights; no calibration is needed.

Knows: `quant.arrays.fit` and, for groups with a zero point, `quant.affine`; that a matrix which lies on a grid already keeps it
(`quant.grid`), whichever solver put it there. Does not know: graphs or where moments come from. Moments, where there are some,
only measure what it lost.
"""

from dataclasses import replace

import numpy as np

from quant.affine import dequantize_affine, fit_affine
from quant.arrays import ALGORITHM, FitError, Halves, Int8s, dequantize, fit, groups_of, turn_positive
from quant.grid import on_grid
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form
from quant.solvers import Solved

VERSION = ALGORITHM
NEEDS_MOMENTS = False


_ROWS = 4096
"""Rows in float at once."""


def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
    """See `quant.solvers`."""
    held = on_grid(weight, form.bits, form.group, symmetric=form.symmetric)
    if held is not None:
        signal = sum(float(np.einsum("k,k->", row, row, dtype=np.float64)) for row in weight)
        lost = None if moments is None else 0.0
        return Solved(held.q, held.scales, held.zeros, FitError(signal, 0.0, 0, weight.size), lost)
    if form.symmetric:
        q = np.empty(weight.shape, np.int8)
        scales = np.empty((len(weight), groups_of(weight.shape[1], form.group)), np.float16)
        zeros = None
        error = fit(weight, form.bits, form.group, q, scales, threads=threads)
        if form.group == 0 and (scales < 0).any():
            q, scales, error = _positive(weight, q, scales, form.bits, error)
    else:
        q, scales, zeros, error = fit_affine(weight, form.bits, form.group, threads=threads)
    proxy = None
    if moments is not None:
        proxy = proxy_loss(weight, dequantize_affine(q, scales, zeros, form.bits, form.group), moments.h)
    return Solved(q, scales, zeros, error, proxy)


def _positive(weight: np.ndarray, q: Int8s, scales: Halves, bits: int, error: FitError) -> tuple[Int8s, Halves, FitError]:
    """One scale a row: all positive, and what the few weights lose that this cuts."""
    q, scales = turn_positive(q, scales, bits)
    noise = 0.0
    for start in range(0, len(q), _ROWS):
        part = slice(start, start + _ROWS)
        rest = np.asarray(weight[part], np.float32) - dequantize(q[part], scales[part], 0)
        noise += float(np.einsum("nk,nk->", rest, rest, dtype=np.float64))
    return q, scales, replace(error, noise=noise)
