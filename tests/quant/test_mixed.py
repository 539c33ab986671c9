"""Exceptions chosen by measurement: within the budget, where it hurts most, each with its reason."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.errors import TargetError
from appliance.targets import load
from export import arch
from export.slices import opener
from quant import mixed, schemes
from quant.budget import bytes_of
from quant.calibrate import Setup
from quant.decide import decide
from quant.plan import Plan, plans
from quant.scheme import Form, Options, Scheme, WeightRule
from quant.sensitivity import Cost
from tests.golden import recipe

SCHEME = dataclasses.replace(schemes.find("w4a8-mixed"), solver="fit")


def ready(work: Path) -> tuple[ir.Model, Setup]:
    config: dict[str, Any] = arch.find("llama").TINY["all"]
    opened = arch.open_model(recipe.Memory(config, recipe.tensors(config, 3)))
    ids = np.random.default_rng(7).integers(0, opened.config.vocab_size, (4, 24))
    return opened.build(), Setup(ids, opener(24, work / "parts"), work, "checkpoint")


def made_up(kl: dict[str, float]) -> Any:
    """In place of the measurement: costs by a piece of the name."""

    def measure(model: ir.Model, planned: list[Plan], setup: Setup, forms: tuple[Form, ...], progress: Any) -> tuple[Cost, ...]:
        factors = {form: 0.004 if form.bits == 8 else form.group / 32 * (1 if form.symmetric else 0.85) for form in forms}
        cost = {plan.name: next((value for piece, value in kl.items() if piece in plan.name), 1e-3) for plan in planned}
        return tuple(Cost((plan.name,), cost[plan.name], factors) for plan in planned)

    return measure


def sizes(model: ir.Model, scheme: Scheme, work: Path) -> float:
    """Bits a weight of the body of what really comes out."""
    decision = decide(model, scheme, load("cpu"), work, source="checkpoint")
    body = [matrix for matrix in decision.matrices if not set(matrix.roles) & {"embed", "head"}]
    taken = sum(matrix.parameters * matrix.form.bits / 8 + 2 * matrix.scales for matrix in body)
    taken += sum(matrix.rows * -(-matrix.columns // matrix.form.group // 2) for matrix in body if not matrix.form.symmetric)
    floats = [one for one in decision.kept if one.role not in ("", "rope")]
    weights = sum(matrix.parameters for matrix in body) + sum(one.parameters for one in floats)
    return 8 * (taken + 4 * sum(one.parameters for one in floats)) / weights


@pytest.mark.parametrize("above", [0.01, 0.7, 1.5, 3.0])
def test_the_body_keeps_within_its_budget_and_uses_it(above: float, tmp_path: Path) -> None:
    model, setup = ready(tmp_path)
    least = sizes(model, dataclasses.replace(SCHEME, budget=None, options=Options(group=128)), tmp_path / "least")
    model, setup = ready(tmp_path)
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=least + above), (load("cpu"),), setup)
    found = sizes(model, scheme, tmp_path)
    assert least + above - 0.6 < found <= least + above + 1e-6


def test_the_weights_that_cost_most_get_eight_bits_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    monkeypatch.setattr(mixed, "measure", made_up({"layers.1.mlp.down_proj": 9.0}))
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=8.0), (load("cpu"),), setup)
    name = "model.layers.1.mlp.down_proj.weight"
    assert scheme.form("mlp.down", weight=name).bits == 8
    reason = scheme.options.weights[name].reason
    assert reason.startswith("measured: 4 bits in groups of 32 cost 9 nats of KL, number 1 of 14") and "8 bits" in reason
    planned = {plan.name: plan for plan in plans(model, scheme, load("cpu"))}
    assert planned[name].reason == reason and planned[name].form.bits == 8


def test_every_unit_that_was_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    monkeypatch.setattr(mixed, "measure", made_up({"layers.1.mlp.down_proj": 9.0}))
    asked = dataclasses.replace(SCHEME, budget=8.0)
    scheme = mixed.with_exceptions(model, asked, (load("cpu"),), setup)
    for one in dataclasses.fields(Scheme):
        assert one.name in ("options", "measured") or getattr(scheme, one.name) == getattr(asked, one.name)
    told = {unit.weights[0]: unit for unit in scheme.measured}
    body = [plan for plan in plans(model, scheme, load("cpu")) if plan.in_body and plan.form.bits]
    assert set(told) == {plan.name for plan in body}, "those that stayed as they were too"
    assert told["model.layers.1.mlp.down_proj.weight"].kl == 9.0
    for plan in body:
        assert plan.form in told[plan.name].expected, "what was chosen was to be had"
    assert "measured=" not in repr(scheme), "results on disk are found by it"


def test_what_a_person_has_fixed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    monkeypatch.setattr(mixed, "measure", made_up({"down_proj": 9.0, "o_proj": 9.0}))
    own = {"model.layers.0.mlp.down_proj.weight": WeightRule("because I say so", bits=4, group=64)}
    options = Options(weights=own, roles={"attn.o": {"bits": 4}})
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=7.5, options=options), (load("cpu"),), setup)
    assert scheme.options.weights["model.layers.0.mlp.down_proj.weight"] == own["model.layers.0.mlp.down_proj.weight"]
    assert all("o_proj" not in name for name in scheme.options.weights)
    assert scheme.form("mlp.down", weight="model.layers.1.mlp.down_proj.weight").bits == 8


def test_a_budget_below_the_smallest_forms_is_refused_with_the_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    measured = mixed.measure
    monkeypatch.setattr(mixed, "measure", None)  # it is said before anything is measured
    with pytest.raises(TargetError, match=r"cannot be had; the smallest is --budget \d") as caught:
        mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=3.0), (load("cpu"),), setup)
    smallest = float(str(caught.value).split("--budget ")[1])
    monkeypatch.setattr(mixed, "measure", measured)
    mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=smallest), (load("cpu"),), setup)
    narrow = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=3.0, budget_grows=True), (load("cpu"),), setup)
    body = [plan.form for plan in plans(model, narrow, load("cpu")) if plan.in_body and plan.form.bits]
    assert all(form.bits == 4 and form.group >= 64 and form.symmetric for form in body), "the smallest there are"


def test_zero_points_are_chosen_where_the_target_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    monkeypatch.setattr(mixed, "measure", made_up({}))
    cpu = load("cpu")
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=5.2), (cpu,), setup)
    forms = {plan.name: plan.form for plan in plans(model, scheme, cpu) if plan.in_body}
    assert any(not form.symmetric for form in forms.values()) and all(form.symmetric for form in forms.values() if form.bits == 8)
    assert any("zero points" in rule.reason for rule in scheme.options.weights.values())
    plain = cpu.model_copy(update={"weights": cpu.weights.model_copy(update={"symmetric_only": True})})
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=5.2), (cpu, plain), setup)
    assert all(plan.form.symmetric for plan in plans(model, scheme, plain))


def test_a_scheme_without_a_budget_is_left_alone(tmp_path: Path) -> None:
    model, setup = ready(tmp_path)
    scheme = schemes.find("w4a8")
    assert mixed.with_exceptions(model, scheme, (load("cpu"),), setup) is scheme


def test_q_and_k_take_one_form(tmp_path: Path) -> None:
    model, setup = ready(tmp_path)
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=8.0), (load("cpu"),), setup)
    planned = {plan.name: plan.form for plan in plans(model, scheme, load("cpu")) if plan.in_body}
    for layer in range(2):
        assert len({planned[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qk"}) == 1


def test_a_weight_that_lies_on_its_grid_keeps_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be told from a cost of nothing: the cheapest form would be as good as any."""
    model, setup = ready(tmp_path)

    def nothing_lost(model: Any, plans: Any, setup: Any, forms: Any, progress: Any = None) -> Any:
        return tuple(Cost((plan.name,), 0.0, dict.fromkeys(forms, 0.0)) for plan in plans)

    monkeypatch.setattr(mixed, "measure", nothing_lost)
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=8.0), (load("cpu"),), setup)
    assert not scheme.options.weights


def test_scales_count_as_the_target_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    monkeypatch.setattr(mixed, "measure", made_up({}))
    target = load("cpu-static")
    assert target.weights.scale_dtype == "float32"
    budget = 6.5
    scheme = mixed.with_exceptions(model, dataclasses.replace(SCHEME, budget=budget), (load("cpu"), target), setup)
    body = [plan for plan in plans(model, scheme, target) if plan.in_body and plan.form.bits]
    taken = sum(bytes_of(*plan.shape, plan.form, "float32") for plan in body)
    assert budget - 1 < 8 * taken / sum(plan.parameters for plan in body) <= budget


def test_a_group_that_was_asked_for_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = ready(tmp_path)
    monkeypatch.setattr(mixed, "measure", made_up({}))
    scheme = mixed.with_exceptions(
        model, dataclasses.replace(SCHEME, budget=6.0, options=Options(group=64)), (load("cpu"),), setup
    )
    assert {plan.form.group for plan in plans(model, scheme, load("cpu")) if plan.in_body} == {64}
