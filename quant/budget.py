"""Which weights get more bits when only so many bytes may be spent.

Knows: units of weights that share a form, what each form of a unit costs in bytes and in quality. Does not know: what a unit
is, how its costs were found, or what becomes of the choice.

Every unit starts in its cheapest form. Of each unit only the forms on the lower convex hull of (bytes, loss) can be part of a
best choice for some budget; steps along the hulls are taken in the order of the loss they save per byte until the next one
does not fit, and what is left is filled with whatever still fits and saves most. That is optimal for every budget that the
steps meet exactly, and off by less than one step otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quant.arrays import groups_of
from quant.scheme import Form

VERSION = 2
"""Raised whenever the same costs and forms would give another choice (`quant.mixed` lists the forms)."""
SCALE_BYTES = {"float16": 2, "float32": 4}
"""By `WeightForms.scale_dtype`."""


@dataclass(frozen=True)
class Choice:
    """One form of a unit.

    Attributes:
        form: of all its weights.
        bytes: that they take in it, scales and zero points included.
        loss: what it costs in quality; only differences and ratios count.
    """

    form: Form
    bytes: int
    loss: float


@dataclass(frozen=True)
class Unit:
    """Weights that share a form. `choices` in any order, at least one."""

    name: str
    choices: tuple[Choice, ...]


def bytes_of(rows: int, columns: int, form: Form, scale_dtype: str = "float16") -> int:
    """What a matrix takes in `form`: whole blocks of integers (a last partial one is padded), scales, zero points, offsets."""
    groups = groups_of(columns, form.group)
    whole = groups * form.group if form.group else columns
    zeros = 0 if form.symmetric else -(-groups * form.bits // 8)
    offsets = 2 * groups if form.offsets else 0
    scale = 1 if form.element == "mxfp4" else SCALE_BYTES[scale_dtype]
    return rows * (whole * form.bits // 8 + groups * scale + zeros + offsets)


def choose(units: Sequence[Unit], budget: int) -> list[Choice]:
    """A choice for each unit, in order; together within `budget` bytes wherever the cheapest forms are."""
    hulls = [_hull(unit.choices) for unit in units]
    chosen = [hull[0] for hull in hulls]
    left = budget - sum(choice.bytes for choice in chosen)
    steps = sorted(
        ((_slope(before, after), index, place) for index, hull in enumerate(hulls) for place, (before, after) in _pairs(hull)),
        key=lambda step: (-step[0], step[1], step[2]),
    )
    for _, index, place in steps:
        before, after = hulls[index][place], hulls[index][place + 1]
        if chosen[index] is before and after.bytes - before.bytes <= left:
            chosen[index], left = after, left - (after.bytes - before.bytes)
    _fill(units, chosen, left)
    return chosen


def _fill(units: Sequence[Unit], chosen: list[Choice], left: int) -> None:
    """Spend what is left on the single changes that save most, hull or not."""
    while True:
        best, gain, at = None, 0.0, 0
        for index, unit in enumerate(units):
            for choice in unit.choices:
                saved = chosen[index].loss - choice.loss
                if choice.bytes - chosen[index].bytes <= left and saved > gain:
                    best, gain, at = choice, saved, index
        if best is None:
            return
        left -= best.bytes - chosen[at].bytes
        chosen[at] = best


def _pairs(hull: Sequence[Choice]) -> list[tuple[int, tuple[Choice, Choice]]]:
    return [(place, (hull[place], hull[place + 1])) for place in range(len(hull) - 1)]


def _slope(before: Choice, after: Choice) -> float:
    """Loss saved per byte."""
    return (before.loss - after.loss) / (after.bytes - before.bytes)


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """From the fewest bytes on: each step saves less per byte than the one before."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.bytes, one.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull
