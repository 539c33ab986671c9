"""The solver: never worse than the fit on its own text, far better where inputs hang together; it says when it fell back."""

import dataclasses

import numpy as np
import pytest

from quant import solvers
from quant.affine import dequantize_affine
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form
from quant.solvers import fit, gptq

FORMS = [
    Form(4, 32, "block-dynamic"),
    Form(4, 64, "block-dynamic"),
    Form(4, 0, "block-dynamic"),
    Form(8, 32, "block-dynamic"),
    Form(4, 32, "block-dynamic", symmetric=False),
]


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def inputs(rng: np.random.Generator, tokens: int, columns: int) -> np.ndarray:
    mix = rng.standard_normal((columns, columns)) / columns**0.5 + 0.3 * np.eye(columns)
    return (rng.standard_normal((tokens, columns)) @ mix * rng.uniform(0.1, 3, columns)).astype(np.float32)


def moments(x: np.ndarray) -> Moments:
    return Moments(x.T @ x / len(x), len(x))


def weights(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) * rng.uniform(0.5, 2, (rows, 1)) * 0.05).astype(np.float32)


@pytest.mark.parametrize("columns", [128, 100])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_outputs_on_text_not_seen_lose_far_less_than_with_the_fit(form: Form, columns: int) -> None:
    seed, rng = fresh()
    weight, x = weights(rng, 60, columns), inputs(rng, 6000, columns)
    seen, unseen = moments(x[:3000]), moments(x[3000:])
    plain, found = fit.solve(weight, form, seen, 2), gptq.solve(weight, form, seen, 2)
    assert found.fell_back == "" and found.proxy is not None and plain.proxy is not None
    assert (found.zero_points is None) == form.symmetric
    values = dequantize_affine(found.q, found.scales, found.zero_points, form.bits, form.group)
    assert found.proxy == pytest.approx(proxy_loss(weight, values, seen.h), rel=1e-3), f"seed {seed}"
    assert found.error.noise == pytest.approx(float(((weight - values).astype(np.float64) ** 2).sum()), rel=1e-3)
    before = dequantize_affine(plain.q, plain.scales, plain.zero_points, form.bits, form.group)
    assert proxy_loss(weight, values, unseen.h) < 0.6 * proxy_loss(weight, before, unseen.h), f"seed {seed}"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["few tokens", "independent", "one direction", "a dead input"])
def test_the_proxy_is_never_above_that_of_the_fit(form: Form, kind: str) -> None:
    seed, rng = fresh()
    x = inputs(rng, 2000, 64)
    if kind == "few tokens":
        x = x[:5]
    elif kind == "independent":
        x = rng.standard_normal((4000, 64)).astype(np.float32)
    elif kind == "one direction":
        x = rng.standard_normal((2000, 1)).astype(np.float32) * x[:1] * np.float32(1000)
    else:
        x[:, ::3] = 0
    weight = weights(rng, 20, 64)
    plain, found = fit.solve(weight, form, moments(x), 1), gptq.solve(weight, form, moments(x), 1)
    assert found.proxy is not None and plain.proxy is not None and np.isfinite(found.scales).all()
    assert found.proxy <= plain.proxy, f"seed {seed}"


def test_a_result_that_is_no_better_is_left_for_the_fit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rng = fresh()
    weight, seen, form = weights(rng, 20, 64), moments(inputs(rng, 500, 64)), FORMS[0]
    monkeypatch.setattr(gptq, "_improved", lambda target, grid, *rest: dataclasses.replace(grid, u=-grid.u))
    plain, found = fit.solve(weight, form, seen, 1), gptq.solve(weight, form, seen, 1)
    assert np.array_equal(found.q, plain.q) and np.array_equal(found.scales, plain.scales) and found.proxy == plain.proxy
    assert found.fell_back.startswith("it would lose ") and "the fit" in found.fell_back


def test_without_text_or_with_broken_moments_it_falls_back_and_says_why() -> None:
    _, rng = fresh()
    weight, form = weights(rng, 4, 64), FORMS[0]
    nothing = Moments(np.zeros((64, 64), np.float32), 0)
    broken = Moments(np.full((64, 64), np.nan, np.float32), 10)
    for seen, why in ((None, "no calibration text"), (nothing, "no calibration text"), (broken, "NaN or infinity among the mom")):
        found = gptq.solve(weight, form, seen, 1)
        assert found.fell_back.startswith(why) and np.array_equal(found.q, fit.solve(weight, form, None, 1).q)


def test_weights_that_already_lie_on_a_grid_stay_as_they_are() -> None:
    _, rng = fresh()
    form, seen = FORMS[0], moments(inputs(rng, 500, 64))
    once = fit.solve(weights(rng, 8, 64), form, None, 1)
    weight = dequantize_affine(once.q, once.scales, None, 4, 32)
    found = gptq.solve(weight, form, seen, 1)
    assert np.array_equal(dequantize_affine(found.q, found.scales, None, 4, 32), weight) and found.fell_back == ""


def test_running_twice_gives_the_same_bits_whatever_the_threads() -> None:
    _, rng = fresh()
    weight, seen = weights(rng, 100, 96), moments(inputs(rng, 900, 96))
    one, other = (gptq.solve(weight, FORMS[0], seen, threads) for threads in (1, 3))
    assert np.array_equal(one.q, other.q) and np.array_equal(one.scales, other.scales) and one.proxy == other.proxy
    assert one.q.flags.c_contiguous and one.scales.flags.c_contiguous, "as files hold them"


def test_it_is_found_by_its_name() -> None:
    assert "gptq" in solvers.known() and solvers.find("gptq").NEEDS_MOMENTS


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_weights_are_refused(bad: float) -> None:
    _, rng = fresh()
    weight, seen = weights(rng, 4, 64), moments(inputs(rng, 200, 64))
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity among the weights"):
        gptq.solve(weight, FORMS[0], seen, 1)
