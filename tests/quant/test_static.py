"""Static ranges and one scale a row: the emitted graph against numpy, as a target's own options run it."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import QUANT_LINEAR
from appliance.errors import TargetError
from appliance.targets.capabilities import Target
from quant import solvers
from quant.arrays import dequantize, fit
from quant.decide import decide
from quant.emit import emit
from quant.graph import canonical
from quant.moments import Moments
from quant.proxy import proxy_loss
from quant.scheme import Form, Options, Scheme
from quant.static import Range, Ranges, attach, range_of
from tests.quant.canonical import Weight, inputs, linear_model, session, target, tied_model


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def static() -> Target:
    found = target("cpu-static", groups=(0, 32))
    flags = found.flags.model_copy(update={"activations": ("token-dynamic", "static-u8", "static-u16", "float")})
    return found.model_copy(update={"flags": flags})


def scheme(activation: str, bits: int = 4, group: int = 0) -> Scheme:
    table = Form(8, group, activation)
    return Scheme("under-test", "", Form(bits, group, activation), {"embed": table, "head": table})


def emulated(x: np.ndarray, taken: Range) -> np.ndarray:
    """Q/DQ in float64 with plain words: the nearest step, half to even, saturated."""
    steps = np.array([round(float(one)) for one in (x / np.float32(taken.scale)).reshape(-1)]).reshape(x.shape)
    return (np.clip(steps + taken.zero_point, 0, 2**taken.bits - 1) - taken.zero_point) * taken.scale


def ranges(rng: np.random.Generator, x: np.ndarray, y: np.ndarray, bits: int) -> Ranges:
    """Ranges that saturate a few values on either side."""
    cut = rng.uniform(0.7, 1, 4)
    return Ranges(
        Range.over(float(x.min() * cut[0]), float(x.max() * cut[1]), bits),
        Range.over(float(y.min() * cut[2]), float(y.max() * cut[3]), bits),
    )


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (8, 0), (4, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_static_activations_are_what_numpy_says(width: int, bits: int, group: int, bias: bool, tmp_path: Path) -> None:
    seed, rng = fresh()
    columns = int(rng.integers(40, 200))
    weight = rng.standard_normal((24, columns)).astype(np.float32)
    extra = rng.standard_normal(24).astype(np.float32) if bias else None
    model = linear_model(Weight("proj.weight", "attn.q", weight), extra)
    decide(model, scheme(f"static-u{width}", bits, group), static(), tmp_path / "work")
    node = canonical(model.graph, QUANT_LINEAR)[0]
    q, scales = (node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr]
    x = (rng.standard_normal((1, 9, columns)) * 3 + 1).astype(np.float32)
    plain = x @ weight.T + (0 if extra is None else extra)
    chosen = ranges(rng, x, plain, width)
    attach(model, {str(node.name): chosen})
    emit(model, static())
    y = session(model, tmp_path, options_of=static()).run(None, {"x": x})[0]
    wide = np.repeat(scales.astype(np.float64), group or columns, axis=1)[:, :columns]
    inside = emulated(x, chosen.input) @ (q * wide).T + (0 if extra is None else extra)
    # In float32 the sum may fall to the other side of a half step: then it is one step off, and only there.
    near = np.abs(inside / chosen.output.scale % 1 - 0.5) < 1e-2 * (1 if width == 8 else 20)
    off = np.abs(y - emulated(inside.astype(np.float32), chosen.output))
    assert off[~near].max(initial=0) <= 1e-5 * np.abs(plain).max(), f"seed {seed}"
    assert off.max() <= 1.01 * chosen.output.scale, f"seed {seed}"
    assert np.mean(x > chosen.input.high) > 0 and near.mean() < 0.6, f"seed {seed}"


def test_both_sides_of_the_product_have_one_width(tmp_path: Path) -> None:
    """What a matrix unit of QNN's kind takes: Q/DQ around, weights int4 with one scale a row and axis 1."""
    _, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 64)).astype(np.float32)))
    decide(model, scheme("static-u8"), static(), tmp_path)
    attach(model, {"/model/proj/Linear": Ranges(Range.over(-1, 3, 8), Range.over(-9, 9, 8))})
    emit(model, static())
    ops = [node.op_type for node in model.graph]
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert ops == [*pair, "DequantizeLinear", "MatMul", *pair]
    weight = model.graph[2]
    assert weight.attributes["axis"].as_int() == 1 and "block_size" not in weight.attributes
    assert weight.inputs[0].dtype == ir.DataType.INT4 and tuple(weight.inputs[1].shape) == (24,)  # type: ignore[union-attr,arg-type]
    kinds = [node.inputs[2].dtype for node in model.graph if node.op_type == "QuantizeLinear"]  # type: ignore[union-attr]
    assert kinds == [ir.DataType.UINT8, ir.DataType.UINT8]


def test_linears_of_one_input_and_range_share_their_steps(tmp_path: Path) -> None:
    _, rng = fresh()
    model = tied_model(rng.standard_normal((50, 64)).astype(np.float32))
    decide(model, scheme("static-u8"), static(), tmp_path / "work")
    one, other = Range.over(-2, 2, 8), Range.over(-4, 4, 16)
    names = [str(node.name) for node in canonical(model.graph, QUANT_LINEAR)]
    attach(model, {name: Ranges(other, other, "wide") if "head" in name else Ranges(one, one) for name in names})
    assert {node.attributes["activation"].as_string() for node in canonical(model.graph, QUANT_LINEAR)} == {
        "static-u8", "static-u16",
    }  # fmt: skip
    emit(model, static())
    assert [node.op_type for node in model.graph].count("QuantizeLinear") == 2 + 1 + 2  # gate and up share one
    rows, logits = session(model, tmp_path, options_of=static()).run(None, {"ids": rng.integers(0, 50, (1, 5))})
    assert rows.shape == (1, 5, 64) and np.isfinite(logits).all()


def test_a_row_scaled_table_picks_the_right_rows(tmp_path: Path) -> None:
    seed, rng = fresh()
    model = tied_model(rng.standard_normal((50, 96)).astype(np.float32))
    decide(model, scheme("token-dynamic"), static(), tmp_path / "work")
    q, scales = (model.graph.initializers[f"embed.weight.{part}"].const_value.numpy().copy() for part in ("q", "scales"))  # type: ignore[union-attr]
    emit(model, static())
    ids = rng.integers(0, 50, (1, 9))
    rows, _ = session(model, tmp_path, options_of=static()).run(None, {"ids": ids})
    assert np.array_equal(rows[0], (q * scales.astype(np.float32))[ids[0]]), f"seed {seed}"
    saved = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert [int(np.prod(one.dims)) for one in saved.graph.initializer].count(50 * 96) == 1, "the table is in the file once"


@pytest.mark.parametrize("group", [0, 32])
def test_token_dynamic_is_one_int8_scale_a_token(group: int, tmp_path: Path) -> None:
    seed, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 100)).astype(np.float32)))
    decide(model, scheme("token-dynamic", 4, group), static(), tmp_path / "work")
    node = canonical(model.graph, QUANT_LINEAR)[0]
    q, scales = (node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr]
    emit(model, static())
    x = inputs(rng, 7, 100, 100)
    y = session(model, tmp_path, options_of=static()).run(None, {"x": x[None]})[0][0]
    most = np.abs(x).max(1, keepdims=True) / np.float64(127)
    weights = q * np.repeat(scales.astype(np.float64), group or 100, axis=1)[:, :100]
    wanted = (np.round(x / most) * most) @ weights.T
    assert np.abs(y - wanted).max() <= 1e-5 * np.abs(wanted).max(), f"seed {seed}"


def test_a_static_linear_without_a_range_is_refused(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    decide(model, scheme("static-u8"), static(), tmp_path)
    with pytest.raises(TargetError, match="no range was calibrated for /model/proj/Linear"):
        attach(model, {})
    with pytest.raises(TargetError, match="/model/proj/Linear has static activations and no calibrated range"):
        emit(model, static())


@pytest.mark.parametrize("bits", [8, 16])
def test_a_range_holds_its_ends_and_zero_exactly(bits: int) -> None:
    seed, rng = fresh()
    for low, high in ((-1.0, 3.0), (-3.0, -1.0), (2.0, 5.0), (0.0, 0.0), tuple(sorted(rng.normal(0, 9, 2)))):
        taken = Range.over(low, high, bits)
        assert 0 <= taken.zero_point < 2**bits and taken.apply(np.zeros(1))[0] == 0
        ends = np.array([min(low, 0), max(high, 0)], np.float32)
        assert np.abs(taken.apply(ends) - ends).max() <= taken.scale * 0.51, f"seed {seed}: {low} {high}"
        x = rng.normal(0, 3, 1000).astype(np.float32)
        assert np.abs(taken.apply(x) - emulated(x, taken)).max() <= 1e-6 * np.abs(x).max(), f"seed {seed}"
        assert taken.low <= 0 <= taken.high


def test_ranges_read_back_from_the_node(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    decide(model, scheme("static-u8"), static(), tmp_path)
    given = Ranges(Range.over(-1.3, 2.7, 16), Range.over(-5, 1, 16), "8 bits lose too much")
    attach(model, {"/model/proj/Linear": given})
    node = canonical(model.graph, QUANT_LINEAR)[0]
    assert (range_of(node, "input"), range_of(node, "output")) == (given.input, given.output)


def test_options_of_a_group_still_win() -> None:
    assert Scheme("s", "", Form(4, 0, "static-u8"), options=Options(group=32)).form("attn.q").group == 32


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("solver", ["fit", "gptq", "nearest"])
def test_one_scale_a_row_is_a_positive_one_and_loses_little_by_it(solver: str, bits: int) -> None:
    """QNN's HTP runs negative ones, and weights without a zero point, to other numbers in silence."""
    seed, rng = fresh()
    weight = rng.standard_normal((60, 96)).astype(np.float32)
    x = rng.standard_normal((400, 96)).astype(np.float32)
    moments = Moments(x.T @ x / 400, 400)
    form = Form(bits, 0, "static-u8")
    found = solvers.find(solver).solve(weight, form, moments, 1)
    assert (found.scales > 0).all() and found.q.min() >= -(2 ** (bits - 1)) and found.q.max() <= 2 ** (bits - 1) - 1
    rest = weight - dequantize(found.q, found.scales, 0)
    assert found.error.noise == pytest.approx(float((rest.astype(np.float64) ** 2).sum()), rel=1e-3), f"seed {seed}"
    free, scales = np.empty(weight.shape, np.int8), np.empty((60, 1), np.float16)
    least = fit(weight, bits, 0, free, scales).noise
    assert (scales < 0).mean() > 0.2, "without the rule some are negative"
    if solver == "fit":
        assert found.error.noise < 1.3 * least, f"seed {seed}"
    elif solver == "gptq":
        assert found.proxy < 1.02 * proxy_loss(weight, dequantize(free, scales, 0), moments.h), f"seed {seed}"


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_spelled_out_where_a_row_has_one_scale(bits: int, tmp_path: Path) -> None:
    _, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((25, 64)).astype(np.float32)))
    decide(model, scheme("static-u8", bits), static(), tmp_path)
    attach(model, {"/model/proj/Linear": Ranges(Range.over(-1, 3, 8), Range.over(-9, 9, 8))})
    emit(model, static())
    weights = next(node for node in model.graph if node.op_type == "DequantizeLinear" and "axis" in node.attributes)
    zeros = weights.inputs[2]
    assert zeros is not None and zeros.dtype == (ir.DataType.INT4 if bits == 4 else ir.DataType.INT8)
    assert tuple(zeros.shape) == (25,) and not zeros.const_value.numpy().astype(int).any()  # type: ignore[union-attr,arg-type]
