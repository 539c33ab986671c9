"""One variant a target: decide, lower, emit, save, check the files. Every graph of a bundle is made from the same decision.

Knows: the order of these steps. Does not know: how any of them works.
"""

import onnx_ir as ir

from appliance.bundle.manifest import Variant
from appliance.targets.capabilities import Target
from export import lower, save
from export.stages.job import Job
from quant import decide, emit, record, structure
from quant.static import attach, by_weight


def write_variants(job: Job) -> tuple[dict[str, Variant], dict[str, decide.Decision]]:
    """Write the graphs of every target; variants and decisions by target."""
    variants, decisions = {}, {}
    for target in job.request.targets:
        variants[target.name], decisions[target.name] = _write(job, target)
    return variants, decisions


def decided_model(job: Job, target: Target, progress: decide.Progress | None = None) -> tuple[ir.Model, decide.Decision]:
    """A fresh canonical graph with its integers. Asked for again, it finds them on disk."""
    model = job.model()
    decision = decide.decide(
        model,
        job.scheme,
        target,
        job.request.work,
        progress,
        source=job.source,
        calibration=job.fingerprint(target),
        scales=job.kv,
    )
    if job.ranges is None:
        return model, decision
    ranges = job.ranges[target.name]
    attach(model, ranges)
    return model, record.with_ranges(decision, by_weight(model, ranges))


def _write(job: Job, target: Target) -> tuple[Variant, decide.Decision]:
    decisions, wanted = [], []

    def decided() -> ir.Model:
        model, decision = decided_model(job, target, lambda done, total, _: job.progress("quantize", done, total))
        decisions.append(decision)
        wanted.append(structure.expected(model))
        return model

    limit = job.opened.config.context_length
    lowered = lower.lower(decided, target, min(target.context or limit, limit), target.chunk)
    for model in lowered.graphs.values():
        emit.emit(model, target)
    folder = job.writer.path(f"{target.name}/weights.bin").parent
    files = save.save_all(lowered.graphs, folder, "weights.bin", lambda _, done, total: job.progress("write", done + 1, total))
    structure.check_proxies(decisions[0].matrices)
    structure.check(files.values(), wanted[0], [one.name for one in decisions[0].kept])
    variant = Variant(
        target=target.name,
        form=target.flags.form,
        graphs={kind: f"{target.name}/{kind}.onnx" for kind in lowered.graphs},
        chunk=min(target.chunk, lowered.context),
        context=lowered.context,
        activation=job.scheme.default.activation,
        state=lowered.state,
    )
    return variant, decisions[0]
