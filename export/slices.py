"""Opens parts of a canonical graph in onnxruntime: the `Opener` that `quant.layers` asks for.

Knows: the float reference target, how a part's weights reach a session. Does not know: how a graph is cut, what a part is
run for; how decided matrices are emitted (a function that the composer hands in does that).
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.targets.capabilities import Target
from export.lower import lower
from export.parity import reference_target
from export.save import save_all

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
Emit = Callable[[ir.Model, Target], None]


def opener(
    context: int, folder: Path, emit: Emit | None = None, *, target: Target | None = None, threads: int = 0
) -> Callable[[ir.Model], Run]:
    """What opens canonical graphs of parts, or of whole models, for sequences of up to `context` tokens.

    Args:
        folder: for the weights of a part on their way to the session; what is put there is removed at once.
        emit: writes decided matrices (`quant.emit.emit`); needed only where there are some. They become what `target` says:
            MatMulNBits with int8 activations per block for the reference target.
        target: None = plain ONNX operators, dynamic shapes, weights that stayed float as float32 MatMul.
        threads: 0 = all cores.
    """
    plain = target or reference_target()

    def opened(model: ir.Model) -> Run:
        lowered = lower(lambda: model, plain, context, context).graphs["model"]
        if emit is not None:
            emit(lowered, plain)
        return _session(lowered, folder, plain, threads)

    return opened


def reference_for(target: Target) -> Target:
    """The float reference target whose decided matrices are emitted as for `target`, and run under its session's options."""
    options = {key: value for key, value in target.options.items() if key.startswith("session.")}
    weights = target.weights.model_copy(update={"elements": ("int",)})  # what onnxruntime cannot run, a stand-in does
    return reference_target().model_copy(update={"weights": weights, "options": options})


def _session(model: ir.Model, folder: Path, target: Target, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for key, value in target.options.items():
        options.add_session_config_entry(key, value)
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Parts come and go: memory that a session keeps for its next run is memory that the next part lacks.
    options.enable_cpu_mem_arena = False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="part-", dir=folder) as place:
        path = save_all({"model": model}, Path(place), "weights.bin")["model"]
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    takes = {value.name for value in session.get_inputs()} | {value.name for value in session.get_overridable_initializers()}
    gives = [value.name for value in session.get_outputs()]

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = session.run(gives, {name: array for name, array in feeds.items() if name in takes})
        return dict(zip(gives, found, strict=True))

    return run
