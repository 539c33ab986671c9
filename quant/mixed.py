"""Exceptions to a scheme, chosen by measurement: more bits where a weight costs most, coarser groups where it costs least.

Knows: the order of things: measure every weight, list its possible forms, spend the budget, give each exception its reason and
the record what it was chosen by.
Does not know: how costs are measured (`quant.sensitivity`), how a budget is spent (`quant.budget`), graphs of parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from appliance.bundle.vocabulary import ROLE
from appliance.errors import TargetError
from appliance.targets.capabilities import Target
from quant.budget import SCALE_BYTES, Choice, Unit, bytes_of, choose
from quant.calibrate import Setup
from quant.emit import refusal
from quant.plan import Plan, plans
from quant.scheme import TABLES, Form, Measured, Scheme, WeightRule
from quant.sensitivity import Cost, Progress, measure

GROUPS = {4: (16, 32, 64, 128), 8: (32, 64, 128)}
"""Groups that are tried where the scheme has some, by bits. Smaller ones decode slower (int4 in groups of 16 takes 1.6 times
as long as in 32 where memory is no limit) and save nothing at 8 bits; larger ones round a block's activations together with its
outliers."""


def with_exceptions(
    model: ir.Model, scheme: Scheme, targets: Sequence[Target], setup: Setup, progress: Progress | None = None
) -> Scheme:
    """The scheme with an exception for every weight that should have another form than its default, within its budget.

    Weights that a person or the target has made an exception already stay as they are; their bytes count.

    Args:
        model: canonical float model, not changed.
        targets: at least one; every form that is chosen can be held by all of them.
        setup: of the calibration that follows.

    Raises:
        TargetError: the budget is below what the smallest forms take; it says how much that is.
    """
    if scheme.budget is None:
        return scheme
    body = [plan for plan in plans(model, scheme, targets[0]) if plan.in_body and plan.form.bits]
    forms = {plan.name: _forms(plan, scheme, targets) for plan in body}
    by_name = {plan.name: plan for plan in body if len(forms[plan.name]) > 1}
    asked = tuple(dict.fromkeys(form for name in by_name for form in forms[name]))
    scales = max((target.weights.scale_dtype for target in targets), key=SCALE_BYTES.__getitem__)
    weights, fixed = _body(model, body, by_name, scales)
    budget = int(scheme.budget * weights / 8) - fixed
    least = sum(min(bytes_of(*plan.shape, form, scales) for form in forms[name]) for name, plan in by_name.items())
    if scheme.budget_grows:
        budget = max(budget, least)
    _check_budget(budget, least, fixed, weights, scheme.budget)
    costs = measure(model, list(by_name.values()), setup, asked, progress)
    units = [_unit(cost, by_name, forms, scales) for cost in costs]
    chosen = choose(units, budget)
    _check_budget(budget, sum(choice.bytes for choice in chosen), fixed, weights, scheme.budget)
    rules = _rules(costs, chosen, by_name, scheme.budget)
    told = tuple(
        Measured(cost.weights, cost.kl, {choice.form: choice.loss for choice in unit.choices})
        for cost, unit in zip(costs, units, strict=True)
    )
    return replace(scheme, options=replace(scheme.options, weights={**rules, **scheme.options.weights}), measured=told)


def _check_budget(budget: int, least: int, fixed: int, weights: int, asked: float) -> None:
    """`TargetError` when the smallest forms take more bytes than there are for them."""
    if least > budget:
        smallest = math.ceil(800 * (least + fixed) / weights) / 100
        raise TargetError(f"a body of {asked:g} bits a weight cannot be had", f"the smallest is --budget {smallest:g}")


def _forms(plan: Plan, scheme: Scheme, targets: Sequence[Target]) -> tuple[Form, ...]:
    """What the weight may become: its own form first."""
    given = (*(target.role_overrides for target in targets), scheme.options.roles)
    if plan.name in scheme.options.weights or any(role in rules for rules in given for role in plan.roles):
        return (plan.form,)
    own = scheme.options.group
    found = [plan.form]
    for bits, several in GROUPS.items():
        for group in (0,) if not plan.form.group else several if own is None else (own,):
            for symmetric in (True, False) if group else (True,):
                form = replace(plan.form, bits=bits, group=group, symmetric=symmetric)
                if all(_possible(form, plan, target) for target in targets):
                    found.append(form)
    return tuple(dict.fromkeys(found))


def _possible(form: Form, plan: Plan, target: Target) -> bool:
    if not form.symmetric and (form.bits != 4 or target.weights.symmetric_only):
        return False
    if form.bits not in target.weights.bits or form.group not in target.weights.groups:
        return False
    return refusal(target.weights.operator, form, plan.roles) is None


def _unit(cost: Cost, planned: Mapping[str, Plan], forms: Mapping[str, Sequence[Form]], scales: str) -> Unit:
    shared = [form for form in forms[cost.weights[0]] if all(form in forms[name] for name in cost.weights)]
    if not cost.kl:  # it lies on its form's grid already, and nothing is known of others
        shared = []
    choices = []
    for form in shared or [planned[cost.weights[0]].form]:
        taken = sum(bytes_of(*planned[name].shape, form, scales) for name in cost.weights)
        choices.append(Choice(form, taken, cost.kl * cost.factors[form]))
    return Unit(cost.weights[0], tuple(choices))


def _body(model: ir.Model, body: Sequence[Plan], chosen: Mapping[str, Plan], scales: str) -> tuple[int, int]:
    """Weights of the body, as the record counts them, and the bytes of those that nothing is chosen for."""
    weights, fixed = 0, sum(bytes_of(*plan.shape, plan.form, scales) for plan in body if plan.name not in chosen)
    quantized = {plan.name for plan in body}
    for name, value in model.graph.initializers.items():
        tensor, role = value.const_value, value.metadata_props.get(ROLE, "")
        if tensor is None or role in ("", "rope", *TABLES):
            continue
        weights += int(tensor.size)
        if name not in quantized:
            fixed += 4 * int(tensor.size)
    return weights, fixed


def _rules(costs: Sequence[Cost], chosen: Sequence[Choice], planned: Mapping[str, Plan], budget: float) -> dict[str, WeightRule]:
    order = sorted(range(len(costs)), key=lambda index: -costs[index].kl)
    places = {index: place for place, index in enumerate(order, 1)}
    rules = {}
    for index, (cost, choice) in enumerate(zip(costs, chosen, strict=True)):
        plan = planned[cost.weights[0]]
        if choice.form == plan.form:
            continue
        together = "" if len(cost.weights) == 1 else f" with {len(cost.weights) - 1} more of its stream"
        form = choice.form
        reason = (
            f"measured: {_said(plan.form)} cost {cost.kl:.2g} nats of KL{together}, number {places[index]} of {len(costs)}; "
            f"expected of {_said(form)}: {choice.loss:.2g}; the budget is {budget:g} bits a weight of the body"
        )
        rule = WeightRule(reason, bits=form.bits, group=form.group, symmetric=form.symmetric if form.bits == 4 else None)
        rules.update(dict.fromkeys(cost.weights, rule))
    return rules


def _said(form: Form) -> str:
    where = f"in groups of {form.group}" if form.group else "with one scale a row"
    return f"{form.bits} bits {where}{'' if form.symmetric else ' and zero points'}"
