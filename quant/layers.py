"""A canonical decoder, decided or not, cut into parts at its residual stream, each of which runs alone.

Knows: layer tags of weights, producers. Does not know: any architecture, how a part is lowered or opened: an `Opener` that
the composer hands in does that (`export.slices`), so that this package never imports `export`.

    ids -- embed --> hidden -- layers.0 --> hidden -- layers.1 --> ... hidden -- tail --> logits

    for part in cut(model):                      # model: ir.Model with or without QuantLinears
        running = open_part(part, opener)        # the weights of this part alone are in memory
        out = running.run(hidden)                # embed: ids [B,S] int64; else hidden [B,S,D] float32; the past is empty
        out.hidden                               # [B,S,D] float32; of the tail: the logits [B,S,V]
        out.streams["layers.3.mlp_in"]           # what enters the linears with that stream tag, [B,S,K]
        out.state["present.3.key"]               # [B,Hkv,S,d], rotated; only with open_part(..., state=True)

`open_part(..., streams=False)` gives hidden alone and runs a little faster. `open_part(tail, opener, head=False)` leaves out
the head's matrix: the tail's one stream "head_in" is then its output (Gemma's head would need 1.4 GB as float32).
`part.build()` is a fresh canonical graph of the part, which may be changed (`quant.calibrate` does) and given to an opener.
A hidden state of many windows is kept in a memory-mapped file by `Hidden`, and `pass_through` runs all of it through a part.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.bundle.vocabulary import DOMAIN, KEEP_LAST, LAYER, LINEAR, QUANT_LINEAR, ROLE, STREAM
from appliance.errors import BadInput
from quant.graph import sizes

Runner = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""Inputs by name -> all outputs by name. It takes no notice of inputs that the lowered part has no use for."""

Opener = Callable[[ir.Model], Runner]
"""Takes the canonical graph of a part (and may change it) and gives what runs it."""

HIDDEN, HIDDEN_OUT = "hidden", "hidden.next"
"""Graph input and output of a part: the residual stream."""

EMBED, TAIL = "embed", "tail"

_LINEARS = (LINEAR, QUANT_LINEAR)


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: "embed", "layers.3" or "tail".
        layer: 3; None for embed and tail.
        entering: the value of the whole graph that is this part's input; None for embed.
        leaving: the value that is its output.
    """

    name: str
    layer: int | None
    graph: ir.Graph = field(repr=False)
    nodes: tuple[ir.Node, ...] = field(repr=False)
    entering: ir.Value | None
    leaving: ir.Value

    @property
    def linears(self) -> tuple[ir.Node, ...]:
        """Its Linears and QuantLinears, in order."""
        return tuple(node for node in self.nodes if node.domain == DOMAIN and node.op_type in _LINEARS)

    @property
    def streams(self) -> dict[str, tuple[str, ...]]:
        """Stream tag -> names of the weights it enters (a decided one's is its integers': with .q), in order."""
        found: dict[str, list[str]] = {}
        for node in self.linears:
            found.setdefault(_stream_of(node), []).append(str(_weight(node).name))
        return {stream: tuple(names) for stream, names in found.items()}

    def build(self, *, streams: bool = True, state: bool = False, head: bool = True) -> ir.Model:
        """A fresh canonical graph of the part; numbers of weights are shared with the whole graph and stay lazy.

        Inputs: input_ids [B,S] (of the layers only its shape counts), attention_mask [B,T], hidden [B,S,D] (not of embed),
        past_key_values.N.key and .value. Outputs: hidden.next, or the tail's logits; and, where asked for, streams by their tags,
        present.N.key and .value.
        """
        return _Copy(self, head).model(streams, state)


def cut(model: ir.Model) -> tuple[Part, ...]:
    """The parts in order: embed, one per layer, tail.

    Raises:
        BadInput: the graph has no layers, they do not follow one another, or more than one hidden state goes from one to the
            next; it says where.
    """
    graph, levels = model.graph, _levels(model.graph)
    last = max(levels.values(), default=-1)
    if last < 1:
        raise _uncut("no weight says its layer")
    members: dict[int, list[ir.Node]] = {level: [] for level in range(-1, last + 1)}
    for node in graph:
        members[levels[id(node)]].append(node)
    parts: list[Part] = []
    entering: ir.Value | None = None
    for level, nodes in members.items():
        name = EMBED if level < 0 else TAIL if level == last else f"layers.{level}"
        if not nodes:
            raise _uncut(f"no node belongs to {name}")
        leaving = graph.outputs[0] if level == last else _crossing(graph, levels, level, name)
        parts.append(Part(name, level if 0 <= level < last else None, graph, tuple(nodes), entering, leaving))
        entering = leaving
    return tuple(parts)


@dataclass(frozen=True)
class Outputs:
    """What one run of a part gave: see the top of this file."""

    hidden: np.ndarray
    streams: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]


class Running:
    """An open part.

    Args:
        model: the part's canonical graph, from `Part.build`, perhaps changed since; it is given to the opener.
    """

    def __init__(self, model: ir.Model, opener: Opener):
        inputs = {str(value.name): value for value in model.graph.inputs}
        self._takes_ids = HIDDEN not in inputs
        self._past = {name: value for name, value in inputs.items() if value.metadata_props.get("state")}
        self._hidden = str(model.graph.outputs[0].name)
        self._state = {value.metadata_props["output"] for value in self._past.values()}
        self._run = opener(model)

    def run(self, entering: np.ndarray) -> Outputs:
        """One batch: ids [B,S] for embed, hidden [B,S,D] otherwise."""
        batch, tokens = entering.shape[:2]
        feeds: dict[str, np.ndarray] = {
            vocabulary.ATTENTION_MASK: np.ones((batch, tokens), np.int64),
            vocabulary.LOGITS_TO_KEEP: np.array([tokens], np.int64),
        }
        if self._takes_ids:
            feeds[vocabulary.INPUT_IDS] = np.ascontiguousarray(entering, np.int64)
        else:
            feeds[vocabulary.INPUT_IDS] = np.zeros((batch, tokens), np.int64)
            feeds[HIDDEN] = np.ascontiguousarray(entering, np.float32)
        found = self._run(feeds | {name: _empty(value, batch) for name, value in self._past.items()})
        hidden = found.pop(self._hidden)
        state = {name: found.pop(name) for name in sorted(self._state) if name in found}
        return Outputs(hidden, found, state)


def open_part(part: Part, opener: Opener, *, streams: bool = True, state: bool = False, head: bool = True) -> Running:
    """Build and open a part: see the top of this file."""
    return Running(part.build(streams=streams, state=state, head=head), opener)


class Hidden:
    """Hidden states of all windows in one file, [W,S,D] float32, mapped: they need no memory but what is being read."""

    def __init__(self, path: Path, shape: tuple[int, int, int]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.shape = path, shape
        self._array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)

    @classmethod
    def existing(cls, path: Path, shape: tuple[int, int, int]) -> "Hidden | None":
        """The file of an earlier run, None when it is not there or not whole."""
        try:
            array = np.load(path, mmap_mode="r+")
        except (OSError, ValueError, EOFError):
            return None
        if array.shape != shape or array.dtype != np.float32:
            return None
        found = cls.__new__(cls)
        found.path, found.shape, found._array = path, shape, array
        return found

    def read(self, part: slice) -> np.ndarray:
        """Windows, a view."""
        return np.asarray(self._array[part])

    def write(self, part: slice, values: np.ndarray) -> None:
        """Windows."""
        self._array[part] = values

    def flush(self) -> None:
        """To the disk."""
        self._array.flush()


def pass_through(
    running: Running, entering: np.ndarray | Hidden, leaving: Hidden | None, batch: int
) -> Iterator[tuple[slice, Outputs]]:
    """Run all windows through an open part, `batch` at a time; gives what came out of each batch.

    Args:
        entering: ids [W,S] for embed, hidden states otherwise.
        leaving: where the new hidden states go; it may be `entering` itself.
    """
    for start in range(0, entering.shape[0], batch):
        windows = slice(start, min(start + batch, entering.shape[0]))
        out = running.run(entering.read(windows) if isinstance(entering, Hidden) else entering[windows])
        if leaving is not None:
            leaving.write(windows, out.hidden)
        yield windows, out


def width_of(embed: Part) -> int:
    """D, the hidden state's size, from the second axis of the embedding's table."""
    for node in embed.nodes:
        for value in node.inputs:
            if value is not None and value.const_value is not None and len(value.const_value.shape) == 2:
                return sizes(value.const_value)[1]
    raise AssertionError("the embedding has no table")


def _weight(node: ir.Node) -> ir.Value:
    weight = node.inputs[1]
    assert weight is not None
    return weight


def _stream_of(node: ir.Node) -> str:
    """Which stream enters the linear; a tied head's weight says what enters the embedding, so the head's is said here."""
    tags = _weight(node).metadata_props
    stream = "head_in" if tags.get(ROLE) == "embed" else tags.get(STREAM, "")
    if not stream:
        raise BadInput(f"weight {_weight(node).name} does not say which stream enters it", "tag it with a stream")
    return stream


def _levels(graph: ir.Graph) -> dict[int, int]:
    """Node -> -1 for embed, the layer's number, or one more than the last layer for the tail.

    A node belongs to the layer that its weight or its carried state is tagged with, else to the latest of its inputs'.
    After a layer, KeepLast and weights that are no layer's begin the tail.
    """
    tags = (value.metadata_props.get(LAYER) for value in (*graph.initializers.values(), *graph.inputs))
    tail = max((int(tag) for tag in tags if tag is not None), default=-1) + 1
    levels: dict[int, int] = {}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        before = max((levels[id(made)] for value in inputs if (made := value.producer()) is not None), default=-1)
        own = [int(value.metadata_props[LAYER]) for value in inputs if value.producer() is None and LAYER in value.metadata_props]
        level = max([before, *own])
        if own and (min(own) != max(own) or before > own[0]):
            raise _uncut(f"{node.op_type} {node.name} of layer {own[0]} comes after layer {before}, or mixes two")
        if not own and before >= 0 and (node.op_type == KEEP_LAST or any(_is_weight(value) for value in inputs)):
            level = tail
        levels[id(node)] = level
    return levels


def _is_weight(value: ir.Value) -> bool:
    return value.const_value is not None and value.metadata_props.get(ROLE, "rope") not in ("rope", "position")


def _crossing(graph: ir.Graph, levels: dict[int, int], level: int, name: str) -> ir.Value:
    """The one value that is made up to `level` and read after it."""
    found = [
        value
        for node in graph
        if levels[id(node)] <= level
        for value in node.outputs
        if any(levels[id(use.node)] > level for use in value.uses())
    ]
    if len(found) != 1:
        names = ", ".join(str(value.name) for value in found) or "none"
        raise _uncut(f"{name} hands on {len(found)} values ({names}), one hidden state is wanted")
    return found[0]


def _uncut(why: str) -> BadInput:
    return BadInput(f"the model cannot be cut into layers: {why}", "use a scheme that needs no calibration, such as w4a8")


def _empty(value: ir.Value, batch: int) -> np.ndarray:
    assert value.shape is not None and value.dtype is not None
    words = {"batch": batch, "past": 0}
    sizes = [size if isinstance(size, int) else words[str(size.value)] for size in value.shape]
    return np.zeros(sizes, value.dtype.numpy())


class _Copy:
    """Copies a part's nodes into a graph of their own."""

    def __init__(self, part: Part, head: bool):
        self._part = part
        self._nodes = part.nodes if head or part.name != TAIL else _without_head(part)
        self._values: dict[int, ir.Value] = {}

    def model(self, streams: bool, state: bool) -> ir.Model:
        part, graph = self._part, self._part.graph
        inputs = [self._input(value) for value in graph.inputs if value.name in (vocabulary.INPUT_IDS, vocabulary.ATTENTION_MASK)]
        carried = [value for value in graph.inputs if value not in _named(graph) and self._read(value)]
        if part.entering is not None:
            inputs.append(self._hidden(part.entering))
        inputs += [self._input(value) for value in carried]
        new = ir.Graph(inputs, [], nodes=[], name=part.name, opset_imports=dict(graph.opset_imports))
        for node in self._nodes:
            self._node(new, node)
        headless = self._nodes is not part.nodes
        if not headless:
            new.outputs.append(self._output(new, part.leaving))
        if streams or headless:
            new.outputs.extend(self._streams(new))
        if state:
            new.outputs.extend(self._values[id(value)] for value in graph.outputs[1:] if id(value) in self._values)
        return ir.Model(new, ir_version=10, producer_name="appliance")

    def _read(self, value: ir.Value) -> bool:
        members = {id(node) for node in self._nodes}
        return any(id(use.node) in members for use in value.uses())

    def _input(self, value: ir.Value) -> ir.Value:
        new = ir.Value(name=value.name, type=value.type, shape=value.shape)
        new.metadata_props.update(value.metadata_props)
        self._values[id(value)] = new
        return new

    def _hidden(self, value: ir.Value) -> ir.Value:
        new = ir.Value(name=HIDDEN, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "sequence", "hidden"]))
        self._values[id(value)] = new
        return new

    def _node(self, graph: ir.Graph, node: ir.Node) -> None:
        inputs = [None if value is None else self._entering(graph, value) for value in node.inputs]
        outputs = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in node.outputs]
        self._values.update({id(old): new for old, new in zip(node.outputs, outputs, strict=True)})
        new = ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs, name=node.name,
            metadata_props=dict(node.metadata_props),
        )  # fmt: skip
        graph.append(new)

    def _entering(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        if id(value) in self._values:
            return self._values[id(value)]
        assert value.const_value is not None and value.name is not None, f"{value.name} comes from another part"
        new = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        new.metadata_props.update(value.metadata_props)
        graph.register_initializer(new)
        self._values[id(value)] = new
        return new

    def _output(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """The hidden state under its own name; logits keep theirs."""
        inside = self._values[id(value)]
        if value.is_graph_output():
            return inside
        return give_out(graph, inside, HIDDEN_OUT)

    def _streams(self, graph: ir.Graph) -> list[ir.Value]:
        found: dict[str, ir.Value] = {}
        for node in self._part.linears:
            stream, value = _stream_of(node), node.inputs[0]
            assert value is not None
            known = found.setdefault(stream, value)
            if known is not value:
                raise BadInput(f"two different values carry the stream tag {stream}", "give each stream a tag of its own")
        ordered = sorted(found.items(), key=lambda one: one[0] != "head_in")  # first: what a tail without head gives
        return [give_out(graph, self._values[id(value)], stream) for stream, value in ordered]


def give_out(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """An Identity: its output may have any name, where the value itself may be an input or be renamed by a rewrite."""
    output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "sequence", f"size.{name}"]))
    graph.append(ir.node("Identity", [value], name=f"/parts/{name}", outputs=[output]))
    return output


def _named(graph: ir.Graph) -> list[ir.Value]:
    return [value for value in graph.inputs if value.name in (vocabulary.INPUT_IDS, vocabulary.ATTENTION_MASK)]


def _without_head(part: Part) -> tuple[ir.Node, ...]:
    """The part's nodes but for its last linear and what comes after that."""
    gone = {id(part.linears[-1])}
    for node in part.nodes:
        if any(id(value.producer()) in gone for value in node.inputs if value is not None):
            gone.add(id(node))
    return tuple(node for node in part.nodes if id(node) not in gone)
