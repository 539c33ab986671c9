"""OpenVINO's plugin: registered once, a device by name, its absence in one clear line."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from appliance.errors import BundleError, DeviceError, TargetError
from appliance.runtime.providers import SessionChoice, openvino
from appliance.targets import load
from tests.openvino_device import processor_listed_by_openvino

TARGET = load("openvino")


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """y = relu(x), and another output that no provider but onnxruntime's own has an operator for."""
    return write(tmp_path / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"])])


def write(path: Path, nodes: list[onnx.NodeProto]) -> Path:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph(nodes, "g", value[:1], value[1:])
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def processor() -> Iterator[None]:
    with processor_listed_by_openvino():
        yield


@pytest.mark.usefixtures("processor")
def test_runs_on_the_named_device_and_says_so(graph: Path) -> None:
    opened = openvino.open_session(graph, TARGET, SessionChoice(threads=1, forbid_fallback=True))
    assert opened.placement.provider == "OpenVINOExecutionProvider"
    assert opened.placement.nodes == (("OpenVINOExecutionProvider", 1),)
    assert not opened.placement.fallbacks
    x = np.array([[-1, 2, -3, 4]], np.float32)
    assert (opened.session.run(None, {"x": x})[0] == np.maximum(x, 0)).all()


@pytest.mark.usefixtures("processor")
def test_a_second_session_registers_nothing_anew(graph: Path) -> None:
    for _ in range(2):
        openvino.open_session(graph, TARGET, SessionChoice(threads=1))
    assert openvino._register.cache_info().currsize == 1


@pytest.mark.usefixtures("processor")
def test_nodes_left_to_the_processor_are_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("CDist", ["r", "r"], ["d"], domain="com.microsoft", metric="euclidean"),
    ]
    nodes.append(helper.make_node("Add", ["r", "d"], ["y"]))
    path = write(tmp_path / "mixed.onnx", nodes)
    placement = openvino.open_session(path, TARGET, SessionChoice(threads=1)).placement
    assert placement.provider == "OpenVINOExecutionProvider"
    assert placement.fallbacks == ("1 of 3 nodes run on CPUExecutionProvider, not on OpenVINOExecutionProvider: CDist x1",)


@pytest.mark.usefixtures("processor")
def test_a_graph_of_which_it_takes_nothing_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("CDist", ["x", "x"], ["y"], domain="com.microsoft", metric="euclidean")
    path = write(tmp_path / "none.onnx", [node])
    with pytest.raises(
        DeviceError, match="OpenVINOExecutionProvider took no node of the graph, CPUExecutionProvider has them all"
    ):
        openvino.open_session(path, TARGET, SessionChoice(threads=1))
    with pytest.raises(DeviceError, match="refused the graph"):
        openvino.open_session(path, TARGET, SessionChoice(threads=1, forbid_fallback=True))


@pytest.mark.usefixtures("processor")
def test_a_device_that_is_not_there_is_named_with_those_that_are(graph: Path) -> None:
    with pytest.raises(DeviceError, match=r"OpenVINO has no device NPU here; it offers CPU; choose a target"):
        openvino.open_session(graph, TARGET.model_copy(update={"device": "NPU"}), SessionChoice(threads=1))


def test_a_machine_without_any_device_is_told_so(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_ep_devices", lambda: [])
    with pytest.raises(DeviceError, match="OpenVINO has no device CPU here; it offers none on this machine"):
        openvino.open_session(graph, TARGET, SessionChoice(threads=1))


def test_without_the_plugin_the_mend_is_named(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    openvino._register.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(importlib.util, "find_spec", lambda name: None if name == openvino.PACKAGE else real(name))
            with pytest.raises(DeviceError, match=r"not installed; install it: pip install 'appliance\[openvino\]'"):
                openvino.open_session(graph, TARGET, SessionChoice(threads=1))
    finally:
        _forget()


def test_a_plugin_that_does_not_load_is_reported_in_one_line(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    _forget()
    try:
        with monkeypatch.context() as patched:
            patched.setattr("onnxruntime_ep_openvino.get_library_path", lambda: str(broken))
            with pytest.raises(DeviceError, match="OpenVINO's plugin does not load: ") as caught:
                openvino.open_session(graph, TARGET, SessionChoice(threads=1))
        assert "\n" not in str(caught.value)
    finally:
        _forget()


def _forget() -> None:
    """Back to a process that has not asked for the plugin yet."""
    import onnxruntime

    if any(device.ep_name == openvino.PROVIDER for device in onnxruntime.get_ep_devices()):
        onnxruntime.unregister_execution_provider_library(openvino.LIBRARY)
    openvino._register.cache_clear()


@pytest.mark.usefixtures("processor")
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"no graph at all")
    with pytest.raises(BundleError, match=r"bad\.onnx: not a graph that onnxruntime reads"):
        openvino.open_session(path, TARGET, SessionChoice(threads=1))


def test_threads_go_where_the_plugin_looks_for_them() -> None:
    def config(device: str, threads: int, text: str) -> object:
        target = TARGET.model_copy(update={"options": {"load_config": text} if text else {}})
        return json.loads(openvino.provider_options(target, device, threads).get("load_config", "null"))

    assert config("CPU", 2, '{"CPU":{"A":"b"}}') == {"CPU": {"A": "b", "INFERENCE_NUM_THREADS": "2"}}
    assert config("CPU", 2, "") == {"CPU": {"INFERENCE_NUM_THREADS": "2"}}
    assert config("CPU", 2, '{"CPU":{"INFERENCE_NUM_THREADS":"7"}}') == {"CPU": {"INFERENCE_NUM_THREADS": "7"}}
    assert config("CPU", 0, "") is None
    assert config("NPU", 2, '{"NPU":{"A":"b"}}') == {"NPU": {"A": "b"}}


@pytest.mark.parametrize("text", ["{", "[]", '{"CPU":3}'])
def test_a_load_config_that_is_no_object_is_refused(text: str) -> None:
    target = TARGET.model_copy(update={"options": {"load_config": text}})
    with pytest.raises(TargetError, match='target "openvino": load_config is no JSON object of objects'):
        openvino.provider_options(target, "CPU", 2)


def test_the_built_in_target_asks_for_exact_arithmetic() -> None:
    """bf16 and regrouped activations would both pass for success, only less exact."""
    config = json.loads(TARGET.options["load_config"])["CPU"]
    assert config == {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
