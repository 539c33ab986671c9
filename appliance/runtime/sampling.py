"""Sampling: which token comes next, given a row of logits and what was said before.

Knows: penalties, bias, temperature, top-k, top-p, min-p, seeds, log probabilities. Does not know: text or models.

Order, as vLLM and transformers have it: bias and penalties change the logits, temperature divides them, then top-k, top-p
(of what top-k left) and min-p (against the likeliest token) cut the tail. A whole sort of the vocabulary is the slow part
everywhere, so no filter sorts more than the few tokens that can matter:

    top-k: the k-th largest of some hundred maxima of disjoint parts bounds the k-th largest logit from below
    top-p: all weights below (1-p) x total / V together weigh less than 1-p, so they can be left out unseen
    sort only what lies above such a bound
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.errors import DeviceError, RequestError

Row = NDArray[np.float32]
Ids = NDArray[np.intp]

GREEDY_BELOW = 1e-5
"""Temperatures under this would overflow float32 when they divide; they mean "the likeliest" anyhow."""

PARTS = 2048
"""Parts that a vocabulary is cut into; part i holds the tokens i, i + PARTS, i + 2 PARTS ... so that one vector operation
a row gives what all parts hold."""

GUESSES = (1e-2, 1e-4)
"""Weights, the likeliest token's being 1, that top-p tries as bounds before the one that is sure to hold."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are chosen, every default filled in. Fields as in `appliance.engine.protocol.Sampling`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def check(self, vocab_size: int) -> None:
        """Raise `RequestError` for a value out of range; NaN is out of every range."""
        finite = float("inf")
        _within("temperature", self.temperature, 0, finite)
        _within("top_k", self.top_k, 0, finite)
        _within("top_p", self.top_p, 0, 1, open_below=True)
        _within("min_p", self.min_p, 0, 1)
        _within("repetition_penalty", self.repetition_penalty, 0, finite, open_below=True)
        _within("presence_penalty", self.presence_penalty, -finite, finite, open_below=True)
        _within("frequency_penalty", self.frequency_penalty, -finite, finite, open_below=True)
        for token, bias in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}", f"token ids here go from 0 to {vocab_size - 1}", param="logit_bias"
                )
            _within("logit_bias", bias, -finite, finite, open_below=True)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Log probabilities (natural) of the chosen token and of the likeliest ones, of the unmodified distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # likeliest first; equal ones by id


class _Tally:
    """Which tokens were there, and how often; reading them costs what they are, not what the vocabulary is."""

    def __init__(self, vocab_size: int, tokens: Sequence[int]):
        self.times = np.zeros(vocab_size, np.float32)
        self._ids = np.empty(256, np.intp)
        self._count = 0
        for token in tokens:
            self.add(token)

    @property
    def ids(self) -> Ids:
        return self._ids[: self._count]

    def add(self, token: int) -> None:
        if self.times[token] == 0:
            if self._count == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._ids[self._count] = token
            self._count += 1
        self.times[token] += 1


class Sampler:
    """Chooses one token after another for one answer, and remembers what penalties need."""

    def __init__(self, choice: Choice, vocab_size: int, prompt: Sequence[int]):
        choice.check(vocab_size)
        self._choice = choice
        # SeedSequence takes no negative numbers; OpenAI's seed is any 64-bit integer.
        self._random = np.random.default_rng(None if choice.seed is None else choice.seed % 2**64)
        self._weights = np.empty(0, np.float32)
        self._seen = _Tally(vocab_size, prompt) if choice.repetition_penalty != 1.0 else None
        self._answer = _Tally(vocab_size, ()) if choice.presence_penalty or choice.frequency_penalty else None
        bias = dict(choice.logit_bias)
        self._biased = np.fromiter(bias.keys(), np.intp, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))

    def pick(self, logits: Row) -> int:
        """The next token.

        Args:
            logits: [V] float32; changed in place by bias and penalties.

        Raises:
            DeviceError: the logits hold NaN or +inf, or nothing finite.
        """
        self._adjust(logits)
        if self._choice.temperature < GREEDY_BELOW:
            token = int(logits.argmax())
            _check_peak(float(logits[token]))
        else:
            token = self._draw(logits)
        self._remember(token)
        return token

    def distribution(self, logits: Row) -> NDArray[np.float64]:
        """[V] the exact probabilities that `pick` would draw from at this point; nothing is remembered, nothing changed."""
        logits = logits.copy()
        self._adjust(logits)
        probabilities = np.zeros(len(logits), np.float64)
        if self._choice.temperature < GREEDY_BELOW:
            probabilities[int(logits.argmax())] = 1.0
            return probabilities
        ids, weights = self._kept(logits)
        probabilities[slice(None) if ids is None else ids] = weights
        probabilities /= probabilities.sum()
        return probabilities

    def _remember(self, token: int) -> None:
        for tally in (self._seen, self._answer):
            if tally is not None:
                tally.add(token)

    def _adjust(self, logits: Row) -> None:
        choice = self._choice
        if self._seen is not None:
            ids = self._seen.ids
            seen = logits[ids]
            penalty = np.float32(choice.repetition_penalty)
            logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._answer is not None:
            ids = self._answer.ids
            said = self._answer.times[ids]
            logits[ids] -= np.float32(choice.presence_penalty) + np.float32(choice.frequency_penalty) * said
        if len(self._biased):
            logits[self._biased] += self._bias

    def _draw(self, logits: Row) -> int:
        ids, weights = self._kept(logits)
        if ids is None:
            return _draw_from_parts(weights, self._random.random())
        return int(ids[_draw_from(weights, self._random.random())])

    def _kept(self, logits: Row) -> tuple[Ids | None, Row]:
        """Tokens that may be drawn and their unnormalized probabilities; None = all of them, in order of id."""
        choice = self._choice
        peak = float(logits.max())
        _check_peak(peak)
        if 0 < choice.top_k < len(logits):
            ids = best(logits, choice.top_k)
            weights = self._weigh(logits[ids], peak)
            if choice.top_p < 1.0:
                kept = _nucleus(weights, choice.top_p)
                ids, weights = ids[kept], weights[kept]
        elif choice.top_p < 1.0:
            weights = self._weigh(logits, peak)
            ids = _nucleus(weights, choice.top_p)
            weights = weights[ids]
        else:
            weights = self._weigh(logits, peak)
            if choice.min_p == 0.0:
                return None, weights
            ids = np.flatnonzero(weights >= np.float32(choice.min_p))
            return ids, weights[ids]
        if choice.min_p > 0.0:
            kept = np.flatnonzero(weights >= np.float32(choice.min_p))
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def _weigh(self, logits: Row, peak: float) -> Row:
        """exp((logits - peak) / temperature), in a buffer that is used again for every token."""
        if len(self._weights) < len(logits):
            self._weights = np.empty(len(logits), np.float32)
        weights = self._weights[: len(logits)]
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, np.float32(peak), out=weights)
            if self._choice.temperature != 1.0:
                np.multiply(weights, np.float32(1.0 / self._choice.temperature), out=weights)
            np.exp(weights, out=weights)
        return weights


def rank(logits: Row, token: int, count: int) -> Ranked:
    """Log probabilities of `token` and of the `count` likeliest tokens.

    Args:
        logits: [V] float32, before any change.
        token: the chosen one.
        count: 0..V.
    """
    peak = float(logits.max())
    _check_peak(peak)
    with np.errstate(under="ignore"):
        total = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        ids = best(logits, count)
        order = np.argsort(-logits[ids], kind="stable")[:count]
        top = tuple((int(one), float(logits[one]) - total) for one in ids[order])
    return Ranked(float(logits[token]) - total, top)


def best(values: Row, count: int) -> Ids:
    """Positions of the `count` largest values, ascending; more when several equal the last of them.

    At least `count` parts reach the count-th largest of their maxima, so at least `count` values do, and every value
    wanted is among those that do.
    """
    size = len(values)
    if count >= size:
        return np.arange(size)
    rows = size // PARTS
    if rows == 0 or count > PARTS // 2:
        return np.flatnonzero(values >= np.partition(values, size - count)[size - count])
    maxima = np.maximum.reduce(values[: rows * PARTS].reshape(rows, PARTS), axis=0)
    ids = np.flatnonzero(values >= np.partition(maxima, PARTS - count)[PARTS - count])
    few = values[ids]
    kept: Ids = ids[few >= np.partition(few, len(few) - count)[len(few) - count]]
    return kept


def _nucleus(weights: Row, share: float) -> Ids:
    """Positions, ascending, of the fewest largest weights that hold `share` of the sum; of equal ones the first."""
    total = float(weights.sum())
    wanted = share * total
    sure = (1.0 - share) * total / len(weights)
    for bound in (*(guess for guess in GUESSES if guess > sure), sure):
        ids = np.flatnonzero(weights >= np.float32(bound))
        few = weights[ids]
        if float(few.sum()) >= wanted:
            break
    ordered = np.sort(few)[::-1]
    sums = np.cumsum(ordered, dtype=np.float64)
    # Rounding can leave the last sum a hair below what is wanted: then all of them are kept.
    count = min(int(np.searchsorted(sums, wanted)) + 1, len(ordered))
    last = ordered[count - 1]
    above = few > last
    equal = np.flatnonzero(few == last)[: count - int(np.count_nonzero(above))]
    above[equal] = True
    kept: Ids = ids[above]
    return kept


def _draw_from(weights: Row, uniform: float) -> int:
    sums = np.cumsum(weights, dtype=np.float64)
    return _at(sums, weights, uniform * float(sums[-1]))


def _draw_from_parts(weights: Row, uniform: float) -> int:
    """Draw from all weights: first a part, then within it, so that only one part is summed up step by step."""
    rows = len(weights) // PARTS
    if rows == 0:
        return _draw_from(weights, uniform)
    parts = weights[: rows * PARTS].reshape(rows, PARTS).sum(axis=0)
    rest = len(weights) - rows * PARTS
    parts[:rest] += weights[rows * PARTS :]
    sums = np.cumsum(parts, dtype=np.float64)
    aim = uniform * float(sums[-1])
    part = _at(sums, parts, aim)
    # A fresh look at the part alone: what is left of the aim decides inside it, whatever rounding did to the sums.
    inside = weights[part::PARTS]
    left = (aim - (float(sums[part]) - float(parts[part]))) / float(parts[part])
    return part + PARTS * _draw_from(inside, min(max(left, 0.0), 1.0))


def _at(sums: NDArray[np.float64], weights: Row, aim: float) -> int:
    """Where `aim` falls among running sums; never on a weight of zero."""
    place = min(int(np.searchsorted(sums, aim, side="right")), len(sums) - 1)
    while weights[place] == 0.0:  # only when rounding put the aim past the last weight there is
        place -= 1
    return place


def _check_peak(peak: float) -> None:
    if not np.isfinite(peak):
        raise DeviceError(f"the model's logits have the peak {peak}", "rebuild the bundle, or run it on another target")


def _within(name: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    inside = (low < value if open_below else low <= value) and value <= high and value != float("inf")
    if not inside:
        least = f"more than {low}" if open_below else f"{low} or more"
        most = "" if high == float("inf") else f", at most {high}"
        raise RequestError(f"{name} is {value}", f"it must be {least}{most}", param=name)
