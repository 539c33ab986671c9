"""Who writes to the residual stream of a canonical decoder and who reads it, found by following the graph.

Knows: operators that leave the basis of a hidden state alone, and those that fix it. Does not know: weights' numbers,
what is done with the answer (`quant.rotate`, `quant.equalize`), any architecture's name.

    Embedding -(x number)- hidden -(+)- hidden -(+)- ... - KeepLast - RMSNorm - Linear - logits
                             |      |     |      |
                          RMSNorm Linear ...  Linear
                             |      |
                        Linear ... --        readers: RMSNorm and the linears behind it; writers: Embedding, Linear
"""

from dataclasses import dataclass

import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN, EMBEDDING, KEEP_LAST, LINEAR, RMS_NORM
from quant.graph import canonical


@dataclass(frozen=True)
class Reader:
    """A norm over the stream, and the linears that take what it gives. `norm` is None where linears read the stream itself."""

    norm: ir.Node | None
    linears: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Residual:
    """The stream of one decoder.

    Attributes:
        size: D, numbers of a token's hidden state.
        embeddings: nodes whose rows start it.
        writers: linears whose output is added to it.
        readers: who takes it.
        obstacle: why it cannot be put into another basis, with the node to look at; "" = it can.
    """

    size: int
    embeddings: tuple[ir.Node, ...]
    writers: tuple[ir.Node, ...]
    readers: tuple[Reader, ...]
    obstacle: str


class _Obstacle(Exception):
    """Something fixes the basis of the stream; the argument says what."""


def find(graph: ir.Graph) -> Residual:
    """Follow the stream from the embedding to the end."""
    embeddings = tuple(canonical(graph, EMBEDDING))
    if not embeddings:
        return Residual(0, (), (), (), "the graph has no embedding")
    weight = embeddings[0].inputs[1]
    assert weight is not None and weight.shape is not None
    size = int(weight.shape[1])  # type: ignore[arg-type]
    try:
        stream = _stream([node.outputs[0] for node in embeddings])
        writers, readers = _ends(stream)
    except _Obstacle as found:
        return Residual(size, embeddings, (), (), str(found))
    return Residual(size, embeddings, writers, readers, "")


def readers_of_norms(graph: ir.Graph) -> tuple[Reader, ...]:
    """Every norm whose output only linears take: its gain can be moved into them, wherever it stands."""
    found = []
    for norm in canonical(graph, RMS_NORM):
        try:
            linears = _linears_behind(norm)
        except _Obstacle:
            continue
        if linears:
            found.append(Reader(norm, linears))
    return tuple(found)


def _stream(start: list[ir.Value]) -> dict[int, ir.Value]:
    """All values that hold the stream: sums, multiples and chosen rows of it."""
    found: dict[int, ir.Value] = {}
    waiting = list(start)
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if value.is_graph_output():
            raise _Obstacle(f"the graph gives out {value.name}")
        waiting += [use.node.outputs[0] for use in value.uses() if _carries_on(use.node)]
    return found


def _carries_on(node: ir.Node) -> bool:
    if node.domain == DOMAIN:
        return node.op_type == KEEP_LAST
    return node.domain == "" and (node.op_type == "Add" or (node.op_type == "Mul" and _by_number(node)))


def _by_number(node: ir.Node) -> bool:
    """Whether one input is a constant of one number."""
    return any(value is not None and value.const_value is not None and value.const_value.size == 1 for value in node.inputs)


def _ends(stream: dict[int, ir.Value]) -> tuple[tuple[ir.Node, ...], tuple[Reader, ...]]:
    writers: dict[int, ir.Node] = {}
    readers: dict[int, Reader] = {}
    for value in stream.values():
        for use in value.uses():
            node = use.node
            if node.domain == "" and node.op_type == "Add":
                others = [one for one in node.inputs if one is not None and id(one) not in stream]
                writers.update({id(one): one for other in others for one in _writers_of(other)})
            elif _is(node, RMS_NORM) and use.idx == 0:
                readers[id(node)] = Reader(node, _linears_behind(node))
            elif _is(node, LINEAR) and use.idx == 0:
                readers[id(node)] = Reader(None, (node,))
            elif not _carries_on(node):
                raise _Obstacle(f"{node.op_type} {node.name} reads the residual stream, and is neither a norm nor a linear")
    return tuple(writers.values()), tuple(readers.values())


def _writers_of(value: ir.Value) -> list[ir.Node]:
    """The linears whose outputs make up a value that is added to the stream."""
    node = value.producer()
    if node is None:
        raise _Obstacle(f"{value.name} is added to the residual stream, and is no linear's output")
    if len(value.uses()) > 1:
        raise _Obstacle(f"{node.name} writes to the residual stream and to something else")
    if _is(node, LINEAR):
        return [node]
    if node.domain == "" and (node.op_type == "Add" or (node.op_type == "Mul" and _by_number(node))):
        inputs = [one for one in node.inputs if one is not None and one.const_value is None]
        if node.op_type == "Mul" or len(inputs) == 2:
            return [one for entering in inputs for one in _writers_of(entering)]
    what = "a norm with a gain stands before the addition" if _is(node, RMS_NORM) else "is no linear"
    raise _Obstacle(f"{node.op_type} {node.name} writes to the residual stream: {what}")


def _linears_behind(norm: ir.Node) -> tuple[ir.Node, ...]:
    """The linears that take a norm's output, all of them."""
    found, waiting = [], [norm.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            raise _Obstacle(f"the graph gives out {value.name}")
        for use in value.uses():
            if _is(use.node, KEEP_LAST):
                waiting.append(use.node.outputs[0])
            elif _is(use.node, LINEAR) and use.idx == 0:
                found.append(use.node)
            else:
                raise _Obstacle(f"{use.node.op_type} {use.node.name} takes the output of {norm.name}, and is no linear")
    return tuple(found)


def _is(node: ir.Node, op: str) -> bool:
    return node.domain == DOMAIN and node.op_type == op
