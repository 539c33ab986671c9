"""Ranges of static activations: found for every target, on what its matrices make of the calibration text.

Knows: when a build wants them, what the record is told. Does not know: how they are found (`quant.ranges`) or written
(`quant.static`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from export import slices
from export.stages.calibration import text_of
from export.stages.job import Job
from export.stages.variants import decided_model
from quant import emit, ranges
from quant.calibration_text import spread
from quant.scheme import Scheme
from quant.static import STATIC_BITS, Ranges

TOKENS = 8192
"""Of the calibration text: extremes of 4 times as many gain nothing that was seen."""


def wants_ranges(scheme: Scheme) -> bool:
    """Whether a linear has static activations."""
    return any(form.activation in STATIC_BITS for form in (scheme.default, *scheme.roles.values()))


def ranged(job: Job) -> Job:
    """The job with the ranges of every static linear, and what they cost as evidence; as it was where there are none.

    Raises:
        BadInput: no text could be had, or the model cannot be cut into layers.
    """
    if not wants_ranges(job.scheme):
        return job
    text = text_of(job)
    windows = text.ids[spread(len(text.ids), max(1, TOKENS // text.ids.shape[1]))]
    found: dict[str, Mapping[str, Ranges]] = {}
    told: dict[str, Any] = {}
    for target in job.request.targets:
        model, _ = decided_model(job, target)
        opener = slices.opener(text.ids.shape[1], job.request.work / "parts", emit.emit, target=slices.reference_for(target))
        key = f"{job.source} {target!r} {job.fingerprint(target)} {job.scheme}"
        setup = ranges.Setup(windows, opener, job.request.work, key)
        streams = ranges.collect(model, setup, lambda done, total, _: job.progress("find ranges", done, total))
        found[target.name] = ranges.choose_widths(streams, job.scheme.wide)
        told[target.name] = _told(streams, found[target.name])
    evidence = {"calibration": text.record(), **(job.evidence or {}), "ranges": told}
    return replace(job, ranges=found, evidence=evidence)


def _told(streams: Sequence[ranges.Stream], chosen: Mapping[str, Ranges]) -> list[dict[str, Any]]:
    """One entry a stream."""
    found = []
    for stream in streams:
        entering = chosen[next(iter(stream.outputs))]
        found.append(
            {
                "stream": stream.name,
                "bits": entering.input.bits,
                "reason": entering.reason,
                "cost_8_bits": float(f"{stream.cost:.4g}"),
                "low": float(f"{stream.input.narrow.low:.5g}"),
                "high": float(f"{stream.input.narrow.high:.5g}"),
                "input": asdict(entering.input),
                "outputs": {name: asdict(chosen[name].output) for name in stream.outputs},
            }
        )
    return found
