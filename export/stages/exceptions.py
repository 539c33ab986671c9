"""Exceptions that a person asked for: patterns become rules for the weights of this model.

Knows: which model and target a build has. Does not know: how patterns are read or what they fit (`quant.asked`).
"""

from dataclasses import replace

from export.stages.job import Job
from quant import asked


def excepted(job: Job) -> Job:
    """The job with a rule for every weight that a pattern fits."""
    if not job.request.exceptions:
        return job
    return replace(job, scheme=asked.applied(job.request.exceptions, job.model(), job.scheme, job.request.targets[0]))
