"""Graphs of other exporters in float16, in bfloat16 and in parts of them: read as float32, told of, exact as their weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from appliance.errors import BadInput
from quant import schemes
from quant.foreign.quantize import open_graph
from quant.foreign.widen import widen
from tests.quant.foreign.graphs import FOREIGN, logits, write_foreign
from tests.quant.foreign.test_quantize import ids_of, made, run
from tests.static_pair import fresh_seed

KINDS = {"float16": (TensorProto.FLOAT16, np.float16), "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16)}
LOWEST = {"float16": -65504.0, "bfloat16": -3.3895e38}


def narrowed(source: Path, kind: str) -> Path:
    """The file with every float32 of it in that type, beside it. Written with onnx alone."""
    code, dtype = KINDS[kind]
    model = onnx.load(source)

    def half(tensor: TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT:
            array = np.maximum(numpy_helper.to_array(tensor), np.float32(LOWEST[kind])).astype(dtype)
            raw = onnx.TensorProto(name=tensor.name, data_type=code, dims=tensor.dims, raw_data=array.tobytes())
            tensor.CopyFrom(raw)

    counted = {output for node in model.graph.node if node.op_type == "Range" for output in node.output}
    for tensor in model.graph.initializer:
        half(tensor)
    for node in list(model.graph.node):
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.HasField("t"):
                half(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = code
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in counted:
            value.type.tensor_type.elem_type = code
    return saved(model, source.with_name(f"{kind}.onnx"))


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=256)
    return path


def rounded(kind: str) -> Callable[[ir.Model], None]:
    """Every float tensor of a float32 graph on the grid of that type."""

    def change(model: ir.Model) -> None:
        code = KINDS[kind][1]
        for graph in (model.graph, *model.graph.subgraphs()):
            for value in graph.initializers.values():
                tensor = value.const_value
                if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
                    value.const_value = ir.tensor(on_grid(tensor.numpy(), code, kind), name=value.name)
            for node in graph:
                for name, attribute in list(node.attributes.items()):
                    if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.FLOAT:
                        array = on_grid(attribute.as_tensor().numpy(), code, kind)
                        node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))

    return change


def on_grid(array: np.ndarray, code: Any, kind: str) -> np.ndarray:
    return np.maximum(array, np.float32(LOWEST[kind])).astype(code).astype(np.float32)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_stays_float_computes_what_the_narrow_weights_are(name: str, kind: str, tmp_path: Path) -> None:
    """Equal to the float32 graph with the same numbers; near to what onnxruntime makes of the float16 one."""
    seed = fresh_seed()
    source = narrowed(write_foreign(name, tmp_path / "a", seed), kind)
    request, result = made(source, schemes.find("float"))
    found = logits(request.output, ids_of(seed))
    same = logits(write_foreign(name, tmp_path / "b", seed, rounded(kind)), ids_of(seed))
    assert found.dtype == np.float32 and distance(found, same) < 1e-6, f"seed {seed}: {distance(found, same)}"
    if kind == "float16":
        assert distance(found, logits(source, ids_of(seed)).astype(np.float32)) < 0.01, f"seed {seed}"
    told = result.record["read_as_float32"]
    assert list(told["tensors"]) == [kind] and told["outputs"][0] == "logits"
    assert told["inputs"] == [] if name.startswith("torch") else len(told["inputs"]) == 4 and len(told["outputs"]) == 5
    assert result.record["loss"]["relative_difference"] < (0.01 if kind == "float16" else 1e-6), result.record["loss"]
    left = onnx.load(request.output)
    assert not {value.type.tensor_type.elem_type for value in (*left.graph.input, *left.graph.output)} & {10, 16}
    assert not {one.data_type for one in left.graph.initializer} & {10, 16}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["genai-llama", "torch-gpt2-eager", "torch-gemma3_text-eager"])
def test_the_integers_are_those_of_the_same_weights_in_float32(name: str, kind: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    source = narrowed(write_foreign(name, tmp_path / "a", seed), kind)
    wide = write_foreign(name, tmp_path / "b", seed, rounded(kind))
    request, result = made(source, schemes.find("w4a8"))
    other, same = made(wide, schemes.find("w4a8"))
    packed = [sorted(one.raw_data for one in onnx.load(path.output).graph.initializer if one.data_type == TensorProto.UINT8)
              for path in (request, other)]  # fmt: skip
    assert packed[0] and packed[0] == packed[1], f"seed {seed}"
    lost, known = (one.record["loss"]["relative_difference"] for one in (result, same))
    assert lost == pytest.approx(known, rel=0.1) and lost > 1e-3, f"seed {seed}: {lost} {known}"
    assert sorted(path.name for path in request.output.parent.iterdir()) == ["model.onnx", "model.onnx.data", "model.record.json"]


def weights_alone(model: onnx.ModelProto) -> None:
    """Weights in float16, each behind a Cast to float32; the rest as it was."""
    graph = model.graph
    big = {one.name: one for one in graph.initializer if one.data_type == TensorProto.FLOAT and len(one.dims) == 2}
    casts = []
    for name, tensor in big.items():
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, name))
        casts.append(onnx.helper.make_node("Cast", [name], [f"{name}/wide"], name=f"{name}/Cast", to=TensorProto.FLOAT))
    for node in graph.node:
        node.input[:] = [f"{name}/wide" if name in big else name for name in node.input]
    for cast in reversed(casts):
        graph.node.insert(0, cast)
    known = [value for value in graph.value_info if value.name in big]
    for value in known:
        graph.value_info.remove(value)


def softmax_apart(model: onnx.ModelProto) -> None:
    """A float32 island around every Softmax of a float16 graph."""
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Softmax":
            before, after = f"{node.input[0]}/wide", f"{node.output[0]}/wide"
            nodes.append(onnx.helper.make_node("Cast", [node.input[0]], [before], name=f"{node.name}/in", to=TensorProto.FLOAT))
            back = onnx.helper.make_node("Cast", [after], [node.output[0]], name=f"{node.name}/out", to=TensorProto.FLOAT16)
            node.input[0], node.output[0] = before, after
            nodes += [node, back]
        else:
            nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


@pytest.mark.parametrize("name", ["torch-llama-eager", "torch-phi3-eager", "genai-qwen3"])
@pytest.mark.parametrize("island", [weights_alone, softmax_apart])
def test_graphs_of_two_types(island: Callable[[onnx.ModelProto], None], name: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    source = write_foreign(name, tmp_path, seed)
    model = onnx.load(source if island is weights_alone else narrowed(source, "float16"))
    island(model)
    mixed = saved(model, tmp_path / "mixed.onnx")
    wanted = logits(mixed, ids_of(seed)).astype(np.float32)
    request, result = made(mixed, schemes.find("float"))
    assert distance(logits(request.output, ids_of(seed)), wanted) < (1e-6 if island is weights_alone else 0.01), f"seed {seed}"
    assert not result.record["not_understood"] and result.record["read_as_float32"]["tensors"]["float16"] >= 10
    found, known = (made(one, schemes.find("w4a8"))[1].record for one in (mixed, source))
    assert [one["roles"] for one in found["inferred"]] == [one["roles"] for one in known["inferred"]]
    lost, usual = (one["loss"]["relative_difference"] for one in (found, known))
    assert 1e-3 < lost < 2 * usual, f"seed {seed}: {lost} {usual}"


def test_a_float32_graph_is_left_as_it_is(tmp_path: Path) -> None:
    model = open_graph(write_foreign("torch-llama-eager", tmp_path, fresh_seed()))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert widen(model).told() is None
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_weights_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = narrowed(write_foreign("torch-llama-eager", tmp_path, fresh_seed()), "bfloat16")
    model = open_graph(source)
    monkeypatch.setattr(ir.ExternalTensor, "numpy", lambda self: pytest.fail(f"{self.name} was read"))
    assert widen(model).tensors["bfloat16"] > 10


@pytest.mark.parametrize(("op", "domain"), [("BitCast", ""), ("PagedAttention", "com.microsoft"), ("Swirl", "my.own")])
def test_an_operator_that_needs_the_narrow_type_is_named(op: str, domain: str, tmp_path: Path) -> None:
    model = open_graph(narrowed(write_foreign("torch-llama-eager", tmp_path, fresh_seed()), "float16"))
    node = next(node for node in model.graph if node.op_type == "Sigmoid")
    other = ir.node(op, list(node.inputs), domain=domain, name="/odd")
    model.graph.insert_before(node, other)
    with pytest.raises(BadInput, match=rf"/odd \({op}\) takes float16 and may not take float32"):
        widen(model)


@pytest.mark.usefixtures("home")
def test_the_command_tells_what_became_of_the_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = narrowed(write_foreign("genai-llama", tmp_path, fresh_seed()), "float16")
    for more in ([], ["--dry-run"]):
        code, out, err = run(capsys, str(source), *more)
        assert code == 0 and "read as float32, and float32 now: " in out and "tensors of float16, 4 inputs, 5 outputs" in out, err
    code, out, _ = run(capsys, str(source), "--json")
    facts = json.loads(out)
    assert code == 0 and facts["read_as_float32"]["inputs"][0] == "past_key_values.0.key"
    assert json.loads(Path(facts["record"]).read_text(encoding="utf-8"))["read_as_float32"] == facts["read_as_float32"]
    code, out, _ = run(capsys, str(write_foreign("genai-llama", tmp_path / "wide", 1)), "--dry-run")
    assert code == 0 and "read as float32" not in out
