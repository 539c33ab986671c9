"""The plots of a record, as SVG.

Knows: what each plot shows and how it is read. Does not know: colours (`style.css`), or how anything was measured.
"""

import itertools
from collections.abc import Sequence

from appliance.bundle.record import AblationRecord, LayerRecord, MatrixRecord, Record, TextRecord
from appliance.report import words
from appliance.report.marks import Frame, Safe, axes, box, element, figure, joined, legend, line, stroke, svg, text, ticks

_SHADES = 9
"""Steps of the heat map's colour."""


def layers(found: Sequence[LayerRecord]) -> Safe | None:
    """SNR of each layer's output."""
    numbered = [(layer, one) for one in found if (layer := layer_of(one.name)) is not None]
    local = [(layer, one.local_snr_db) for layer, one in numbered if one.local_snr_db is not None]
    along = [(layer, one.snr_db) for layer, one in numbered if one.snr_db is not None]
    values = [snr for _, snr in [*local, *along] if snr is not None]
    if not values:
        return None
    marks = ticks(min(0.0, *values), max(values))
    last = max(1, *(layer for layer, _ in numbered))
    frame = Frame(x=(0, last), y=(marks[0], marks[-1]))
    x_ticks = {mark: f"{mark:g}" for mark in ticks(0, last, 6) if mark <= last and mark == int(mark)}
    picture = svg(
        frame,
        "Signal to noise of each layer's output in decibels, by itself and with all layers before it",
        axes(frame, x_ticks, {mark: f"{mark:g}" for mark in marks}, "layer", "SNR in dB"),
        line(frame, [(x, y) for x, y in local if y is not None], 1),
        line(frame, [(x, y) for x, y in along if y is not None], 2),
    )
    explained = (
        "How far the signal stands above the error in what each layer hands on; 20 dB is an error of a tenth. Local: the layer "
        "alone, fed by the float model. Accumulated: fed by the quantized layers before it. A dip names the layer to look at."
    )
    return figure("Layers", explained, legend(["local", "accumulated"]), picture)


def positions(texts: Sequence[TextRecord]) -> Safe | None:
    """Mean KL by place in the window."""
    shown = [one for one in texts if len(one.by_position) > 1]
    if not shown:
        return None
    marks = ticks(0, max(share.kl for one in shown for share in one.by_position))
    last = max(one.by_position[-1].last for one in shown)
    frame = Frame(x=(8, last), y=(0, marks[-1]), log=True)
    powers = {float(1 << power): str(1 << power) for power in range(3, 32) if (1 << power) <= last}
    series = [
        line(frame, [(max(8.0, (share.first + share.last) / 2), share.kl) for share in one.by_position], number)
        for number, one in enumerate(shown, 1)
    ]
    picture = svg(
        frame,
        "Divergence from the float model by place in the window",
        axes(frame, powers, {mark: f"{mark:g}" for mark in marks}, "token of the window", "KL in nats"),
        *series,
    )
    explained = (
        "How far the probabilities of the next token are from the float model's, by how many tokens came before. A curve that "
        "rises to the right means that the error grows with the length of the text."
    )
    return figure("Along the text", explained, legend([one.name for one in shown]), picture)


def bars(title: str, explained: str, rows: Sequence[tuple[str, float, str]], errors: Sequence[float | None] = ()) -> Safe:
    """Horizontal bars: (name, value, value in words). Values below 0 go to the left."""
    low, high = min(0.0, *(value for _, value, _ in rows)), max(0.0, *(value for _, value, _ in rows))
    height = 34 * len(rows) + 12
    frame = Frame(x=(low, high or 1), y=(0, 1), height=height, left=150, right=86)
    parts: list[Safe] = []
    for number, (name, value, said) in enumerate(rows):
        top = 8 + 34 * number
        from_, to = sorted((frame.across(0), frame.across(value)))
        parts.append(text(frame.left - 8, top + 15, "tick end", name))
        parts.append(box(from_, top, to - from_, 22, "bar s1", f"{name}: {said}"))
        error = errors[number] if number < len(errors) else None
        if error:
            ends = (frame.across(max(value - error, low)), min(frame.across(value + error), float(frame.width - 4)))
            parts.append(stroke(ends, (top + 11, top + 11), "whisker"))
        parts.append(text(to + 8 + (0 if not error else ends[1] - to), top + 15, "tick", said))
    parts.append(stroke((frame.across(0), frame.across(0)), (2, height - 2), "axis"))
    return figure(title, explained, svg(frame, title, *parts))


def ablations(found: Sequence[AblationRecord]) -> Safe | None:
    """What each part costs alone."""
    rows = [(one.name, one.delta, words.signed(one.delta)) for one in found if one.delta is not None]
    if not rows:
        return None
    explained = "Rise of ln PPL when only this is quantized and all else stays float. " + " ".join(
        f"{one.name}: {one.what}." for one in found
    )
    return bars("What costs how much", explained, [(name, value, said) for name, value, said in rows if value is not None])


def sizes(record: Record) -> Safe | None:
    """Bytes by type."""
    found = record.sizes.get(record.target)
    if found is None:
        return None
    rows = [
        (name, float(count), words.size(count)) for name, count in sorted(found.bytes_by_type.items(), key=lambda one: -one[1])
    ]
    body = f", {found.bits_per_body_weight:.2f} without embedding and head" if found.bits_per_body_weight else ""
    explained = f"{words.size(found.bytes)} in the graph files: {found.bits_per_weight:.2f} bits a weight{body}."
    return bars("What the bytes are", explained, rows)


def heat(matrices: Sequence[MatrixRecord]) -> Safe | None:
    """SNR of every matrix: a row for each role, a column for each layer; bits where they are not the common ones."""
    placed = {(role, layer): one for one in matrices if (layer := layer_of(one.name)) is not None for role in one.roles}
    if not placed:
        return None
    roles = list(dict.fromkeys(role for role, _ in placed))
    last = max(layer for _, layer in placed)
    values = [one.snr_db for one in placed.values() if one.snr_db is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    counts = [one.bits for one in placed.values()]
    common = max(set(counts), key=counts.count)
    left, cell, tall = 96, max(10.0, min(40.0, 980 / (last + 1))), 26
    width = int(left + cell * (last + 1) + 8)
    parts: list[Safe] = []
    for row, role in enumerate(roles):
        parts.append(text(left - 8, 8 + tall * row + 17, "tick end", role))
        for layer in range(last + 1):
            one = placed.get((role, layer))
            if one is None:
                continue
            x, y = left + cell * layer, 6.0 + tall * row
            tip = f"{one.name}: {one.bits} bits, group {one.group or 'row'}, {words.decibels(one.snr_db)}"
            parts.append(box(x + 0.5, y + 0.5, cell - 1, tall - 1, f"h{shade(one.snr_db, low, high)}", tip))
            if one.bits != common:
                parts.append(text(x + cell / 2, y + 17, "mark middle", one.bits))
    bottom = 6 + tall * len(roles)
    step = max(1, -(-28 // int(cell)))
    parts += [text(left + cell * (layer + 0.5), bottom + 14, "tick middle", layer) for layer in range(0, last + 1, step)]
    parts.append(text(left + cell * (last + 1) / 2, bottom + 32, "name middle", "layer"))
    frame = Frame(x=(0, 1), y=(0, 1), width=width, height=bottom + 38)
    scale = joined([element("i", {"class": f"key h{number}"}) for number in range(_SHADES)])
    key = element("div", {"class": "legend"}, f"{low:.1f} dB ", scale, f" {high:.1f} dB")
    explained = (
        f"How far each matrix stands above its rounding error. {common} bits, but where a cell says otherwise; 6 dB are one bit."
    )
    return figure("Matrices", explained, key, element("div", {"class": "wide"}, svg(frame, "SNR of every matrix", *parts)))


def shade(snr: float | None, low: float, high: float) -> int:
    """Step of the colour: 0 for the least SNR, the last one for the most and for what lost nothing."""
    if snr is None or high <= low:
        return _SHADES - 1
    return min(_SHADES - 1, int((snr - low) / (high - low) * _SHADES))


def layer_of(name: str) -> int | None:
    """The layer that a weight's name tells; None where it tells none."""
    parts = name.split(".")
    numbers = [part for before, part in itertools.pairwise(parts) if before in ("layers", "layer", "blk", "h")]
    return int(numbers[0]) if numbers and numbers[0].isascii() and numbers[0].isdigit() else None
