"""Sampling against a naive implementation: sorts of everything in float64, plain loops, no tricks."""

import math
import random
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.errors import DeviceError, RequestError
from appliance.runtime.sampling import Choice, Sampler, best, rank

SIZES = (3, 257, 5000, 20_000)


def naive(logits: NDArray[np.float32], choice: Choice, prompt: list[int], answer: list[int]) -> dict[int, float]:
    """Token -> probability, straight from the definitions."""
    x = [float(one) for one in logits]
    for token in set(prompt) | set(answer):
        if choice.repetition_penalty != 1:
            x[token] = x[token] / choice.repetition_penalty if x[token] > 0 else x[token] * choice.repetition_penalty
    for token in set(answer):
        x[token] -= choice.presence_penalty + choice.frequency_penalty * answer.count(token)
    for token, bias in choice.logit_bias:
        x[token] += bias
    ranked = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if choice.temperature == 0:
        return {ranked[0]: 1.0}
    if choice.top_k:
        last = x[ranked[min(choice.top_k, len(ranked)) - 1]]
        ranked = [token for token in ranked if x[token] >= last]
    weight = {token: math.exp((x[token] - x[ranked[0]]) / choice.temperature) for token in ranked}
    if choice.top_p < 1:
        goal, total, kept = choice.top_p * math.fsum(weight.values()), 0.0, []
        for token in ranked:
            kept.append(token)
            total += weight[token]
            if total >= goal:
                break
        ranked = kept
    ranked = [token for token in ranked if weight[token] >= choice.min_p]
    total = math.fsum(weight[token] for token in ranked)
    return {token: weight[token] / total for token in ranked}


def random_choice(draw: random.Random, size: int) -> Choice:
    def maybe(value: float, off: float) -> float:
        return value if draw.random() < 0.5 else off

    return Choice(
        temperature=draw.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=draw.choice([0, 0, 1, 5, 40, size, size + 5]),
        top_p=maybe(draw.uniform(0.05, 0.999), 1.0),
        min_p=maybe(draw.uniform(0.0, 0.3), 0.0),
        repetition_penalty=maybe(draw.uniform(0.7, 1.5), 1.0),
        presence_penalty=maybe(draw.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(draw.uniform(-2, 2), 0.0),
        logit_bias=tuple((draw.randrange(size), draw.uniform(-9, 9)) for _ in range(draw.choice([0, 0, 1]))),
        seed=draw.randrange(-(2**63), 2**63),
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_distribution_is_the_naive_one(size: int) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    for _ in range(40 if size < 10_000 else 6):
        choice = random_choice(draw, size)
        prompt = [draw.randrange(size) for _ in range(draw.randrange(30))]
        sampler = Sampler(choice, size, prompt)
        answer: list[int] = []
        for _ in range(3):
            spread = draw.choice([0.1, 2.0, 8.0])  # from almost flat to almost certain
            logits = np.random.default_rng(draw.randrange(2**32)).normal(0, spread, size).astype(np.float32)
            wanted = naive(logits, choice, prompt, answer)
            found = sampler.distribution(logits)
            message = f"seed {seed}, {choice}, answer {answer}"
            # A token at the very edge of a filter may fall on either side in float32: it then weighs next to nothing more
            # than its neighbour, so whole distributions are compared, not sets of tokens.
            distance = sum(abs(found[token] - probability) for token, probability in wanted.items())
            distance += sum(found[token] for token in np.flatnonzero(found) if int(token) not in wanted)
            edge = 2 * min(wanted.values()) if choice.top_p < 1 or choice.min_p else 0.0
            assert distance < 2e-5 + edge, f"{distance}, {message}"
            token = sampler.pick(logits)
            assert token in wanted or edge, message
            answer.append(token)


@pytest.mark.parametrize(
    "choice", [Choice(seed=5), Choice(top_p=0.9, seed=5), Choice(top_k=7, seed=5), Choice(min_p=0.02, seed=5)]
)
def test_draws_follow_the_distribution(choice: Choice) -> None:
    """Chi-squared over many draws; the seed is fixed because a fair test fails now and then."""
    logits = np.random.default_rng(11).normal(0, 2, 5000).astype(np.float32)
    sampler = Sampler(choice, len(logits), [])
    wanted = sampler.distribution(logits)
    draws = 10_000
    counts = np.bincount([sampler.pick(logits) for _ in range(draws)], minlength=len(logits))
    assert counts[wanted == 0].sum() == 0
    often = wanted * draws >= 10
    expected = np.append(wanted[often], wanted[~often].sum()) * draws
    observed = np.append(counts[often], counts[~often].sum())
    used = expected > 0
    chi = (((observed - expected) ** 2)[used] / expected[used]).sum()
    freedom = used.sum() - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), f"{chi} for {freedom} degrees of freedom"


def test_equal_logits_are_all_equally_likely_and_ties_are_settled_by_id() -> None:
    flat = np.zeros(1000, np.float32)
    assert np.allclose(Sampler(Choice(), 1000, []).distribution(flat), 1e-3)
    assert Sampler(Choice(temperature=0), 1000, []).pick(flat.copy()) == 0
    kept = np.flatnonzero(Sampler(Choice(top_p=0.25), 1000, []).distribution(flat))
    assert list(kept) == list(range(250))


def test_the_same_seed_draws_the_same_tokens_and_none_draws_fresh_ones() -> None:
    logits = np.random.default_rng(3).normal(0, 1, 4000).astype(np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Choice(seed=seed), len(logits), [])
        return [sampler.pick(logits.copy()) for _ in range(20)]

    assert draw(-7) == draw(-7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_a_weight_of_zero_is_never_drawn() -> None:
    """Draws at both ends of [0, 1), where the sums of parts and of their members round apart."""
    from appliance.runtime import sampling

    end = float(np.nextafter(1.0, 0.0))
    for size in (1, 2047, 2048, 2049, 4096, 9000):
        weights = np.random.default_rng(size).random(size).astype(np.float32)
        drawn = {sampling._draw_from_parts(weights, uniform) for uniform in (0.0, end)}
        assert all(0 <= one < size for one in drawn)
        weights[:] = 0
        weights[size // 2] = 1e-30
        for uniform in (0.0, 0.5, end):
            assert sampling._draw_from_parts(weights, uniform) == size // 2


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_log_probabilities_are_those_of_the_unmodified_distribution(count: int) -> None:
    seed = time.time_ns()
    logits = np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    ranked = rank(logits, 17, count)
    order = sorted(range(300), key=lambda token: (-exact[token], token))[:count]
    assert [token for token, _ in ranked.top] == order, seed
    assert np.allclose([value for _, value in ranked.top], exact[order], atol=1e-5), seed
    assert abs(ranked.chosen - exact[17]) < 1e-5, seed


def test_best_finds_what_a_whole_sort_finds() -> None:
    seed = time.time_ns()
    generator = np.random.default_rng(seed)
    for _ in range(200):
        size = int(generator.integers(1, 5000))
        values = generator.integers(0, 200, size).astype(np.float32)  # many equal ones
        count = int(generator.integers(1, size + 10))
        bound = np.sort(values)[::-1][min(count, size) - 1]
        assert list(best(values, count)) == list(np.flatnonzero(values >= bound)), (seed, size, count)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[50] = bad
    with pytest.raises(DeviceError, match="peak"):
        Sampler(Choice(temperature=temperature), 100, []).pick(logits)


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[3, 200]] = 1.0
    sampler = Sampler(Choice(seed=1), 300, [])
    assert {sampler.pick(logits.copy()) for _ in range(50)} == {3, 200}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (Choice(temperature=-1), "temperature"),
        (Choice(temperature=float("nan")), "temperature"),
        (Choice(temperature=float("inf")), "temperature"),
        (Choice(top_k=-1), "top_k"),
        (Choice(top_p=0), "top_p"),
        (Choice(top_p=1.1), "top_p"),
        (Choice(min_p=-0.1), "min_p"),
        (Choice(repetition_penalty=0), "repetition_penalty"),
        (Choice(presence_penalty=float("nan")), "presence_penalty"),
        (Choice(logit_bias=((100, 1.0),)), "logit_bias"),
        (Choice(logit_bias=((-1, 1.0),)), "logit_bias"),
        (Choice(logit_bias=((1, float("nan")),)), "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused_by_name(choice: Choice, param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        Sampler(choice, 100, [])
    assert caught.value.param == param
