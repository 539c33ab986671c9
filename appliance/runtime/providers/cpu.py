"""The CPU provider: onnxruntime's own kernels.

Knows: session options for a small box that holds one model for days. Does not know: what is inside the graph.
"""

from pathlib import Path

from appliance.errors import BundleError, DeviceError
from appliance.runtime import huge_pages
from appliance.runtime.providers import SessionChoice
from appliance.runtime.session import RECORD_PLACEMENT, OpenSession, read_placement
from appliance.targets.capabilities import Target

PROVIDER = "CPUExecutionProvider"


def open_session(path: Path, target: Target, choice: SessionChoice) -> OpenSession:
    """See `appliance.runtime.providers.Provider.open_session`. The target's options are session config entries."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, InvalidGraph, InvalidProtobuf, NoSuchFile

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = choice.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    entries = {RECORD_PLACEMENT: "1"} | target.options | dict(choice.overrides)
    # `choice.forbid_fallback` asks nothing here: this is what others fall back to, and onnxruntime refuses the combination.
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    try:
        with huge_pages.under_new_memory():
            session = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDER])
    except (InvalidArgument, InvalidGraph, InvalidProtobuf, NoSuchFile) as failure:
        raise BundleError(f"{path}: not a graph that onnxruntime reads: {_line(failure)}", "build the bundle again") from None
    except Exception as failure:
        raise DeviceError(f"{path}: {PROVIDER} refused the graph: {_line(failure)}", "build it for another target") from failure
    return OpenSession(session, read_placement(session, PROVIDER))


def _line(failure: Exception) -> str:
    return " ".join(str(failure).split())[:300]
