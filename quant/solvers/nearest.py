"""nearest: one scale a group from its largest weight, one rounding. The baseline that every gain is shown against.

Knows: `quant.arrays.round_to_nearest`. Does not know: graphs or where moments come from.
"""

import numpy as np

from quant.arrays import FitError, dequantize, groups_of, round_to_nearest
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form
from quant.solvers import Solved

VERSION = 1
NEEDS_MOMENTS = False

_PIECE = 1 << 20
"""Weights in float at once."""


def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
    """See `quant.solvers`. Zero points, where the form has them, stay in the middle: plain rounding has no use for them."""
    if not np.isfinite(weight).all():
        raise ValueError("NaN or infinity among the weights")
    most = float(np.abs(weight).max(initial=0))
    if most / ((1 << (form.bits - 1)) - 1) >= 65520:
        raise ValueError(f"a weight of {most:.3g} needs a scale beyond float16")
    q = np.empty(weight.shape, np.int8)
    scales = np.empty((len(weight), groups_of(weight.shape[1], form.group)), np.float16)
    signal = noise = 0.0
    step = max(1, _PIECE // max(weight.shape[1], 1))
    for start in range(0, len(weight), step):
        part = np.asarray(weight[start : start + step], np.float32)
        q[start : start + step], scales[start : start + step] = round_to_nearest(part, form.bits, form.group)
        rest = part - dequantize(q[start : start + step], scales[start : start + step], form.group)
        signal += float(np.einsum("nk,nk->", part, part, dtype=np.float64))
        noise += float(np.einsum("nk,nk->", rest, rest, dtype=np.float64))
    zeros = None if form.symmetric else np.full(scales.shape, 1 << (form.bits - 1), np.uint8)
    proxy = None if moments is None else proxy_loss(weight, dequantize(q, scales, form.group), moments.h)
    return Solved(q, scales, zeros, FitError(signal, noise, 0, weight.size), proxy)
