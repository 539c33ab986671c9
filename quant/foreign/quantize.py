"""A float ONNX decoder of another exporter, quantized: one file in, one file with its weights and a record out.

Knows: the order of the steps. Does not know: how roles are found (`quant.foreign.infer`), forms, what a person is shown.

    model.onnx -> float32 -> roles -> canonical nodes -> decide -> emit -> what stays float as it was -> files beside their places
               -> read back and compared with what was decided -> run beside the float file -> .record.json -> their places
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from appliance.bundle.vocabulary import PARTS, ROLE
from appliance.errors import BadInput, BundleError, LossError, StorageError, TargetError
from appliance.targets.capabilities import Target
from quant import asked, decide, emit, record, shipped, solvers, structure
from quant.foreign.adopt import Adopted, adopt, restore
from quant.foreign.infer import Inference, Inferred, infer
from quant.foreign.loss import Facts, facts, measure
from quant.foreign.widen import NARROW, Widened, widen
from quant.graph import sizes
from quant.scheme import TABLES, Scheme

SOLVER_THREADS = 2
ALIGNMENT = 4096
"""Offsets of tensors: a page, so that onnxruntime maps them."""

Progress = Callable[[str, int, int], None]
"""Called with the stage ("quantize", "write", "measure"), how much of it is done and how much there is, as it goes."""


@dataclass(frozen=True)
class Request:
    """What to quantize.

    Attributes:
        source: the .onnx file; its external data lies beside it.
        target: whose matrix operator holds the result.
        output: the new .onnx file; `.data` and `.record.json` get the same stem.
        leave_float: leave matrices whose role cannot be told as they are, instead of refusing the model.
        exceptions: that a person asked for, by name of weight.
        command: the command line that makes this file again.
    """

    source: Path
    scheme: Scheme
    target: Target
    output: Path
    leave_float: bool = False
    exceptions: tuple[asked.Asked, ...] = ()
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
        if value.dtype == ir.DataType.FLOAT or value.dtype in NARROW:  # weights that an old exporter lists as inputs too
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
    """Quantize the file; see the picture above. Interrupted, it leaves only `request.work`; refused at the end, nothing.

    Raises:
        BadInput: the graph cannot be read or understood, or needs a type narrower than float32; the node is named.
        TargetError: the scheme needs calibration, or cannot be held.
        StorageError: the disk is full.
        BundleError: the written file does not hold what was decided.
        LossError: it does not run, or its logits are no numbers.
    """
    _check(request)
    model = open_graph(request.source)
    source = hashes(model, request.source)
    widened = widen(model)
    inference = infer(model)
    if not request.leave_float:
        refuse(inference)
    known = facts(inference, _places(model.graph, inference))
    request.work.mkdir(parents=True, exist_ok=True)
    adopted = adopt(model, inference, lambda roles: _most_precise(roles, request))
    decision = decide.decide(
        model,
        asked.applied(request.exceptions, model, request.scheme, request.target),
        request.target,
        request.work,
        lambda done, total, _: progress("quantize", done, total),
        threads=SOLVER_THREADS,
    )
    wanted = structure.expected(model)
    emit.emit(model, request.target)
    restore(model, adopted)
    _tag_parts(model.graph)
    made = {**_record(request, inference, adopted, decision), "source": source, "read_as_float32": widened.told()}

    def tell(graph: Path) -> dict[str, Any]:
        _compare(graph, model.graph, wanted, decision)
        return {
            **_sizes(graph, request.target, decision),
            "loss": _loss(_reference(request, widened, graph.parent), graph, known, progress),
        }

    try:
        written = _write(model, request, made, tell, progress)
    except (BundleError, LossError):
        shutil.rmtree(request.work)  # what it holds may be what was wrong
        raise
    shutil.rmtree(request.work)
    return Quantized(inference, written)


def hashes(model: ir.Model, source: Path) -> dict[str, Any]:
    """The graph's file and those of its weights, by the names that the graph gives them."""
    tensors = [value.const_value for graph in (model.graph, *model.graph.subgraphs()) for value in graph.initializers.values()]
    outside = {_told(one): Path(one.path) for one in tensors if isinstance(one, ir.ExternalTensor)}
    weights = {name: _sha256(path) for name, path in sorted(outside.items())}
    return {"file": source.name, "sha256": _sha256(source), "weights": weights}


def _told(tensor: ir.ExternalTensor) -> str:
    """Where its numbers lie, as seen from the graph."""
    location = Path(str(tensor.location))
    return location.name if location.is_absolute() else location.as_posix()


def _places(graph: ir.Graph, inference: Inference) -> int | None:
    """How many positions the model has rows for in tables of positions or angles; None when it has no such table."""
    tensors = [graph.initializers[name].const_value for name, role in inference.others.items() if role in ("position", "rope")]
    shapes = [sizes(tensor) for tensor in tensors if tensor is not None]
    return min((shape[0] for shape in shapes if len(shape) == 2 and shape[0] > 1), default=None)


def _compare(path: Path, graph: ir.Graph, wanted: structure.Expected, decision: decide.Decision) -> None:
    """`quant.structure.check` of the written file: what was never decided is accounted for as float, under the names it has."""
    floats = {name.removesuffix(".turned"): tags for name, tags in wanted.floats.items()}
    kept = {one.name.removesuffix(".turned") for one in decision.kept}
    rest = {name: value.metadata_props for name, value in graph.initializers.items() if name not in wanted.decided}
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    held = {name: one for name, one in tensors.items() if one is not None and one.dtype.is_floating_point()}
    beside = replace(wanted.rest, floats=held, roles=dict.fromkeys(held, ""))
    structure.check([path], structure.Expected(wanted.decided, {**rest, **floats}, beside), {*rest, *kept})


def _sizes(graph: Path, target: Target, decision: decide.Decision) -> dict[str, Any]:
    """Counted in the file, as a bundle's record has it."""
    tables = sum(one.parameters for one in decision.matrices if set(one.roles) & set(TABLES))
    tables += sum(one.parameters for one in decision.kept if one.role in TABLES)
    found = shipped.size([graph], decision.parameters, tables)
    return {
        "sizes": {target.name: found.model_dump()},
        "bits_per_weight": found.bits_per_weight,
        "bits_per_body_weight": found.bits_per_body_weight,
    }


def _reference(request: Request, widened: Widened, folder: Path) -> Path:
    """The file whose logits are the measure: the source, or what it is in float32, put into `folder`, where that alone runs."""
    if widened.runs_here:
        return request.source
    model, path = open_graph(request.source), folder / "float32.onnx"
    widen(model)
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=1024)
    return path


def _loss(reference: Path, graph: Path, known: Facts, progress: Progress) -> dict[str, Any]:
    return measure(reference, graph, known, SOLVER_THREADS, lambda done, total: progress("measure", done, total))


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
        "command": request.command,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    packages = ("appliance", "onnx", "onnx-ir", "onnxruntime", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


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


def _write(
    model: ir.Model, request: Request, made: dict[str, Any], tell: Callable[[Path], dict[str, Any]], progress: Progress
) -> dict[str, Any]:
    """All files beside their places first, where `tell` judges the graph and adds to the record; the graph goes last."""
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
        made = {**made, **tell(graph)}
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
