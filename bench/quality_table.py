"""The arithmetic of bench/quality.py: bits a weight, which of our points a peer is held against, the table.

Knows: measured points as numbers. Does not know: models, files, or how anything was measured.
"""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One point.

    Attributes:
        name: side/what.
        weights: bytes of all weights in its files; computed: bytes of tables that are no weights (ropes).
        body_bits, bits: bytes x 8 / parameters, of the layers' matrices and of the whole model, a tied table once.
        forms: how many matrices of the body have which type.
        kl, kl_median, kl_p99: to the float graph, nats a token.
        delta, delta_se: mean nll less the float graph's on the same tokens, and its standard error over windows.
        same_top: share of positions with the same most likely token.
    """

    name: str
    weights: int
    computed: int
    body_bits: float
    bits: float
    forms: dict[str, int]
    kl: float
    kl_median: float
    kl_p99: float
    delta: float
    delta_se: float | None
    same_top: float
    windows: int


GOAL = 0.8
"""Of a peer's KL, at no more bytes."""


@dataclass(frozen=True)
class Held:
    """A peer's point against ours; a ratio below 1 means that ours is closer to float.

    Attributes:
        ours: the best of ours that takes no more bytes, and ratio: its KL over the peer's.
        level: the same with ours at the peer's own bytes, on the line (in log KL) between our points around them;
            None where the peer lies beyond the last. A budget can be any number, a peer's size cannot.
    """

    peer: str
    ours: str
    ratio: float
    level: float | None


def verdict(held: list[Held]) -> str:
    """One line: how many peers' points lose to ours by the goal."""
    if not held:
        return "no peer takes as many bytes as any of ours"
    reached, level = ([one.peer for one in held if _reached(one.ratio)], [one for one in held if one.level is not None])
    even = sum(_reached(one.level or 0) for one in level)
    lacking = [one.peer for one in held if one.peer not in reached]
    rest = f"; not {', '.join(lacking)}" if lacking else ""
    told = f"{len(reached)} of {len(held)} points at no more bytes, {even} of {len(level)} at equal bytes"
    return f"at most {GOAL} of the peer's KL: {told}{rest}"


def _reached(ratio: float) -> bool:
    return ratio <= GOAL


def bits_a_weight(size: int, parameters: int) -> float:
    """Bytes over parameters, in bits."""
    return 8 * size / parameters


def held_against(points: list[Measured], ours: str) -> list[Held]:
    """For every point of another side: the lowest KL among the points whose names begin with `ours` that are not above its bytes.

    Floats (over 16 bits a weight) are left out, and peers that are smaller than all of ours.

    Args:
        ours: side/what the names begin with.
    """
    mine = [one for one in points if one.name.startswith(ours)]
    side = ours.split("/")[0]
    found = []
    for peer in sorted(points, key=lambda one: one.weights):
        if peer.name.split("/")[0] == side or peer.bits > 16:
            continue
        fitting = [one for one in mine if one.weights <= peer.weights]
        if fitting:
            best = min(fitting, key=lambda one: one.kl)
            found.append(Held(peer.name, best.name, best.kl / peer.kl, _level(mine, peer)))
    return found


def _level(mine: list[Measured], peer: Measured) -> float | None:
    """KL of ours at the peer's bytes, over the peer's."""
    line: list[Measured] = []  # of points that no smaller one beats
    for one in sorted(mine, key=lambda one: (one.weights, one.kl)):
        if not line or one.kl < line[-1].kl:
            line.append(one)
    for small, large in itertools.pairwise(line):
        if small.weights <= peer.weights <= large.weights:
            share = (peer.weights - small.weights) / (large.weights - small.weights)
            return math.exp((1 - share) * math.log(small.kl) + share * math.log(large.kl)) / peer.kl
    return None


def table(points: list[Measured], held: list[Held]) -> str:
    """The table that people read, smallest first."""
    against = {one.peer: one for one in held}
    head = (
        f"{'point':<28} {'MB':>7} {'body':>6} {'all':>6} {'KL mean':>9} {'median':>9} {'p99':>8} {'delta ln PPL':>18} {'top':>6}"
    )
    lines = [f"{head}  {'ours at no more bytes':<26} {'ratio':>6} {'level':>6}  types in the body"]
    for one in sorted(points, key=lambda one: one.weights):
        error = "" if one.delta_se is None else f" ±{one.delta_se:.4f}"
        row = f"{one.name:<28} {one.weights / 1e6:>7.1f} {one.body_bits:>6.2f} {one.bits:>6.2f} {_small(one.kl):>9}"
        row += f" {_small(one.kl_median):>9} {_small(one.kl_p99):>8} {f'{one.delta:+.4f}{error}':>18} {one.same_top:>6.1%}"
        match = against.get(one.name)
        level = "" if match is None or match.level is None else f"{match.level:.2f}"
        row += f"  {match.ours:<26} {match.ratio:>6.2f} {level:>6}" if match else f"  {'':<26} {'':>6} {'':>6}"
        lines.append(f"{row}  {', '.join(f'{count} {form}' for form, count in one.forms.items())}")
    return "\n".join(lines)


def record(points: list[Measured], held: list[Held]) -> dict[str, Any]:
    """The same as one JSON object."""
    return {"points": [asdict(one) for one in points], "goal": GOAL, "held": [asdict(one) for one in held]}


def _small(value: float) -> str:
    return f"{value:.4f}" if value >= 0.00095 else f"{value:.1e}"
