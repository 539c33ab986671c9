"""Statistics of logits against slow accounts of their own: Python's floats, one word and one row at a time."""

import math
import statistics

import numpy as np
import pytest

from quant.evaluate import Likeness, Tally, agreement, compare, rows_at_once


def draw(rows: int, words: int, spread: float = 6.0) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Seed, reference, logits that differ a little, next tokens."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    reference = (spread * rng.standard_normal((rows, words)) + rng.normal(0, 30, (rows, 1))).astype(np.float32)
    logits = (reference + rng.standard_normal((rows, words)) + rng.normal(0, 9, (rows, 1))).astype(np.float32)
    return seed, reference, logits, rng.integers(0, words, rows)


def slow_log_softmax(row: np.ndarray) -> list[float]:
    values = [float(value) for value in row]
    most = max(values)
    total = math.fsum(math.exp(value - most) for value in values)
    return [value - most - math.log(total) for value in values]


def slow(reference: np.ndarray, logits: np.ndarray, target: int) -> tuple[float, float, float, bool]:
    p, q = slow_log_softmax(reference), slow_log_softmax(logits)
    kl = math.fsum(math.exp(one) * (one - other) for one, other in zip(p, q, strict=True))
    return -p[target], -q[target], kl, p.index(max(p)) == q.index(max(q))


def test_every_row_has_the_numbers_of_a_slow_account() -> None:
    seed, reference, logits, targets = draw(40, 700)
    rows = compare(reference, logits, targets)
    for at in range(40):
        first, second, kl, same = slow(reference[at], logits[at], int(targets[at]))
        assert rows.reference_nll[at] == pytest.approx(first, abs=2e-5), seed
        assert rows.nll[at] == pytest.approx(second, abs=2e-5), seed
        assert rows.kl[at] == pytest.approx(kl, rel=1e-4, abs=1e-6), seed
        assert rows.same_top[at] == same, seed
    assert not rows.broken.any()


def test_a_divergence_of_a_millionth_is_seen() -> None:
    seed, reference, _, targets = draw(20, 5000, 2.0)
    logits = reference + np.float32(2e-3) * np.random.default_rng(seed).standard_normal(reference.shape).astype(np.float32)
    rows = compare(reference, logits, targets)
    wanted = [slow(one, other, 0)[2] for one, other in zip(reference, logits, strict=True)]
    assert 1e-6 < statistics.mean(wanted) < 3e-6
    assert rows.kl == pytest.approx(wanted, rel=0.1, abs=1e-7), seed


def test_equal_logits_lose_nothing_and_a_shift_of_all_changes_nothing() -> None:
    seed, reference, _, targets = draw(9, 300)
    rows = compare(reference, reference + np.float32(16), targets)
    assert rows.same_top.all() and rows.kl == pytest.approx(0, abs=1e-5), seed
    assert rows.nll == pytest.approx(rows.reference_nll, abs=1e-4), seed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_no_numbers_are_counted_and_left_out(value: float) -> None:
    seed, reference, logits, targets = draw(12, 50)
    clean = compare(reference, logits, targets)
    logits[3, 7] = value
    tally = Tally()
    tally.begin()
    tally.add(compare(reference, logits, targets))
    found = tally.quality()
    assert (found.tokens, found.broken) == (12, 1), seed
    assert found.kl_mean == pytest.approx(np.delete(clean.kl, 3).mean()), seed


def test_nothing_finite_gives_no_numbers() -> None:
    _, reference, logits, targets = draw(5, 20)
    tally = Tally()
    tally.begin()
    tally.add(compare(reference, np.full_like(logits, np.nan), targets))
    found = tally.quality()
    assert (found.broken, found.kl_mean, found.delta, found.same_top, found.by_position) == (5, None, None, None, ())
    assert Tally().quality().tokens == 0


def test_a_reference_that_is_not_finite_is_refused() -> None:
    _, reference, logits, targets = draw(5, 20)
    with pytest.raises(ValueError, match="the reference's logits hold NaN"):
        compare(np.full_like(reference, np.nan), logits, targets)
    with pytest.raises(ValueError, match="do not fit"):
        compare(reference, logits[:4], targets)


def test_windows_are_gathered_whatever_pieces_they_come_in() -> None:
    """Four windows, the last one short, each in pieces of another size; every figure against Python's own statistics."""
    sizes = (60, 60, 60, 23)
    seed, reference, logits, targets = draw(sum(sizes), 90)
    rng = np.random.default_rng(seed)
    tally, windows, first = Tally(), [], 0
    for size in sizes:
        tally.begin()
        piece = int(rng.integers(1, 30))
        for start in range(first, first + size, piece):
            part = slice(start, min(start + piece, first + size))
            tally.add(compare(reference[part].copy(), logits[part].copy(), targets[part]))
        account = [slow(reference[at], logits[at], int(targets[at])) for at in range(first, first + size)]
        windows.append(account)
        first += size
    found = tally.quality()
    every = [row for window in windows for row in window]
    deltas = [[second - first for first, second, _, _ in window] for window in windows]
    kl = sorted(row[2] for row in every)
    assert (found.windows, found.tokens, found.broken) == (4, 203, 0)
    assert found.reference_nll == pytest.approx(statistics.mean(row[0] for row in every), abs=1e-5), seed
    mean = statistics.mean(value for window in deltas for value in window)
    assert found.delta == pytest.approx(mean, abs=1e-5), seed
    assert found.kl_mean == pytest.approx(statistics.mean(kl), rel=1e-4), seed
    assert found.kl_median == pytest.approx(statistics.median(kl), rel=1e-3), seed
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-3), seed
    assert found.same_top == pytest.approx(sum(row[3] for row in every) / 203), seed
    square = sum((sum(window) - mean * len(window)) ** 2 for window in deltas)
    assert found.delta_se == pytest.approx(math.sqrt(4 / 3 * square) / 203, rel=1e-3), seed
    assert [(one.first, one.last) for one in found.by_position] == [(0, 16), (16, 32), (32, 60)]
    middle = statistics.mean(row[2] for window in windows for row in window[16:32])
    assert found.by_position[1].kl == pytest.approx(middle, rel=1e-4), seed


def test_with_windows_of_one_length_the_error_is_the_usual_one() -> None:
    seed, reference, logits, targets = draw(100, 40)
    tally, means = Tally(), []
    for start in range(0, 100, 20):
        tally.begin()
        part = slice(start, start + 20)
        rows = compare(reference[part], logits[part], targets[part])
        tally.add(rows)
        means.append(float((rows.nll - rows.reference_nll).mean()))
    assert tally.quality().delta_se == pytest.approx(statistics.stdev(means) / math.sqrt(5), rel=1e-9), seed


def test_one_window_has_no_error() -> None:
    _, reference, logits, targets = draw(10, 40)
    tally = Tally()
    tally.begin()
    tally.add(compare(reference, logits, targets))
    assert tally.quality().delta_se is None


def test_the_likeness_of_streams() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    one = rng.standard_normal((2, 7, 12)).astype(np.float32)
    two = one + 0.1 * rng.standard_normal(one.shape).astype(np.float32)
    like = Likeness()
    like.add(one[:1], two[:1])
    like.add(one[1], two[1])
    shares = []
    for a, b in zip(one.reshape(-1, 12).tolist(), two.reshape(-1, 12).tolist(), strict=True):
        noise = math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True))
        shares.append(noise / math.fsum(x**2 for x in a))
    assert like.snr_db == pytest.approx(-10 * math.log10(statistics.mean(shares)), rel=1e-6), seed
    cosines = []
    for a, b in zip(one.reshape(-1, 12).tolist(), two.reshape(-1, 12).tolist(), strict=True):
        cosines.append(math.sumprod(a, b) / math.hypot(*a) / math.hypot(*b) if hasattr(math, "sumprod") else
                       sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b))  # fmt: skip
    assert like.cosine == pytest.approx(statistics.mean(cosines), rel=1e-6), seed


def test_one_long_row_does_not_hide_the_others() -> None:
    one = np.ones((10, 4))
    one[0] *= 1e4
    like = Likeness()
    like.add(one, one + np.where(np.arange(10) == 0, 0.0, 0.1)[:, None])
    assert like.snr_db == pytest.approx(20 - 10 * math.log10(0.9))


def test_likeness_of_equal_empty_and_broken_streams() -> None:
    same = Likeness()
    same.add(np.zeros((3, 4)), np.zeros((3, 4)))
    assert (same.snr_db, same.cosine) == (None, 1.0)
    apart = Likeness()
    apart.add(np.zeros((3, 4)), np.ones((3, 4)))
    assert apart.cosine == 0
    broken = Likeness()
    broken.add(np.ones((3, 4)), np.full((3, 4), np.nan))
    assert (broken.snr_db, broken.cosine) == (None, None)
    assert Likeness().cosine is None


def test_texts_part_at_their_first_difference() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreement([1, 2], [1, 2, 3]) == 2
    assert agreement([5], [1]) == 0
    assert agreement([], [1]) == 0


def test_rows_are_as_many_as_fit() -> None:
    assert rows_at_once(262144) == 4 and rows_at_once(49152) == 21 and rows_at_once(1 << 30) == 1
