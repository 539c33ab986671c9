"""The composer: one checkpoint, one scheme, any number of targets -> one bundle.

Knows: the order of the stages and what each hands to the next. The one file that may import both `export` and `quant`.
Does not know: how any stage does its work, or how progress is shown.

    checkpoint -> canonical graph -> decide (once) -+-> lower -> emit -> save   for the first target
                                                    +-> lower -> emit -> save   for the next ...
    tokenizer, template, generation defaults, record -> manifest last -> one rename
"""

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import onnx_ir as ir

from appliance.bundle import store
from appliance.bundle.manifest import FORMAT, Manifest, Provenance, Variant
from appliance.errors import BadInput, TargetError
from appliance.targets.capabilities import Target
from export import arch, lower, save
from export.checkpoint import open_checkpoint
from export.checkpoint.source import Checkpoint
from export.tokenizer import write_tokenizer
from quant import decide, emit, record
from quant.scheme import Scheme

EMBEDDER_SCHEME = "w8a8"
"""What embedding models are built with unless another scheme is named: they are small, and their vectors are compared with
each other for as long as an index lives. MiniLM's lowest cosine to the float model over twenty texts: 0.998; with w4a8, 0.889."""

Progress = Callable[[str, int, int], None]
"""Called with the stage ("quantize", "write"), how much of it is done and how much there is, as it goes."""


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        source: checkpoint file or folder.
        targets: one variant is built for each.
        scheme: how weights and activations are kept.
        destination: folder of the bundle; an older bundle there is replaced when the new one is whole.
        name: the model's id on the endpoint.
        context: tokens of context, 0 = as many as the model was made for.
        command: the command line that makes this bundle again.
        license: the one it was pulled under, for a checkpoint that states none itself; "" = unknown.
    """

    source: Path
    targets: tuple[Target, ...]
    scheme: Scheme
    destination: Path
    name: str
    context: int
    command: str
    license: str = ""

    @property
    def work(self) -> Path:
        """Folder of the decisions that an interrupted build left for the next one."""
        return self.destination.parent / f".{self.destination.name}.work"


def build(request: BuildRequest, progress: Progress) -> store.Bundle:
    """Build the bundle; see the picture above.

    Interrupted (KeyboardInterrupt) it leaves only `request.work`, from which the same command goes on; when it fails
    it leaves nothing.

    Raises:
        CheckpointError: the source is missing, damaged, unsafe, or of an unknown architecture.
        TargetError: the scheme cannot be held by a target.
        StorageError: the disk is full.
    """
    if not request.targets:
        raise TargetError("no target was named", "name one: --target cpu")
    opened = _with_context(arch.open_model(open_checkpoint(request.source)), request.context)
    if opened.task == "embed" and (static := [target.name for target in request.targets if target.flags.form == "static"]):
        raise TargetError(f"{static[0]} takes static graphs, and embedding models are built in the dynamic form", "--target cpu")
    with store.writing(request.destination) as writer:
        try:
            bundle = _write(request, opened, writer, progress)
        except KeyboardInterrupt:
            raise
        except BaseException:
            shutil.rmtree(request.work, ignore_errors=True)
            raise
    shutil.rmtree(request.work, ignore_errors=True)
    return bundle


def default_scheme(source: Path, target: Target) -> str:
    """The scheme for a checkpoint when none is named: by what its model is for, else the target's own."""
    return EMBEDDER_SCHEME if arch.open_model(open_checkpoint(source)).task == "embed" else target.default_scheme


def _with_context(opened: arch.Opened, context: int) -> arch.Opened:
    made_for = opened.config.context_length
    if context > made_for:
        raise BadInput(f"a context of {context} tokens was asked for, the model was made for {made_for}", "ask for fewer")
    return replace(opened, config=replace(opened.config, context_length=context)) if context else opened


def _write(request: BuildRequest, opened: arch.Opened, writer: store.BundleWriter, progress: Progress) -> store.Bundle:
    tokenizer = write_tokenizer(opened.checkpoint, writer)
    hashes = {path.name: store.sha256(path) for path in opened.checkpoint.files()}
    variants, decisions = {}, {}
    for target in request.targets:
        variants[target.name], decisions[target.name] = _write_variant(request, opened, target, hashes, writer, progress)
    first = request.targets[0]
    decision, scales = decisions[first.name], first.weights.scale_dtype
    evidence = {**record.record(decision, scales), "command": request.command}
    writer.path(store.RECORD).write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n", encoding="utf-8")
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
    return writer.finish(manifest)


def _write_variant(
    request: BuildRequest,
    opened: arch.Opened,
    target: Target,
    hashes: dict[str, str],
    writer: store.BundleWriter,
    progress: Progress,
) -> tuple[Variant, decide.Decision]:
    """Lower, emit and save the graphs of one target; every graph is made from the same decision."""
    decisions = []
    source = " ".join(f"{name}={digest}" for name, digest in sorted(hashes.items()))

    def decided() -> ir.Model:
        model = opened.build()
        decisions.append(
            decide.decide(
                model,
                request.scheme,
                target,
                request.work,
                lambda done, total, _: progress("quantize", done, total),
                source=source,
            )
        )
        return model

    context = min(target.context or opened.config.context_length, opened.config.context_length)
    lowered = lower.lower(decided, target, context, target.chunk)
    for model in lowered.graphs.values():
        emit.emit(model, target)
    folder = writer.path(f"{target.name}/weights.bin").parent
    save.save_all(lowered.graphs, folder, "weights.bin", lambda _, done, total: progress("write", done + 1, total))
    variant = Variant(
        target=target.name,
        form=target.flags.form,
        graphs={kind: f"{target.name}/{kind}.onnx" for kind in lowered.graphs},
        chunk=min(target.chunk, lowered.context),
        context=lowered.context,
        activation=target.flags.activations[0],
        state=lowered.state,
    )
    return variant, decisions[0]


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
