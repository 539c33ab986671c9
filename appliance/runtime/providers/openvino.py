"""OpenVINO's plugin for onnxruntime: Intel processors, GPUs and NPUs (extra: appliance[openvino]).

Knows: how the plugin is registered and one of its devices chosen. Does not know: what is inside the graph.
Source: onnxruntime's plugin providers, `register_execution_provider_library`, `get_ep_devices`, `add_provider_for_devices`.

The device is chosen by name. The automatic policies of onnxruntime may choose another plugin's, and naming a plugin in
`providers=[...]` gives the CPU provider without a word.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import BundleError, DeviceError, TargetError
from appliance.runtime.providers import SessionChoice
from appliance.runtime.session import FORBID_FALLBACK, RECORD_PLACEMENT, OpenSession, read_placement
from appliance.targets.capabilities import Target

if TYPE_CHECKING:
    import onnxruntime

PROVIDER = "OpenVINOExecutionProvider"
PACKAGE = "onnxruntime_ep_openvino"
LIBRARY = "appliance.openvino"
"""Name under which the library is registered: once a process, whoever asks."""

_REGISTERING = threading.Lock()


def open_session(path: Path, target: Target, choice: SessionChoice) -> OpenSession:
    """See `appliance.runtime.providers.Provider.open_session`.

    A `DeviceError` says so when the plugin is not installed, when it has no such device, or when no node of the graph
    was taken. Nodes that it left to the processor are named in the placement.
    """
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph, InvalidProtobuf, NoSuchFile

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = choice.threads  # for nodes that the plugin leaves to onnxruntime
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    entries = {RECORD_PLACEMENT: "1"} | dict(choice.overrides)
    if choice.forbid_fallback:
        entries[FORBID_FALLBACK] = "1"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    device = target.device or "CPU"
    options.add_provider_for_devices([_device(device)], provider_options(target, device, choice.threads))
    try:
        session = onnxruntime.InferenceSession(str(path), options)
    except (InvalidGraph, InvalidProtobuf, NoSuchFile) as failure:
        raise BundleError(f"{path}: not a graph that onnxruntime reads: {_line(failure)}", "build the bundle again") from None
    except Exception as failure:
        raise DeviceError(f"{path}: {PROVIDER} refused the graph: {_line(failure)}", "build it for another target") from failure
    placement = read_placement(session, PROVIDER)
    if placement.provider != PROVIDER:
        raise DeviceError(
            f"{path}: {PROVIDER} took no node of the graph, {placement.provider} has them all", "build it for another target"
        )
    return OpenSession(session, placement)


def provider_options(target: Target, device: str, threads: int) -> dict[str, str]:
    """The target's options, with the number of threads put where the plugin looks for it.

    Raises:
        TargetError: `load_config` is no JSON object of objects.
    """
    options = dict(target.options)
    try:
        config = json.loads(options.get("load_config", "{}"))
        if device == "CPU" and threads:
            config[device] = {"INFERENCE_NUM_THREADS": str(threads)} | config.get(device, {})
    except (ValueError, TypeError, AttributeError) as failure:
        raise TargetError(f'target "{target.name}": load_config is no JSON object of objects: {failure}') from None
    if config:
        options["load_config"] = json.dumps(config)
    return options


def _device(name: str) -> onnxruntime.OrtEpDevice:
    """The plugin's device that OpenVINO calls `name` (CPU, GPU, GPU.1, NPU)."""
    import onnxruntime

    with _REGISTERING:
        _register()
    found = {
        device.ep_metadata.get("ov_device", ""): device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER
    }
    if name not in found:
        have = f"it offers {', '.join(sorted(found))}" if found else "it offers none on this machine: it lists Intel's only"
        raise DeviceError(f"OpenVINO has no device {name} here; {have}", "choose a target whose device is there, e.g. cpu-static")
    return found[name]


@functools.cache
def _register() -> None:
    """Load the plugin; a second registration in one process would be an error."""
    import onnxruntime

    if importlib.util.find_spec(PACKAGE) is None:
        raise DeviceError("OpenVINO's plugin for onnxruntime is not installed", "install it: pip install 'appliance[openvino]'")
    import onnxruntime_ep_openvino

    try:
        onnxruntime.register_execution_provider_library(LIBRARY, onnxruntime_ep_openvino.get_library_path())
    except Exception as failure:
        raise DeviceError(
            f"OpenVINO's plugin does not load: {_line(failure)}",
            "install it again: pip install --force-reinstall 'appliance[openvino]'",
        ) from failure


def _line(failure: Exception) -> str:
    return " ".join(str(failure).split())[:300]
