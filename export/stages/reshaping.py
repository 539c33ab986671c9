"""An easier float model for the schemes that ask for one: rotated where its graph allows that, and equalized.

Knows: when a build wants it, what the record is told. Does not know: how weights are changed (`quant.reshape`).
"""

from dataclasses import replace

import onnx_ir as ir

from export.stages.job import Change, Job
from quant.reshape import Reshaping


def reshaped(job: Job) -> Job:
    """The job with the change that every canonical graph goes through, and what it does as evidence."""
    if not job.scheme.reshape:
        return job
    reshaping = Reshaping()
    told = reshaping.apply(job.model())

    def apply(model: ir.Model) -> None:
        reshaping.apply(model)

    change = Change(told.fingerprint, apply)
    return replace(job, changes=(*job.changes, change), evidence={**(job.evidence or {}), "reshaped": told.record()})
