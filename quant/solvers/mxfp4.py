"""mxfp4: each block's power of two from its largest weight, or twice that where it loses less; elements rounded to nearest.

Knows: `quant.mx`. Does not know: graphs or where moments come from. Moments, where there are some, only measure what it lost.
"""

import numpy as np

from quant import mx
from quant.arrays import FitError, Floats, Int8s, dequantize, groups_of
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form
from quant.solvers import Solved

VERSION = 1
NEEDS_MOMENTS = False

_PIECE = 1 << 20
"""Weights in float at once."""


def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
    """See `quant.solvers`. q are twice the elements, scales float32 powers of two (see `quant.mx`)."""
    q: Int8s = np.empty(weight.shape, np.int8)
    scales: Floats = np.empty((len(weight), groups_of(weight.shape[1], form.group)), np.float32)
    signal = noise = 0.0
    clamped, step = 0, max(1, _PIECE // max(weight.shape[1], 1))
    for start in range(0, len(weight), step):
        at, part = slice(start, start + step), np.asarray(weight[start : start + step], np.float32)
        q[at], scales[at], count = mx.quantize_weights(part)
        rest = part - dequantize(q[at], scales[at], form.group)
        signal += float(np.einsum("nk,nk->", part, part, dtype=np.float64))
        noise += float(np.einsum("nk,nk->", rest, rest, dtype=np.float64))
        clamped += count
    proxy = None if moments is None else proxy_loss(weight, dequantize(q, scales, form.group), moments.h)
    return Solved(q, scales, None, FitError(signal, noise, clamped, weight.size), proxy)
