"""Vectors against vectors: cosines, neighbours and ranks, each by loops."""

import math
import statistics

import numpy as np
import pytest

from quant.embedders import compare_vectors
from quant.texts import Text

TEXT = Text("mine", "", "ab" * 32)


def draw(count: int, size: int, noise: float) -> tuple[int, np.ndarray, np.ndarray]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    one = rng.standard_normal((count, size)).astype(np.float32)
    two = one + noise * rng.standard_normal(one.shape).astype(np.float32)
    return seed, one, two


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_cosines_neighbours_and_ranks() -> None:
    seed, one, two = draw(15, 6, 0.3)
    found = compare_vectors(TEXT, one, two)
    a, b = one.tolist(), two.tolist()
    cosines = [cosine(x, y) for x, y in zip(a, b, strict=True)]
    assert found.cosine_mean == pytest.approx(statistics.mean(cosines), abs=1e-5), seed
    assert found.cosine_min == pytest.approx(min(cosines), abs=1e-5), seed
    same, shared, ranks = 0, [], []
    for at in range(15):
        others = [other for other in range(15) if other != at]
        near = [sorted(others, key=lambda other: -cosine(of[at], of[other])) for of in (a, b)]
        same += near[0][0] == near[1][0]
        shared.append(len(set(near[0][:10]) & set(near[1][:10])) / 10)
        square = sum((near[0].index(other) - near[1].index(other)) ** 2 for other in others)
        ranks.append(1 - 6 * square / (14 * (14**2 - 1)))  # Spearman's own formula
    assert found.top1 == pytest.approx(same / 15, abs=1e-5) and 0 < same < 15, seed
    assert found.top10 == pytest.approx(statistics.mean(shared), abs=1e-5), seed
    assert found.rank_correlation == pytest.approx(statistics.mean(ranks), abs=1e-5), seed


def test_the_same_vectors_lose_nothing() -> None:
    _, one, _ = draw(30, 8, 0)
    found = compare_vectors(TEXT, one, 3 * one)
    assert (found.top1, found.top10) == (1, 1)
    assert found.cosine_min == pytest.approx(1) and found.rank_correlation == pytest.approx(1)


def test_a_vector_that_is_none_is_counted() -> None:
    _, one, two = draw(5, 8, 0.1)
    two[2, 3] = np.nan
    found = compare_vectors(TEXT, one, two)
    assert (found.broken, found.passages, found.cosine_mean, found.top1) == (1, 5, None, None)


def test_two_passages_have_no_neighbours_to_choose_from() -> None:
    _, one, two = draw(2, 8, 0.1)
    found = compare_vectors(TEXT, one, two)
    assert found.cosine_mean is not None and found.top1 is None
