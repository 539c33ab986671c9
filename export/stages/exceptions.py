"""Exceptions that a person asked for: patterns become rules for the weights of this model.

Knows: when a build has any. Does not know: how they are read or what they fit (`quant.asked`).
"""

from dataclasses import replace

from export.stages.job import Job
from quant import asked
from quant.plan import plans


def excepted(job: Job) -> Job:
    """The job with a rule for every weight that a pattern fits. No chooser touches those afterwards."""
    if not job.request.exceptions:
        return job
    rules = asked.rules(job.request.exceptions, plans(job.model(), job.scheme, job.request.targets[0]))
    options = replace(job.scheme.options, weights={**job.scheme.options.weights, **rules})
    return replace(job, scheme=replace(job.scheme, options=options))
