"""Decide every matrix of a canonical model: one weight at a time, its integers spilled to disk.

Knows: roles, which node takes which form, ties. Does not know: how integers are found (`quant.arrays`), any one scheme,
what a target's graph looks like (`quant.emit`).

    Linear(x, weight, bias?)   ->  QuantLinear(x, q, scales, bias?)      bits, group, activation
    Embedding(ids, weight)     ->  QuantEmbedding(ids, q, scales)        bits, group
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from appliance.bundle.vocabulary import (
    DOMAIN,
    EMBEDDING,
    FLOAT_ROLES,
    LINEAR,
    QUANT_EMBEDDING,
    QUANT_LINEAR,
    ROLE,
    ROLES,
)
from appliance.errors import BadInput, CheckpointError, TargetError
from appliance.targets.capabilities import Target
from quant import spill
from quant.arrays import FitError, groups_of
from quant.emit import refusal
from quant.graph import add_initializer, canonical, drop_unused, lazy, replace, sizes, tensor_of
from quant.scheme import Form, Scheme, nearest
from quant.spill import Spilled

Progress = Callable[[int, int, str], None]
"""(parameters done, parameters in all, name of the weight)."""


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix. `roles` are all uses of it: a tied one serves embed and head."""

    name: str
    roles: tuple[str, ...]
    rows: int
    columns: int
    form: Form
    error: FitError

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


@dataclass(frozen=True)
class _Plan:
    """A weight to be quantized, and the nodes that read it."""

    weight: ir.Value
    nodes: tuple[ir.Node, ...]
    roles: tuple[str, ...]
    form: Form


def decide(
    model: ir.Model,
    scheme: Scheme,
    target: Target,
    work: Path,
    progress: Progress | None = None,
    *,
    source: str = "",
    threads: int = 2,
) -> Decision:
    """Rewrite the Linears and Embeddings of `model`, in place, to what `scheme` makes of them for `target`.

    Call it before any lowering. Results that are already in `work` are used again, so an interrupted build goes on.

    Args:
        model: canonical model; its weights are read one at a time and not kept.
        work: folder for the integers; the new initializers read from it until the model is saved.
        source: fingerprint of the checkpoint. With it, results are found without reading the weights again; without
            it the key is the hash of each weight's values.
        threads: rows of one weight are worked on by this many threads.

    Raises:
        BadInput: a weight has no role, or an unknown one; it is named.
        TargetError: the target cannot hold what the scheme asks for; nothing has been changed yet.
        CheckpointError: a weight holds NaN or infinity, or does not fit float16 scales; it is named.
    """
    plans = [_plan(value, scheme, target) for value in _weights(model.graph)]
    chosen = [plan for plan in plans if plan.form.bits]
    total = sum(_size(plan.weight) for plan in chosen)
    matrices, done = [], 0
    for plan in chosen:
        name = str(plan.weight.name)
        if progress:
            progress(done, total, name)
        spilled = _quantized(plan, work, source, threads)
        _rewrite(model.graph, plan, spilled)
        rows, columns = spilled.q().shape
        matrices.append(Matrix(name, plan.roles, rows, columns, plan.form, spilled.error))
        done += rows * columns
    if progress:
        progress(done, total, "")
    taken = {f"{matrix.name}{suffix}" for matrix in matrices for suffix in (".q", ".scales")}
    kept = tuple(_kept(value) for name, value in model.graph.initializers.items() if name not in taken)
    return Decision(scheme, target.name, tuple(matrices), kept)


def _weights(graph: ir.Graph) -> list[ir.Value]:
    """Each matrix once, in the order of its first use."""
    found: dict[int, ir.Value] = {}
    for node in canonical(graph, LINEAR, EMBEDDING):
        tensor_of(node.inputs[1], node)
        weight = node.inputs[1]
        assert weight is not None
        found.setdefault(id(weight), weight)
    return list(found.values())


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return int(value.const_value.size)


def _plan(weight: ir.Value, scheme: Scheme, target: Target) -> _Plan:
    nodes = tuple(usage.node for usage in weight.uses() if usage.node.op_type in (LINEAR, EMBEDDING))
    role = weight.metadata_props.get(ROLE, "")
    if role not in ROLES:
        what = f'has the unknown role "{role}"' if role else "has no role"
        raise BadInput(f"weight {weight.name} of {nodes[0].op_type} {nodes[0].name} {what}", nearest(role, sorted(ROLES)))
    linear = any(node.op_type == LINEAR for node in nodes)
    looked_up = any(node.op_type == EMBEDDING for node in nodes)
    roles = ("embed", "head") if linear and looked_up else (role,)
    forms = [scheme.form(each, target.role_overrides) for each in roles]
    if len(set(forms)) > 1:
        raise TargetError(
            f"{weight.name} is both embedding and head, and scheme {scheme.name} gives them different forms",
            "give embed and head the same bits and group",
        )
    form = forms[0] if linear or not forms[0].bits else Form(forms[0].bits, forms[0].group, "float")
    if form.bits:
        _check_held(form, roles, scheme, target)
    return _Plan(weight, nodes, roles, form)


def _check_held(form: Form, roles: tuple[str, ...], scheme: Scheme, target: Target) -> None:
    what = f"scheme {scheme.name} keeps {' and '.join(roles)} in {form.bits} bits, group {form.group}"
    takes = target.weights
    if form.bits not in takes.bits:
        raise TargetError(f"{what}; target {target.name} takes {_list(takes.bits)} bits", "choose another scheme")
    if form.group not in takes.groups:
        raise TargetError(f"{what}; target {target.name} takes groups of {_list(takes.groups)}", "choose one of them")
    if form.activation not in ("float", *target.flags.activations):
        raise TargetError(
            f"scheme {scheme.name} wants {form.activation} activations for {' and '.join(roles)}; "
            f"target {target.name} computes in {_list(target.flags.activations)}",
            "choose another scheme",
        )
    reason = refusal(takes.operator, form, roles)
    if reason:
        raise TargetError(f"{what}; {reason}", "change the scheme's options")


def _list(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))


def _quantized(plan: _Plan, work: Path, source: str, threads: int) -> Spilled:
    tensor = plan.weight.const_value
    assert tensor is not None
    shape = sizes(tensor)
    if len(shape) != 2:
        raise BadInput(f"weight {plan.weight.name} has shape {list(shape)}", "a Linear or Embedding takes a matrix")
    form = plan.form
    weight = None if source else tensor.numpy()
    identity = f"{source}/{plan.weight.name}" if weight is None else spill.content_of(weight)
    key = spill.key_of(identity, shape, form.bits, form.group)
    found = spill.find(work, key, shape, form.group)
    if found is not None:
        return found
    try:
        return spill.write(work, key, tensor.numpy() if weight is None else weight, form.bits, form.group, threads)
    except ValueError as failure:
        raise CheckpointError(f"weight {plan.weight.name}: {failure}", "the checkpoint is damaged; fetch it again") from None


def _rewrite(graph: ir.Graph, plan: _Plan, spilled: Spilled) -> None:
    name, tags = str(plan.weight.name), dict(plan.weight.metadata_props)
    q = add_initializer(graph, lazy(f"{name}.q", ir.DataType.INT8, spilled.q().shape, spilled.q), tags)
    scales = add_initializer(graph, lazy(f"{name}.scales", ir.DataType.FLOAT16, spilled.scales().shape, spilled.scales), tags)
    for node in plan.nodes:
        attributes: dict[str, int | str] = {"bits": plan.form.bits, "group": plan.form.group}
        if node.op_type == LINEAR:
            attributes["activation"] = plan.form.activation
        decided = ir.node(
            QUANT_LINEAR if node.op_type == LINEAR else QUANT_EMBEDDING,
            [node.inputs[0], q, scales, *node.inputs[2:]],
            attributes,
            domain=DOMAIN,
            name=node.name,
            outputs=[ir.Value(name=node.outputs[0].name)],
            metadata_props=dict(node.metadata_props),
        )
        graph.insert_before(node, decided)
        replace(node, decided.outputs[0])
    drop_unused(graph, [plan.weight])


def _kept(value: ir.Value) -> Kept:
    tensor = value.const_value
    assert tensor is not None
    role = value.metadata_props.get(ROLE, "")
    if not role:
        reason = "a constant of the graph"
    elif role in FLOAT_ROLES:
        reason = f"{role} always stays float"
    elif any(usage.node.op_type in (LINEAR, EMBEDDING) for usage in value.uses()):
        reason = f"the scheme keeps {role} float"
    else:
        reason = "not the matrix of a linear or an embedding"
    return Kept(str(value.name), role, sizes(tensor), int(tensor.nbytes), reason)
