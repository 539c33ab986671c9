"""The composer: one checkpoint, one scheme, any number of targets -> one bundle.

Knows: the order of the stages and what each hands to the next. With `export.stages`, the only code that may import both
`export` and `quant`. Does not know: how any stage does its work, or how progress is shown.

    checkpoint -> canonical graph -> changes -> calibrate -> decide (once) -+-> lower -> emit -> save   for the first target
                                                                            +-> lower -> emit -> save   for the next ...
    tokenizer, template, generation defaults -> run and measure what was written -> record, report -> manifest last -> one rename
"""

import fcntl
import importlib.metadata
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from appliance.bundle import store
from appliance.bundle.manifest import FORMAT, Manifest, Provenance
from appliance.errors import BadInput, LossError, TargetError, Unavailable
from appliance.targets.capabilities import Target
from export import arch
from export.checkpoint import open_checkpoint
from export.checkpoint.source import Checkpoint
from export.stages.calibration import calibrated, needs_calibration
from export.stages.evaluation import write_evidence
from export.stages.exceptions import excepted
from export.stages.job import BuildRequest, Job, Progress
from export.stages.keep import keep_quantized
from export.stages.kv import check_targets, kv_scaled
from export.stages.ranges import ranged
from export.stages.reshaping import reshaped
from export.stages.variants import write_variants
from export.tokenizer import write_tokenizer
from quant import record

__all__ = ["BuildRequest", "Progress", "build", "default_scheme"]

EMBEDDER_SCHEME = "w8a8"
"""What embedding models are built with unless another scheme is named: they are small, and their vectors are compared with
each other for as long as an index lives. MiniLM's lowest cosine to the float model over twenty texts: 0.998; with w4a8, 0.889."""


def build(request: BuildRequest, progress: Progress) -> store.Bundle:
    """Build the bundle; see the picture above.

    Interrupted (KeyboardInterrupt), or when a calibrated scheme lost too much, it leaves only `request.work`, from which the
    same command goes on; when it fails otherwise it leaves nothing.

    Raises:
        CheckpointError: the source is missing, damaged, unsafe, or of an unknown architecture.
        TargetError: the scheme cannot be held by a target.
        StorageError: the disk is full.
        LossError: what came out lost more than the scheme may.
    """
    if not request.targets:
        raise TargetError("no target was named", "name one: --target cpu")
    opened = _with_context(arch.open_model(open_checkpoint(request.source)), request.context)
    if opened.task == "embed" and (static := [target.name for target in request.targets if target.flags.form == "static"]):
        raise TargetError(f"{static[0]} takes static graphs, and embedding models are built in the dynamic form", "--target cpu")
    check_targets(request, opened.task)
    with _alone(request), store.writing(request.destination) as writer:
        try:
            bundle = _write(request, opened, writer, progress)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            # Minutes of calibration are kept for the same build with --accept-loss.
            if not (isinstance(failure, LossError) and needs_calibration(request.scheme)):
                request.clear()
            raise
        request.clear()
    return bundle


@contextmanager
def _alone(request: BuildRequest) -> Iterator[None]:
    """Keep other builds out of the work folder, where things lie half-done, and out of the destination with it."""
    work = request.work
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / ".lock", "w")  # noqa: SIM115 - the block below closes it
    except OSError as failure:
        raise store.unwritable(request.kept or request.destination, failure) from failure
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"another build works in {work}", "wait for it, or choose another --output and --work") from None
        try:
            yield
        finally:
            if work.is_dir() and [path.name for path in work.iterdir()] == [".lock"]:
                shutil.rmtree(work, ignore_errors=True)


def default_scheme(source: Path, target: Target) -> str:
    """The scheme for a checkpoint when none is named: by what its model is for, else the target's own."""
    return EMBEDDER_SCHEME if arch.open_model(open_checkpoint(source)).task == "embed" else target.default_scheme


def _with_context(opened: arch.Opened, context: int) -> arch.Opened:
    made_for = opened.config.context_length
    if context > made_for:
        raise BadInput(f"a context of {context} tokens was asked for, the model was made for {made_for}", "ask for fewer")
    return replace(opened, config=replace(opened.config, context_length=context)) if context else opened


def _write(request: BuildRequest, opened: arch.Opened, writer: store.BundleWriter, progress: Progress) -> store.Bundle:
    """The stages, one a line: each takes the job and gives it back with what it found out."""
    tokenizer = write_tokenizer(opened.checkpoint, writer)
    hashes = {path.name: store.sha256(path) for path in opened.checkpoint.files()}
    job = Job(request, opened, writer, progress, hashes, tokenizer, request.scheme)
    job = reshaped(job)
    job = excepted(job)
    job = keep_quantized(job)
    job = calibrated(job)
    job = kv_scaled(job)
    job = ranged(job)
    variants, decisions = write_variants(job)
    first = request.targets[0]
    decision, scales = decisions[first.name], first.weights.scale_dtype
    manifest = Manifest(
        format=FORMAT,
        name=request.name,
        task=opened.task,
        architecture=opened.model_type,
        parameters=decision.parameters,
        context_length=opened.config.context_length,
        vocab_size=opened.config.vocab_size,
        hidden_size=opened.config.hidden_size,
        scheme=record.summary(decision, scales),
        tokenizer=tokenizer.info,
        chat_template=tokenizer.chat_template,
        generation=tokenizer.generation,
        variants=variants,
        files={},
        provenance=_provenance(request, opened.checkpoint, hashes),
    )
    write_evidence(job, manifest, decision, {**record.record(decision, scales), **(job.evidence or {})})
    return writer.finish(manifest)


def _provenance(request: BuildRequest, checkpoint: Checkpoint, hashes: dict[str, str]) -> Provenance:
    return Provenance(
        source=checkpoint.path.name,
        source_sha256=hashes,
        license=checkpoint.license if checkpoint.license != "unknown" else request.license or "unknown",
        command=request.command,
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _versions() -> dict[str, str]:
    packages = ("appliance", "onnx", "onnx-ir", "onnxruntime", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
