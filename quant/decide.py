"""Decide every matrix of a canonical model: one weight at a time, its integers spilled to disk.

Knows: how a planned node is rewritten. Does not know: which form it gets (`quant.plan`), how integers are found
(`quant.solvers`), what a target's graph looks like (`quant.emit`).

    Linear(x, weight, bias?)   ->  QuantLinear(x, q, scales, bias?, zero_points?, offsets?)    bits, group, activation
    Embedding(ids, weight)     ->  QuantEmbedding(ids, q, scales, -, zero_points?, offsets?)   bits, group
    Attention(q, k, v, ...)    ->  Attention(q, k, v, ..., key_scale, value_scale)             where state is kept in int8
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN, EMBEDDING, FLOAT_ROLES, LINEAR, QUANT_EMBEDDING, QUANT_LINEAR, ROLE
from appliance.errors import CheckpointError
from appliance.targets.capabilities import Target
from quant import solvers, spill
from quant.arrays import FitError, groups_of
from quant.graph import add_initializer, drop_unused, lazy, replace, sizes
from quant.kv import KvScales, check_held
from quant.kv import rewrite as rewrite_attention
from quant.moments import Moments
from quant.plan import Plan, plans
from quant.scheme import Form, Scheme
from quant.spill import Spilled

PARTS = (".q", ".scales", ".zero_points", ".offsets")
"""Endings of the initializers that take a weight's place."""

Progress = Callable[[int, int, str], None]
"""(parameters done, parameters in all, name of the weight)."""


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix.

    Attributes:
        roles: all uses of it: a tied one serves embed and head.
        solver: who found the integers.
        proxy: loss of its outputs on the calibration text, see `quant.solvers.Solved`.
        plain_proxy: the same of the plain fit, where the solver looked at it.
        fell_back: why the solver took the plainer way, "" when it did not.
        reason: why its form is an exception to the scheme, "" when it is none.
        activation_reason: why its activations are, "" when they are none.
    """

    name: str
    roles: tuple[str, ...]
    rows: int
    columns: int
    form: Form
    error: FitError
    solver: str = "fit"
    proxy: float | None = None
    plain_proxy: float | None = None
    fell_back: str = ""
    reason: str = ""
    activation_reason: str = ""

    @property
    def parameters(self) -> int:
        return self.rows * self.columns

    @property
    def scales(self) -> int:
        """How many scales it has."""
        return self.rows * groups_of(self.columns, self.form.group)


@dataclass(frozen=True)
class Kept:
    """One tensor that stays as the checkpoint has it."""

    name: str
    role: str
    shape: tuple[int, ...]
    bytes: int
    reason: str

    @property
    def parameters(self) -> int:
        """Its numbers if they are weights of the model: 0 for a computed table or a constant."""
        return math.prod(self.shape) if self.role not in ("", "rope") else 0


@dataclass(frozen=True)
class Decision:
    """What was decided for a model, the evidence included."""

    scheme: Scheme
    target: str
    matrices: tuple[Matrix, ...]
    kept: tuple[Kept, ...]

    @property
    def parameters(self) -> int:
        """Weights of the model, tied ones once; computed tables and constants are none."""
        return sum(matrix.parameters for matrix in self.matrices) + sum(one.parameters for one in self.kept)


def decide(
    model: ir.Model,
    scheme: Scheme,
    target: Target,
    work: Path,
    progress: Progress | None = None,
    *,
    source: str = "",
    calibration: str = "",
    scales: Mapping[int, KvScales] | None = None,
    threads: int = 2,
) -> Decision:
    """Rewrite the Linears and Embeddings of `model`, in place, to what `scheme` makes of them for `target`.

    Call it before any lowering. Results that are already in `work` are used again, so an interrupted build goes on.

    Args:
        model: canonical model; its weights are read one at a time and not kept.
        work: folder for the integers; the new initializers read from it until the model is saved.
        source: fingerprint of the checkpoint. With it, results are found without reading the weights again; without
            it the key is the hash of each weight's values.
        calibration: fingerprint of the calibration text; weights whose solver needs moments are in `work` already
            (`quant.calibrate` put them there).
        scales: of keys and values, by layer (`quant.kv_ranges`), for a scheme that keeps them in int8; None = not known yet,
            they stay float.
        threads: rows of one weight are worked on by this many threads.

    Raises:
        BadInput: a weight has no role, or an unknown one; it is named.
        TargetError: the target cannot hold what the scheme asks for; nothing has been changed yet.
        CheckpointError: a weight holds NaN or infinity, or does not fit float16 scales; it is named.
    """
    check_held(scheme.options.kv, target)
    planned = plans(model, scheme, target)
    chosen = [plan for plan in planned if plan.form.bits]
    total = sum(plan.parameters for plan in chosen)
    matrices, done = [], 0
    for plan in chosen:
        if progress:
            progress(done, total, plan.name)
        spilled = _quantized(plan, work, source, calibration, threads)
        _rewrite(model.graph, plan, spilled)
        rows, columns = plan.shape
        matrices.append(_matrix(plan, spilled))
        done += rows * columns
    if progress:
        progress(done, total, "")
    taken = {f"{matrix.name}{suffix}" for matrix in matrices for suffix in PARTS}
    reasons = {plan.name: plan.reason for plan in planned}
    kept = tuple(_kept(value, reasons.get(name, "")) for name, value in model.graph.initializers.items() if name not in taken)
    if scales is not None:
        rewrite_attention(model, scales)
    return Decision(scheme, target.name, tuple(matrices), kept)


def key_of(plan: Plan, source: str, calibration: str, weight: np.ndarray | None = None) -> str:
    """Where the spill keeps the plan's result.

    Args:
        source: fingerprint of the checkpoint; without it `weight`, whose values are then the key.
        calibration: fingerprint of the calibration text; it counts only for solvers that need moments.
    """
    solver = solvers.find(plan.solver)
    identity = f"{source}/{plan.name}" if source or weight is None else spill.content_of(weight)
    version = f"{plan.solver} {solver.VERSION}"
    return spill.key_of(identity, plan.shape, plan.form, version, calibration if solver.NEEDS_MOMENTS else "")


def _quantized(plan: Plan, work: Path, source: str, calibration: str, threads: int) -> Spilled:
    tensor = plan.weight.const_value
    assert tensor is not None
    weight = None if source else tensor.numpy()
    key = key_of(plan, source, calibration, weight)
    found = spill.find(work, key, plan.shape, plan.form)
    if found is not None:
        return found
    return solve(plan, tensor.numpy() if weight is None else weight, None, work, key, threads)


def solve(plan: Plan, weight: np.ndarray, moments: Moments | None, work: Path, key: str, threads: int) -> Spilled:
    """Have the plan's solver find the integers of `weight` and keep them in `work` under `key`.

    Raises:
        CheckpointError: the weight holds NaN or infinity, or does not fit float16 scales; it is named.
    """
    return spill.write(work, key, solved(plan, weight, moments, threads))


def solved(plan: Plan, weight: np.ndarray, moments: Moments | None, threads: int) -> solvers.Solved:
    """What the plan's solver makes of `weight`; raises as `solve` does."""
    solver = solvers.find(plan.solver)
    assert moments is not None or not solver.NEEDS_MOMENTS, f"{plan.name}: {plan.solver} needs calibration first"
    try:
        return solver.solve(weight, plan.form, moments if solver.NEEDS_MOMENTS else None, threads)
    except ValueError as failure:
        raise CheckpointError(f"weight {plan.name}: {failure}", "the checkpoint is damaged; fetch it again") from None


def _matrix(plan: Plan, spilled: Spilled) -> Matrix:
    rows, columns = plan.shape
    return Matrix(
        name=plan.name,
        roles=plan.roles,
        rows=rows,
        columns=columns,
        form=plan.form,
        error=spilled.error,
        solver=plan.solver,
        proxy=spilled.proxy,
        plain_proxy=spilled.plain_proxy,
        fell_back=spilled.fell_back,
        reason=plan.reason,
    )


def _rewrite(graph: ir.Graph, plan: Plan, spilled: Spilled) -> None:
    name, tags = plan.name, dict(plan.weight.metadata_props)
    q = add_initializer(graph, lazy(f"{name}.q", ir.DataType.INT8, spilled.q().shape, spilled.q), tags)
    kind = ir.DataType.from_numpy(spilled.scales().dtype)
    scales = add_initializer(graph, lazy(f"{name}.scales", kind, spilled.scales().shape, spilled.scales), tags)
    rest: list[ir.Value | None] = []
    shape = spilled.scales().shape
    if not plan.form.symmetric:
        rest = [add_initializer(graph, lazy(f"{name}.zero_points", ir.DataType.UINT8, shape, spilled.zero_points), tags)]
    elif plan.form.offsets:
        rest = [None, add_initializer(graph, lazy(f"{name}.offsets", ir.DataType.FLOAT16, shape, spilled.offsets), tags)]
    for node in plan.nodes:
        bias = list(node.inputs[2:]) or [None] * bool(rest)
        attributes: dict[str, int | str] = {"bits": plan.form.bits, "group": plan.form.group}
        if node.op_type == LINEAR:
            attributes["activation"] = plan.form.activation
        if plan.form.element != "int":
            attributes["element"] = plan.form.element
        decided = ir.node(
            QUANT_LINEAR if node.op_type == LINEAR else QUANT_EMBEDDING,
            [node.inputs[0], q, scales, *bias, *rest],
            attributes,
            domain=DOMAIN,
            name=node.name,
            outputs=[ir.Value(name=node.outputs[0].name)],
            metadata_props=dict(node.metadata_props),
        )
        graph.insert_before(node, decided)
        replace(node, decided.outputs[0])
    drop_unused(graph, [plan.weight])


def _kept(value: ir.Value, why: str) -> Kept:
    """Args: `why`: of its plan; "" when it has none, or is no exception."""
    tensor = value.const_value
    assert tensor is not None
    role = value.metadata_props.get(ROLE, "")
    if not role:
        reason = "a constant of the graph"
    elif role in FLOAT_ROLES:
        reason = f"{role} always stays float"
    elif any(usage.node.op_type in (LINEAR, EMBEDDING) for usage in value.uses()):
        reason = why or f"the scheme keeps {role} float"
    else:
        reason = "not the matrix of a linear or an embedding"
    return Kept(str(value.name), role, sizes(tensor), int(tensor.nbytes), reason)
