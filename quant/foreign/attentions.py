"""Attention in another exporter's graph: what enters it as query, key and value, and where its result comes out.

Knows: fused operators, and a softmax between two products. Does not know: where query, key and value come from.

    query --- MatMul - (scale, cap, mask) - Softmax - (guards) - MatMul --> result
    key^T ----+                                                  |
    value -------------------------------------------------------+

Source: onnxruntime, ContribOperators.md; ONNX, Attention (opset 23).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from quant.foreign.products import behind, integer

FUSED = {
    ("", "Attention"),
    *(("com.microsoft", f"{kind}Attention") for kind in ("GroupQuery", "MultiHead", "Sparse", "Paged", "DecoderMaskedMultiHead")),
}
"""Operators that take query, key and value as their first three inputs, or all of them in the first."""


@dataclass(frozen=True)
class Attention:
    """One attention.

    Attributes:
        ends: the nodes whose outputs are its result.
        entering: role -> the values that enter as it. All three name one value where they enter packed.
        heads: (query heads, key heads) of a fused operator that takes them packed, rows of each after the other; else None.
    """

    ends: tuple[ir.Node, ...]
    entering: Mapping[str, tuple[ir.Value, ...]]
    heads: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The name of the node that its result comes from."""
        return self.ends[0].name or str(self.ends[0].outputs[0].name)


def find_attentions(graph: ir.Graph, products: Collection[int]) -> list[Attention]:
    """All of them, in the order of the graph. `products`: ids of the nodes that multiply by a weight."""
    found = []
    for node in graph:
        if (node.domain, node.op_type) in FUSED:
            found.append(_fused(node))
        elif (node.domain, node.op_type) == ("", "Softmax"):
            one = _spelled_out(node, products)
            if one is not None:
                found.append(one)
    return found


def _fused(node: ir.Node) -> Attention:
    query, key, value = ([*node.inputs, None, None, None])[:3]
    assert query is not None
    if key is None:
        both = integer(node, "num_heads", 0), integer(node, "kv_num_heads", 0)
        return Attention((node,), {f"attn.{part}": (query,) for part in "qkv"}, both if all(both) else None)
    entering = {"attn.q": (query,), "attn.k": (key,), "attn.v": (key if value is None else value,)}
    return Attention((node,), entering)


def _spelled_out(softmax: ir.Node, products: Collection[int]) -> Attention | None:
    """The attention around a softmax; None where it is another one's, a router's or a sampler's."""
    scores = _products_before(softmax, products)
    ends = _products_after(softmax, products)
    if not scores or not ends:
        return None
    entering = {
        "attn.q": _inputs(scores, 0),
        "attn.k": _inputs(scores, 1),
        "attn.v": _inputs(ends, 1),
    }
    return Attention(tuple(ends), entering)


def _inputs(nodes: list[ir.Node], index: int) -> tuple[ir.Value, ...]:
    return tuple(value for node in nodes if (value := node.inputs[index]) is not None)


def _products_before(softmax: ir.Node, products: Collection[int]) -> list[ir.Node]:
    """The products of computed sides that scores come from; none if a weight's product is nearer."""
    graph = softmax.graph
    assert isinstance(graph, ir.Graph)
    stops = {id(node) for node in graph if node.op_type == "MatMul"} | set(products)
    found = [node for node in behind([value for value in softmax.inputs if value is not None], stops) if id(node) in stops]
    return [] if any(id(node) in products for node in found) else found


def _products_after(softmax: ir.Node, products: Collection[int]) -> list[ir.Node]:
    """The products whose first side the weights are; what lies between neither mixes nor multiplies by a weight."""
    found: dict[int, ir.Node] = {}
    seen: set[int] = set()
    waiting = [softmax.outputs[0]]
    while waiting:
        value = waiting.pop()
        for use in value.uses():
            node = use.node
            if node.op_type == "MatMul" and id(node) not in products:
                if use.idx == 0:
                    found[id(node)] = node
            elif id(node) not in seen and id(node) not in products:
                seen.add(id(node))
                waiting.extend(node.outputs)
    return list(found.values())
