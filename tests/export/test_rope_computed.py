"""Tables of rotary angles: not in the file, the same numbers when the session has loaded, and computed only then."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from appliance.targets import load
from export import arch, parity
from export.lower import lower
from export.save import save_all
from tests.golden import recipe


def saved(kind: str, variant: str, folder: Path, context: int) -> Path:
    config = {**arch.find(kind).TINY[variant], "max_position_embeddings": 4 * context}
    opened = arch.open_model(recipe.Memory(config, recipe.tensors(config, 1)))
    return save_all({"model": lower(opened.build, load("cpu"), context, 16).graphs["model"]}, folder, "weights.bin")["model"]


@pytest.mark.parametrize(("kind", "variant", "tables"), [("llama", "llama3-rope", 2), ("gemma3_text", "all", 4)])
def test_the_file_holds_no_tables(kind: str, variant: str, tables: int, tmp_path: Path) -> None:
    path = saved(kind, variant, tmp_path, 512)
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {one.name: tuple(one.dims) for one in graph.initializer}
    assert not [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == 512]
    assert sum(node.op_type in ("Cos", "Sin") for node in graph.node) == tables
    seen = {one.name for one in [*graph.input, *graph.initializer]}
    for node in graph.node:  # onnxruntime would sort them itself; others may not
        assert set(node.input) - {""} <= seen, node.name
        seen |= set(node.output)


def test_a_loaded_session_computes_none(tmp_path: Path) -> None:
    path = saved("gemma3_text", "all", tmp_path, 512)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    left = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert not left & {"Cos", "Sin", "Range"} and "GroupQueryAttention" in left


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_what_is_computed_are_the_tables(kind: str, tmp_path: Path) -> None:
    """Every one of 2048 positions, against the tables that the canonical graph has."""
    config = {**arch.find(kind).TINY["all"], "max_position_embeddings": 2048}
    opened = arch.open_model(recipe.Memory(config, recipe.tensors(config, 1)))
    kept = {name: value.const_value for name, value in opened.build().graph.initializers.items() if name.startswith("rope.")}
    model = lower(opened.build, parity.reference_target(), 0, 1).graphs["model"]
    path = save_all({"model": model}, tmp_path, "weights.bin")["model"]
    proto = onnx.load(path)
    outputs = {node.name: node.output[0] for node in proto.graph.node if node.op_type in ("Cos", "Sin")}
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs.values())
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    state = {
        one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in session.get_inputs() if "past" in one.name
    }
    feeds = {"input_ids": np.array([[1]]), "attention_mask": np.array([[1]]), **state}
    for name, output in outputs.items():
        table = kept[name.split("/")[2]]
        assert table is not None
        found = session.run([output], feeds)[0]
        assert found.shape == (2048, 16) and np.abs(found - table.numpy()).max() < 2e-7, name
    assert len(outputs) == len(kept)
