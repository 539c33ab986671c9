"""A record in words: what a newcomer reads first, and the few lines that `appliance show` prints.

Knows: what the numbers of a record mean. Does not know: HTML, terminals, or how anything was measured.
"""

import math

from appliance.bundle.record import EvaluationRecord, Record, TextRecord

_GRADES = ((0.003, "practically nothing"), (0.02, "very little"), (0.1, "a little"), (0.3, "noticeably"), (1.0, "much"))
"""Up to which rise of ln PPL, or which KL where that is more, which word holds; beyond them it is broken."""


_LIMITS = {
    "kl": "mean KL at most {}",
    "delta": "rise of ln PPL at most {}",
    "saturation": "clipped weights of a matrix at most {}",
    "emulation": "difference of an operator from numpy at most {}",
    "layer_snr_db": "SNR of what a layer by itself adds at least {} dB",
    "cosine": "mean cosine of vectors at least {}",
}
"""By name of a limit of the band: some are the most there may be, some the least."""


def limit(name: str, value: float) -> str:
    """One limit of a scheme's band; a name that is not known is given as it is, with no direction."""
    figure = share(value) if name == "saturation" else f"{value:g}"
    return _LIMITS[name].format(figure) if name in _LIMITS else f"{name} {figure}"


def measured_on(record: Record) -> str:
    """Which figures come from running the bundle's graph files, and what the others come from."""
    found = record.evaluation
    own = "Weights' SNR, clipped shares and proxy losses are what the quantizer counted."
    if found is None:
        return f"The bundle was not run. {own}"
    if found.embeddings:
        return f"The vectors come from running the bundle's graph file beside the unquantized model on the same passages. {own}"
    parts = "layers, ablations, operators and output losses"
    same = "the quantized model with the same integers, run a layer at a time on the processor"
    if found.ran != "files":
        return (
            f"None of the figures comes from running the bundle's graph files: {found.ran}. The losses on text and those of "
            f"{parts} come from {same}, beside the unquantized model on the same text. {own}"
        )
    said = "The losses on text and the bundle's answers come from running its graph files beside the unquantized model."
    return f"{said} The figures of {parts} come from {same}. {own}" if found.layers else f"{said} {own}"


def lost(record: Record) -> str:
    """One sentence that says what the bundle lost against the float model."""
    found = record.evaluation
    if found is None:
        return "Nobody has measured yet what was lost: this bundle was built without an evaluation."
    if found.embeddings:
        return _lost_in_vectors(found)
    if not found.texts:
        return "Nothing was measured on text."
    text = found.texts[0]
    if text.delta is None or text.kl_mean is None or text.same_top is None or text.broken:
        return f"Broken: {text.broken} of {text.tokens} positions gave no numbers at all."
    size = f"{record.bits_per_weight:.2f} bits a weight" if record.bits_per_weight else "its size"
    change = math.expm1(text.delta)
    turn = f"{abs(change):.1%} {'more' if change >= 0 else 'less'} perplexed by human text"
    word = grade(max(text.delta, text.kl_mean))
    return (
        f"It lost {word}: with {size} it is {turn} than the float model, and picks the same next word "
        f"{text.same_top:.0%} of the time."
    )


def grade(delta: float) -> str:
    """A rise of ln PPL in words."""
    for limit, word in _GRADES:
        if delta < limit:
            return word
    return "so much that it is of no use"


def kept_quantized(record: Record) -> list[str]:
    """What --keep-quantized came to: a line for what was carried over, one for each reason why something was not."""
    kept = record.kept_quantized
    if kept is None:
        return []
    lines = []
    if kept.carried:
        types = ", ".join(f"{one.matrices} in {kind}" for kind, one in kept.carried.items())
        weights = sum(one.shape[0] * one.shape[1] for one in record.matrices)
        part = share(sum(one.parameters for one in kept.carried.values()) / max(1, weights))
        lines.append(f"carried over as the checkpoint has them: {types} ({part} of the quantized weights)")
    reasons: dict[str, list[str]] = {}
    for one in kept.requantized:
        reasons.setdefault(one.reason, []).append(one.name)
    for reason, names in reasons.items():
        lines.append(f"quantized again: {len(names)} matrices ({names[0]}{', ...' if names[1:] else ''}): {reason}")
    return lines


def _lost_in_vectors(found: EvaluationRecord) -> str:
    one = found.embeddings[0]
    if one.broken or one.cosine_min is None or one.top1 is None:
        return f"Broken: {one.broken} of {one.passages} passages gave no vector at all."
    return (
        f"Its vectors point where the float model's do, to a cosine of {one.cosine_min:.4f} or more, and the nearest other "
        f"passage is the same for {one.top1:.0%} of the passages."
    )


def of_text(text: TextRecord) -> str:
    """The figures of one text on a line."""
    if text.delta is None or text.kl_mean is None:
        return f"{text.name}: {text.broken} of {text.tokens} positions are no numbers"
    return (
        f"{text.name}: delta ln PPL {signed(text.delta)}{error(text.delta_se)}, KL mean {number(text.kl_mean)} "
        f"median {number(text.kl_median)} p99 {number(text.kl_p99)}, same top-1 {share(text.same_top)} "
        f"({text.windows} windows, {text.tokens} tokens)"
    )


def agreed(record: EvaluationRecord) -> str:
    """How long greedy text stays the float model's; "" when it was not measured."""
    if not record.greedy:
        return ""
    counts = sorted(one.agreed for one in record.greedy)
    middle = counts[len(counts) // 2] if len(counts) % 2 else (counts[len(counts) // 2 - 1] + counts[len(counts) // 2]) / 2
    most = max(one.tokens for one in record.greedy)
    return f"{middle:g} tokens (median of {len(counts)} prompts, {counts[0]} to {counts[-1]} of {most})"


def number(value: float | None) -> str:
    """Three digits that count, without an exponent down to a millionth; "-" for none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def small(value: float | None) -> str:
    """A figure whose order of size matters: two digits that count, with an exponent where it is small; "-" for none."""
    return "-" if value is None else f"{value:.2g}"


def signed(value: float | None) -> str:
    """With its sign, four decimals."""
    return "-" if value is None else f"{value:+.4f}"


def error(value: float | None) -> str:
    """ "± 0.0012", or nothing when there is no error to give."""
    return "" if value is None else f" ± {value:.4f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{value:.1%}"


def decibels(value: float | None, cosine: float | None = 1.0) -> str:
    """An SNR; "exact" when nothing was lost, "broken" when nothing finite came out."""
    if cosine is None:
        return "broken"
    return "exact" if value is None else f"{value:.1f} dB"


def size(count: int) -> str:
    """Bytes as kB or MB."""
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
