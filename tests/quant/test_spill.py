"""Results on disk are those that were written, in whatever order an array keeps its numbers."""

from pathlib import Path

import numpy as np
import pytest

from quant import spill
from quant.arrays import FitError
from quant.scheme import Form
from quant.solvers import Solved


@pytest.mark.parametrize("order", ["C", "F"])
def test_what_is_written_is_found(order: str, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    q = np.array(rng.integers(-8, 8, (6, 64)), np.int8, order=order)  # type: ignore[call-overload]
    scales = np.array(rng.uniform(1, 2, (6, 2)), np.float16, order=order)  # type: ignore[call-overload]
    zeros = np.array(rng.integers(0, 16, (6, 2)), np.uint8, order=order)  # type: ignore[call-overload]
    error = FitError(signal=1.0, noise=0.5, saturated=3, weights=384)
    form = Form(4, 32, "block-dynamic", symmetric=False)
    spill.write(tmp_path, "key", Solved(q=q, scales=scales, zero_points=zeros, error=error, proxy=0.25, fell_back=""))
    found = spill.find(tmp_path, "key", (6, 64), form)
    assert found is not None and (found.error, found.proxy) == (error, 0.25)
    assert np.array_equal(found.q(), q) and np.array_equal(found.scales(), scales) and np.array_equal(found.zero_points(), zeros)


@pytest.mark.parametrize("part", ["q", "s", "z"])
def test_a_result_that_has_changed_since_is_not_found(part: str, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    q, scales = rng.integers(-8, 8, (6, 64)).astype(np.int8), rng.uniform(1, 2, (6, 2)).astype(np.float16)
    zeros, form = rng.integers(0, 16, (6, 2)).astype(np.uint8), Form(4, 32, "block-dynamic", symmetric=False)
    spill.write(tmp_path, "key", Solved(q=q, scales=scales, zero_points=zeros, error=FitError(1.0, 0.5, 3, 384)))
    assert spill.find(tmp_path, "key", (6, 64), form) is not None
    path = tmp_path / f"key.{part}.npy"
    data = bytearray(path.read_bytes())
    data[-1 - int(rng.integers(0, 12))] ^= 1
    path.write_bytes(data)
    assert spill.find(tmp_path, "key", (6, 64), form) is None
