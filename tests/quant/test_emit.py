"""Emitted graphs against numpy, in both forms."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from appliance.errors import TargetError
from quant.decide import decide
from quant.emit import emit, refusal
from quant.scheme import Form, Options, Scheme
from quant.schemes import find
from tests.quant.canonical import Weight, emulate, inputs, linear_model, session, target, tied_model

FORMS = ("cpu", "cpu-static")


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def decided(model: ir.Model) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales that the decision wrote, as the canonical graph holds them."""
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    return tuple(node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr,return-value]


CASES = [
    *itertools.product(FORMS, (4, 8), (32, 64, 128), (256, 320, 100), (True,)),
    *itertools.product(FORMS, (4,), (64,), (20,), (True, False)),
    *itertools.product(("cpu",), (4, 8), (16,), (256, 100), (True,)),
]


@pytest.mark.parametrize(("form", "bits", "group", "columns", "bias"), CASES)
def test_a_quantized_matmul_is_what_numpy_says(
    form: str, bits: int, group: int, columns: int, bias: bool, tmp_path: Path
) -> None:
    seed, rng = fresh()
    weight = rng.standard_normal((24, columns)).astype(np.float32)
    extra = rng.standard_normal(24).astype(np.float32) if bias else None
    model = linear_model(Weight("proj.weight", "attn.q", weight), extra)
    options = Options(group=group, roles={"attn.q": {"bits": bits}})
    decide(model, find("w4a8", options), target(form), tmp_path / "work")
    q, scales = decided(model)
    emit(model, target(form))
    run = session(model, tmp_path)
    for rows in (1, 7, 33):
        x = inputs(rng, rows, columns, group)
        y = run.run(None, {"x": x[None]})[0][0]
        wanted = emulate(x, q, scales, group) + (0 if extra is None else extra)
        assert np.abs(y - wanted).max() <= 1e-5 * np.abs(wanted).max(), f"seed {seed}, {rows} rows"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("columns", "group"), [(128, 64), (96, 64), (40, 64)])
def test_a_tied_table_is_one_initializer_and_serves_both(form: str, columns: int, group: int, tmp_path: Path) -> None:
    seed, rng = fresh()
    table = rng.standard_normal((50, columns)).astype(np.float32)
    model = tied_model(table)
    decide(model, find("w4a8", Options(group=group)), target(form), tmp_path / "work")
    q, scales = (model.graph.initializers[f"embed.weight.{part}"].const_value.numpy().copy() for part in ("q", "scales"))
    emit(model, target(form))
    ids = rng.integers(0, 50, (1, 9))
    rows, logits = session(model, tmp_path).run(None, {"ids": ids})
    wide = np.repeat(scales.astype(np.float32), group, axis=1)[:, :columns]
    assert np.array_equal(rows[0], (q * wide)[ids[0]]), f"seed {seed}"
    assert np.isfinite(logits).all() and logits.shape == (1, 9, 50)
    saved = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    sizes = [int(np.prod(one.dims)) for one in saved.graph.initializer]
    padded = -(-columns // group) * group
    assert sizes.count(50 * padded) == 1, "the table is in the file once"
    assert not [node.op_type for node in saved.graph.node if node.domain == "appliance"]
    assert not [one.domain for one in saved.opset_import if one.domain == "appliance"]


@pytest.mark.parametrize("form", FORMS)
def test_an_untied_head_is_a_matrix_of_its_own(form: str, tmp_path: Path) -> None:
    _, rng = fresh()
    model = tied_model(rng.standard_normal((50, 64)).astype(np.float32), tied=False)
    decision = decide(model, find("w4a8"), target(form), tmp_path / "work")
    assert {matrix.name: (matrix.roles, matrix.form.bits) for matrix in decision.matrices} == {
        "embed.weight": (("embed",), 8),
        "head.weight": (("head",), 8),
        "gate.weight": (("mlp.gate",), 4),
        "up.weight": (("mlp.up",), 4),
    }
    emit(model, target(form))
    rows, logits = session(model, tmp_path).run(None, {"ids": np.arange(5)[None]})
    assert rows.shape == (1, 5, 64) and np.isfinite(logits).all()


def test_both_forms_hold_the_same_numbers(tmp_path: Path) -> None:
    seed, rng = fresh()
    table = rng.standard_normal((50, 96)).astype(np.float32)
    answers = []
    for form in FORMS:
        model = tied_model(table)
        decide(model, find("w4a8"), target(form), tmp_path / "work")
        emit(model, target(form))
        answers.append(session(model, tmp_path / form).run(None, {"ids": np.arange(9)[None]}))
    assert np.array_equal(answers[0][0], answers[1][0])
    # A step that lies on a half may fall either way in two orders of operations: one of 127 in one block.
    assert np.abs(answers[0][1] - answers[1][1]).max() <= 2e-3 * np.abs(answers[0][1]).max(), f"seed {seed}"


def test_linears_of_one_input_share_their_activations(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    decide(model, find("w4a8"), target("cpu-static"), tmp_path)
    emit(model, target("cpu-static"))
    assert [node.op_type for node in model.graph].count("Round") == 2  # gate and up together, head


def test_no_transpose_of_a_weight_at_run_time(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    decide(model, find("w4a8"), target("cpu-static"), tmp_path)
    emit(model, target("cpu-static"))
    assert "Transpose" not in [node.op_type for node in model.graph]


def test_half_scales_are_on_disk_and_their_cast_is_folded_at_load(tmp_path: Path) -> None:
    for form in FORMS:
        model = linear_model(
            Weight("proj.weight", "attn.q", np.random.default_rng().standard_normal((24, 64)).astype(np.float32))
        )
        decide(model, find("w4a8"), target(form, scale_dtype="float16"), tmp_path / form / "work")
        emit(model, target(form, scale_dtype="float16"))
        kinds = {value.const_value.dtype for value in model.graph.initializers.values() if value.metadata_props.get("role")}
        assert ir.DataType.FLOAT16 in kinds and ir.DataType.FLOAT not in kinds
        session(model, tmp_path / form, tmp_path / form / "optimized.onnx")
        ops = [node.op_type for node in onnx.load(tmp_path / form / "optimized.onnx").graph.node]
        assert "Cast" not in ops and ops.count("MatMulNBits") == 1


def test_float_scales_on_disk_where_the_target_wants_them(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    decide(model, find("w4a8"), target("cpu", scale_dtype="float32"), tmp_path / "work")
    emit(model, target("cpu", scale_dtype="float32"))
    assert [node.op_type for node in model.graph] == ["MatMulNBits"]
    y = session(model, tmp_path).run(None, {"x": np.ones((1, 1, 64), np.float32)})[0]
    assert np.allclose(y, 64, rtol=1e-3)


def test_saving_twice_gives_identical_bytes(tmp_path: Path) -> None:
    weight = np.random.default_rng().standard_normal((50, 96)).astype(np.float32)
    for form in FORMS:
        for run in "ab":
            model = tied_model(weight)
            decide(model, find("w4a8"), target(form), tmp_path / f"work-{run}", threads=1 + (run == "b"))
            emit(model, target(form))
            session(model, tmp_path / form / run)
        for file in ("model.onnx", "model.data"):
            assert (tmp_path / form / "a" / file).read_bytes() == (tmp_path / form / "b" / file).read_bytes()


def test_a_four_bit_table_picks_the_right_rows(tmp_path: Path) -> None:
    """GatherBlockQuantized takes 8 as zero for packed uint8 of 4 bits; MatMulNBits must agree on the same bytes."""
    seed, rng = fresh()
    model = tied_model(rng.standard_normal((50, 96)).astype(np.float32))
    options = Options(roles={"embed": {"bits": 4}, "head": {"bits": 4}})
    decide(model, find("w4a8", options), target("cpu"), tmp_path / "work")
    q, scales = (model.graph.initializers[f"embed.weight.{part}"].const_value.numpy().copy() for part in ("q", "scales"))
    emit(model, target("cpu"))
    rows = session(model, tmp_path).run(["rows"], {"ids": np.arange(50)[None]})[0][0]
    assert np.array_equal(rows, q * np.repeat(scales.astype(np.float32), 64, axis=1)[:, :96]), f"seed {seed}"


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_without_their_zero_point_are_other_weights(bits: int, tmp_path: Path) -> None:
    """Two's complement in B, which other operators take, is wrong here; the check above would see it."""
    _, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 64)).astype(np.float32)))
    decide(model, find("w4a8", Options(roles={"attn.q": {"bits": bits}})), target("cpu"), tmp_path / "work")
    q, scales = decided(model)
    emit(model, target("cpu"))
    weight = model.graph.initializers[f"proj.weight.q{bits}"]
    flip = 0x88 if bits == 4 else 0x80
    weight.const_value = ir.tensor(weight.const_value.numpy() ^ np.uint8(flip), name=weight.name)  # type: ignore[union-attr]
    x = inputs(rng, 7, 64, 64)
    y, wanted = session(model, tmp_path).run(None, {"x": x[None]})[0][0], emulate(x, q, scales, 64)
    assert np.abs(y - wanted).max() > 0.1 * np.abs(wanted).max()


def test_one_scale_a_row_where_the_target_takes_it(tmp_path: Path) -> None:
    seed, rng = fresh()
    rows = target("cpu-static", groups=(0,))
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 100)).astype(np.float32)))
    decide(model, find("w4a8", Options(group=0)), rows, tmp_path / "work")
    q, scales = decided(model)
    emit(model, rows)
    assert scales.shape == (24, 1)
    x = inputs(rng, 7, 100, 100)
    opened = session(model, tmp_path, options_of=rows)
    y, wanted = opened.run(None, {"x": x[None]})[0][0], emulate(x, q, scales, 100)
    assert np.abs(y - wanted).max() <= 1e-5 * np.abs(wanted).max(), f"seed {seed}"


@pytest.mark.parametrize("form", FORMS)
def test_float_activations_are_left_alone(form: str, tmp_path: Path) -> None:
    """In the static form no step rounds them; what onnxruntime's own fusion does at load is another matter."""
    scheme = Scheme("w4a16", "4-bit weights only", Form(4, 64, "float"))
    model = linear_model(Weight("proj.weight", "attn.q", np.random.default_rng().standard_normal((24, 96)).astype(np.float32)))
    decide(model, scheme, target(form), tmp_path)
    emit(model, target(form))
    assert "Round" not in [node.op_type for node in model.graph]
    levels = [node.attributes["accuracy_level"].as_int() for node in model.graph if node.op_type == "MatMulNBits"]
    assert levels == ([1] if form == "cpu" else [])


def test_eight_bits_are_never_multiplied_by_float_activations(tmp_path: Path) -> None:
    """One row is tens of times as slow so. Rows of a table are only picked, and 4 bits have a kernel."""
    wide, narrow = Form(8, 64, "float"), Form(4, 64, "float")
    for roles in (("attn.q",), ("head",), ("embed", "head")):
        assert "too slowly" in (refusal("MatMulNBits", wide, roles) or ""), roles
        assert refusal("MatMulNBits", dataclasses.replace(wide, activation="block-dynamic"), roles) is None
        assert refusal("MatMulNBits", narrow, roles) is None
    assert refusal("MatMulNBits", wide, ("embed",)) is None
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    with pytest.raises(TargetError, match=r"scheme w8a16 keeps attn\.q in 8 bits, group 64; .* too slowly"):
        decide(model, Scheme("w8a16", "", wide), target("cpu"), tmp_path)


def test_an_old_opset_is_refused(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    model.graph.opset_imports[""] = 20
    decide(model, find("w4a8"), target("cpu-static"), tmp_path)
    with pytest.raises(TargetError, match="opset 21"):
        emit(model, target("cpu-static"))
