"""stored: the integers are those that the checkpoint holds, so there is nothing to find.

Knows: that `quant.keep` has put them into the spill. Does not know: how a checkpoint holds them.
"""

import numpy as np

from quant.moments import Moments
from quant.scheme import Form
from quant.solvers import Solved

VERSION = 1
NEEDS_MOMENTS = False


def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
    """Never reached: what the checkpoint holds cannot be found from values, only read (`quant.keep.keep`)."""
    raise AssertionError("a stored grid was not carried over before it was asked for")
