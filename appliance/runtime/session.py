"""Sessions: one opened graph, and the truth about where its nodes run.

Knows: how placement is read back and judged. Does not know: options of any provider (`appliance.runtime.providers`).
Source: onnxruntime 1.32, `session.record_ep_graph_assignment_info` and `get_provider_graph_assignment_info()`.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime

RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"
FORBID_FALLBACK = "session.disable_cpu_ep_fallback"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the nodes of a session's graph were put."""

    provider: str  # that runs the most nodes of those wanted; the wanted one when it runs any
    nodes: tuple[tuple[str, int], ...]  # provider -> nodes, most first
    fallbacks: tuple[str, ...]  # one sentence for each provider that took nodes from the wanted one


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An onnxruntime session and where its nodes run."""

    session: onnxruntime.InferenceSession
    placement: Placement


def read_placement(session: onnxruntime.InferenceSession, wanted: str) -> Placement:
    """Read back who runs what; the session must have been opened with `RECORD_PLACEMENT`.

    Args:
        session: an initialized session.
        wanted: the provider that was asked for, e.g. "CPUExecutionProvider".
    """
    counts: Counter[str] = Counter()
    operators: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        counts[part.ep_name] += len(nodes)
        operators.setdefault(part.ep_name, Counter()).update(node.op_type for node in nodes)
    return judge(counts, operators, wanted)


def judge(counts: Counter[str], operators: dict[str, Counter[str]], wanted: str) -> Placement:
    """The placement that these counts amount to; pure, so that every way of falling back can be tested."""
    nodes = tuple(counts.most_common())
    total = sum(counts.values())
    fallbacks = tuple(
        f"{count} of {total} nodes run on {provider}, not on {wanted}: {_named(operators.get(provider, Counter()))}"
        for provider, count in nodes
        if provider != wanted
    )
    provider = wanted if counts[wanted] or not nodes else nodes[0][0]
    return Placement(provider, nodes, fallbacks)


def joined(placements: Sequence[Placement]) -> Placement:
    """The placement of several sessions that serve as one decoder, e.g. the static pair."""
    counts: Counter[str] = Counter()
    for placement in placements:
        counts.update(dict(placement.nodes))
    fallbacks = tuple(dict.fromkeys(sentence for placement in placements for sentence in placement.fallbacks))
    # A pair of which one half fell back is named after the half that did.
    provider = next((one.provider for one in placements if one.fallbacks), placements[0].provider)
    return Placement(provider, tuple(counts.most_common()), fallbacks)


def give_back_memory() -> None:
    """Hand freed pages back to the system, where the C library can (glibc); call it after a session is gone.

    Closing a session frees its weights into the C library's pool, which by itself keeps half of them resident.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _named(operators: Counter[str]) -> str:
    shown = [f"{name} x{count}" for name, count in operators.most_common(4)]
    return ", ".join(shown) + (", ..." if len(operators) > 4 else "")
