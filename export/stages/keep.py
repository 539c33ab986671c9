"""Carry over what the checkpoint has quantized already, where every target of the build can hold it.

Knows: when a build asks for it. Does not know: how grids are read or kept (`export.checkpoint`, `quant.keep`).
"""

from dataclasses import replace

from export.stages.job import Job
from quant import keep


def keep_quantized(job: Job) -> Job:
    """The job with a rule for every weight that is carried over, and the account of all of them as evidence."""
    if not job.request.keep_quantized:
        return job
    keeping = keep.keep(job.model(), job.scheme, job.request.targets, job.request.work, job.source)
    return replace(job, scheme=keeping.scheme, evidence={**(job.evidence or {}), "kept_quantized": keeping.record()})
