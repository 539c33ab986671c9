"""From the canonical graph to what a target takes: every file in this folder is one rewrite, found by looking.

A pass offers `STAGE` (passes run in order of stage, then name), `wanted(flags) -> bool` (it asks capability flags, never
names) and `run(model, target, step)` (in place). Stages: 0-9 sizes, 10-19 joining canonical nodes, 20-29 attention,
30-39 norms, 40-49 the remaining canonical operators, 50 and up cleaning. A QuantLinear or QuantEmbedding goes through
untouched: `quant` writes those afterwards.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.bundle.manifest import GraphName, StateTensor
from appliance.errors import TargetError
from appliance.targets.capabilities import Flags, Target
from export.blocks import GROWTH, OUTPUT, ROPE_COS, STATE, UPDATE
from export.graph import drop_unused_initializers, sizes
from export.step import Step
from export.weights import check_tags

__all__ = ["Lowered", "Step", "lower", "passes"]

_QUANTIZED = {vocabulary.QUANT_LINEAR, vocabulary.QUANT_EMBEDDING}


@dataclass(frozen=True)
class Lowered:
    """What a target gets: graphs by name ("model", or "prefill" and "decode"), the state they carry, their context."""

    graphs: dict[GraphName, ir.Model]
    state: tuple[StateTensor, ...]
    context: int


def passes(flags: Flags) -> list[ModuleType]:
    """The passes that a target with these flags wants, in the order they run."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    found = [importlib.import_module(f"export.lower.{name}") for name in names]
    return sorted((one for one in found if one.wanted(flags)), key=lambda one: (one.STAGE, one.__name__))


def lower(build: Callable[[], ir.Model], target: Target, context: int, chunk: int) -> Lowered:
    """Rewrite a canonical graph, built anew for every graph that is wanted, for `target`.

    Args:
        build: makes the canonical graph, decided or not.
        target: whose flags choose the passes.
        context: tokens of context the graphs are to hold; 0 = what the target says, else what the model allows.
        chunk: prompt tokens of one prefill step (static form).

    Raises:
        TargetError: the model or the target cannot hold that context.
    """
    flags = target.flags
    graphs: dict[GraphName, ir.Model] = {}
    names: tuple[GraphName, ...] = ("model",) if flags.form == "dynamic" else ("prefill", "decode")
    held = 0
    for name in names:
        model = build()
        held = _context(model, target, context)
        step = Step(
            "dynamic" if name == "model" else name,
            tokens={"model": 0, "prefill": min(chunk, held), "decode": 1}[name],
            context=held,
        )
        check_tags(model.graph)
        for one in passes(flags):
            one.run(model, target, step)
        drop_unused_initializers(model.graph)
        _check_done(model)
        graphs[name] = model
    return Lowered(graphs, state_of(graphs["model" if "model" in graphs else "decode"], flags), held)


def state_of(model: ir.Model, flags: Flags) -> tuple[StateTensor, ...]:
    """The state that a lowered graph carries, read from the tags of its inputs."""
    found = []
    for value in model.graph.inputs:
        tags = value.metadata_props
        if STATE not in tags:
            continue
        assert value.name is not None and value.shape is not None
        layer, kind = int(tags[vocabulary.LAYER]), tags[STATE]
        words = {"past": "context"}
        sizes = [size if isinstance(size, int) else str(size.value) for size in value.shape]
        assert value.dtype is not None
        dtype = value.dtype.numpy().name
        if kind in ("kv.key", "kv.value"):
            sizes[2] = "past"  # a static graph has a number there; which axis it is must not have to be guessed
        found.append(
            StateTensor.model_validate(
                {
                    "name": f"layers.{layer}.{kind.removeprefix('kv.')}",
                    "kind": kind,
                    "layer": layer,
                    "input": value.name,
                    "output": tags[OUTPUT],
                    "dtype": dtype,
                    "quantization": "channel" if dtype == "int8" else "none",
                    "shape": tuple(size if isinstance(size, int) else words.get(size, size) for size in sizes),
                    "growth": tags[GROWTH],
                    "update": tags.get(UPDATE, flags.state_update),
                }
            )
        )
    return tuple(found)


def _context(model: ir.Model, target: Target, asked: int) -> int:
    table = model.graph.initializers.get(ROPE_COS)
    limits = [target.flags.max_context] if target.flags.max_context else []
    if table is not None:
        limits.append(sizes(table)[0])
    limit = min(limits) if limits else 0
    if asked and limit and asked > limit:
        raise TargetError(f"a context of {asked} tokens is too long: model and target hold {limit}", f"ask for {limit} or less")
    held = asked or (min(target.context, limit) if target.context and limit else target.context or limit)
    if not held:
        raise TargetError("neither model nor target says how long the context may be", "give --context")
    return held


def _check_done(model: ir.Model) -> None:
    """No canonical operator may be left, but for those that quantization writes; opsets name what is used."""
    graph = model.graph
    left = {node.op_type for node in graph if node.domain == vocabulary.DOMAIN} - _QUANTIZED
    assert not left, f"no pass lowered {sorted(left)}"
    used = {node.domain for node in graph}
    for domain in used - set(graph.opset_imports):
        graph.opset_imports[domain] = 1
    for domain in set(graph.opset_imports) - used - {""}:
        del graph.opset_imports[domain]
