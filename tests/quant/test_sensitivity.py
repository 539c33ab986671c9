"""The measured cost of each weight, against the whole model run with that one weight changed."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.targets import load
from export import arch
from export.slices import opener
from quant import sensitivity
from quant.arrays import dequantize, fit, groups_of
from quant.calibrate import Setup
from quant.graph import lazy
from quant.layers import Running, cut
from quant.plan import Plan, plans
from quant.scheme import Form, Scheme
from quant.sensitivity import drawn, measure, rounding_loss, sampled_kl
from tests.golden import recipe

FORM = Form(8, 32, "block-dynamic")
FORMS = (FORM, Form(8, 64, "block-dynamic"), Form(4, 32, "block-dynamic"))
SCHEME = Scheme("measured", "for tests", FORM)


def fresh() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def ready(work: Path, seed: int, name: str = "llama", kind: str = "all") -> tuple[ir.Model, tuple[Plan, ...], Setup]:
    config: dict[str, Any] = arch.find(name).TINY[kind]
    opened = arch.open_model(recipe.Memory(config, recipe.tensors(config, 3)))
    ids = np.random.default_rng(seed).integers(0, opened.config.vocab_size, (5, 24))
    model = opened.build()
    return model, plans(model, SCHEME, load("cpu")), Setup(ids, opener(24, work / "parts"), work, "checkpoint")


def log_probabilities(model: ir.Model, setup: Setup, ids: np.ndarray, changed: dict[str, np.ndarray]) -> np.ndarray:
    x: np.ndarray = ids
    for part in cut(model):
        built = part.build(streams=False)
        for name in set(changed) & set(built.graph.initializers):
            values = changed[name]
            built.graph.initializers[name].const_value = lazy(name, ir.DataType.FLOAT, values.shape, lambda values=values: values)  # type: ignore[misc]
        x = Running(built, setup.opener).run(x).hidden
    wide = x.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True)) - wide.max(-1, keepdims=True)


def fitted(weight: np.ndarray) -> np.ndarray:
    q, scales = np.empty(weight.shape, np.int8), np.empty((len(weight), groups_of(weight.shape[1], 32)), np.float16)
    fit(weight, 8, 32, q, scales)
    return dequantize(q, scales, 32)


@pytest.mark.parametrize(("name", "kind"), [("llama", "all"), ("gemma3_text", "period")])
def test_each_cost_is_the_kl_of_the_whole_model_with_that_unit_alone_quantized(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = fresh()
    model, planned, setup = ready(tmp_path, seed, name, kind)
    monkeypatch.setattr(sensitivity, "HELD_OUT", 48)
    monkeypatch.setattr(sensitivity, "_SAMPLES", 500)
    costs = measure(model, planned, setup, FORMS)
    body = {plan.name: plan for plan in planned if plan.in_body}
    assert sorted(name for cost in costs for name in cost.weights) == sorted(body), "every weight of the body once"
    held = setup.ids[[0, len(setup.ids) // 2]]
    plain = log_probabilities(model, setup, held, {})
    for cost in costs:
        changed = {name: fitted(np.asarray(body[name].weight.const_value.numpy(), np.float32)) for name in cost.weights}  # type: ignore[union-attr]
        exact = (np.exp(plain) * (plain - log_probabilities(model, setup, held, changed))).sum(-1).mean()
        assert cost.kl == pytest.approx(exact, rel=0.3, abs=1e-9), f"seed {seed}: {cost.weights}"


def test_q_and_k_are_one_unit_and_finer_forms_cost_less(tmp_path: Path) -> None:
    model, planned, setup = ready(tmp_path, 1)
    costs = measure(model, planned, setup, FORMS)
    assert [len(cost.weights) for cost in costs] == [2, 1, 1, 1, 1, 1] * 2
    assert all(role in "".join(costs[0].weights) for role in ("q_proj", "k_proj"))
    for cost in costs:
        assert cost.factors[FORM] > 1, "activations are rounded too"
        assert cost.factors[FORMS[1]] > cost.factors[FORM] and cost.factors[FORMS[2]] > 20 * cost.factors[FORMS[1]]


def test_weights_are_solved_with_the_moments_of_what_enters_them(tmp_path: Path) -> None:
    model, _, setup = ready(tmp_path, 2)
    ids = np.random.default_rng(fresh()).integers(0, 64, (80, 24))
    setup = dataclasses.replace(setup, ids=ids)
    scheme = dataclasses.replace(SCHEME, default=Form(4, 32, "block-dynamic"))
    plain = measure(model, plans(model, scheme, load("cpu")), setup, FORMS[2:])
    solved = measure(model, plans(model, dataclasses.replace(scheme, solver="gptq"), load("cpu")), setup, FORMS[2:])
    assert sum(cost.kl for cost in solved) < 0.8 * sum(cost.kl for cost in plain)


def test_a_stopped_measurement_goes_on_and_a_second_one_is_only_read(tmp_path: Path) -> None:
    model, planned, setup = ready(tmp_path / "whole", 3)
    whole = measure(model, planned, setup, FORMS)
    model, planned, setup = ready(tmp_path / "stopped", 3)

    def stop(done: int, total: int, name: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, planned, setup, FORMS, stop)
    started: list[int] = []
    assert measure(model, planned, setup, FORMS, lambda done, total, name: started.append(done)) == whole
    assert started[0] == 1, "the first layer is not done again"
    assert not list((tmp_path / "stopped").glob("*.npy")), "hidden states are gone"

    def never(graph: ir.Model) -> Any:
        raise AssertionError("nothing runs the second time")

    assert measure(model, planned, dataclasses.replace(setup, opener=never), FORMS) == whole
    model, planned, other = ready(tmp_path / "stopped", 4)
    assert [cost.kl for cost in measure(model, planned, other, FORMS)] != [cost.kl for cost in whole], "another text"


@pytest.mark.parametrize("group", [16, 32, 0])
def test_rounding_of_activations_costs_what_it_does(group: int) -> None:
    """Against outputs of rounded inputs; an outlier makes larger blocks dearer."""
    seed = fresh()
    rng = np.random.default_rng(seed)
    weight, vectors = rng.standard_normal((20, 40)).astype(np.float32), rng.standard_normal((3000, 40)).astype(np.float32)
    vectors[:, 5] *= 30
    rounded = vectors.copy()
    for start in range(0, 40, group or 40):
        block = vectors[:, start : start + (group or 40)]
        step = np.abs(block).max(1, keepdims=True) / 127
        rounded[:, start : start + (group or 40)] = np.rint(block / step) * step
    wanted = float((((vectors - rounded) @ weight.T).astype(np.float64) ** 2).sum())
    found = rounding_loss(weight, vectors, Form(4, group, "block-dynamic"))
    assert found == pytest.approx(wanted, rel=0.05), f"seed {seed}"
    assert rounding_loss(weight, vectors, Form(4, 0, "block-dynamic")) >= found
    assert rounding_loss(weight, vectors, Form(4, group, "float")) == 0


def test_words_are_drawn_as_often_as_they_are_likely() -> None:
    seed = fresh()
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((3, 7)) * 2).astype(np.float32)
    words = drawn(logits, 40000, rng)
    likely = np.exp(logits.astype(np.float64))
    likely /= likely.sum(1, keepdims=True)
    for row in range(3):
        np.testing.assert_allclose(np.bincount(words[row], minlength=7) / 40000, likely[row], atol=0.015, err_msg=f"seed {seed}")


def test_sampled_kl_is_the_kl_of_a_small_change() -> None:
    seed = fresh()
    rng = np.random.default_rng(seed)
    head, entering = rng.standard_normal((50, 8)).astype(np.float32), rng.standard_normal((30, 8)).astype(np.float32)
    change = (rng.standard_normal((30, 8)) * 0.03).astype(np.float32)

    def logs(x: np.ndarray) -> np.ndarray:
        wide = (x @ head.T).astype(np.float64)
        return wide - np.log(np.exp(wide).sum(1, keepdims=True))

    before, after = logs(entering), logs(entering + change)
    exact = (np.exp(before) * (before - after)).sum(1).mean()
    words = drawn(entering @ head.T, 3000, rng)
    assert sampled_kl(head[words], change) == pytest.approx(exact, rel=0.1), f"seed {seed}"
