"""The plan: which form every matrix of a canonical model gets, and who solves it. Nothing is computed here.

Knows: roles, ties, what a target's operator can hold. Does not know: how integers are found, any one scheme.
"""

from dataclasses import dataclass, replace

import onnx_ir as ir

from appliance.bundle.vocabulary import EMBEDDING, LINEAR, ROLE, ROLES
from appliance.errors import BadInput, TargetError
from appliance.targets.capabilities import Target
from quant import solvers
from quant.emit import refusal
from quant.graph import canonical, sizes, tensor_of
from quant.scheme import TABLES, Form, Scheme, nearest


@dataclass(frozen=True)
class Plan:
    """One weight, and the nodes that read it.

    Attributes:
        weight: the initializer.
        nodes: its Linears and Embeddings.
        roles: all its uses: ("embed", "head") for a tied table.
        form: what it becomes; 0 bits = it stays float.
        solver: file in `quant/solvers`.
        reason: why it is an exception to its scheme, "" when it is none.
    """

    weight: ir.Value
    nodes: tuple[ir.Node, ...]
    roles: tuple[str, ...]
    form: Form
    solver: str
    reason: str = ""

    @property
    def name(self) -> str:
        """The weight's name."""
        return str(self.weight.name)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        assert self.weight.const_value is not None
        rows, columns = sizes(self.weight.const_value)
        return rows, columns

    @property
    def parameters(self) -> int:
        """N * K."""
        assert self.weight.const_value is not None
        return int(self.weight.const_value.size)

    @property
    def in_body(self) -> bool:
        """Whether it counts for a budget: neither embedding nor head."""
        return not set(self.roles) & set(TABLES)


def plans(model: ir.Model, scheme: Scheme, target: Target) -> tuple[Plan, ...]:
    """A plan for each matrix of the model, in the order of first use; those that stay float too.

    Raises:
        BadInput: a weight has no role, an unknown one, or is no matrix; it is named.
        TargetError: the target cannot hold what the scheme asks for, or an exception names no weight.
    """
    found = tuple(_plan(value, scheme, target) for value in _weights(model.graph))
    names = {plan.name for plan in found}
    for name in scheme.options.weights:
        if name not in names:
            raise TargetError(
                f'scheme {scheme.name} has an exception for the unknown weight "{name}"', nearest(name, sorted(names))
            )
    return found


def _weights(graph: ir.Graph) -> list[ir.Value]:
    """Each matrix once, in the order of its first use."""
    found: dict[int, ir.Value] = {}
    for node in canonical(graph, LINEAR, EMBEDDING):
        tensor_of(node.inputs[1], node)
        weight = node.inputs[1]
        assert weight is not None
        found.setdefault(id(weight), weight)
    return list(found.values())


def _plan(weight: ir.Value, scheme: Scheme, target: Target) -> Plan:
    nodes = tuple(usage.node for usage in weight.uses() if usage.node.op_type in (LINEAR, EMBEDDING))
    role, name = weight.metadata_props.get(ROLE, ""), str(weight.name)
    if role not in ROLES:
        what = f'has the unknown role "{role}"' if role else "has no role"
        raise BadInput(f"weight {name} of {nodes[0].op_type} {nodes[0].name} {what}", nearest(role, sorted(ROLES)))
    linear = any(node.op_type == LINEAR for node in nodes)
    looked_up = any(node.op_type == EMBEDDING for node in nodes)
    roles = TABLES if linear and looked_up else (role,)
    forms = [scheme.form(each, target.role_overrides, name) for each in roles]
    if len(set(forms)) > 1:
        raise TargetError(
            f"{name} is both embedding and head, and scheme {scheme.name} gives them different forms",
            "give embed and head the same bits and group",
        )
    form = forms[0] if linear or not forms[0].bits else replace(forms[0], activation="float")
    if form.bits:
        _check_held(form, roles, scheme, target)
        if weight.const_value is not None and len(shape := sizes(weight.const_value)) != 2:
            raise BadInput(f"weight {name} has shape {list(shape)}", "a Linear or Embedding takes a matrix")
    solver = scheme.solver_of(name)
    if form.element != "int":
        solver = form.element
    elif solver == scheme.default.element or (set(roles) & set(TABLES) and solvers.find(solver).NEEDS_MOMENTS):
        solver = "fit"
    reasons = (scheme.reason(each, target.role_overrides, target.name, name) for each in roles)
    return Plan(weight, nodes, roles, form, solver, next(filter(None, reasons), ""))


def _check_held(form: Form, roles: tuple[str, ...], scheme: Scheme, target: Target) -> None:
    what = f"scheme {scheme.name} keeps {' and '.join(roles)} in {form.bits} bits, group {form.group}"
    takes = target.weights
    if form.element not in takes.elements:
        raise TargetError(
            f"scheme {scheme.name} keeps {' and '.join(roles)} in {form.element.upper()}; target {target.name} takes "
            f"{_list(takes.elements)} weights, as every built-in target does",
            "choose another scheme, or a target whose file names it in weights.elements",
        )
    if form.bits not in takes.bits:
        raise TargetError(f"{what}; target {target.name} takes {_list(takes.bits)} bits", "choose another scheme")
    if form.group not in takes.groups:
        raise TargetError(f"{what}; target {target.name} takes groups of {_list(takes.groups)}", "choose one of them")
    if not form.symmetric and takes.symmetric_only:
        raise TargetError(f"{what} with zero points; target {target.name} takes none", "leave out --asymmetric")
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
