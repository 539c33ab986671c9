"""gptq: integers and scales that keep the linear's outputs on the calibration text, not its weights.

Knows: the steps of `quant.gptq` and their order. Does not know: graphs or where moments come from.

Scales are searched with what each column costs once the others make good for it; columns are rounded in the order of their
inputs' size over the whole row, each error handed on; then integers and scales are put to their best values in turn. The
figures that chose each step are in docs/LOG.md. Where all that is no better than the plain fit, the fit is taken.
"""

from dataclasses import replace

import numpy as np

from quant.arrays import FitError, Floats, turn_positive
from quant.gptq import Feedback, Grid, descend, feedback, refit, round_with_feedback, search
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form
from quant.solvers import Solved, fit

VERSION = 3
NEEDS_MOMENTS = True

_DAMPING = 0.03
_ROUNDS = 2
"""Times that scales and integers take turns; two more gain 1% of the proxy."""
_SWEEPS = 2


def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
    """See `quant.solvers`."""
    plain = fit.solve(weight, form, moments, threads)
    plain = replace(plain, plain_proxy=plain.proxy)
    if moments is None or plain.proxy is None or not moments.h.any():
        return replace(plain, fell_back="no calibration text reached it")
    if plain.error.noise == 0:
        return plain
    try:
        given = feedback(moments.h, _DAMPING)
    except ValueError as failure:
        return replace(plain, fell_back=str(failure))
    target = np.asarray(weight, np.float32)
    start = search(target, given.importance, form.bits, form.group, symmetric=form.symmetric, threads=threads)
    grid = _positive(_improved(target, _positive(start), given, _damped(moments.h, given), threads))
    proxy = proxy_loss(target, grid.values, moments.h)
    if not proxy < plain.proxy:
        return replace(plain, fell_back=f"it would lose {proxy:.3g} of its output's power, the fit {plain.proxy:.3g}")
    return Solved(grid.q, grid.scales, grid.zeros, _error(target, grid), proxy, plain_proxy=plain.proxy)


def _improved(target: Floats, grid: Grid, given: Feedback, h: Floats, threads: int) -> Grid:
    grid = round_with_feedback(target, grid, given, threads=threads)
    grid = descend(target, grid, h, _SWEEPS, threads=threads)
    for _ in range(_ROUNDS):
        grid = refit(target, grid, h, threads=threads)
        grid = descend(target, grid, h, _SWEEPS, threads=threads)
    return grid


def _positive(grid: Grid) -> Grid:
    """Rows with one scale each get a positive one before they are rounded; what that cuts, rounding makes good."""
    if grid.group or grid.zeros is not None or not (grid.scales < 0).any():
        return grid
    u, scales = turn_positive(grid.u, grid.scales, grid.bits)
    return replace(grid, u=u, scales=scales)


def _damped(h: Floats, given: Feedback) -> Floats:
    """H damped as `feedback` damped it; a column that never has input gets the damping alone."""
    damped = h.copy()
    np.fill_diagonal(damped, np.diag(h) + np.float32(given.damping * float(np.diag(h).mean())))
    return damped


def _error(weight: Floats, grid: Grid) -> FitError:
    rest = weight - grid.values
    signal = float(np.einsum("nk,nk->", weight, weight, dtype=np.float64))
    return FitError(signal, float(np.einsum("nk,nk->", rest, rest, dtype=np.float64)), grid.clipped(weight), weight.size)
