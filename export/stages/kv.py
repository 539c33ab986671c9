"""Scales of int8 keys and values: found once for a bundle, on what its first target's matrices make of a calibration text.

Knows: when a build wants them, what the record is told. Does not know: how they are found (`quant.kv_ranges`) or how a graph
holds them (`quant.kv`, `export.lower`).
"""

from dataclasses import replace

from appliance.bundle.vocabulary import LAYER
from appliance.errors import TargetError
from export import slices
from export.stages.calibration import needs_calibration, text_of
from export.stages.job import BuildRequest, Job
from export.stages.variants import decided_model
from quant import emit, kv, kv_ranges
from quant.calibration_text import CalibrationText
from quant.scheme import Scheme

TOKENS = 8192
"""Of text that is written for this alone: more gain nothing (signal to noise of SmolLM2's values on other text, by tokens:
2048 32.2 dB, 4096 36.9, 8192 38.0, 12288 38.2)."""


def wants_scales(scheme: Scheme) -> bool:
    """Whether keys and values are to be kept in int8."""
    return scheme.options.kv != kv.FLOAT


def check_targets(request: BuildRequest, task: str) -> None:
    """Refuse at once what would be refused after minutes of calibration.

    Raises:
        TargetError: a target cannot carry keys and values so, or the model has none.
    """
    if not wants_scales(request.scheme):
        return
    if task != "generate":
        raise TargetError("an embedding model keeps no keys and values", "leave out --kv")
    for target in request.targets:
        kv.check_held(request.scheme.options.kv, target)


def kv_scaled(job: Job) -> Job:
    """The job with the scales of every layer's keys and values, and what they lose as evidence; as it was if none are wanted.

    Raises:
        BadInput: no text could be had, or the model cannot be cut into layers.
        CheckpointError: keys or values are not finite.
    """
    if not wants_scales(job.scheme):
        return job
    text, target = _text(job), job.request.targets[0]
    model, _ = decided_model(job, target)
    opener = slices.opener(text.ids.shape[1], job.request.work / "parts", emit.emit, target=slices.reference_for(target))
    key = f"{job.source} {target!r} {job.fingerprint(target)} {job.scheme}"
    setup = kv_ranges.Setup(text.ids, opener, job.request.work, key)
    layers = kv_ranges.collect(model, setup, lambda done, total, _: job.progress("find scales of keys and values", done, total))
    told = {
        "dtype": job.scheme.options.kv,
        "scales": "static, one for each head and channel, from the largest that occurs; of a rotated pair its length counts",
        "tokens": int(text.ids.size),
        "layers": [
            {LAYER: one.layer, "key_snr_db": round(one.key_snr_db, 2), "value_snr_db": round(one.value_snr_db, 2)}
            for one in layers
        ],
    }
    evidence = {"calibration": text.record(), **(job.evidence or {}), "kv": told}
    return replace(job, kv={one.layer: one.scales for one in layers}, evidence=evidence)


def _text(job: Job) -> CalibrationText:
    """What the scheme was calibrated on; a shorter one for a scheme that was not."""
    if needs_calibration(job.scheme):
        return text_of(job)
    shorter = replace(job.request, calibration_tokens=min(TOKENS, job.request.calibration_tokens))
    return text_of(replace(job, request=shorter))
