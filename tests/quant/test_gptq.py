"""Rounding that keeps outputs: every step against a plain reference in float64, and all of them against exhaustive search."""

import itertools

import numpy as np
import pytest

from quant import gptq
from quant.affine import fit_affine
from quant.arrays import dequantize, fit, groups_of, limits

SHAPES = [(7, 64, 16), (5, 50, 16), (6, 40, 0)]


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def moments(rng: np.random.Generator, columns: int, tokens: int = 0) -> np.ndarray:
    """Of inputs that hang together and differ in size."""
    mix = rng.standard_normal((columns, columns)) / columns**0.5 + 0.5 * np.eye(columns)
    inputs = rng.standard_normal((tokens or 4 * columns, columns)) @ mix * rng.uniform(0.2, 3, columns)
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


def fitted(weight: np.ndarray, group: int, bits: int = 4) -> gptq.Grid:
    q = np.empty(weight.shape, np.int8)
    scales = np.empty((len(weight), groups_of(weight.shape[1], group)), np.float16)
    fit(weight, bits, group, q, scales)
    return gptq.grid_of(q, scales, None, bits, group)


def weights(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)


def cost(weight: np.ndarray, values: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Per row."""
    rest = weight.astype(np.float64) - values
    return np.einsum("nk,kj,nj->n", rest, h.astype(np.float64), rest)


def damped(h: np.ndarray, damping: float) -> np.ndarray:
    return (h + damping * np.diag(h).mean() * np.eye(len(h))).astype(np.float32)


def eliminated(weight: np.ndarray, scale: np.ndarray, h: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Feedback as it is defined: after each column the inverse of H over the columns that are left."""
    rest, u, inverse, left = weight.astype(np.float64), np.zeros(weight.shape), np.linalg.inv(h.astype(np.float64)), list(order)
    for column in order:
        u[:, column] = np.clip(np.rint(rest[:, column] / scale[:, column]), -8, 7)
        lost = (rest[:, column] - u[:, column] * scale[:, column]) / inverse[column, column]
        rest[:, left] -= lost[:, None] * inverse[column, left]
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        left.remove(column)
    return u


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_feedback_is_elimination_one_column_after_the_other(rows: int, columns: int, group: int) -> None:
    seed, rng = fresh()
    weight, h = weights(rng, rows, columns), moments(rng, columns)
    grid, given = fitted(weight, group), gptq.feedback(h, 0.01)
    assert np.array_equal(np.diag(h)[given.order], np.sort(np.diag(h))[::-1]), "largest inputs first"
    found = gptq.round_with_feedback(weight, grid, given).u
    scale = np.repeat(grid.scales.astype(np.float64), group or columns, axis=1)[:, :columns]
    wanted = eliminated(weight, scale, damped(h, 0.01), given.order)
    # A tie that float32 breaks the other way changes what follows in its row.
    assert (found == wanted).all(1).mean() > 0.7, f"seed {seed}"
    alike = (found == wanted).all(1)
    assert alike.any() and (found[alike] == wanted[alike]).all()


def test_importance_is_the_conditional_one() -> None:
    seed, rng = fresh()
    h = moments(rng, 30)
    wanted = 1 / np.diag(np.linalg.inv(damped(h, 0.02).astype(np.float64)))
    np.testing.assert_allclose(gptq.feedback(h, 0.02).importance, wanted, rtol=1e-4, err_msg=f"seed {seed}")


def test_damping_is_raised_until_moments_of_few_tokens_can_be_inverted() -> None:
    seed, rng = fresh()
    h = moments(rng, 64, tokens=3)
    given = gptq.feedback(h, 0.0)
    assert given.damping > 0 and np.isfinite(given.coefficients).all(), f"seed {seed}"
    with pytest.raises(ValueError, match="not positive"):
        gptq.feedback(-(10.0**9) * np.ones((4, 4), np.float32) + np.eye(4, dtype=np.float32), 1e-12)
    with pytest.raises(ValueError, match="NaN"):
        gptq.feedback(np.full((4, 4), np.nan, np.float32), 0.01)


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_descent_ends_where_no_single_integer_can_be_bettered(rows: int, columns: int, group: int) -> None:
    seed, rng = fresh()
    weight, h = weights(rng, rows, columns), damped(moments(rng, columns), 0.01)
    start = fitted(weight, group)
    once = gptq.descend(weight, start, h, 1)
    end = gptq.descend(weight, start, h, 60)
    before, after, last = (cost(weight, grid.values, h) for grid in (start, once, end))
    assert (after <= before * (1 + 1e-5)).all() and (last <= after * (1 + 1e-5)).all(), f"seed {seed}"
    for column in range(columns):
        for u in range(-8, 8):
            other = end.u.copy()
            other[:, column] = u
            values = dequantize(other.astype(np.int8), end.scales, group)
            assert (cost(weight, values, h) >= last * (1 - 1e-4)).all(), f"seed {seed}, column {column}"


def test_all_steps_come_near_the_best_of_all_integers() -> None:
    """Of 16^4 rows of integers on the same scale."""
    seed, rng = fresh()
    every = np.array(list(itertools.product(range(-8, 8), repeat=4)), np.float64)
    best = found = plain = 0.0
    for _ in range(40):
        weight, h = weights(rng, 1, 4), damped(moments(rng, 4, tokens=6), 0.01)
        grid = fitted(weight, 0)
        rest = weight - every * float(grid.scales[0, 0])
        optimum = np.einsum("nk,kj,nj->n", rest, h.astype(np.float64), rest).min()
        rounded = gptq.descend(weight, gptq.round_with_feedback(weight, grid, gptq.feedback(h, 0)), h, 4)
        mine = cost(weight, rounded.values, h)[0]
        assert mine >= optimum * (1 - 1e-5), f"seed {seed}: better than the best"
        best, found, plain = best + optimum, found + mine, plain + cost(weight, grid.values, h)[0]
    assert found < best + 0.35 * (plain - best), f"seed {seed}: {best} {found} {plain}"


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_scales_are_refitted_to_the_least_squares_ones(rows: int, columns: int, group: int) -> None:
    seed, rng = fresh()
    weight, h = weights(rng, rows, columns), damped(moments(rng, columns), 0.01)
    grid = gptq.round_with_feedback(weight, fitted(weight, group), gptq.feedback(h, 0.01))
    found = gptq.refit(weight, grid, h)
    assert np.array_equal(found.u, grid.u)
    assert (cost(weight, found.values, h) <= cost(weight, grid.values, h)).all(), f"seed {seed}"
    root = np.linalg.cholesky(h.astype(np.float64))
    starts = np.arange(0, columns, group or columns)
    for row in range(rows):
        design = np.add.reduceat(grid.u[row].astype(np.float64)[:, None] * root, starts, axis=0).T
        wanted = np.linalg.lstsq(design, weight[row] @ root, rcond=None)[0]
        np.testing.assert_allclose(found.scales[row], wanted, rtol=3e-3, atol=3e-5, err_msg=f"seed {seed}")


def test_a_group_of_zeros_keeps_its_scale() -> None:
    _, rng = fresh()
    weight, h = weights(rng, 3, 64), damped(moments(rng, 64), 0.01)
    weight[1, 16:32] = 0
    grid = fitted(weight, 16)
    found = gptq.refit(weight, grid, h)
    assert np.isfinite(found.scales).all() and found.scales[1, 1] == grid.scales[1, 1]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_no_scale_of_a_fine_grid_is_much_better(bits: int, rows: int, columns: int, group: int) -> None:
    seed, rng = fresh()
    weight, importance = weights(rng, rows, columns), rng.uniform(0.1, 5, columns).astype(np.float32)
    found = gptq.search(weight, importance, bits, group)
    low, high = limits(bits)
    assert found.u.min() >= low and found.u.max() <= high
    mine = np.add.reduceat((weight - found.values) ** 2 * importance, np.arange(0, columns, group or columns), axis=1)
    size = group or columns
    for number, start in enumerate(range(0, columns, size)):
        block, weighting = weight[:, start : start + size], importance[start : start + size]
        extreme = np.abs(block).max(1, keepdims=True)
        best = np.full(rows, np.inf)
        for place in np.linspace(-low * 0.6, -low * 1.5, 700):
            for sign in (1, -1):
                step = (sign * extreme / place).astype(np.float16).astype(np.float32)
                error = ((block - np.clip(np.rint(block / step), low, high) * step) ** 2 * weighting).sum(1)
                best = np.minimum(best, error)
        if block.shape[1] < size:
            continue  # of two weights some one of 1400 scales meets both by luck
        assert mine[:, number].sum() <= (1.05 if bits == 4 else 1.8) * best.sum(), f"seed {seed}"


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_zero_points_are_found_where_weights_lie_to_one_side(rows: int, columns: int, group: int) -> None:
    """Against a fine grid of ranges; never worse than without zero points."""
    seed, rng = fresh()
    weight, importance = weights(rng, rows, columns), rng.uniform(0.1, 5, columns).astype(np.float32)
    weight += rng.uniform(-0.1, 0.1, (rows, 1)).astype(np.float32)
    found = gptq.search(weight, importance, 4, group, symmetric=False)
    assert found.zeros is not None
    z = np.repeat(found.zeros.astype(int) - 8, group or columns, axis=1)[:, :columns]
    assert (found.u + z >= -8).all() and (found.u + z <= 7).all(), f"seed {seed}"
    starts = np.arange(0, columns, group or columns)

    def lost(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat((weight - values) ** 2 * importance, starts, axis=1)

    mine = lost(found.values)
    assert (mine <= lost(gptq.search(weight, importance, 4, group).values) * (1 + 1e-5)).all(), f"seed {seed}"
    best = np.full(mine.shape, np.inf)
    for number, start in enumerate(starts):
        block, weighting = weight[:, start : start + (group or columns)], importance[start : start + (group or columns)]
        least, most = np.minimum(block.min(1, keepdims=True), 0), np.maximum(block.max(1, keepdims=True), 0)
        for shrink in np.linspace(0.6, 1.1, 60):
            step = ((most - least) * shrink / 15).astype(np.float16).astype(np.float32)
            for shift in range(16):
                u = np.clip(np.rint(block / step), -shift, 15 - shift)
                best[:, number] = np.minimum(best[:, number], ((block - u * step) ** 2 * weighting).sum(1))
    assert mine.sum() <= 1.2 * best.sum(), f"seed {seed}"


def test_zero_points_are_carried_through() -> None:
    seed, rng = fresh()
    weight, h = weights(rng, 9, 64) + np.float32(0.03), damped(moments(rng, 64), 0.01)
    q, scales, zeros, _ = fit_affine(weight, 4, 16)
    grid = gptq.grid_of(q, scales, zeros, 4, 16)
    assert np.array_equal(grid.q, q)
    z = np.repeat(zeros.astype(int) - 8, 16, axis=1)
    for better in (gptq.descend(weight, grid, h, 3), gptq.round_with_feedback(weight, grid, gptq.feedback(h, 0.01))):
        assert better.u.min() < -8 or better.u.max() > 7, "the range moves with the zero point"
        assert (better.u + z >= -8).all() and (better.u + z <= 7).all(), f"seed {seed}"
        assert cost(weight, better.values, h).sum() < cost(weight, grid.values, h).sum()


def test_threads_and_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rng = fresh()
    weight, h = weights(rng, 40, 64), damped(moments(rng, 64), 0.01)

    def all_steps(threads: int) -> gptq.Grid:
        given = gptq.feedback(h, 0.01)
        grid = gptq.search(weight, given.importance, 4, 16, threads=threads)
        grid = gptq.round_with_feedback(weight, grid, given, threads=threads)
        grid = gptq.refit(weight, grid, h, threads=threads)
        return gptq.descend(weight, grid, h, 2, threads=threads)

    one = all_steps(1)
    monkeypatch.setattr(gptq, "_PIECE", 8)
    other = all_steps(3)
    assert (one.u == other.u).mean() > 0.99 and (one.scales == other.scales).mean() > 0.99
    again = all_steps(1)
    assert np.array_equal(other.u, again.u) and np.array_equal(other.scales, again.scales)


def test_a_triangle_is_inverted_by_halves() -> None:
    _, rng = fresh()
    upper = np.triu(rng.uniform(-1, 1, (300, 300))) / 17 + np.eye(300)
    np.testing.assert_allclose(gptq._inverse(upper) @ upper, np.eye(300), atol=1e-9)
