"""Calibration of a build: get the text, let exceptions be chosen, solve layer by layer. `decide` then finds the results.

Knows: when a build needs it, what is handed to whom, what the record is told. Does not know: how text is written
(`quant.selfwritten`), exceptions chosen (`quant.mixed`) or layers solved (`quant.calibrate`).

    checkpoint - 8-bit model by plain rounding - writes text -+- choose exceptions - solve layer by layer - spill
                             a person's own text or record ---+
"""

import hashlib
import json
import shutil
from dataclasses import replace

from appliance.bundle import store
from appliance.bundle.manifest import FORMAT, FileEntry, Manifest, Provenance, SchemeSummary
from appliance.errors import BadInput
from appliance.targets import load
from export import lower, save, slices
from export.stages.job import Job
from quant import calibrate, calibration_text, decide, emit, kv, mixed, selfwritten, solvers, spill
from quant.calibration_text import WINDOW, CalibrationText
from quant.plan import plans
from quant.scheme import STORED, Options, Scheme
from quant.schemes import find
from quant.selfwritten import Wish, Writer


def needs_calibration(scheme: Scheme) -> bool:
    """Whether the scheme's integers depend on a text."""
    return scheme.budget is not None or solvers.find(scheme.solver).NEEDS_MOMENTS


def reads_text(scheme: Scheme) -> bool:
    """Whether anything of the build does: integers, ranges of activations, scales of keys and values."""
    forms = (scheme.default, *scheme.roles.values())
    static = any(form.activation.startswith("static") for form in forms)
    return needs_calibration(scheme) or static or scheme.options.kv != kv.FLOAT


def calibrated(job: Job) -> Job:
    """The job with its scheme's exceptions chosen, every body weight solved into the work folder, and the text as evidence.

    Raises:
        BadInput: the text cannot be read, the model writes none, or it cannot be cut into layers.
    """
    if not reads_text(job.scheme) and job.request.calibration is not None:
        raise BadInput(f"scheme {job.scheme.name} is not calibrated", "leave out --calibration, or choose --scheme w4a8-gptq")
    if not needs_calibration(job.scheme) or not _anything_left(job):
        return job
    if job.opened.task == "embed":
        raise BadInput(f"scheme {job.scheme.name} is calibrated by layers of a language model", "choose --scheme w8a8")
    text = text_of(job)
    opener = slices.opener(text.ids.shape[1], job.request.work / "parts")
    setup = calibrate.Setup(text.ids, opener, job.request.work, job.source)
    scheme = mixed.with_exceptions(job.model(), job.scheme, job.request.targets, setup, _told(job, "choose"))
    prints = {}
    for target in job.request.targets:
        model = job.model()
        prints[target.name] = calibrate.calibrate(model, plans(model, scheme, target), setup, _told(job, "calibrate"))
    evidence = {**(job.evidence or {}), "calibration": text.record()}
    return replace(job, scheme=scheme, calibration=prints, evidence=evidence)


def _anything_left(job: Job) -> bool:
    """Whether a weight of the body is still to be solved: with --keep-quantized the checkpoint may hold all of them."""
    model = job.model()
    found = [plan for target in job.request.targets for plan in plans(model, job.scheme, target)]
    return any(plan.form.bits and plan.in_body and plan.solver != STORED for plan in found)


def _told(job: Job, stage: str) -> calibrate.Progress:
    return lambda done, total, _: job.progress(stage, done, total)


def text_of(job: Job) -> CalibrationText:
    """The person's text, or what the model writes; kept in the work folder once it is whole."""
    request = job.request
    window = min(WINDOW, job.opened.config.context_length)
    words = _words(job)
    if request.calibration is not None:
        return calibration_text.given(request.calibration, words, request.calibration_tokens, window)
    windows = max(1, request.calibration_tokens // window)
    files = [f"{name}={entry.sha256}" for name, entry in words.manifest.files.items()]
    source = " ".join([job.source, *files, repr(job.tokenizer)])
    key = hashlib.sha256(json.dumps([source, selfwritten.VERSION, windows, window]).encode()).hexdigest()[:32]
    path = request.work / f"text.{key}.json"
    try:
        return calibration_text.of_record(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, BadInput):
        pass  # not there, or cut short by a stop: it is written now
    text = selfwritten.write_text(
        lambda: _writer(job, window),
        words,
        Wish(windows, window, turns=windows // 2),
        request.work,
        source,
        lambda done, total: job.progress("write text", done, total),
    )
    spill.replace_file(path, lambda place: spill.write_text(place, json.dumps(text.record())))
    shutil.rmtree(request.work / "writer", ignore_errors=True)
    return text


def _writer(job: Job, window: int) -> Writer:
    """The model by plain rounding to 8 bits, on disk: quick to make, and its text is the float model's (KL 0.001)."""
    target, folder = load("cpu"), job.request.work / "writer"
    folder.mkdir(parents=True, exist_ok=True)
    scheme = replace(find("w8a8", Options(group=32)), solver="nearest")
    model = job.model()
    decide.decide(
        model, scheme, target, folder, lambda done, total, _: job.progress("prepare text", done, total), source=job.source
    )
    lowered = lower.lower(lambda: model, target, window, target.chunk)
    graph = lowered.graphs["model"]
    emit.emit(graph, target)
    return Writer(save.save(graph, folder, "model"), lowered.state, job.opened.config.vocab_size)


def _words(job: Job) -> store.Bundle:
    """The tokenizer's files as far as they are written, as a bundle that has no graphs yet."""
    files = {path.name: FileEntry(bytes=path.stat().st_size, sha256=store.sha256(path))
             for path in sorted(job.writer.folder.iterdir()) if path.is_file()}  # fmt: skip
    manifest = Manifest(
        format=FORMAT,
        name=job.request.name,
        architecture=job.opened.model_type,
        parameters=0,
        context_length=job.opened.config.context_length,
        vocab_size=job.opened.config.vocab_size,
        hidden_size=job.opened.config.hidden_size,
        scheme=SchemeSummary(name=job.scheme.name, roles={}),
        tokenizer=job.tokenizer.info,
        chat_template=job.tokenizer.chat_template,
        generation=job.tokenizer.generation,
        variants={},
        files=files,
        provenance=Provenance(source="", command="", versions={}, created=""),
    )
    return store.Bundle(job.writer.folder, manifest)
