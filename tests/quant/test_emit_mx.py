"""Microscaling weights and activations: who takes them, what is written, and what onnx's own evaluator makes of it."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from appliance import targets
from appliance.errors import TargetError
from appliance.targets.capabilities import Target
from export.save import save
from quant import mx, record
from quant.decide import decide
from quant.emit import emit
from quant.emulate import difference
from quant.scheme import Options
from quant.schemes import find
from tests.quant.canonical import Weight, linear_model, session, target, tied_model

FILE = """
summary = "an accelerator with Microscaling units"
provider = "cpu"

[flags]
form = "static"
contrib_ops = false
attention = "decomposed"
activations = ["mxfp8", "float"]
state_update = "append"

[weights]
operator = "DequantizeLinear"
elements = ["mxfp4", "int"]
groups = [32]
"""


@pytest.fixture
def accelerator(tmp_path: Path) -> Target:
    """A vendor's target file, in a targets.d."""
    (tmp_path / "targets.d").mkdir()
    (tmp_path / "targets.d" / "microscale.toml").write_text(FILE)
    return targets.load("microscale", tmp_path / "targets.d")


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def test_no_built_in_target_takes_it_and_says_so_in_a_line(tmp_path: Path) -> None:
    for name in targets.names():
        model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
        with pytest.raises(TargetError) as caught:
            decide(model, find("mxfp4a8"), targets.load(name), tmp_path)
        said = str(caught.value)
        assert f"keeps attn.q in MXFP4; target {name} takes int weights" in said and "\n" not in said
        assert [node.op_type for node in model.graph] == ["Linear"], "nothing has been changed"


@pytest.mark.parametrize("columns", [64, 70, 32])
@pytest.mark.parametrize("bias", [True, False])
def test_the_graph_computes_what_numpy_says(columns: int, bias: bool, accelerator: Target, tmp_path: Path) -> None:
    seed, rng = fresh()
    weight = (rng.standard_normal((24, columns)) * 2.0 ** rng.integers(-40, 40, (24, 1))).astype(np.float32)
    extra = rng.standard_normal(24).astype(np.float32) if bias else None
    model = linear_model(Weight("proj.weight", "attn.q", weight), extra)
    decision = decide(model, find("mxfp4a8"), accelerator, tmp_path / "work")
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    q, scales = (node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr]
    emit(model, accelerator)
    path = save(model, tmp_path, "model")
    onnx.checker.check_model(str(path), full_check=True)
    x = (rng.standard_normal((1, 5, columns)) * 2.0 ** rng.integers(-20, 20, (1, 5, 1))).astype(np.float32)
    y = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0]
    wanted = mx.linear(x, q, scales) + (0 if extra is None else extra)
    assert np.allclose(y, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max(axis=-1, keepdims=True)), f"seed {seed}"
    exact = x @ weight.T + (0 if extra is None else extra)
    assert not np.allclose(y, exact, rtol=1e-3), "activations or weights were not rounded"
    matrix = decision.matrices[0]
    assert (matrix.form.element, matrix.form.activation, matrix.solver) == ("mxfp4", "mxfp8", "mxfp4")
    assert 15 < (matrix.error.snr_db or 0) < 25


def test_bytes_in_the_file_are_the_formats(accelerator: Target, tmp_path: Path) -> None:
    """4.25 bits a weight, and an account that says so."""
    _, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((64, 96)).astype(np.float32)))
    decision = decide(model, find("mxfp4a8"), accelerator, tmp_path / "work")
    emit(model, accelerator)
    saved = onnx.load(save(model, tmp_path, "model"))
    kinds = {one.data_type: one for one in saved.graph.initializer if one.data_type in (23, 24)}
    assert (kinds[onnx.TensorProto.FLOAT4E2M1].dims, kinds[onnx.TensorProto.FLOAT8E8M0].dims) == ([96, 64], [3, 64])
    assert sum(len(one.raw_data) for one in kinds.values()) == 96 * 64 * 4.25 / 8
    assert record.matrix_bytes(decision.matrices[0]) == 96 * 64 * 4.25 / 8
    assert saved.opset_import[0].version == 24 and saved.ir_version == 12


def test_elements_in_the_wrong_order_are_other_weights(accelerator: Target, tmp_path: Path) -> None:
    seed, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 64)).astype(np.float32)))
    decide(model, find("mxfp4a8"), accelerator, tmp_path / "work")
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    q, scales = (node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr]
    emit(model, accelerator)
    saved = onnx.load(save(model, tmp_path, "model"))
    packed = next(one for one in saved.graph.initializer if one.data_type == onnx.TensorProto.FLOAT4E2M1)
    raw = np.frombuffer(packed.raw_data, np.uint8)
    packed.raw_data = ((raw >> 4) | (raw << 4)).tobytes()
    x = rng.standard_normal((1, 3, 64)).astype(np.float32)
    y = ReferenceEvaluator(saved).run(None, {"x": x})[0]
    wanted = mx.linear(x, q, scales)
    assert np.abs(y - wanted).max() > 0.1 * np.abs(wanted).max(), f"seed {seed}"


def test_head_and_embedding_stay_float_and_readers_share_their_activations(accelerator: Target, tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    decision = decide(model, find("mxfp4a8"), accelerator, tmp_path / "work")
    assert [(one.name, one.reason) for one in decision.kept if one.role == "embed"] == [
        ("embed.weight", "the scheme keeps embed float")
    ]
    emit(model, accelerator)
    assert [node.op_type for node in model.graph].count("QuantizeLinear") == 1, "gate and up have one input"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(group=64), "groups of 32"),
        (Options(roles={"attn.q": {"group": 0, "bits": 8}}), "groups of 32"),
    ],
)
def test_options_that_the_format_does_not_have(options: Options, message: str, accelerator: Target, tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    with pytest.raises(TargetError, match=message):
        decide(model, find("mxfp4a8", options), accelerator, tmp_path)


def test_asymmetric_changes_nothing(accelerator: Target, tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    decision = decide(model, find("mxfp4a8", Options(symmetric=False)), accelerator, tmp_path)
    assert decision.matrices[0].form.symmetric


def test_whole_numbers_beside_it_are_written_as_such(accelerator: Target, tmp_path: Path) -> None:
    """An exception by role: 8-bit whole numbers in the same graph, with float activations."""
    rng = np.random.default_rng()
    model = tied_model(rng.standard_normal((50, 64)).astype(np.float32))
    both = accelerator.model_copy(
        update={"flags": accelerator.flags.model_copy(update={"activations": ("mxfp8", "block-dynamic")})}
    )
    tables = Options(roles={role: {"bits": 8, "group": 32} for role in ("embed", "head")})
    decision = decide(model, find("mxfp4a8", tables), both, tmp_path / "work")
    assert {matrix.name: matrix.solver for matrix in decision.matrices} == {
        "embed.weight": "fit", "gate.weight": "mxfp4", "up.weight": "mxfp4",
    }  # fmt: skip
    emit(model, both)
    kinds = {value.dtype for value in model.graph.initializers.values()}
    assert {ir.DataType.FLOAT4E2M1, ir.DataType.INT8} <= kinds


def test_an_operator_without_a_form_for_it_refuses_it(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((24, 64), np.float32)))
    wrong = target("cpu", elements=("int", "mxfp4"))
    wrong = wrong.model_copy(update={"flags": wrong.flags.model_copy(update={"activations": ("mxfp8",)})})
    with pytest.raises(TargetError, match='no form writes mxfp4 weights for the operator "MatMulNBits"'):
        decide(model, find("mxfp4a8"), wrong, tmp_path)


@pytest.mark.parametrize("columns", [64, 70])
def test_the_stand_in_rounds_as_the_format_does(columns: int, accelerator: Target, tmp_path: Path) -> None:
    """What runs in onnxruntime when the bundle cannot: the same numbers, powers of two included."""
    seed, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, columns)).astype(np.float32)))
    decide(model, find("mxfp4a8"), accelerator, tmp_path / "work")
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    q, scales = (node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr]
    emit(model, target("cpu"))
    x = (rng.standard_normal((1, 200, columns)) * 2.0 ** rng.integers(-100, 60, (1, 200, 1))).astype(np.float32)
    x[0, :150, 0] = 2.0 ** np.arange(-110, 40)  # blocks whose largest is a power of two, and just below one
    x[0, :150, 1:32] *= 0
    x[0, 75:150, 0] = np.nextafter(x[0, 75:150, 0], np.float32(0))
    x[0, 160] = 0
    y = session(model, tmp_path).run(None, {"x": x})[0]
    wanted = mx.linear(x, q, scales)
    assert np.allclose(y, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max(axis=-1, keepdims=True)), f"seed {seed}"


def test_the_operator_is_held_against_numpy(accelerator: Target, tmp_path: Path) -> None:
    """What a build does with every matrix, here in onnx's own evaluator."""
    seed, rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 70)).astype(np.float32)))
    decide(model, find("mxfp4a8"), accelerator, tmp_path)
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    assert difference(node, rng.standard_normal((1, 5, 70)).astype(np.float32), accelerator) < 1e-5, f"seed {seed}"
