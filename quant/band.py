"""What a scheme may lose at most: a bundle outside of it is taken for broken and is not installed.

Knows: limits and what a record must hold for them. Does not know: any scheme's numbers (each states its own).
A band is no goal. It is wide enough for the smallest models, whose every weight counts, and narrow enough for what goes wrong
when something is wrong: a layer with other scales, swapped nibbles, a transposed matrix.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from appliance.bundle.record import EvaluationRecord, LayerRecord, MatrixRecord


@dataclass(frozen=True)
class Band:
    """Limits of a whole bundle: the largest values it may have, and the smallest where it says "least".

    Attributes:
        kl: mean KL to the float model, nats, on any text.
        delta: rise of ln PPL on any text.
        saturation: share of weights of any matrix that were clipped.
        emulation: difference of an operator's outputs from numpy's, relative to the largest.
        layer_snr_db: least SNR of what a layer by itself adds to the residual stream: at 0 dB its noise is as large.
        cosine: least mean cosine of an embedding model's vectors to the float model's.
    """

    kl: float = 1.0
    delta: float = 1.0
    saturation: float = 0.25
    emulation: float = 1e-3
    layer_snr_db: float = 0.0
    cosine: float = 0.85

    def limits(self) -> dict[str, float]:
        """For the record."""
        return asdict(self)


def complaint(band: Band, matrices: Sequence[MatrixRecord], found: EvaluationRecord) -> str:
    """What is outside the band and where to look, as one sentence; "" when all is well."""
    wrong = _wrong(band, found)
    if wrong:
        return f"{wrong}; look at {culprit(band, found)}"
    clipped = max(matrices, key=lambda matrix: matrix.saturation, default=None)
    if clipped is not None and clipped.saturation > band.saturation:
        return f"{clipped.saturation:.0%} of the weights of {clipped.name} were clipped; look at it"
    if found.tokenizer is not None and not found.tokenizer.equal:
        return f"the tokenizer cuts a text otherwise: {found.tokenizer.first_difference}"
    return ""


def culprit(band: Band, found: EvaluationRecord) -> str:
    """The operator that does not compute what its integers say, else the part that loses most by itself."""
    if _off(band, found):
        assert found.emulation is not None
        return f"the operator of {found.emulation.worst_matrix}"
    worst = worst_part(found.layers)
    if worst is None:
        return "the record"
    if worst.local_snr_db is None:
        return f"{worst.name}, which gives no numbers"
    return f"{worst.name}, which by itself has the lowest SNR, {worst.local_snr_db:.1f} dB"


def worst_part(layers: Sequence[LayerRecord]) -> LayerRecord | None:
    """The part to look at: the first that gives no numbers, else the one that loses most by itself."""
    for layer in layers:
        if layer.local_cosine is None:
            return layer
    measured = [layer for layer in layers if layer.local_snr_db is not None]
    return min(measured, key=lambda layer: layer.local_snr_db or 0.0, default=None)


def _off(band: Band, found: EvaluationRecord) -> bool:
    one = found.emulation
    return one is not None and (one.worst is None or one.worst > band.emulation)


def _wrong(band: Band, found: EvaluationRecord) -> str:
    for text in found.texts:
        if text.broken or text.kl_mean is None or text.delta is None:
            return f"on {text.name} {text.broken} of {text.tokens} positions have logits that are no numbers"
        if text.kl_mean > band.kl:
            return f"on {text.name} the mean KL to the float model is {text.kl_mean:.3f}, over the scheme's {band.kl:g}"
        if text.delta > band.delta:
            return f"on {text.name} ln PPL rises by {text.delta:.3f}, over the scheme's {band.delta:g}"
    for one in found.embeddings:
        if one.broken or one.cosine_mean is None:
            return f"on {one.text} {one.broken} of {one.passages} vectors are no numbers"
        if one.cosine_mean < band.cosine:
            return f"on {one.text} vectors have a mean cosine of {one.cosine_mean:.3f}, under the scheme's {band.cosine:g}"
    if _off(band, found):
        return "an operator does not compute what its integers stand for"
    if any(layer.local_cosine is None for layer in found.layers):
        return "a layer gives no numbers"
    worst = worst_part(found.layers)
    if worst is not None and worst.local_snr_db is not None and worst.local_snr_db < band.layer_snr_db:
        return f"{worst.name} by itself has an SNR of {worst.local_snr_db:.1f} dB, under the scheme's {band.layer_snr_db:g}"
    return ""
