"""Where another exporter's graph multiplies by a weight, and where it looks rows up in a table.

Knows: how exporters write y = x W and a table of rows. Does not know: what a weight is for (`quant.foreign.infer`).

    MatMul(x, W [K,N])                  a weight in reverse: what is wanted is [N,K]
    MatMul(x, Transpose(W [N,K]))       as it is wanted
    Gemm(x, W, bias), transB 0 or 1     the same two, with a bias
    Gather(W [V,D], ids), axis 0        a table; of Transpose(W [D,V]) in reverse
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from quant.graph import sizes

SHAPELESS = frozenset({"Shape", "Size", "NonZero"})
"""What they give tells nothing of their input's numbers."""


@dataclass(frozen=True)
class Matrix:
    """One use of a weight matrix.

    Attributes:
        node: the node that multiplies by it or looks rows up in it.
        weight: the initializer.
        reverse: it lies as [K,N] (or [D,V]) where [N,K] (or [V,D]) is wanted.
        turned: the graph itself transposes it before use.
    """

    node: ir.Node
    weight: ir.Value
    reverse: bool
    turned: bool

    @property
    def name(self) -> str:
        """The weight's name."""
        return str(self.weight.name)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), or (V, D) of a table."""
        assert self.weight.const_value is not None
        first, second = sizes(self.weight.const_value)
        return (second, first) if self.reverse else (first, second)

    @property
    def entering(self) -> ir.Value:
        """x of a product, the ids of a table."""
        value = self.node.inputs[1 if self.node.op_type == "Gather" else 0]
        assert value is not None
        return value


def product_of(node: ir.Node) -> Matrix | None:
    """The product with a weight that `node` is; None when it is none (two computed sides, or scaled as no linear is)."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    found = _matrix(node.inputs[1])
    if found is None or node.inputs[0] is None or node.inputs[0].is_initializer():
        return None
    weight, turned = found
    if node.op_type == "MatMul":
        return Matrix(node, weight, not turned, turned)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if integer(node, "transA", 0) or number(node, "alpha", 1.0) != 1.0 or (bias is not None and number(node, "beta", 1.0) != 1.0):
        return None
    if bias is not None and (bias.const_value is None or len(sizes(bias.const_value)) != 1):
        return None
    return Matrix(node, weight, bool(integer(node, "transB", 0)) == turned, turned)


def table_of(node: ir.Node) -> Matrix | None:
    """The look-up of rows that `node` is; None when it is none."""
    if node.domain != "" or node.op_type != "Gather" or integer(node, "axis", 0) or node.inputs[1] is None:
        return None
    found = _matrix(node.inputs[0])
    return None if found is None or node.inputs[1].is_initializer() else Matrix(node, found[0], found[1], found[1])


def _matrix(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """(the float32 matrix behind `value`, whether the graph transposes it)."""
    if value is None:
        return None
    node = value.producer()
    if node is not None and (node.domain, node.op_type) == ("", "Transpose"):
        inner = _matrix(node.inputs[0])
        perm = node.attributes.get("perm")
        if inner is None or inner[1] or (perm is not None and list(perm.as_ints()) != [1, 0]):
            return None
        return inner[0], True
    tensor = value.const_value
    if node is not None or tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return None
    return value, False


def integer(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    return node.attributes[name].as_int() if name in node.attributes else default


def number(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    return node.attributes[name].as_float() if name in node.attributes else default


def constant(value: ir.Value | None) -> list[int] | None:
    """The whole numbers of a constant value; None when it is computed."""
    if value is None or value.const_value is None or value.const_value.size > 16:
        return None
    return [int(one) for one in value.const_value.numpy().reshape(-1)]


def computed(node: ir.Node) -> list[ir.Value]:
    """Inputs that are no constants and whose numbers count."""
    if node.domain == "" and node.op_type in SHAPELESS:
        return []
    return [value for value in node.inputs if value is not None and value.const_value is None]


def behind(values: Sequence[ir.Value], stops: set[int]) -> list[ir.Node]:
    """Every node that `values` are computed from, nearest first; not beyond a node whose id is in `stops`, which is listed."""
    found: dict[int, ir.Node] = {}
    waiting = list(values)
    while waiting:
        node = waiting.pop(0).producer()
        if node is None or id(node) in found:
            continue
        found[id(node)] = node
        if id(node) not in stops:
            waiting.extend(computed(node))
    return list(found.values())
