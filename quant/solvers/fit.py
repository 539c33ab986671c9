"""fit: the scale of every group searched for the least squared error of its weights; no calibration is needed.

Knows: `quant.arrays.fit` and, for groups with a zero point, `quant.affine`. Does not know: graphs or where moments come from.
Moments, where there are some, only measure what it lost.
"""

import numpy as np

from quant.affine import dequantize_affine, fit_affine
from quant.arrays import ALGORITHM, fit, groups_of
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form
from quant.solvers import Solved

VERSION = ALGORITHM
NEEDS_MOMENTS = False
NEEDS_CROSS = False


def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
    """See `quant.solvers`."""
    if form.symmetric:
        q = np.empty(weight.shape, np.int8)
        scales = np.empty((len(weight), groups_of(weight.shape[1], form.group)), np.float16)
        zeros = None
        error = fit(weight, form.bits, form.group, q, scales, threads=threads)
    else:
        q, scales, zeros, error = fit_affine(weight, form.bits, form.group, threads=threads)
    proxy = None
    if moments is not None:
        proxy = proxy_loss(weight, dequantize_affine(q, scales, zeros, form.bits, form.group), moments.h)
    return Solved(q, scales, zeros, error, proxy)
