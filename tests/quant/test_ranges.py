"""Ranges of streams: what is counted, what is chosen, which streams get 16 bits; and a static model end to end."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance import targets
from appliance.bundle.vocabulary import QUANT_LINEAR
from appliance.targets.capabilities import Target
from export import arch
from export.slices import opener, reference_for
from quant.decide import decide
from quant.emit import emit
from quant.graph import canonical
from quant.histogram import Histogram
from quant.ranges import Setup, Side, Stream, choose_widths, collect
from quant.reshape import Reshaping
from quant.scheme import Form, Scheme
from quant.static import Range, attach
from tests.golden import recipe
from tests.quant.planting import plant

TABLE = Form(8, 0, "static-u16")
U8 = Scheme("u8", "", Form(8, 0, "static-u8"), {"embed": TABLE, "head": TABLE})


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def error(values: np.ndarray, taken: Range, weights: np.ndarray | float = 1.0) -> float:
    return float((weights * (taken.apply(values) - values).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("bits", [8, 16])
def test_the_best_range_loses_as_little_as_any_that_is_tried_on_the_numbers_themselves(bits: int) -> None:
    seed, rng = fresh()
    for heavy in (2.0, 5.0, 100.0):
        values = rng.standard_t(heavy, (400, 50)).astype(np.float32) + np.float32(rng.normal())
        histogram = Histogram()
        for part in np.split(values, 4):
            histogram.add(part)
        best = error(values, histogram.best(bits))
        tried = [
            Range.over(values.min() * a, values.max() * b, bits)
            for a in np.linspace(0.02, 1, 25)
            for b in np.linspace(0.02, 1, 25)
        ]
        assert best <= 1.1 * min(error(values, one) for one in tried), f"seed {seed}, {heavy}"
        # What a cut costs is told from bins: of 900 draws the worst was 1.043.
        assert best <= 1.08 * error(values, histogram.extremes(bits)), f"seed {seed}, {heavy}"
        assert histogram.loss(histogram.best(bits)) == pytest.approx(
            best / float((values.astype(np.float64) ** 2).sum()), rel=0.5
        )


def test_extremes_are_exact_and_counted_once_are_kept_where_cutting_them_costs_more() -> None:
    seed, rng = fresh()
    values = rng.standard_normal((1000, 64)).astype(np.float32)
    values[7, 3] = 5000.0  # the first token's row of a real model is like this
    histogram = Histogram()
    histogram.add(values)
    assert (histogram.low, histogram.high) == (values.min(), 5000.0)
    assert histogram.best(16).high > 4000, f"seed {seed}"
    assert histogram.percentile(1e-3, 8).high < 5, f"seed {seed}"
    assert histogram.extremes(8).high == pytest.approx(5000, rel=1e-2)


def test_columns_that_count_more_decide_the_range() -> None:
    seed, rng = fresh()
    values = rng.standard_normal((2000, 2)).astype(np.float32) * np.array([1, 40], np.float32)
    weights = np.array([1e6, 1.0])
    light, plain = Histogram(), Histogram()
    light.add(values, weights)
    plain.add(values)
    assert error(values, light.best(8), weights) < 0.7 * error(values, plain.best(8), weights), f"seed {seed}"


def stream(name: str, cost: float, products: int, width: int = 8) -> Stream:
    side = Side(Range.over(-1, 1, 8), Range.over(-1, 1, 16))
    return Stream(name, width, side, {f"/{name}": side}, products, cost)


def test_sixteen_bits_go_where_eight_cost_most_a_product_and_stay_in_budget() -> None:
    streams = (stream("a", 4e-4, 100), stream("b", 9e-4, 300), stream("c", 1e-6, 100), stream("head", 0, 900, 16))
    widths = {name: found.input.bits for name, found in choose_widths(streams, 0.2).items()}
    assert widths == {"/a": 16, "/b": 8, "/c": 8, "/head": 16}
    found = choose_widths(streams, 0.8)
    assert {name for name, one in found.items() if one.reason} == {"/a", "/b"}
    assert "2.0%" in found["/a"].reason and "31%" in found["/a"].reason
    assert all(one.input.bits == one.output.bits for one in found.values())
    assert {one.input.bits for name, one in choose_widths(streams, 0).items() if name != "/head"} == {8}


def tiny(config: str, seed: int) -> arch.Opened:
    found = arch.find("llama").TINY[config]
    return arch.open_model(recipe.Memory(found, recipe.tensors(found, seed)))


def static() -> Target:
    return reference_for(targets.load("cpu-static"))


def calibrated(opened: Any, scheme: Scheme, folder: Path, ids: np.ndarray, choose: Any = Histogram.best) -> Any:
    """Streams of the decided model."""
    model = opened.build()
    decide(model, scheme, targets.load("cpu-static"), folder / "work", source="x")
    opens = opener(64, folder / "parts", emit, target=static(), threads=1)
    return collect(model, Setup(ids, opens, folder / "work", "", choose))


@pytest.mark.parametrize("damage", ["", "note", "hidden"])
def test_a_stopped_run_goes_on_with_its_part(damage: str, tmp_path: Path) -> None:
    seed, rng = fresh()
    opened, ids = tiny("all", seed % 1000), rng.integers(0, 320, (4, 32))
    wanted = calibrated(opened, U8, tmp_path / "whole", ids)
    model = opened.build()
    folder = tmp_path / "stopped"
    decide(model, U8, targets.load("cpu-static"), folder, source="x")
    setup = Setup(ids, opener(64, folder / "parts", emit, target=static(), threads=1), folder, "key")

    def stop(done: int, total: int, name: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(model, setup, stop)
    note = next(folder.glob("ranges.*.note.json"))
    if damage == "note":
        note.write_text(note.read_text().replace('"narrow"', '"narrower"', 1))
    elif damage == "hidden":
        next(folder.glob("ranges.*.npy")).write_bytes(b"short")
    told: list[int] = []
    assert collect(model, setup, lambda done, total, name: told.append(done)) == wanted
    assert told[0] == (0 if damage else 2), "begun anew only when something is missing"
    assert not list(folder.glob("ranges.*"))
    other = dataclasses.replace(setup, key="other")
    with pytest.raises(KeyboardInterrupt):
        collect(model, setup, stop)
    told.clear()
    collect(model, other, lambda done, total, name: told.append(done))
    assert told[0] == 0, "another key goes on with nothing"


def run(opened: Any, scheme: Scheme, folder: Path, ids: np.ndarray, change: Callable[[ir.Model], None]) -> dict[str, np.ndarray]:
    """All outputs of the whole decided model, with what enters and leaves every QuantLinear given out after `change`."""
    model = opened.build()
    decide(model, scheme, targets.load("cpu-static"), folder / "work", source="x")
    change(model)
    for node in canonical(model.graph, QUANT_LINEAR):
        for side, value in (("in", node.inputs[0]), ("out", node.outputs[0])):
            given = ir.Value(
                name=f"{side}:{node.name}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None, None, None])
            )
            model.graph.append(ir.node("Identity", [value], outputs=[given], name=f"given/{side}{node.name}"))
            model.graph.outputs.append(given)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "logits_to_keep": np.array([ids.shape[1]])}
    for value in model.graph.inputs:
        if value.name.startswith("past"):
            _, heads, _, size = value.shape
            feeds[value.name] = np.zeros((len(ids), heads, 0, size), np.float32)
    return opener(64, folder / "whole", emit, target=static(), threads=1)(model)(feeds)


def as_float(model: ir.Model) -> None:
    for node in canonical(model.graph, QUANT_LINEAR):
        node.attributes["activation"] = ir.AttrString("activation", "float")


@pytest.mark.parametrize("config", ["tied", "all"])
def test_ranges_are_those_of_the_whole_model_run_with_float_activations(config: str, tmp_path: Path) -> None:
    seed, rng = fresh()
    opened = tiny(config, seed % 1000)
    ids = rng.integers(0, 320, (4, 32))
    streams = calibrated(opened, U8, tmp_path, ids, Histogram.extremes)
    whole = run(opened, U8, tmp_path, ids, as_float)
    ranges = choose_widths(streams, 0)
    assert len(ranges) == 2 * 7 + 1 and len(streams) == 2 * 4 + 1
    for name, found in ranges.items():
        for side, taken in (("in", found.input), ("out", found.output)):
            values = whole[f"{side}:{name}"]
            assert taken == Range.over(float(values.min()), float(values.max()), taken.bits) or (
                abs(taken.low - min(values.min(), 0)) <= taken.scale and abs(taken.high - max(values.max(), 0)) <= taken.scale
            ), f"seed {seed}: {side} {name}"


def test_a_static_model_is_near_the_float_one_and_nearer_with_more_bits(tmp_path: Path) -> None:
    seed, rng = fresh()
    opened = tiny("untied", seed % 1000)
    ids = rng.integers(0, 320, (4, 32))
    streams = calibrated(opened, U8, tmp_path, ids)
    assert all(one.cost > 0 for one in streams if one.width == 8)
    exact = run(opened, U8, tmp_path, ids, as_float)["logits"]
    off = {}
    for budget in (0.0, 0.4, 1.0):
        found = run(opened, U8, tmp_path, ids, lambda model, budget=budget: attach(model, choose_widths(streams, budget)))[
            "logits"
        ]
        off[budget] = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert 0.2 > off[0.0] > off[0.4] > 5 * off[1.0], f"seed {seed}: {off}"


def test_an_outlier_makes_its_stream_the_costly_one(tmp_path: Path) -> None:
    seed, rng = fresh()
    opened = tiny("untied", seed % 1000)
    weights = dict(opened.checkpoint.weights)  # type: ignore[attr-defined]
    up = weights["model.layers.1.mlp.up_proj.weight"].copy()
    up[3] *= 300
    weights["model.layers.1.mlp.up_proj.weight"] = up
    changed = arch.open_model(replace(opened.checkpoint, weights=weights))  # type: ignore[type-var]
    streams = calibrated(changed, U8, tmp_path, rng.integers(0, 320, (4, 32)))
    layer = {one.name: one.cost for one in streams if one.name.startswith("layers.1.")}
    assert max(layer, key=lambda name: layer[name]) in ("layers.1.mlp_mid", "layers.1.mlp_in"), f"seed {seed}: {layer}"
    assert not list((tmp_path / "work").glob("ranges.*")), "hidden states are gone when all is done"


def test_planted_outliers_cost_a_static_model_nothing(tmp_path: Path) -> None:
    seed, rng = fresh()
    opened = tiny("untied", seed % 1000)
    ids = rng.integers(0, 320, (4, 32))
    exact = run(opened, Scheme("float", "", Form(0, 0, "float")), tmp_path / "float", ids, lambda model: None)["logits"]
    off = {}
    for name, changes in (("clean", [reshape]), ("planted", [planted(seed), reshape]), ("bare", [planted(seed)])):
        changed = Changed(opened, changes)
        ranges = choose_widths(calibrated(changed, U8, tmp_path / name, ids), 0.25)
        found = run(changed, U8, tmp_path / name, ids, lambda model, ranges=ranges: attach(model, ranges))["logits"]
        off[name] = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert off["planted"] < 1.2 * off["clean"] + 1e-3 and off["bare"] > 3 * off["clean"], f"seed {seed}: {off}"


class Changed:
    """An opened model whose graphs are changed."""

    def __init__(self, opened: arch.Opened, changes: list[Callable[[ir.Model], Any]]):
        self._opened, self._changes = opened, changes

    def build(self) -> ir.Model:
        model = self._opened.build()
        for change in self._changes:
            change(model)
        return model


def reshape(model: ir.Model) -> None:
    Reshaping().apply(model)


def planted(seed: int) -> Callable[[ir.Model], None]:
    return lambda model: plant(model, np.random.default_rng(seed))
