"""Discovery of solvers: every module here finds the integers and scales of one weight in its own way.

Knows: the folder, and what a solver gives back. Does not know: any solver.

A solver's module holds VERSION (raised whenever it would give other numbers for the same input: results on disk are then
stale), NEEDS_MOMENTS, and `solve(weight [N,K] float32, form, moments or None, threads) -> Solved`; `ValueError` from it means
that the weight is damaged (NaN, infinity, beyond float16) and says how.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from appliance.errors import TargetError
from quant.arrays import Bytes, FitError, Floats, Halves, Int8s
from quant.moments import Moments
from quant.scheme import Form
from quant.scheme import nearest as hint  # the module of that name takes its place in this package once it is imported


@dataclass(frozen=True)
class Solved:
    """One quantized matrix.

    Attributes:
        q: [N,K] int8, -8..7 for 4 bits.
        scales: [N,G] float16, G = ceil(K/group); float32 powers of two for Microscaling elements.
        zero_points: [N,G] uint8 in 0..2^bits-1, None when symmetric. value = (q - (zero_point - 2^(bits-1))) * scale.
        error: what was lost of the weights themselves.
        offsets: [N,G] float16, None when the form has none. value = (q + 2^(bits-1)) * scale + offset.
        proxy: what is lost of the outputs on the calibration text, relative: mean |x (W - W')^T|^2 / mean |x W^T|^2, over the
            vectors that the moments are of. None where there were none.
        plain_proxy: the same of the plain fit, where the solver looked at it: `proxy` is never above it.
        fell_back: why the plainer way was taken for this matrix; "" when it was not.
    """

    q: Int8s
    scales: Halves | Floats
    zero_points: Bytes | None
    error: FitError
    proxy: float | None = None
    fell_back: str = ""
    offsets: Halves | None = None
    plain_proxy: float | None = None


class Solver(Protocol):
    """What a module in this folder looks like."""

    VERSION: int
    NEEDS_MOMENTS: bool

    def solve(self, weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
        """See the top of this file."""


def known() -> list[str]:
    """Every solver's name, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Solver:
    """The solver called `name`; `TargetError` with the nearest name when there is none."""
    if name not in known():
        raise TargetError(f'unknown solver "{name}"', hint(name, known()))
    return cast(Solver, importlib.import_module(f"{__name__}.{name}"))
