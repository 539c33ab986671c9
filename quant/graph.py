"""Places in an `onnx_ir` graph where quantization writes: canonical nodes, lazy initializers, nodes before another node.

Knows: how nodes and initializers are added and replaced. Does not know: what is quantized, or any operator's meaning.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN
from appliance.errors import BadInput

Attribute = int | float | str | Sequence[int]


def canonical(graph: ir.Graph, *ops: str) -> list[ir.Node]:
    """Nodes of the canonical operators `ops`, in order."""
    return [node for node in graph if node.domain == DOMAIN and node.op_type in ops]


def tensor_of(value: ir.Value | None, node: ir.Node) -> ir.TensorProtocol:
    """The numbers of a weight input; `BadInput` naming the node when it is no initializer."""
    if value is None or value.const_value is None:
        raise BadInput(f"{node.op_type} {node.name}: its weight is no initializer", "build weights as initializers")
    return value.const_value


def sizes(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Its shape as plain integers."""
    return tuple(tensor.shape.numpy())


def lazy(name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], np.ndarray]) -> ir.LazyTensor:
    """A tensor that `read` makes anew each time and nothing keeps.

    For types of 4 bits `read` gives the packed bytes, for E8M0 the bytes.
    """

    def evaluate() -> ir.TensorProtocol:
        array = read()
        if dtype in (ir.DataType.INT4, ir.DataType.FLOAT4E2M1):
            return ir.PackedTensor(array, dtype, shape=ir.Shape(shape), name=name)
        if dtype == ir.DataType.FLOAT8E8M0:
            array = array.view(dtype.numpy())
        return ir.Tensor(array, dtype=dtype, shape=ir.Shape(shape), name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), cache=False, name=name)


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol, tags: Mapping[str, str]) -> ir.Value:
    """Register `tensor` under its own name; `BadInput` when the name is taken."""
    name = str(tensor.name)
    if name in graph.initializers:
        raise BadInput(f"the graph already has an initializer {name}", "quantize a model only once")
    value = ir.Value(name=name, shape=ir.Shape(sizes(tensor)), type=ir.TensorType(tensor.dtype), const_value=tensor)
    value.metadata_props.update(tags)
    graph.register_initializer(value)
    return value


def replace(old: ir.Node, output: ir.Value) -> None:
    """Let `output` take the place of the one output of `old`, as a graph output too, and remove `old`."""
    graph, before = old.graph, old.outputs[0]
    assert isinstance(graph, ir.Graph)
    output.type, output.shape = before.type, before.shape
    if before.is_graph_output():
        output.name, before.name = before.name, f"{before.name}.replaced"
    ir.convenience.replace_all_uses_with(before, output, replace_graph_outputs=True)
    graph.remove(old, safe=True)


def drop_unused(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Remove those of the initializers `values` that nothing reads any more."""
    for value in values:
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)


class Writer:
    """Writes nodes before `anchor`, named after it."""

    def __init__(self, anchor: ir.Node):
        graph = anchor.graph
        assert isinstance(graph, ir.Graph)
        self.graph, self.anchor = graph, anchor
        name = anchor.name or str(anchor.outputs[0].name)
        self.path = name.removesuffix(f"/{anchor.op_type}").removesuffix("/Linear").removesuffix("/Embedding")

    def value(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        domain: str = "",
        name: str = "",
    ) -> ir.Value:
        """The output of a new node called `<path>/<name or op>`, numbered if the graph has that name already."""
        full = self._free(f"{self.path}/{name or op}")
        node = ir.node(
            op, list(inputs), dict(attributes or {}), domain=domain, name=full, outputs=[ir.Value(name=f"{full}/output_0")]
        )
        node.metadata_props.update(self.anchor.metadata_props)
        self.graph.insert_before(self.anchor, node)
        return node.outputs[0]

    def _free(self, name: str) -> str:
        taken = self.graph.meta.setdefault("quant.names", set())
        if not taken:
            taken.update(node.name for node in self.graph)
        free, count = name, 1
        while free in taken:
            count += 1
            free = f"{name}_{count}"
        taken.add(free)
        return free

    def constant(self, array: np.ndarray | np.float32) -> ir.Value:
        """A small constant, one initializer for all that ask for the same."""
        array = np.asarray(array)
        name = f"quant.{array.dtype}.{'.'.join(map(repr, array.reshape(-1).tolist()))}.{array.ndim}"
        known = self.graph.initializers.get(name)
        return known if known is not None else add_initializer(self.graph, ir.tensor(array, name=name), {})

    def cut(self, value: ir.Value, columns: int) -> ir.Value:
        """The first `columns` of the last axis."""
        bounds = [self.constant(np.array([number])) for number in (0, columns, -1)]
        return self.value("Slice", [value, *bounds])
