"""A float ONNX decoder of another exporter, quantized: one file in, one file with its weights and a record out.

Knows: the order of the steps. Does not know: how roles are found (`quant.foreign.infer`), forms, what a person is shown.

    model.onnx -> roles -> canonical nodes -> decide -> emit -> what stays float as it was -> model.onnx, .data, .record.json
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from appliance.bundle.vocabulary import PARTS, ROLE
from appliance.errors import BadInput, StorageError, TargetError
from appliance.targets.capabilities import Target
from quant import decide, emit, record, solvers
from quant.foreign.adopt import Adopted, adopt, restore
from quant.foreign.infer import Inference, Inferred, infer
from quant.scheme import Scheme

SOLVER_THREADS = 2
ALIGNMENT = 4096
"""Offsets of tensors: a page, so that onnxruntime maps them."""

Progress = Callable[[str, int, int], None]
"""Called with the stage ("quantize", "write"), how much of it is done and how much there is, as it goes."""


@dataclass(frozen=True)
class Request:
    """What to quantize.

    Attributes:
        source: the .onnx file; its external data lies beside it.
        target: whose matrix operator holds the result.
        output: the new .onnx file; `.data` and `.record.json` get the same stem.
        leave_float: leave matrices whose role cannot be told as they are, instead of refusing the model.
        command: the command line that makes this file again.
    """

    source: Path
    scheme: Scheme
    target: Target
    output: Path
    leave_float: bool = False
    command: str = ""

    @property
    def data(self) -> Path:
        """File of the weights."""
        return self.output.with_name(f"{self.output.name}.data")

    @property
    def record(self) -> Path:
        """What was done."""
        return self.output.with_suffix(".record.json")

    @property
    def work(self) -> Path:
        """Folder of the integers, from which an interrupted run goes on."""
        return self.output.with_name(f".{self.output.name}.work")


@dataclass(frozen=True)
class Quantized:
    """What came of it: what was inferred, and the record as it stands in the file."""

    inference: Inference
    record: Mapping[str, Any]


def open_graph(source: Path) -> ir.Model:
    """Read a graph; its weights stay on disk. Functions are written out, constants become initializers.

    Raises:
        BadInput: no such file, no ONNX, or the file of its external data is missing.
    """
    from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

    if not source.is_file():
        raise BadInput(f"{source} is no file", "name a model.onnx")
    try:
        model = ir.load(source)
    except Exception as failure:
        raise BadInput(f"{source} cannot be read as ONNX: {type(failure).__name__}", "check the file") from failure
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            raise BadInput(f"{tensor.path}, which holds the weights of {source.name}, is missing", "put it beside the model")
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    model.graph.sort()
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        if value.dtype == ir.DataType.FLOAT:  # weights that an old exporter lists as inputs too
            model.graph.inputs.remove(value)
    return model


def refuse(inference: Inference) -> None:
    """`BadInput` naming what has no role, if anything has none."""
    unknown = inference.unknown
    if unknown:
        first = unknown[0]
        what = f"weight {first.name} of {first.node}" if first.name else first.node
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadInput(f"cannot tell what {what} is for: {first.why}{more}", "leave such weights float: --leave-float")


def quantize(request: Request, progress: Progress) -> Quantized:
    """Quantize the file; see the picture above. Interrupted, it leaves only `request.work`.

    Raises:
        BadInput: the graph cannot be read or understood; the node is named.
        TargetError: the scheme needs calibration, or cannot be held.
        StorageError: the disk is full.
    """
    _check(request)
    model = open_graph(request.source)
    inference = infer(model)
    if not request.leave_float:
        refuse(inference)
    adopted = adopt(model, inference, lambda roles: _most_precise(roles, request))
    request.work.mkdir(parents=True, exist_ok=True)
    decision = decide.decide(
        model,
        request.scheme,
        request.target,
        request.work,
        lambda done, total, _: progress("quantize", done, total),
        threads=SOLVER_THREADS,
    )
    emit.emit(model, request.target)
    restore(model, adopted)
    _tag_parts(model.graph)
    made = _record(request, inference, adopted, decision)
    written = _write(model, request, made, progress)
    shutil.rmtree(request.work)
    return Quantized(inference, written)


def _check(request: Request) -> None:
    scheme = request.scheme
    if solvers.find(scheme.solver).NEEDS_MOMENTS or scheme.budget is not None:
        raise TargetError(
            f"scheme {scheme.name} is calibrated layer by layer, which needs the checkpoint that the graph came from",
            "choose w4a8, w4a8-rtn or w8a8, or build the checkpoint: appliance build",
        )
    if request.output.exists() and request.output.samefile(request.source):
        raise BadInput(f"{request.output} is the model itself", "name another file: --output FILE")


def _most_precise(roles: tuple[str, ...], request: Request) -> str:
    """The role of a packed matrix whose form is the finest: no part may get less than its scheme says."""

    def fineness(role: str) -> tuple[int, int]:
        form = request.scheme.form(role, request.target.role_overrides)
        return form.bits or 32, -form.group

    return max(roles, key=fineness)


def _tag_parts(graph: ir.Graph) -> None:
    """A packed weight says whose its rows are, and no single role."""
    for value in graph.initializers.values():
        if PARTS in value.metadata_props:
            value.metadata_props.pop(ROLE, None)


def _record(request: Request, inference: Inference, adopted: Adopted, decision: decide.Decision) -> dict[str, Any]:
    """The weights' part as a bundle's record has it, and what was inferred."""
    matrices = tuple(
        replace(one, roles=adopted.matrices[one.name].roles if len(one.roles) == 1 else one.roles) for one in decision.matrices
    )
    return {
        **record.record(replace(decision, matrices=matrices), request.target.weights.scale_dtype),
        "inferred": [told(one) for one in inference.matrices],
        "not_understood": [{"weight": one.name, "node": one.node, "why": one.why} for one in inference.unknown],
        "head_is_a_copy_of_the_embedding": adopted.copied,
        "source": {"file": request.source.name, "sha256": _sha256(request.source)},
        "command": request.command,
    }


def told(one: Inferred) -> dict[str, Any]:
    matrix = one.matrix
    return {
        "weight": matrix.name,
        "roles": list(one.roles),
        "shape": list(matrix.shape),
        "layer": one.layer,
        "stream": one.stream,
        "because": one.because,
        "rows": {role: list(rows) for role, rows in one.rows.items()} if one.rows else None,
    }


def _write(model: ir.Model, request: Request, made: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """All files beside their places first; the graph takes its place last."""
    partial = request.output.with_name(f".{request.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        graph = partial / request.output.name
        ir.save(
            model, graph, external_data=request.data.name, size_threshold_bytes=1024, alignment=ALIGNMENT, align_threshold=0,
            callback=lambda _, told: progress("write", told.index + 1, told.total),
        )  # fmt: skip
        files = [path for path in (partial / request.data.name, graph) if path.exists()]
        made["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
        (partial / request.record.name).write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for path in (partial / request.record.name, *files):
            os.replace(path, request.output.with_name(path.name))
    except OSError as failure:
        raise StorageError(f"{request.output} cannot be written: {failure.strerror}", "free some space") from failure
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
