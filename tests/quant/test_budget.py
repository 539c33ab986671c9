"""Choosing forms under a budget, against every possible choice."""

import itertools

import numpy as np
import pytest

from quant.budget import Choice, Unit, bytes_of, choose
from quant.scheme import Form

FOUR, EIGHT = Form(4, 32, "block-dynamic"), Form(8, 128, "block-dynamic")


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def unit(rng: np.random.Generator, name: str, count: int) -> Unit:
    """More bytes mostly lose less."""
    sizes = np.cumsum(rng.integers(1, 60, count))
    losses = np.sort(rng.exponential(rng.uniform(0.1, 3), count))[::-1] * rng.uniform(0.7, 1.3, count)
    order = rng.permutation(count)
    return Unit(name, tuple(Choice(FOUR, int(sizes[index]), float(losses[index])) for index in order))


def best(units: list[Unit], budget: int) -> float:
    """The least loss of all choices within the budget."""
    every = itertools.product(*(one.choices for one in units))
    return min(sum(choice.loss for choice in some) for some in every if sum(choice.bytes for choice in some) <= budget)


def test_it_comes_near_the_best_of_all_choices() -> None:
    seed, rng = fresh()
    units = [unit(rng, str(index), int(rng.integers(1, 5))) for index in range(7)]
    least = sum(min(choice.bytes for choice in one.choices) for one in units)
    most = sum(max(choice.bytes for choice in one.choices) for one in units)
    for budget in range(least, most + 40, max(1, (most - least) // 15)):
        chosen = choose(units, budget)
        assert sum(choice.bytes for choice in chosen) <= budget, f"seed {seed}"
        assert all(choice in one.choices for choice, one in zip(chosen, units, strict=True))
        optimum, found = best(units, budget), sum(choice.loss for choice in chosen)
        largest = max(max(c.loss for c in one.choices) - min(c.loss for c in one.choices) for one in units)
        assert optimum - 1e-12 <= found <= optimum + largest, f"seed {seed}, budget {budget}"
    assert sum(choice.loss for choice in choose(units, 10**9)) == pytest.approx(best(units, 10**9))


def test_on_the_hull_it_is_the_best() -> None:
    """Two forms a unit and equal bytes: the worst units come first."""
    seed, rng = fresh()
    losses = rng.uniform(0, 1, 12)
    units = [Unit(str(i), (Choice(EIGHT, 8, 0.0), Choice(FOUR, 4, float(loss)))) for i, loss in enumerate(losses)]
    for count in range(13):
        chosen = choose(units, 12 * 4 + count * 4 + 3)
        eight = {index for index, choice in enumerate(chosen) if choice.form == EIGHT}
        assert eight == set(np.argsort(-losses)[:count].tolist()), f"seed {seed}"


def test_a_form_that_costs_more_and_loses_more_is_never_taken() -> None:
    units = [Unit("a", (Choice(FOUR, 4, 1.0), Choice(EIGHT, 8, 1.5)))]
    assert choose(units, 100)[0].form == FOUR


def test_what_the_hull_leaves_over_is_spent() -> None:
    """The best step per byte does not fit; a lesser one does."""
    units = [
        Unit("a", (Choice(FOUR, 10, 5.0), Choice(EIGHT, 30, 0.0))),
        Unit("b", (Choice(FOUR, 10, 1.0), Choice(EIGHT, 12, 0.9))),
    ]
    assert [choice.form for choice in choose(units, 25)] == [FOUR, EIGHT]


def test_the_cheapest_forms_are_taken_when_even_they_do_not_fit() -> None:
    assert choose([Unit("a", (Choice(EIGHT, 8, 0.0), Choice(FOUR, 4, 1.0)))], 0)[0].form == FOUR


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (Form(4, 32, ""), 4.5),
        (Form(4, 64, ""), 4.25),
        (Form(8, 128, ""), 8.125),
        (Form(4, 32, "", symmetric=False), 4.625),
        (Form(8, 32, ""), 8.5),
    ],
)
def test_bytes_are_those_of_integers_scales_and_zero_points(form: Form, bits: float) -> None:
    assert bytes_of(7, 256, form) * 8 == 7 * 256 * bits


def test_a_last_partial_group_takes_a_whole_block() -> None:
    assert bytes_of(1, 100, Form(4, 32, "")) == 4 * (16 + 2)
    assert bytes_of(3, 100, Form(8, 0, "")) == 3 * 102
