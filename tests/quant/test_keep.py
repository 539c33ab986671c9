"""Weights that lie on a grid already are carried over to the last bit, or it is said why not."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import STORED_GRID, STORED_TYPE
from appliance.targets.capabilities import Target
from quant import keep
from quant.decide import Decision, decide
from quant.emit import emit
from quant.emulate import difference, in_numpy, run_alone
from quant.scheme import Form, Options, WeightRule
from quant.schemes import find
from tests.quant.canonical import Weight, inputs, linear_model, session, target, tied_model

GROUP = 32


@dataclass(frozen=True)
class Grid:
    q: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None

    def values(self, bits: int) -> np.ndarray:
        """Float32 [N,K] by loops over groups, an offset being what the lowest integer stands for."""
        found = np.empty(self.q.shape, np.float32)
        for group in range(self.scales.shape[1]):
            at = slice(group * GROUP, (group + 1) * GROUP)
            scale = self.scales[:, group : group + 1].astype(np.float32)
            if self.offsets is None:
                found[:, at] = self.q[:, at].astype(np.float32) * scale
            else:
                steps = (self.q[:, at].astype(np.int32) + 2 ** (bits - 1)).astype(np.float32)
                found[:, at] = steps * scale + self.offsets[:, group : group + 1].astype(np.float32)
        return found


@dataclass(frozen=True)
class Stored:
    kind: str
    bits: int
    group: int
    has_offsets: bool
    grid: Grid

    def read(self) -> Grid:
        return self.grid


def drawn(rng: np.random.Generator, kind: str, rows: int, columns: int, whole: bool = False) -> Stored:
    bits = 8 if kind == "Q8_0" else 4
    q = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns)).astype(np.int8)
    scales = (rng.uniform(0.001, 0.1, (rows, columns // GROUP)) * rng.choice([-1, 1], (rows, columns // GROUP))).astype(
        np.float16
    )
    offsets = None
    if kind == "Q4_1":
        offsets = -rng.uniform(4, 12, scales.shape) * scales
        if whole:
            scales = scales.view(np.uint16)
            scales = (scales & 0xFFC0).view(np.float16)  # few enough bits that a whole multiple is a float16
            offsets = -rng.integers(0, 16, scales.shape) * scales
        offsets = offsets.astype(np.float16)
    return Stored(kind, bits, GROUP, offsets is not None, Grid(q, scales, offsets))


def riding(model: ir.Model, grids: dict[str, Stored]) -> ir.Model:
    """The model with grids on its tensors, as a checkpoint's reader puts them there."""
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        if name in grids:
            value.const_value.meta[STORED_GRID] = grids[name]
            value.const_value.meta[STORED_TYPE] = grids[name].kind
        else:
            value.const_value.meta[STORED_TYPE] = "Q6_K"
    return model


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def kept(model: ir.Model, work: Path, to: Target, options: Options | None = None) -> tuple[keep.Keeping, Decision]:
    keeping = keep.keep(model, find("w4a8", options), [to], work, "checkpoint")
    decision = decide(model, keeping.scheme, to, work, source="checkpoint")
    emit(model, to)
    return keeping, decision


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "whole"), [("Q4_0", False), ("Q8_0", False), ("Q4_1", False), ("Q4_1", True)])
def test_a_linear_computes_what_the_stored_weights_do(form: str, bias: bool, kind: str, whole: bool, tmp_path: Path) -> None:
    """With one activation a block that int8 holds exactly, nothing but the order of sums differs from the float product."""
    seed, rng = fresh()
    stored = drawn(rng, kind, 24, 160, whole)
    values = stored.grid.values(stored.bits)
    extra = rng.standard_normal(24).astype(np.float32) if bias else None
    model = riding(linear_model(Weight("proj.weight", "attn.q", values), extra), {"proj.weight": stored})
    keeping, decision = kept(model, tmp_path / "work", target(form))
    assert [(one.kind, one.why_not) for one in keeping.matrices] == [(kind, "")]
    matrix = decision.matrices[0]
    wanted = Form(stored.bits, GROUP, "block-dynamic", symmetric=not whole, offsets=kind == "Q4_1" and not whole)
    assert (matrix.form, matrix.solver, matrix.error.noise, matrix.error.snr_db) == (wanted, "stored", 0, None)
    assert matrix.error.signal == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-6)
    run = session(model, tmp_path)
    for rows in (1, 9):
        x = np.rint(rng.uniform(-127, 127, (rows, 160))).astype(np.float32)
        x[:, ::GROUP] = 127
        y = run.run(None, {"x": x[None]})[0][0]
        exact = x.astype(np.float64) @ values.T.astype(np.float64) + (0 if extra is None else extra)
        assert np.abs(y - exact).max() <= 2e-6 * np.abs(x).max() * np.abs(values).sum(1).max(), f"seed {seed}"


def test_offsets_do_not_suffer_from_int8_activations(tmp_path: Path) -> None:
    """The offsets' share is computed in float: a weight of offsets alone loses nothing on any input."""
    seed, rng = fresh()
    stored = drawn(rng, "Q4_1", 24, 96)
    stored = Stored("Q4_1", 4, GROUP, True, Grid(np.zeros_like(stored.grid.q), stored.grid.scales, stored.grid.offsets))
    values = stored.grid.values(4)
    model = riding(linear_model(Weight("proj.weight", "attn.q", values)), {"proj.weight": stored})
    kept(model, tmp_path / "work", target("cpu"))
    x = rng.standard_normal((7, 96)).astype(np.float32)
    y = session(model, tmp_path).run(None, {"x": x[None]})[0][0]
    assert np.allclose(y, x @ values.T, rtol=1e-5, atol=1e-5 * np.abs(values).max()), f"seed {seed}"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_tied_table_gives_the_stored_rows(kind: str, tmp_path: Path) -> None:
    seed, rng = fresh()
    stored = drawn(rng, kind, 50, 96)
    values = stored.grid.values(stored.bits)
    model = riding(tied_model(values), {"embed.weight": stored})
    keeping, _ = kept(model, tmp_path / "work", target("cpu"))
    assert {one.name: bool(one.why_not) for one in keeping.matrices} == {
        "embed.weight": False, "gate.weight": True, "up.weight": True,
    }  # fmt: skip
    rows = session(model, tmp_path).run(["rows"], {"ids": np.arange(50)[None]})[0][0]
    if kind == "Q4_1":  # added in another order than the file's own tools do
        assert np.abs(rows - values).max() <= 2e-7 * np.abs(values).max(), f"seed {seed}"
    else:
        assert np.array_equal(rows, values), f"seed {seed}"
    packed = [value for value in model.graph.initializers.values() if value.dtype == ir.DataType.UINT8]
    assert len(packed) == 3, "the table is there once"


def test_what_cannot_be_held_is_quantized_again_and_says_why(tmp_path: Path) -> None:
    _, rng = fresh()
    grids = {"embed.weight": drawn(rng, "Q4_0", 50, 96), "gate.weight": drawn(rng, "Q4_1", 96, 96)}
    model = riding(tied_model(grids["embed.weight"].grid.values(4)), grids)
    narrow = target("cpu", groups=(64,))
    keeping, decision = kept(model, tmp_path / "a", narrow)
    assert [(one.name, one.kind, one.why_not) for one in keeping.matrices] == [
        ("embed.weight", "Q4_0", "groups of 32: target cpu takes 64"),
        ("gate.weight", "Q4_1", "groups of 32: target cpu takes 64"),
        ("up.weight", "Q6_K", "Q6_K is no grid of whole 4- or 8-bit numbers with one scale a group"),
    ]
    assert {matrix.solver for matrix in decision.matrices} == {"fit"}
    model = riding(tied_model(grids["embed.weight"].grid.values(4)), grids)
    keeping, _ = kept(model, tmp_path / "b", target("cpu-static"))
    assert "an embedding takes 8 bits" in keeping.requantized[0].why_not
    assert keeping.record()["carried"] == {"Q4_1": {"matrices": 1, "parameters": 96 * 96}}
    assert [one["name"] for one in keeping.record()["requantized"]] == ["embed.weight", "up.weight"]


def test_a_weight_that_the_scheme_leaves_float_stays_float(tmp_path: Path) -> None:
    _, rng = fresh()
    stored = drawn(rng, "Q8_0", 24, 64)
    model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(8))), {"proj.weight": stored})
    keeping, decision = kept(model, tmp_path, target("cpu"), Options(roles={"attn.q": {"bits": 0}}))
    assert (keeping.matrices, decision.matrices) == ((), ())


def test_a_weight_that_another_form_was_asked_for_gets_that_one(tmp_path: Path) -> None:
    _, rng = fresh()
    stored = drawn(rng, "Q8_0", 24, 64)
    model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(8))), {"proj.weight": stored})
    rule = WeightRule("asked for: --exception *=4/64", 4, 64)
    keeping, decision = kept(model, tmp_path, target("cpu"), Options(weights={"proj.weight": rule}))
    assert [(one.kind, one.why_not) for one in keeping.matrices] == [("Q8_0", rule.reason)]
    assert [(one.form.bits, one.form.group, one.solver) for one in decision.matrices] == [(4, 64, "fit")]


def test_numbers_that_a_pass_has_changed_are_no_grid_any_more(tmp_path: Path) -> None:
    _, rng = fresh()
    stored = drawn(rng, "Q8_0", 24, 64)
    model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(8))), {"proj.weight": stored})
    value = model.graph.initializers["proj.weight"]
    value.const_value = ir.tensor(stored.grid.values(8) * 2, name="proj.weight")
    keeping, _ = kept(model, tmp_path, target("cpu"))
    assert [one.why_not for one in keeping.matrices] == ["its numbers were changed before it came to be quantized"]


def test_all_targets_of_a_build_get_the_same_numbers(tmp_path: Path) -> None:
    _, rng = fresh()
    grids = {"embed.weight": drawn(rng, "Q4_0", 50, 96), "gate.weight": drawn(rng, "Q4_1", 96, 96, whole=True)}
    model = riding(tied_model(grids["embed.weight"].grid.values(4)), grids)
    both = [target("cpu"), target("cpu-static", symmetric_only=True)]
    keeping = keep.keep(model, find("w4a8", Options(roles={"embed": {"bits": 8}, "head": {"bits": 8}})), both, tmp_path, "x")
    assert [(one.name, bool(one.why_not)) for one in keeping.matrices] == [
        ("embed.weight", True), ("gate.weight", False), ("up.weight", True),
    ]  # fmt: skip
    assert keeping.scheme.options.weights["gate.weight"].stored == Form(4, GROUP, "block-dynamic", offsets=True)


@pytest.mark.parametrize(
    ("offset", "found"),
    [(-0.5 * 3, 3), (0.0, 0), (-0.5 * 15, 15), (-0.5 * 16, None), (0.5, None), (-0.7001953125, None)],
)
def test_whole_zero_points(offset: float, found: int | None) -> None:
    half = np.array([[0.5, 0.5]], np.float16)
    grid = Grid(np.zeros((1, 64), np.int8), half, np.array([[offset, -1.0]], np.float16))
    zeros = keep.whole_zero_points(grid, 4)
    assert zeros is None if found is None else zeros is not None and zeros.tolist() == [[found, 2]]


def test_a_second_build_takes_what_the_first_carried(tmp_path: Path) -> None:
    _, rng = fresh()
    stored = drawn(rng, "Q4_1", 24, 64)
    files = []
    for _ in range(2):
        model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(4))), {"proj.weight": stored})
        kept(model, tmp_path, target("cpu"))
        files.append({path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()})
    assert files[0] == files[1] and len(files[0]) == 4


def test_a_real_input_loses_only_what_int8_activations_lose(tmp_path: Path) -> None:
    seed, rng = fresh()
    stored = drawn(rng, "Q4_1", 24, 320)
    values = stored.grid.values(4)
    model = riding(linear_model(Weight("proj.weight", "attn.q", values)), {"proj.weight": stored})
    kept(model, tmp_path / "work", target("cpu"))
    x = inputs(rng, 33, 320, GROUP)
    y = session(model, tmp_path).run(None, {"x": x[None]})[0][0]
    blocks = x.reshape(33, -1, GROUP).astype(np.float64)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    steps = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)) * scale
    middles = stored.grid.offsets.astype(np.float64) + 8 * stored.grid.scales.astype(np.float64)  # type: ignore[union-attr]
    wanted = steps.reshape(33, -1) @ (values - np.repeat(middles, GROUP, axis=1)).T + blocks.sum(-1) @ middles.T
    assert np.abs(y - wanted).max() <= 1e-5 * np.abs(wanted).max(), f"seed {seed}"


def test_a_table_with_whole_zero_points_is_picked_right_too(tmp_path: Path) -> None:
    """The operator that picks rows is not given zero points, so even whole ones are carried as offsets there."""
    seed, rng = fresh()
    stored = drawn(rng, "Q4_1", 50, 96, whole=True)
    values = stored.grid.values(4)
    _, decision = kept(riding(model := tied_model(values), {"embed.weight": stored}), tmp_path / "work", target("cpu"))
    assert decision.matrices[0].form.offsets
    rows = session(model, tmp_path).run(["rows"], {"ids": np.arange(50)[None]})[0][0]
    assert np.abs(rows - values).max() <= 2e-7 * np.abs(values).max(), f"seed {seed}"


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
def test_the_operators_are_held_against_numpy_with_their_offsets(form: str, tmp_path: Path) -> None:
    seed, rng = fresh()
    stored = drawn(rng, "Q4_1", 24, 96)
    model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(4))), {"proj.weight": stored})
    keeping = keep.keep(model, find("w4a8"), [target(form)], tmp_path, "checkpoint")
    decide(model, keeping.scheme, target(form), tmp_path, source="checkpoint")
    x = rng.standard_normal((1, 5, 96)).astype(np.float32)
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    assert difference(node, x, target(form), 1) < 1e-5, f"seed {seed}"
    spoiled = stored.grid.offsets * np.float16(1.05)  # type: ignore[operator]
    node.inputs[5].const_value = ir.tensor(spoiled, name="proj.weight.offsets")  # type: ignore[union-attr]
    wanted, other = (in_numpy(node, x), run_alone(node, x, target(form), 1))
    assert np.abs(wanted - other).max() < 1e-5 * np.abs(wanted).max(), "both read the same offsets"
    assert np.abs(wanted - x @ stored.grid.values(4).T).max() > 1e-2 * np.abs(wanted).max()
