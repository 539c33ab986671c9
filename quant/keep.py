"""Carry over what a checkpoint has quantized already: the very integers and scales, where the target's operator holds them.

Knows: grids that ride on lazy tensors (`vocabulary.STORED_GRID`), which form holds one. Does not know: any file format, how
forms are emitted.

    value = q * scale                          symmetric
    value = q * scale + offset, q from 0       zero points, where -offset/scale is a whole number in 0..2^bits-1 in every group
                                               of the matrix; otherwise offsets (see `quant.offsets`)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import STORED_GRID, STORED_TYPE
from appliance.targets.capabilities import Target
from quant import spill
from quant.arrays import Bytes, FitError, Floats, Halves, Int8s, dequantize, group_size
from quant.decide import key_of
from quant.emit import refusal
from quant.plan import Plan, plans
from quant.scheme import STORED, Form, Scheme, WeightRule
from quant.solvers import Solved

_PIECE = 1 << 20
"""Weights in float at once."""


class Grid(Protocol):
    """Integers [N,K], scales and (or None) offsets [N,G] of one matrix; an offset is what the lowest integer stands for."""

    @property
    def q(self) -> Int8s: ...
    @property
    def scales(self) -> Halves: ...
    @property
    def offsets(self) -> Halves | None: ...


class StoredGrid(Protocol):
    """What rides on a tensor: the file's name for the type, its form, and how the integers are read."""

    @property
    def kind(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def has_offsets(self) -> bool: ...
    @property
    def read(self) -> Callable[[], Grid]: ...


@dataclass(frozen=True)
class Stored:
    """One matrix that the scheme would have quantized. `why_not` is "" when it was carried over."""

    name: str
    kind: str
    parameters: int
    why_not: str = ""


@dataclass(frozen=True)
class Keeping:
    """What came of it: the scheme, which now leaves the carried matrices alone, and the account of every matrix."""

    scheme: Scheme
    matrices: tuple[Stored, ...]

    @property
    def carried(self) -> tuple[Stored, ...]:
        """Those that were carried over."""
        return tuple(one for one in self.matrices if not one.why_not)

    @property
    def requantized(self) -> tuple[Stored, ...]:
        """Those that were not."""
        return tuple(one for one in self.matrices if one.why_not)

    def record(self) -> dict[str, Any]:
        """For `record.json`: how much was carried over, by type, and what was not and why."""
        carried: dict[str, dict[str, int]] = {}
        for one in self.carried:
            count = carried.setdefault(one.kind, {"matrices": 0, "parameters": 0})
            count["matrices"] += 1
            count["parameters"] += one.parameters
        return {
            "carried": dict(sorted(carried.items())),
            "requantized": [
                {"name": one.name, "stored": one.kind, "parameters": one.parameters, "reason": one.why_not}
                for one in self.requantized
            ],
        }


def keep(model: ir.Model, scheme: Scheme, targets: Sequence[Target], work: Path, source: str) -> Keeping:
    """Put every grid of the model that all `targets` hold into the spill `work`, where `decide` finds it.

    One that some of them cannot hold is quantized for all, so that they run the same numbers.

    Call it before calibration and `decide`, on the model as the checkpoint has it: a pass that changes a weight's numbers
    leaves it without a grid.

    Args:
        source: fingerprint of the checkpoint, as `decide` gets it; not empty.

    Raises:
        BadInput, TargetError: as `quant.plan.plans`.
        CheckpointError: a stored scale is no number.
    """
    rules: dict[str, WeightRule] = {}
    found = []
    for plan in plans(model, scheme, targets[0]):
        if not plan.form.bits:
            continue
        tensor = plan.weight.const_value
        assert tensor is not None
        if plan.name in scheme.options.weights:
            found.append(Stored(plan.name, str(tensor.meta.get(STORED_TYPE, "")), plan.parameters, plan.reason))
            continue
        stored: StoredGrid | None = tensor.meta.get(STORED_GRID)
        kind = str(tensor.meta.get(STORED_TYPE, ""))
        if stored is not None:
            why = _carry(plan, stored, targets, work, source, rules)
        elif kind:
            why = f"{kind} is no grid of whole 4- or 8-bit numbers with one scale a group"
        else:
            why = "its numbers were changed before it came to be quantized"
        found.append(Stored(plan.name, kind, plan.parameters, why))
    options = replace(scheme.options, weights={**scheme.options.weights, **rules})
    return Keeping(replace(scheme, options=options), tuple(found))


def _carry(
    plan: Plan, stored: StoredGrid, targets: Sequence[Target], work: Path, source: str, rules: dict[str, WeightRule]
) -> str:
    """Spill one grid and add its rule; why it cannot be is returned instead."""
    grid = stored.read()
    zeros = whole_zero_points(grid, stored.bits) if stored.has_offsets and "embed" not in plan.roles else None
    if any(target.weights.symmetric_only for target in targets):
        zeros = None
    form = Form(stored.bits, stored.group, plan.form.activation, zeros is None, stored.has_offsets and zeros is None)
    for target in targets:
        if why := _why_not(form, plan.roles, target):
            return why
    rules[plan.name] = WeightRule(f"carried over: {stored.kind} in the checkpoint", stored=form)
    carried = replace(plan, form=form, solver=STORED)
    key = key_of(carried, source, "")
    if spill.find(work, key, plan.shape, form) is None:
        offsets = grid.offsets if form.offsets else None
        error = FitError(_signal(grid, stored), 0.0, 0, plan.parameters)
        spill.write(work, key, Solved(grid.q, grid.scales, zeros, error, offsets=offsets))
    return ""


def _why_not(form: Form, roles: tuple[str, ...], target: Target) -> str | None:
    takes = target.weights
    if form.bits not in takes.bits:
        return f"{form.bits} bits: target {target.name} takes {', '.join(map(str, takes.bits))}"
    if form.group not in takes.groups:
        groups = ", ".join(str(group) if group else "the whole row" for group in takes.groups)
        return f"groups of {form.group}: target {target.name} takes {groups}"
    return refusal(takes.operator, form, roles)


def whole_zero_points(grid: Grid, bits: int) -> Bytes | None:
    """Zero points [N,G] uint8 that stand for the offsets exactly; None when one of the groups has none.

    offset = -z * scale with a whole z in 0..2^bits-1, both sides exact in float64 (11 x 8 bits fit).
    """
    assert grid.offsets is not None
    scales, offsets = grid.scales.astype(np.float64), grid.offsets.astype(np.float64)
    z = np.rint(np.divide(-offsets, scales, out=np.zeros_like(offsets), where=scales != 0))
    exact = (z >= 0) & (z < 1 << bits) & (-z * scales == offsets)
    return z.astype(np.uint8) if exact.all() else None


def dequantize_stored(q: np.ndarray, scales: np.ndarray, offsets: np.ndarray, bits: int, group: int) -> Floats:
    """(q + 2^(bits-1)) * scale + offset as float32 [N,K], one rounding after each operation, as GGUF's own tools have it."""
    steps = dequantize(q.astype(np.int16) + (1 << (bits - 1)), scales, group)
    columns = q.shape[1]
    return steps + np.repeat(offsets.astype(np.float32), group_size(columns, group), axis=1)[:, :columns]


def _signal(grid: Grid, stored: StoredGrid) -> float:
    """Sum of squares of the weights."""
    total, rows = 0.0, max(1, _PIECE // max(grid.q.shape[1], 1))
    for start in range(0, len(grid.q), rows):
        part = slice(start, start + rows)
        if grid.offsets is None:
            values = dequantize(grid.q[part], grid.scales[part], stored.group)
        else:
            values = dequantize_stored(grid.q[part], grid.scales[part], grid.offsets[part], stored.bits, stored.group)
        total += float(np.einsum("nk,nk->", values, values, dtype=np.float64))
    return total
