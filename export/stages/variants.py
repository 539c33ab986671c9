"""One variant a target: decide, lower, emit, save. Every graph of a bundle is made from the same decision.

Knows: the order of these steps. Does not know: how any of them works.
"""

import onnx_ir as ir

from appliance.bundle.manifest import Variant
from appliance.targets.capabilities import Target
from export import lower, save
from export.stages.job import Job
from quant import decide, emit


def write_variants(job: Job) -> tuple[dict[str, Variant], dict[str, decide.Decision]]:
    """Write the graphs of every target; variants and decisions by target."""
    variants, decisions = {}, {}
    for target in job.request.targets:
        variants[target.name], decisions[target.name] = _write(job, target)
    return variants, decisions


def _write(job: Job, target: Target) -> tuple[Variant, decide.Decision]:
    decisions = []

    def decided() -> ir.Model:
        model = job.model()
        decisions.append(
            decide.decide(
                model,
                job.scheme,
                target,
                job.request.work,
                lambda done, total, _: job.progress("quantize", done, total),
                source=job.source,
                calibration=job.fingerprint(target),
            )
        )
        return model

    limit = job.opened.config.context_length
    lowered = lower.lower(decided, target, min(target.context or limit, limit), target.chunk)
    for model in lowered.graphs.values():
        emit.emit(model, target)
    folder = job.writer.path(f"{target.name}/weights.bin").parent
    save.save_all(lowered.graphs, folder, "weights.bin", lambda _, done, total: job.progress("write", done + 1, total))
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
