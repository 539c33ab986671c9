"""What a quantized model lost, as statistics of its logits against the float model's: pure functions on arrays.

Knows: rows of logits, windows, positions; sums over them that need no row twice. Does not know: models, files, texts, or
who computed the logits.

A vocabulary may have 262144 words, and a window 1024 positions: that would be a gigabyte of logits. So everything here
takes a few rows at a time and keeps some numbers a row. n = rows, V = words of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ELEMENTS = 1 << 20
"""Logits that are compared at once: 4 MiB of float32, and four times that meanwhile."""


def rows_at_once(vocabulary: int) -> int:
    """How many rows of logits to take at a time."""
    return max(1, ELEMENTS // vocabulary)


@dataclass(frozen=True)
class Rows:
    """What is kept of n positions.

    Attributes:
        reference_nll: -ln p(next token) by the reference, [n] float64.
        nll: the same by the model.
        kl: KL(reference || model) in nats, [n] float64; NaN where a logit of the model is not finite.
        same_top: whether both put the same word first, [n].
    """

    reference_nll: Doubles
    nll: Doubles
    kl: Doubles
    same_top: npt.NDArray[np.bool_]

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """Rows whose numbers are no numbers."""
        return ~(np.isfinite(self.kl) & np.isfinite(self.nll))


def compare(reference: Floats, logits: Floats, targets: npt.NDArray[np.int64]) -> Rows:
    """Compare rows of logits, [n,V] each, at positions whose next tokens are `targets` [n].

    KL = sum p (ln p - ln q), as the p-weighted mean of the difference of logits less the difference of their log-sums:
    the difference is taken before anything is exponentiated, so that a KL of 1e-6 is still seen in float32.

    Raises:
        ValueError: the shapes do not fit, or the reference itself is not finite.
    """
    if reference.shape != logits.shape or targets.shape != reference.shape[:1]:
        raise ValueError(f"logits {logits.shape} and {targets.shape} targets do not fit a reference of {reference.shape}")
    at = np.arange(len(targets))
    with np.errstate(invalid="ignore", over="ignore"):
        same_top = reference.argmax(1) == logits.argmax(1)
        first = reference - reference.max(1, keepdims=True)
        second = logits - logits.max(1, keepdims=True)
        picked, chosen = first[at, targets].astype(np.float64), second[at, targets].astype(np.float64)
        difference = first - second
        weights = np.exp(first, out=first)
        total = weights.sum(1, dtype=np.float64)
        log_total = np.log(total)
        log_other = np.log(np.exp(second, out=second).sum(1, dtype=np.float64))
        weighted = np.multiply(weights, difference, out=difference).sum(1, dtype=np.float64)
        kl = weighted / total - (log_total - log_other)
    if not np.isfinite(log_total).all():
        raise ValueError("the reference's logits hold NaN or infinity")
    return Rows(log_total - picked, log_other - chosen, np.where(kl < 0, 0.0, kl), same_top)


@dataclass(frozen=True)
class Share:
    """Mean KL of the positions first..last-1 of their windows."""

    first: int
    last: int
    kl: float


@dataclass(frozen=True)
class Quality:
    """What the model lost on one text. Losses are in nats a token; None where nothing finite was there to measure.

    Attributes:
        windows, tokens: how much was compared; a window's last token predicts nothing.
        broken: rows whose logits held NaN or infinity; they are left out of everything else.
        reference_nll: mean -ln p(next token) of the float model: its perplexity is exp of this.
        delta: mean of the model's nll less the reference's, on the same tokens: delta ln PPL.
        delta_se: standard error of `delta` over windows; None for a single one.
        kl_mean, kl_median, kl_p99: of KL(reference || model) over positions.
        same_top: share of positions where both put the same word first.
        by_position: mean KL by place in the window.
    """

    windows: int
    tokens: int
    broken: int
    reference_nll: float | None
    delta: float | None
    delta_se: float | None
    kl_mean: float | None
    kl_median: float | None
    kl_p99: float | None
    same_top: float | None
    by_position: tuple[Share, ...]


@dataclass
class Tally:
    """Gathers rows, window after window; `quality` may be asked for at any time."""

    _windows: list[list[Rows]] = field(default_factory=list)

    def begin(self) -> None:
        """The rows that follow are of the next window, from its first position on."""
        self._windows.append([])

    def add(self, rows: Rows) -> None:
        """The next rows of this window."""
        self._windows[-1].append(rows)

    def quality(self) -> Quality:
        """The statistics of all that was added."""
        whole = [_joined(parts) for parts in self._windows if parts]
        every = _joined(whole) if whole else _EMPTY
        good = ~every.broken
        count = int(good.sum())
        deltas = [(one.nll - one.reference_nll)[~one.broken] for one in whole]
        delta, error = _paired(deltas)
        kl = every.kl[good]
        return Quality(
            windows=len(whole),
            tokens=len(every.kl),
            broken=len(every.kl) - count,
            reference_nll=float(every.reference_nll[good].mean()) if count else None,
            delta=delta,
            delta_se=error,
            kl_mean=float(kl.mean()) if count else None,
            kl_median=float(np.median(kl)) if count else None,
            kl_p99=float(np.percentile(kl, 99)) if count else None,
            same_top=float(every.same_top[good].mean()) if count else None,
            by_position=_by_position(whole),
        )


_NOTHING = np.empty(0, np.float64)
_EMPTY = Rows(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.bool_))


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(
        np.concatenate([one.reference_nll for one in parts]),
        np.concatenate([one.nll for one in parts]),
        np.concatenate([one.kl for one in parts]),
        np.concatenate([one.same_top for one in parts]),
    )


def _paired(deltas: Sequence[Doubles]) -> tuple[float | None, float | None]:
    """Mean difference over all tokens, and its standard error from the windows' sums, which are independent where tokens of
    one window are not: the ratio estimator, so that a short last window counts as what it is."""
    sizes = np.array([len(one) for one in deltas if len(one)], np.float64)
    sums = np.array([one.sum() for one in deltas if len(one)], np.float64)
    if not len(sizes):
        return None, None
    mean = float(sums.sum() / sizes.sum())
    if len(sizes) == 1:
        return mean, None
    residuals = sums - mean * sizes
    count = len(sizes)
    return mean, float(np.sqrt(count / (count - 1) * (residuals**2).sum()) / sizes.sum())


def _by_position(windows: Sequence[Rows]) -> tuple[Share, ...]:
    """Shares of doubling width: 0-15, 16-31, 32-63 and so on."""
    longest = max((len(one.kl) for one in windows), default=0)
    found, first, last = [], 0, 16
    while first < longest:
        part = np.concatenate([one.kl[first:last][~one.broken[first:last]] for one in windows])
        if len(part):
            found.append(Share(first, min(last, longest), float(part.mean())))
        first, last = last, 2 * last
    return tuple(found)


@dataclass
class Likeness:
    """How like two streams of vectors are: signal to noise, and the mean cosine of their rows.

    Noise is relative to its own row: some models have a few rows a thousand times as long as the others (the first token's,
    most often), and a sum over all would be about those alone.
    """

    noise: float = 0.0
    cosines: float = 0.0
    rows: int = 0

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Rows [...,D] of both; a row of zeros is like another of zeros and like nothing else."""
        first, second = (array.reshape(-1, reference.shape[-1]) for array in (reference, other))
        step = max(1, ELEMENTS // (4 * first.shape[1]))
        for start in range(0, len(first), step):
            rows = slice(start, start + step)
            self._add(np.asarray(first[rows], np.float64), np.asarray(second[rows], np.float64))

    def _add(self, one: Doubles, two: Doubles) -> None:
        signal = (one**2).sum(1)
        noise = ((one - two) ** 2).sum(1)
        self.noise += float(np.divide(noise, signal, out=np.where(noise == 0, 0.0, 1.0), where=signal > 0).sum())
        lengths = np.sqrt(signal * (two**2).sum(1))
        dots = (one * two).sum(1)
        alike = np.divide(dots, lengths, out=(one == two).all(1).astype(np.float64), where=lengths != 0)
        self.cosines += float(alike.sum())
        self.rows += len(one)

    @property
    def snr_db(self) -> float | None:
        """-10 log10 of the mean of |error|^2 / |row|^2; None when both streams are equal, or one of them is not finite."""
        if self.noise == 0 or not np.isfinite(self.noise):
            return None
        return float(-10 * np.log10(self.noise / self.rows))

    @property
    def cosine(self) -> float | None:
        """Mean cosine of the rows; None where nothing finite was added."""
        return self.cosines / self.rows if self.rows and np.isfinite(self.cosines) else None


def agreement(reference: Sequence[int], written: Sequence[int]) -> int:
    """Tokens until two texts part: the length of what they begin with in common."""
    for count, (one, other) in enumerate(zip(reference, written, strict=False)):
        if one != other:
            return count
    return min(len(reference), len(written))
