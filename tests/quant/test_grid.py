"""Weights that lie on a grid already: found again whoever made them, and nothing else is taken for one."""

import numpy as np
import pytest

from quant import solvers
from quant.affine import dequantize_affine
from quant.arrays import groups_of, limits
from quant.grid import OnGrid, on_grid
from quant.moments import Moments
from quant.scheme import Form
from tests.static_pair import fresh_seed

FORMS = [
    (bits, group, symmetric) for bits in (4, 8) for group in (0, 32, 64) for symmetric in (True, False) if group or symmetric
]


def values_of(found: OnGrid, bits: int, group: int) -> np.ndarray:
    return dequantize_affine(found.q, found.scales, found.zeros, bits, group)


def made(rng: np.random.Generator, bits: int, group: int, symmetric: bool, columns: int = 100) -> np.ndarray:
    """Weights [24,K] of random integers, few of which reach the ends of their range."""
    low, high = limits(bits)
    count = groups_of(columns, group)
    q = np.clip(rng.normal(0, high / 4, (24, columns)).round(), low, high)
    q[:, ::7] = 0
    scales = (
        rng.uniform(0.001, 0.1, (24, count)) * (1 if not group or not symmetric else rng.choice([-1, 1], (24, count)))
    ).astype(np.float16)
    zeros = None if symmetric else rng.integers(0, 1 << bits, (24, count)).astype(np.uint8)
    return dequantize_affine(q.astype(np.int8), scales, zeros, bits, group)


@pytest.mark.parametrize("solver", ["fit", "gptq"])
@pytest.mark.parametrize("columns", [100, 192])
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_quantizing_what_a_solver_made_changes_nothing(bits: int, group: int, symmetric: bool, columns: int, solver: str) -> None:
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    form = Form(bits=bits, group=group, activation="float", symmetric=symmetric)
    vectors = rng.standard_normal((400, columns)) * np.exp(rng.normal(0, 1, columns))
    moments = Moments((vectors.T @ vectors / 400).astype(np.float32), 400)
    weight = rng.standard_normal((300, columns)).astype(np.float32)
    first = solvers.find(solver).solve(weight, form, moments, 1)
    once = dequantize_affine(first.q, first.scales, first.zero_points, bits, group)
    again = solvers.find(solver).solve(once, form, moments, 1)
    twice = dequantize_affine(again.q, again.scales, again.zero_points, bits, group)
    assert not np.array_equal(once, weight) and np.array_equal(once, twice), f"seed {seed}"
    assert again.error.noise == 0 and again.proxy == 0 and again.error.signal > 0, f"seed {seed}"


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_a_grid_is_found_from_its_values_alone(bits: int, group: int, symmetric: bool) -> None:
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    weight = made(rng, bits, group, symmetric)
    found = on_grid(weight, bits, group, symmetric=symmetric)
    assert found is not None and np.array_equal(values_of(found, bits, group), weight), f"seed {seed}"
    assert (found.zeros is None) == symmetric
    off = weight.copy()
    at = np.flatnonzero(weight[20])[-1]  # one weight of one group, behind the rows that are looked at first
    off[20, at] *= np.float32(1 + 2**-20)
    assert on_grid(off, bits, group, symmetric=symmetric) is None, f"seed {seed}"


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_ordinary_weights_of_any_type_lie_on_none(bits: int, group: int, symmetric: bool) -> None:
    seed = fresh_seed()
    weight = np.random.default_rng(seed).standard_normal((40, 192))
    for given in (
        weight.astype(np.float32),
        weight.astype(np.float16),
        (weight.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
    ):
        assert on_grid(given, bits, group, symmetric=symmetric) is None, f"seed {seed}: {given.dtype}"
    assert on_grid(np.zeros((4, 64), np.float32), bits, group, symmetric=symmetric) is None
    assert on_grid(np.full((4, 64), np.inf, np.float32), bits, group, symmetric=symmetric) is None


def test_integers_that_the_form_cannot_hold_are_no_grid_of_it() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :3] = 0.5, -4.0, 3.5  # -8 and 7 of 0.5
    assert on_grid(weight, 4, 32, symmetric=True) is not None
    weight[0, 2] = 4.0
    assert on_grid(weight, 4, 32, symmetric=True) is None and on_grid(weight, 8, 32, symmetric=True) is not None
    weight[0, 1] = -3.5
    assert on_grid(weight, 4, 32, symmetric=True) is not None, "a negative scale holds 8"
    assert on_grid(weight, 4, 0, symmetric=True) is None, "one scale a row is positive"
