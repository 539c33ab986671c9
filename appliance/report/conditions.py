"""How a bundle was quantized, in words: options, what was done to the float model first, static activations, keys and values.

Knows: what these parts of a record mean; a line each, for a terminal and for the page. Does not know: HTML, terminals, losses
(`appliance.report.words`).
"""

from collections.abc import Mapping
from typing import Any

from appliance.bundle.record import KvRecord, Record, ReshapedRecord, StreamRecord

_NAMED = 3
"""Streams that a line names; the tables have them all."""


def lines(record: Record) -> dict[str, str]:
    """By what it is about; only what the record has."""
    found = {"options": options(record.options), "budget": budget(record)}
    if record.reshaped is not None:
        found["reshaped"] = reshaped(record.reshaped)
    if record.ranges:
        found["static"] = "; ".join(f"{target}: {widths(streams)}" for target, streams in record.ranges.items()) + allowed(record)
    if record.kv is not None:
        found["kept state"] = kept_state(record.kv)
    return {name: said for name, said in found.items() if said}


def budget(record: Record) -> str:
    """What exceptions were bought with, and how many weights were looked at; "" when none were bought."""
    if record.budget is None:
        return ""
    looked = sum(one.cost_kl is not None for one in record.matrices)
    said = f"{record.budget:g} bits a weight without the tables, scales included"
    return f"{said}; chosen by the measured cost of {looked} matrices" if looked else said


def allowed(record: Record) -> str:
    """The share of the products that may have 16-bit activations; "" when none may."""
    return f"; the scheme lets {record.wide:.0%} of the products have them" if record.wide else ""


def options(told: Mapping[str, Any]) -> str:
    """What differs from the scheme; "" when nothing does."""
    said = [_option(name, value) for name, value in told.items()]
    return ", ".join(filter(None, said))


def _option(name: str, value: Any) -> str:
    if value is None or value == {}:
        return ""
    if name == "group":
        return _group(value)
    if name == "symmetric":
        return "" if value else "zero points"
    if name == "kv":
        return "" if value == "float32" else f"keys and values in {value}"
    if name == "weights":
        return f"{len(value)} weights with forms of their own"
    if name == "roles":
        return ", ".join(f"{role} {_form(changes)}" for role, changes in value.items())
    return f"{name} {value}"


def _group(size: int) -> str:
    return f"groups of {size}" if size else "one scale a row"


def _form(changes: Mapping[str, int]) -> str:
    parts = [f"{changes['bits']} bits" if changes["bits"] else "float"] if "bits" in changes else []
    return " in ".join([*parts, *([_group(changes["group"])] if "group" in changes else [])])


def reshaped(told: ReshapedRecord) -> str:
    """What was rotated and equalized, and what stood in the way."""
    said = [f"residual stream rotated ({told.residual})" if told.residual else "residual stream not rotated"]
    if told.obstacle:
        said[0] += f": {told.obstacle}"
    if told.heads:
        said.append(f"value heads of {told.layers} layers rotated ({told.heads})")
    if told.folded:
        said.append(f"gains of {told.folded} norms folded into the weights behind them")
    if told.tied:
        said.append("a square matrix before the head keeps it tied")
    equalized = [f"{count} {name}" for name, count in _equalized(told).items() if count]
    return "; ".join([*said, *([f"equalized: {', '.join(equalized)}"] if equalized else [])])


def _equalized(told: ReshapedRecord) -> dict[str, int]:
    return {"norms": told.norms, "layers' values": told.values, "feed-forward blocks": told.gated}


def widths(streams: tuple[StreamRecord, ...]) -> str:
    """How many streams have 16 bits, and how many of them because 8 cost too much there."""
    wide, chosen = (sum(one.bits == 16 for one in streams), [one.stream for one in streams if one.reason])
    said = f"16 bits for {wide} of {len(streams)} streams"
    if not chosen:
        return said
    names = ", ".join(chosen[:_NAMED]) + (", ..." if len(chosen) > _NAMED else "")
    return f"{said}, {len(chosen)} of them because 8 cost most there ({names})"


def kept_state(told: KvRecord) -> str:
    """How keys and values are kept, and the signal to noise of the worst layer."""
    said = f"keys and values in {told.dtype}"
    if not told.layers:
        return said
    key = min(told.layers, key=lambda one: one.key_snr_db)
    value = min(told.layers, key=lambda one: one.value_snr_db)
    return (
        f"{said}, SNR of keys {key.key_snr_db:.1f} dB or more (layer {key.layer}), "
        f"of values {value.value_snr_db:.1f} dB or more (layer {value.layer})"
    )
