"""Losses of outputs against the whole float graph with every input of a product given out, and sums in float64."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import LINEAR, QUANT_EMBEDDING, QUANT_LINEAR
from appliance.targets import load
from export import arch
from export.checkpoint import open_checkpoint
from export.slices import opener
from quant import decide, emit, output_loss
from quant.graph import canonical, tensor_of
from quant.layers import Part
from quant.schemes import find
from quant.side_by_side import Models, Walk, walk
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(2, 64, 2, 1, 96, vocab=300, context=64)


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def entering(model: ir.Model, ids: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """What enters each Linear of a whole float model, by its weight's name: [S,K] float64."""
    names = {}
    for number, node in enumerate(canonical(model.graph, LINEAR)):
        names[f"in.{number}"] = str(node.inputs[1].name)  # type: ignore[union-attr]
        given = ir.Value(name=f"in.{number}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None, None, None]))
        model.graph.append(ir.node("Identity", [node.inputs[0]], outputs=[given], name=f"given/{number}"))
        model.graph.outputs.append(given)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "logits_to_keep": np.array([ids.shape[1]])}
    for value in model.graph.inputs:
        if str(value.name).startswith("past"):
            assert value.shape is not None
            feeds[str(value.name)] = np.zeros((1, int(value.shape[1]), 0, int(value.shape[3])), np.float32)  # type: ignore[arg-type]
    found = opener(64, folder, emit.emit, threads=1)(model)(feeds)
    return {weight: found[name][0].astype(np.float64) for name, weight in names.items()}


def power(rows: np.ndarray) -> float:
    return float((rows.astype(np.float64) ** 2).sum())


def values(model: ir.Model) -> dict[str, np.ndarray]:
    """What the integers of a decided model stand for, by weight; symmetric ones."""
    found = {}
    for node in canonical(model.graph, QUANT_LINEAR, QUANT_EMBEDDING):
        q, scales = (tensor_of(node.inputs[at], node).numpy().astype(np.float64) for at in (1, 2))
        group = node.attributes["group"].as_int() or q.shape[1]
        scales = scales.reshape(len(q), -1).repeat(group, axis=1)[:, : q.shape[1]]
        found[str(node.inputs[1].name).removesuffix(".q")] = q * scales  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(("scheme", "tied"), [("w4a8", True), ("w4a8", False), ("w8a8", True), ("w4a8-rtn", False)])
def test_every_matrix_has_the_loss_of_its_outputs_in_the_float_model(scheme: str, tied: bool, tmp_path: Path) -> None:
    seed, rng = fresh()
    model = replace(MODEL, seed=seed % 1000, tied=tied)
    opened = arch.open_model(open_checkpoint(write_safetensors(tmp_path / "source", model, "float32")))
    plain, decided = opened.build(), opened.build()
    decide.decide(decided, find(scheme), load("cpu"), tmp_path / "work")
    ids = rng.integers(0, 300, (1, 40))
    told: dict[str, float | None] = {}

    def compare(one: Part, two: Part, streams: dict[str, np.ndarray]) -> None:
        told.update(output_loss.losses(one, two, streams, ids))

    going = Walk([ids, ids[:, :9]], tmp_path / "hidden", probes=(0,), compare=compare)  # type: ignore[arg-type]
    walk(Models.of(plain, decided), going, opener(64, tmp_path / "parts", emit.emit, target=None), lambda done, total: None)

    weights = {str(value.name): np.asarray(tensor.numpy(), np.float64) for value in plain.graph.initializers.values()
               if (tensor := value.const_value) is not None and len(tensor.shape) == 2}  # fmt: skip
    quantized = values(decided)
    x = entering(opened.build(), ids, tmp_path / "whole")
    assert set(told) == set(quantized) and len(told) == 2 * 7 + (1 if tied else 2)
    for name, after in quantized.items():
        before = weights[name]
        outputs = [x[name][1:] @ one.T if name in x else one[ids[0]] for one in (before - after, before)]
        wanted = power(outputs[0]) / power(outputs[1])
        assert told[name] == pytest.approx(wanted, rel=1e-3), f"seed {seed}: {name}"
    assert max(value for value in told.values() if value is not None) > 1e-3 or scheme == "w8a8"


def test_rows_are_spread_over_the_window_and_the_first_is_left_out() -> None:
    for length in (1, 2, 100, output_loss.ROWS + 1, 1024):
        stream = np.arange(length, dtype=np.float64)[None, :, None] + np.zeros((2, 1, 3))
        found = output_loss.sampled(stream)[:, 0].tolist()
        assert len(found) == min(max(1, length - 1), output_loss.ROWS), length
        assert found[0] == min(1, length - 1) and found == sorted(set(found)), length
        steps = {round(b - a) for a, b in itertools.pairwise(found)}
        assert not steps or (max(steps) - min(steps) <= 1 and found[-1] >= length - 1 - max(steps)), length


def nodes(weight: np.ndarray, q: np.ndarray, scales: np.ndarray) -> tuple[ir.Node, ir.Node]:
    """A Linear and its QuantLinear in one group a row."""

    def value(array: np.ndarray, name: str) -> ir.Value:
        return ir.Value(name=name, const_value=ir.tensor(array, name=name))

    x = ir.Value(name="x")
    plain = ir.node("Linear", [x, value(weight, "w")], domain="appliance")
    attributes = {"bits": 8, "group": 0, "activation": "float"}
    return plain, ir.node("QuantLinear", [x, value(q, "w.q"), value(scales, "w.scales")], attributes, domain="appliance")


def test_what_is_exact_loses_nothing_and_what_is_no_number_has_no_loss() -> None:
    _, rng = fresh()
    q, scales = rng.integers(-127, 128, (5, 8)).astype(np.int8), rng.uniform(0.5, 2, (5, 1)).astype(np.float16)
    weight = (q * scales.astype(np.float32)).astype(np.float32)
    x = rng.standard_normal((9, 8)).astype(np.float32)
    ids = np.array([[0, 3, 3]])
    assert output_loss.of_product(x, *nodes(weight, q, scales)) == 0.0
    assert output_loss.of_rows(np.unique(ids), ids, *nodes(weight, q, scales)) == 0.0
    assert output_loss.of_product(x, *nodes(np.zeros_like(weight), 0 * q, scales)) == 0.0
    assert output_loss.of_product(x, *nodes(2 * weight, q, scales)) == pytest.approx(0.25)
    with np.errstate(all="ignore"):
        assert output_loss.of_product(x * np.float32(np.nan), *nodes(weight, q, scales)) is None
        assert output_loss.of_product(x, *nodes(np.zeros_like(weight), q, scales)) is None, "something out of nothing"
