"""The checks of written files: they pass on what the build writes, and each sees the one thing that is spoiled for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from appliance import targets
from appliance.errors import BundleError
from appliance.targets.capabilities import Target
from export.save import save
from quant import structure
from quant.arrays import FitError
from quant.decide import Decision, Matrix, decide
from quant.emit import emit
from quant.keep import keep
from quant.scheme import Form, Options
from quant.schemes import find
from quant.written import GraphFile
from tests.quant.canonical import Weight, linear_model, target, tied_model
from tests.quant.test_emit_mx import FILE
from tests.quant.test_keep import drawn, riding


@dataclass(frozen=True)
class Built:
    """A saved graph and what was decided for it."""

    path: Path
    wanted: structure.Expected
    decision: Decision

    def check(self) -> None:
        structure.check([self.path], self.wanted, [one.name for one in self.decision.kept])


def fresh() -> np.random.Generator:
    """Other numbers each time; what is checked does not depend on them."""
    return np.random.default_rng()


def built(model: ir.Model, to: Target, folder: Path, options: Options | None = None, scheme: str = "w4a8") -> Built:
    chosen = keep(model, find(scheme, options), [to], folder / "work", "source").scheme
    decision = decide(model, chosen, to, folder / "work", source="source")
    wanted = structure.expected(model)
    emit(model, to)
    return Built(save(model, folder, "model"), wanted, decision)


def spoil(path: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Change the bytes of an initializer, wherever they lie."""
    model = onnx.load(path, load_external_data=False)
    tensor = next(one for one in model.graph.initializer if one.name == name)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        where = {pair.key: pair.value for pair in tensor.external_data}
        file = path.parent / where["location"]
        change(np.memmap(file, np.uint8, "r+", int(where["offset"]), (int(where["length"]),)))
        return
    raw = np.frombuffer(tensor.raw_data, np.uint8).copy()
    change(raw)
    tensor.raw_data = raw.tobytes()
    onnx.save(model, path)


def rewire(path: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


def flip(raw: np.ndarray) -> None:
    raw[len(raw) // 2] ^= 0x10


def swap_nibbles(raw: np.ndarray) -> None:
    raw[:] = (raw >> 4) | (raw << 4)


FORMS = [
    *[(name, 4, group, 320) for name in ("cpu", "cpu-static") for group in (32, 64, 128)],
    *[(name, 8, 64, columns) for name in ("cpu", "cpu-static") for columns in (320, 100, 20)],
    *[(name, 4, 64, columns) for name in ("cpu", "cpu-static") for columns in (100, 20)],
    ("cpu", 4, 16, 320), ("cpu", 8, 16, 100), ("cpu-static", 4, 0, 100), ("cpu-static", 8, 0, 100),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bits", "group", "columns"), FORMS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_was_written_is_what_was_decided(
    name: str, bits: int, group: int, columns: int, symmetric: bool, tmp_path: Path
) -> None:
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, columns)).astype(np.float32)))
    one = built(model, target(name), tmp_path, Options(group=group, symmetric=symmetric, roles={"attn.q": {"bits": bits}}))
    one.check()
    weight = f"proj.weight.{'q' if name == 'cpu' else 't'}{bits}"
    for what in (flip, swap_nibbles if bits == 4 else flip):
        before = one.path.with_suffix(".bin").read_bytes() if one.path.with_suffix(".bin").exists() else b""
        spoil(one.path, weight, what)
        with pytest.raises(BundleError, match=r"weight proj\.weight"):
            one.check()
        if before:
            one.path.with_suffix(".bin").write_bytes(before)


def test_every_wrong_integer_is_seen_and_located(tmp_path: Path) -> None:
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 256)).astype(np.float32)))
    one = built(model, target("cpu"), tmp_path)
    row, column = int(rng.integers(24)), int(rng.integers(256))
    spoil(
        one.path,
        "proj.weight.q4",
        lambda raw: raw.__setitem__(row * 128 + column // 2, raw[row * 128 + column // 2] ^ (1 << 4 * (column % 2))),
    )
    with pytest.raises(BundleError, match=f"1 integers are not .* at row {row}, column {column}:"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
def test_a_wrong_scale_is_seen(form: str, tmp_path: Path) -> None:
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 256)).astype(np.float32)))
    one = built(model, target(form), tmp_path)
    spoil(one.path, next(n.name for n in onnx.load(one.path).graph.initializer if "scales" in n.name), flip)
    with pytest.raises(BundleError, match=r"weight proj\.weight: 1 scales are not"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
def test_zero_points_are_compared_and_their_default_is_the_middle(form: str, tmp_path: Path) -> None:
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.uniform(0, 1, (24, 256)).astype(np.float32)))
    one = built(model, target(form), tmp_path, Options(symmetric=False))
    one.check()
    points = next(n.name for n in onnx.load(one.path).graph.initializer if "zero_points" in n.name)
    spoil(one.path, points, flip)
    with pytest.raises(BundleError, match=r"weight proj\.weight: 1 zero points are not"):
        one.check()
    spoil(one.path, points, flip)
    one.check()
    decided = one.wanted.decided["proj.weight"].zero_points
    assert decided is not None
    others = int((decided.numpy() != 8).sum())
    assert others

    def leave_out(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type in ("MatMulNBits", "DequantizeLinear"))
        node.input[3 if form == "cpu" else 2] = ""

    rewire(one.path, leave_out)
    with pytest.raises(BundleError, match=rf"weight proj\.weight: {others} zero points are not"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
@pytest.mark.parametrize(("columns", "group"), [(96, 64), (40, 64), (128, 64)])
@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_compared_too(form: str, columns: int, group: int, tied: bool, tmp_path: Path) -> None:
    rng = fresh()
    one = built(tied_model(rng.standard_normal((50, columns)).astype(np.float32), tied=tied), target(form), tmp_path)
    one.check()
    ending = "q8" if form == "cpu" else "t8"
    spoil(one.path, f"embed.weight.{ending}", flip)
    with pytest.raises(BundleError, match=r"weight embed\.weight: 1 integers"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
def test_the_padding_of_the_last_group_must_be_nothing(form: str, tmp_path: Path) -> None:
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 100)).astype(np.float32)))
    one = built(model, target(form), tmp_path)
    last = next(n.name for n in onnx.load(one.path).graph.initializer if n.name.endswith((".q4", ".t4")))
    spoil(one.path, last, lambda raw: raw.__setitem__(-1, raw[-1] ^ 0x40))
    with pytest.raises(BundleError, match=r"weight proj\.weight: the last group is filled up with weights that are not 0"):
        one.check()


def test_a_turned_matrix_is_another_one(tmp_path: Path) -> None:
    """K and N exchanged: as many bytes, and nothing in the file says so."""
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((64, 64)).astype(np.float32)))
    one = built(model, target("cpu-static"), tmp_path, Options(roles={"attn.q": {"bits": 8}}))
    one.check()

    def turn(raw: np.ndarray) -> None:
        raw[:] = np.ascontiguousarray(raw.reshape(64, 64).T).reshape(-1)

    spoil(one.path, "proj.weight.t8", turn)
    with pytest.raises(BundleError, match=r"weight proj\.weight"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
def test_offsets_are_compared(form: str, tmp_path: Path) -> None:
    rng = fresh()
    stored = drawn(rng, "Q4_1", 24, 96)
    model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(4))), {"proj.weight": stored})
    one = built(model, target(form), tmp_path)
    one.check()
    spoil(one.path, "proj.weight.offsets", flip)
    with pytest.raises(BundleError, match=r"weight proj\.weight: 1 offsets are not"):
        one.check()
    half = next(n.name for n in onnx.load(one.path).graph.initializer if n.name.startswith("quant.float32.8.0"))
    rewire(one.path, lambda graph: next(n for n in graph.initializer if n.name == half).CopyFrom(
        onnx.numpy_helper.from_array(np.float32(7), half)))  # fmt: skip
    with pytest.raises(BundleError, match="does not lift the offsets"):
        one.check()


def test_offsets_that_nobody_adds_are_missed(tmp_path: Path) -> None:
    rng = fresh()
    stored = drawn(rng, "Q4_1", 24, 96)
    model = riding(linear_model(Weight("proj.weight", "attn.q", stored.grid.values(4))), {"proj.weight": stored})
    one = built(model, target("cpu"), tmp_path)
    rewire(one.path, lambda graph: next(n for n in graph.node if n.name.endswith("offsets/Add")).__setattr__("op_type", "Sub"))
    with pytest.raises(BundleError, match=r"weight proj\.weight lost offsets"):
        one.check()


def test_offsets_of_a_tied_table_are_compared_in_both_places(tmp_path: Path) -> None:
    rng = fresh()
    stored = drawn(rng, "Q4_1", 50, 96)
    one = built(riding(tied_model(stored.grid.values(4)), {"embed.weight": stored}), target("cpu"), tmp_path)
    one.check()
    spoil(one.path, "embed.weight.offsets", flip)
    with pytest.raises(BundleError, match=r"weight embed\.weight: 1 offsets"):
        one.check()


def test_microscaling_weights_are_compared(tmp_path: Path) -> None:
    (tmp_path / "microscale.toml").write_text(FILE)
    rng = fresh()
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 100)).astype(np.float32)))
    one = built(model, targets.load("microscale", tmp_path), tmp_path, scheme="mxfp4a8")
    one.check()
    kinds = {n.data_type: n.name for n in onnx.load(one.path).graph.initializer}
    spoil(one.path, kinds[onnx.TensorProto.FLOAT8E8M0], lambda raw: raw.__setitem__(5, raw[5] + 1))
    with pytest.raises(BundleError, match="1 scales are not"):
        one.check()
    spoil(one.path, kinds[onnx.TensorProto.FLOAT8E8M0], lambda raw: raw.__setitem__(5, raw[5] - 1))
    spoil(one.path, kinds[onnx.TensorProto.FLOAT4E2M1], swap_nibbles)
    with pytest.raises(BundleError, match="integers are not"):
        one.check()


def test_a_matrix_that_nobody_decided_is_refused(tmp_path: Path) -> None:
    rng = fresh()
    one = built(tied_model(rng.standard_normal((50, 64)).astype(np.float32)), target("cpu"), tmp_path)

    def smuggle(graph: onnx.GraphProto) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "smuggled"))
        last = graph.node[-1]
        graph.node.insert(len(graph.node) - 1, onnx.helper.make_node("Transpose", ["smuggled"], ["turned"]))
        graph.node.insert(len(graph.node) - 1, onnx.helper.make_node("MatMul", [last.input[0], "turned"], ["x"], name="extra"))
        graph.node[-1].input[0] = "x"

    rewire(one.path, smuggle)
    with pytest.raises(BundleError, match="MatMul extra multiplies by smuggled, for which nothing was decided"):
        one.check()


def test_a_float_weight_must_be_accounted_for(tmp_path: Path) -> None:
    rng = fresh()
    model = tied_model(rng.standard_normal((50, 64)).astype(np.float32))
    decide(model, find("w4a8", Options(roles={"mlp.up": {"bits": 0}})), target("cpu"), tmp_path)
    wanted = structure.expected(model)
    assert set(wanted.floats) == {"up.weight"} and set(wanted.decided) == {"embed.weight", "gate.weight"}
    with pytest.raises(BundleError, match=r"weight up\.weight is neither quantized nor accounted for"):
        structure.check([], wanted, [])


def test_a_decided_weight_that_nobody_reads_is_missed(tmp_path: Path) -> None:
    rng = fresh()
    one = built(tied_model(rng.standard_normal((50, 64)).astype(np.float32)), target("cpu"), tmp_path)
    rewire(one.path, lambda graph: graph.node.remove(next(n for n in graph.node if n.input[1:2] == ["gate.weight.q4"])))
    with pytest.raises(BundleError, match=r"weight gate\.weight was decided and no operator reads it"):
        one.check()


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    rng = fresh()
    one = built(
        linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((64, 256)).astype(np.float32))), target("cpu"), tmp_path
    )
    file = one.path.with_suffix(".bin")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"ends at byte"):
        one.check()


def test_logits_that_a_fold_may_and_may_not_change() -> None:
    rng = fresh()
    logits = rng.standard_normal((7, 50)).astype(np.float32)
    structure.check_equal(logits, logits + 0.9e-3 * np.abs(logits).max(), "the fold")
    with pytest.raises(BundleError, match=r"the fold changes logits by 0\.002"):
        structure.check_equal(logits, logits + 2e-3 * np.abs(logits).max(), "the fold")
    with pytest.raises(BundleError, match="inf"):
        structure.check_equal(logits, np.where(logits == logits[0, 0], np.nan, logits), "the fold")


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
@pytest.mark.parametrize(("bits", "columns"), [(4, 256), (8, 256), (4, 100)])
def test_quantizing_what_a_file_holds_gives_the_same_weights(form: str, bits: int, columns: int, tmp_path: Path) -> None:
    rng = fresh()
    weight = rng.standard_normal((24, columns)).astype(np.float32)
    values = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        one = built(
            linear_model(Weight("proj.weight", "attn.q", weight)), target(form), folder, Options(roles={"attn.q": {"bits": bits}})
        )
        (found,) = GraphFile(one.path).matrices()
        (piece,) = found.pieces()
        weight = (piece.q * np.repeat(found.scales, found.group, axis=1))[:, :columns].astype(np.float32)
        values.append(weight)
    assert np.array_equal(values[0], values[1])


def test_both_operators_mean_the_same_by_a_byte_and_another_type_means_another_thing(tmp_path: Path) -> None:
    """Without zero points MatMulNBits and GatherBlockQuantized take half the range as zero for bytes; for int4 it is 0."""
    rng = fresh()
    codes = rng.integers(0, 16, (8, 32)).astype(np.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = rng.uniform(0.5, 1, (8, 1)).astype(np.float32)
    make, kinds = onnx.helper.make_tensor, onnx.TensorProto
    blocks = dict(bits=4, block_size=32, gather_axis=0, quantize_axis=1, domain="com.microsoft")
    nodes = [
        onnx.helper.make_node("GatherBlockQuantized", ["bytes", "ids", "scales"], ["rows"], **blocks),
        onnx.helper.make_node("GatherBlockQuantized", ["int4", "ids", "scales"], ["signed"], **blocks),
        onnx.helper.make_node(
            "MatMulNBits", ["eye", "blocks", "scales"], ["turned"], domain="com.microsoft", K=32, N=8, bits=4, block_size=32
        ),
    ]
    graph = onnx.helper.make_graph(
        nodes, "zeros", [onnx.helper.make_tensor_value_info("ids", kinds.INT64, [8])],
        [onnx.helper.make_tensor_value_info(name, kinds.FLOAT, None) for name in ("rows", "signed", "turned")],
        [
            make("bytes", kinds.UINT8, (8, 16), packed.tobytes(), raw=True),
            make("int4", kinds.INT4, (8, 32), packed.tobytes(), raw=True),
            make("blocks", kinds.UINT8, (8, 1, 16), packed.tobytes(), raw=True),
            onnx.numpy_helper.from_array(scales, "scales"),
            onnx.numpy_helper.from_array(np.eye(32, dtype=np.float32), "eye"),
        ],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows, signed, turned = session.run(["rows", "signed", "turned"], {"ids": np.arange(8)})
    assert np.array_equal(rows, (codes.astype(np.float32) - 8) * scales)
    assert np.allclose(turned.T, rows, rtol=1e-6)
    wide = np.where(codes > 7, codes - np.float32(16), codes).astype(np.float32)
    assert np.array_equal(signed, wide * scales) and not np.allclose(signed, rows)


def test_no_weight_may_be_worse_than_with_the_plain_fit() -> None:
    form, error = Form(4, 64, "block-dynamic"), FitError(1, 0.1, 0, 64)
    one = Matrix("proj.weight", ("attn.q",), 1, 64, form, error, "gptq", proxy=0.01, plain_proxy=0.02)
    structure.check_proxies([one, replace(one, proxy=0.02), replace(one, proxy=None), replace(one, plain_proxy=None)])
    for worse in (0.0201, float("nan")):
        with pytest.raises(BundleError, match=r"weight proj\.weight loses .* with gptq and 0\.02 with the plain fit"):
            structure.check_proxies([one, replace(one, proxy=worse)])
