"""Writing and rewriting nodes of an `onnx_ir` graph.

Knows: how a node is placed, how constants are shared, how one node takes another's place, how rows are joined lazily.
Does not know: what any operator means, architectures, targets.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from appliance.bundle import vocabulary

OPSET = 21
"""Lowest ai.onnx opset whose DequantizeLinear takes blocks of int4; passes that need a newer one raise it."""

Attribute = int | float | str | Sequence[int] | Sequence[float]


class Nodes:
    """Writes nodes under one path of names, at the end of `graph` or before `anchor`."""

    def __init__(self, graph: ir.Graph, path: str, anchor: ir.Node | None = None):
        self.graph = graph
        self.path = path
        self.anchor = anchor

    def below(self, name: str) -> "Nodes":
        """The same place in the graph, one step further down in the names."""
        return Nodes(self.graph, f"{self.path}/{name}", self.anchor)

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        domain: str = "",
        name: str = "",
        outputs: int = 1,
    ) -> ir.Node:
        """One node called `<path>/<name or op>`; its values are called after it."""
        full = self._free(f"{self.path}/{name or op}")
        values = [ir.Value(name=f"{full}/output_{index}") for index in range(outputs)]
        node = ir.node(op, list(inputs), dict(attributes or {}), domain=domain, name=full, outputs=values)
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)
        return node

    def value(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        domain: str = "",
        name: str = "",
    ) -> ir.Value:
        """The single output of a new node."""
        return self.node(op, inputs, attributes, domain=domain, name=name).outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        """A shared int64 vector."""
        return self._constant("ints." + ".".join(map(str, numbers)), np.array(numbers, np.int64))

    def integer(self, number: int) -> ir.Value:
        """A shared int64 scalar."""
        return self._constant(f"integer.{number}", np.array(number, np.int64))

    def number(self, number: float) -> ir.Value:
        """A shared float32 scalar."""
        return self._constant(f"number.{number!r}", np.array(number, np.float32))

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        known = self.graph.initializers.get(name)
        if known is not None:
            return known
        return add_initializer(self.graph, name, ir.tensor(array, name=name), {})

    def _free(self, name: str) -> str:
        """`name`, numbered if the graph already has it (rewrites write beside what they replace)."""
        taken = self.graph.meta.setdefault("appliance.names", set())
        if not taken:
            taken.update(node.name for node in self.graph)
        free, count = name, 1
        while free in taken:
            count += 1
            free = f"{name}_{count}"
        taken.add(free)
        return free


def sizes(of: ir.TensorProtocol | ir.Value) -> tuple[int, ...]:
    """The shape of a tensor, or of a value whose sizes are all known, as plain numbers."""
    assert of.shape is not None
    numbers = tuple(size for size in of.shape if isinstance(size, int))
    assert len(numbers) == len(of.shape), f"{of.name} has the shape {of.shape}, which is not fixed"
    return numbers


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol, tags: Mapping[str, str]) -> ir.Value:
    """Register `tensor` in `graph` under `name` with `tags`; a second one of that name is our own bug."""
    assert name not in graph.initializers, f"initializer {name} is there already"
    value = ir.Value(name=name, shape=ir.Shape(sizes(tensor)), type=ir.TensorType(tensor.dtype), const_value=tensor)
    value.metadata_props.update(tags)
    graph.register_initializer(value)
    return value


def lazy(name: str, shape: Sequence[int], dtype: ir.DataType, read: Callable[[], np.ndarray]) -> ir.LazyTensor:
    """A tensor whose numbers `read` makes anew whenever they are asked for; nothing is kept."""

    def evaluate() -> ir.TensorProtocol:
        array = read()
        assert array.shape == tuple(shape), f"{name}: {array.shape} was read where {tuple(shape)} was promised"
        return ir.tensor(np.ascontiguousarray(array), dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), cache=False, name=name)


def join_rows(name: str, parts: Sequence[ir.TensorProtocol]) -> ir.LazyTensor:
    """One lazy tensor of the rows of all `parts`, in order."""
    rest = sizes(parts[0])[1:]
    shape = (sum(sizes(part)[0] for part in parts), *rest)
    return lazy(name, shape, parts[0].dtype, lambda: np.concatenate([part.numpy() for part in parts]))


def transposed(name: str, tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """The lazy transpose of a matrix."""
    rows, columns = sizes(tensor)
    return lazy(name, (columns, rows), tensor.dtype, lambda: tensor.numpy().T)


def replace(graph: ir.Graph, old: ir.Node, new: Sequence[ir.Value]) -> None:
    """Let `new` take the place of `old`'s outputs, names of graph outputs included, and remove `old`."""
    for before, after in zip(old.outputs, new, strict=True):
        if before.is_graph_output():
            after.name, after.type, after.shape = before.name, before.type, before.shape
            before.name = f"{before.name}.replaced"
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.remove(old, safe=True)


def drop_unused_initializers(graph: ir.Graph) -> None:
    """Remove initializers that nothing reads (an overridable one is a graph input and stays)."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_input() and not value.is_graph_output():
            del graph.initializers[name]


def attribute_int(node: ir.Node, name: str) -> int:
    """An integer attribute that the node must have."""
    return node.attributes[name].as_int()


def attribute_float(node: ir.Node, name: str) -> float:
    """A float attribute that the node must have."""
    return node.attributes[name].as_float()


def nodes_of(graph: ir.Graph, *ops: str) -> list[ir.Node]:
    """The canonical nodes of these operators, in order."""
    return [node for node in graph if node.domain == vocabulary.DOMAIN and node.op_type in ops]
