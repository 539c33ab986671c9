"""The evidence: what a bundle lost, measured on its files before the manifest makes them one, and on what they were made from.

Knows: what is handed to the measurements, where record and report are written, what is refused. Does not know: how anything is
measured (`quant.verify`), or which loss is too much (each scheme's band).
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from appliance.bundle import store
from appliance.bundle.manifest import FileEntry, Manifest
from appliance.bundle.record import EvaluationRecord, Record, SizeRecord, SourceRecord, TokenizerRecord, VerdictRecord
from appliance.errors import BundleError, LossError
from appliance.report import page
from appliance.runtime.tokenizer import load_tokenizer
from appliance.strict import read
from appliance.targets.capabilities import Target
from export import slices, tokenizer_parity
from export.arch import Opened
from export.stages.job import Job
from export.stages.variants import decided_model
from quant import band, emit, shipped, texts
from quant.decide import Decision
from quant.embedders import verify_embedder
from quant.layers import Opener, cut
from quant.scheme import TABLES
from quant.side_by_side import Models
from quant.verify import Effort, Subject, verify
from quant.windows import LENGTH

PASSAGES = 32
"""Of each text, for embedding models, for every two windows that a language model would get."""

PIECE = 40_000
"""Characters of each text that the tokenizers are compared on."""


def write_evidence(job: Job, manifest: Manifest, decision: Decision, weights: Mapping[str, Any]) -> None:
    """Measure what was written, then write record.json and report.html.

    Args:
        manifest: without its files.
        decision: of the first target.
        weights: what `quant.record` tells of the decision, and what other stages found out.

    Raises:
        LossError: the loss is outside the scheme's band, and nobody said that it may be.
    """
    files = _files(job.writer.folder)
    bundle = store.Bundle(job.writer.folder, manifest.model_copy(update={"files": files}))
    sizes = sizes_of(bundle, decision)
    first = sizes[job.request.targets[0].name]
    evaluation = _measure(job, bundle)
    told = read(Record, {**weights, "command": job.request.command}, "the record", BundleError)
    told = told.measured(evaluation).model_copy(
        update={
            "sizes": sizes,
            "bits_per_weight": first.bits_per_weight,
            "bits_per_body_weight": first.bits_per_body_weight,
            "files": {name: entry.sha256 for name, entry in files.items()},
            "source": SourceRecord(name=manifest.provenance.source, files=dict(manifest.provenance.source_sha256)),
            "versions": dict(manifest.provenance.versions),
        }
    )
    complaint = band.complaint(job.scheme.band, told.matrices, evaluation)
    if complaint and not job.request.accept_loss:
        raise LossError(f"{manifest.name} is broken: {complaint}", "build it with another scheme, or all the same: --accept-loss")
    verdict = VerdictRecord(band=job.scheme.band.limits(), complaint=complaint, accepted=bool(complaint))
    told = told.model_copy(update={"verdict": verdict})
    text = json.dumps(told.model_dump(exclude_none=False), indent=1, sort_keys=True, allow_nan=False)
    job.writer.path(store.RECORD).write_text(text + "\n", encoding="utf-8")
    job.writer.path(page.FILE).write_text(page.page(manifest, told), encoding="utf-8")


def sizes_of(bundle: store.Bundle, decision: Decision) -> dict[str, SizeRecord]:
    """By target, counted in its graph files."""
    tables = sum(matrix.parameters for matrix in decision.matrices if set(matrix.roles) & set(TABLES))
    tables += sum(one.parameters for one in decision.kept if one.role in TABLES)
    return {
        name: shipped.size([bundle.path / graph for graph in variant.graphs.values()], decision.parameters, tables)
        for name, variant in bundle.manifest.variants.items()
    }


def parity_of(opened: Opened, bundle: store.Bundle, contents: Iterable[str]) -> TokenizerRecord:
    """The bundle's tokenizer on the texts, against another reader of the checkpoint's."""
    if opened.task == "embed":
        from appliance.bundle.tokenizer_file import parse_json, read_bytes

        path = bundle.file(bundle.manifest.tokenizer.file)
        whole = parse_json(read_bytes(path, BundleError, "build the bundle again"), path, BundleError, "build the bundle again")
        whole.encode_special_tokens = True
        return tokenizer_parity.compare(
            opened.checkpoint, lambda text: list(whole.encode(text, add_special_tokens=False).ids), list(contents)
        )
    tokenizer = load_tokenizer(bundle)
    return tokenizer_parity.compare(
        opened.checkpoint, lambda text: tokenizer.encode(text, special=False, bos=False), list(contents)
    )


def said_of(name: str, folder: Path) -> str:
    """How a command names a bundle, without a path of this machine.

    Args:
        name: its model's id.
        folder: of the bundle, absolute.

    Returns:
        The id where the folder ends as the id reads: it is found among the installed models, or where it lies elsewhere, from the
        folder that it lies in. Else (--output) the folder's own name, which is found from there alone.
    """
    parts = name.split("/")
    return name if list(folder.parts[-len(parts) :]) == parts else folder.name


def opener_of(context: int, work: Path, target: Target) -> Opener:
    """Opens parts of models for windows of up to `context` tokens, decided matrices in the form that `target` takes."""
    return slices.opener(min(context, LENGTH), work / "parts", emit.emit, target=slices.reference_for(target))


def _measure(job: Job, bundle: store.Bundle) -> EvaluationRecord:
    request = job.request
    target, work = request.targets[0], request.work / "evaluation"
    known = [texts.load(name) for name in texts.known()]
    parity = parity_of(job.opened, bundle, (text.content[:PIECE] for text in known))
    source = request.said or request.source.name
    name = said_of(request.name, request.destination)
    command = shlex.join(["appliance", "evaluate", name, "--source", source, "--windows", str(request.windows)])
    opener = opener_of(bundle.variant(target.name).context, work, target)
    if job.opened.task == "embed":
        job.progress("measure", 0, 1)
        found = verify_embedder(
            bundle, target, job.opened.build(), opener, known, passages=PASSAGES * request.windows // 2 or 1, command=command,
            tokenizer=parity, targets=request.target_files,
        )  # fmt: skip
        job.progress("measure", 1, 1)
        return found
    subject = Subject(
        bundle=bundle,
        target=target,
        models=Models.of(job.model(), decided_model(job, target)[0]),
        opener=opener,
        texts=known,
        work=work,
        command=command,
        reference=cut(job.opened.build()) if job.changes else None,
        targets=request.target_files,
        tokenizer=parity,
    )
    return verify(subject, Effort(windows=request.windows), lambda done, total: job.progress("measure", done, total))


def _files(folder: Path) -> dict[str, FileEntry]:
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=store.sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
