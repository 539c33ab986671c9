"""Another exporter's weights as canonical nodes, so that the rest of this package decides on them, and back again.

Knows: how a product with a weight becomes a Linear and what it was. Does not know: how roles were found (`quant.foreign.infer`),
how a Linear is quantized.

    MatMul(x, W [K,N])           ->  Linear(x, W^T [N,K])          W^T is read lazily, one weight at a time
    MatMul(x, Transpose(W))      ->  Linear(x, W)
    Gemm(x, W, bias)             ->  Linear(x, W or W^T, bias)
    Gather(W, ids)               ->  Embedding(ids, W)             only where ids are [B,S]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN, EMBEDDING, LAYER, LINEAR, PARTS, ROLE, STREAM
from quant.foreign.infer import Inference, Inferred
from quant.foreign.products import Matrix
from quant.graph import drop_unused, lazy, replace

Choose = Callable[[tuple[str, ...]], str]
"""Which of the roles of a packed matrix decides on its form."""

SAME_ROWS = 64
"""Rows of two tables that are compared before all of them are."""


@dataclass(frozen=True)
class Adopted:
    """A graph whose weights are canonical.

    Attributes:
        matrices: name of the canonical weight -> what it is.
        originals: each Linear and Embedding, and what stood in its place.
        copied: the head's table is a copy of the embedding's: one is kept for both.
    """

    matrices: dict[str, Inferred]
    originals: tuple[tuple[ir.Node, Matrix], ...]
    copied: bool


def adopt(model: ir.Model, inference: Inference, choose: Choose) -> Adopted:
    """Rewrite every matrix whose role is known, in place; tag all weights."""
    graph = model.graph
    writer = _Writer(graph, _copied(inference))
    for one in inference.matrices:
        writer.write(one, choose)
    for name, role in inference.others.items():
        graph.initializers[name].metadata_props[ROLE] = role
    writer.clean()
    return Adopted(writer.matrices, tuple(writer.originals), writer.copied is not None)


def restore(model: ir.Model, adopted: Adopted) -> None:
    """Put back what stays float exactly as it was, in place; after emission."""
    graph = model.graph
    for node, matrix in adopted.originals:
        if node.graph is graph:
            _put_back(graph, node, matrix)
    if not any(node.domain == DOMAIN for node in graph):
        graph.opset_imports.pop(DOMAIN, None)
    _drop_dead(graph)


def _copied(inference: Inference) -> ir.Value | None:
    """The embedding's weight if the head's is another initializer with the very same numbers."""
    uses = {one.roles[0]: one.matrix for one in inference.matrices if one.roles[0] in ("embed", "head")}
    if len(uses) < 2 or uses["embed"].weight is uses["head"].weight or uses["embed"].shape != uses["head"].shape:
        return None
    table, head = (_oriented(one) for one in (uses["embed"], uses["head"]))
    same = np.array_equal(table[:SAME_ROWS], head[:SAME_ROWS]) and np.array_equal(table, head)
    return uses["embed"].weight if same else None


def _oriented(one: Matrix) -> np.ndarray:
    assert one.weight.const_value is not None
    array = one.weight.const_value.numpy()
    return array.T if one.reverse else array


class _Writer:
    """Writes canonical nodes into one graph."""

    def __init__(self, graph: ir.Graph, copied: ir.Value | None):
        self.graph = graph
        self.copied = copied
        self.matrices: dict[str, Inferred] = {}
        self.originals: list[tuple[ir.Node, Matrix]] = []
        self._turned: dict[tuple[int, bool], ir.Value] = {}
        self._table: ir.Value | None = None

    def write(self, one: Inferred, choose: Choose) -> None:
        """One matrix; a look-up whose ids are no [B,S] stays as it is."""
        matrix = one.matrix
        inputs: list[ir.Value | None]
        if one.roles == ("embed",):
            ids = matrix.entering
            if ids.shape is None or len(ids.shape) != 2:
                matrix.weight.metadata_props[ROLE] = "embed"
                return
            weight = self._table = self._weight(matrix)
            inputs, op = [ids, weight], EMBEDDING
        else:
            tied = one.roles == ("head",) and self.copied is not None and self._table is not None
            weight = self._table if tied and self._table is not None else self._weight(matrix)
            inputs, op = [matrix.entering, weight, *matrix.node.inputs[2:]], LINEAR
        self._tag(weight, one, choose)
        self.matrices.setdefault(str(weight.name), one)
        node = ir.node(
            op,
            inputs,
            domain=DOMAIN,
            name=matrix.node.name,
            outputs=[ir.Value(name=matrix.node.outputs[0].name)],
            metadata_props=dict(weight.metadata_props),
        )
        self.originals.append((node, matrix))
        self.graph.insert_before(matrix.node, node)
        replace(matrix.node, node.outputs[0])

    def clean(self) -> None:
        """Drop what nothing reads now, and let turned weights have the names of those they stand for."""
        self.graph.opset_imports[DOMAIN] = 1
        _drop_dead(self.graph)
        for (_, reverse), value in self._turned.items():
            plain = str(value.name).removesuffix(".turned")
            if reverse and plain not in self.graph.initializers:
                self.matrices = {plain if name == value.name else name: one for name, one in self.matrices.items()}
                value.name = plain

    def _weight(self, matrix: Matrix) -> ir.Value:
        """[N,K]: the initializer itself, or a lazy transpose of it."""
        if not matrix.reverse:
            return matrix.weight
        key = id(matrix.weight), True
        if key not in self._turned:
            tensor = matrix.weight.const_value
            assert tensor is not None
            name = f"{matrix.name}.turned"
            turned = lazy(name, ir.DataType.FLOAT, matrix.shape, lambda: np.ascontiguousarray(tensor.numpy().T))
            value = ir.Value(name=name, shape=ir.Shape(matrix.shape), type=ir.TensorType(tensor.dtype), const_value=turned)
            self.graph.register_initializer(value)
            self._turned[key] = value
        return self._turned[key]

    def _tag(self, weight: ir.Value, one: Inferred, choose: Choose) -> None:
        if ROLE in weight.metadata_props:
            return  # a tied table keeps the embedding's
        tags = {ROLE: choose(one.roles), STREAM: one.stream}
        if one.layer is not None:
            tags[LAYER] = str(one.layer)
        if one.rows:
            ordered = sorted(one.rows.items(), key=lambda item: item[1])
            tags[PARTS] = ",".join(f"{role}:{first}:{end}" for role, (first, end) in ordered)
        weight.metadata_props.update(tags)
        bias = one.matrix.node.inputs[2] if one.matrix.node.op_type == "Gemm" and len(one.matrix.node.inputs) > 2 else None
        if bias is not None:
            bias.metadata_props[ROLE] = "bias"


def _put_back(graph: ir.Graph, node: ir.Node, matrix: Matrix) -> None:
    """The node that `node` was made of, reading the same initializer."""
    weight = matrix.weight
    tags = dict(node.inputs[1].metadata_props) if node.inputs[1] is not None else {}
    weight.metadata_props.update(tags)
    if not weight.is_initializer():
        if str(weight.name) in graph.initializers:
            graph.initializers.pop(str(weight.name))
        graph.register_initializer(weight)
    read = weight
    if matrix.turned:
        turned = ir.Value(name=f"{node.name}/turned")
        turn = ir.node("Transpose", [weight], {"perm": [1, 0]}, name=f"{node.name}/Transpose", outputs=[turned])
        graph.insert_before(node, turn)
        read = turned
    entering, rest = node.inputs[0], list(node.inputs[2:])
    back = ir.Node(
        "",
        matrix.node.op_type,
        [read, entering] if node.op_type == EMBEDDING else [entering, read, *rest],
        list(matrix.node.attributes.values()),
        name=node.name,
        outputs=[ir.Value(name=node.outputs[0].name)],
        metadata_props=dict(node.metadata_props),
    )
    graph.insert_before(node, back)
    replace(node, back.outputs[0])


def _drop_dead(graph: ir.Graph) -> None:
    """Transposes of weights that nothing reads any more, then initializers that nothing reads."""
    for node in reversed(list(graph)):
        read = any(value.uses() or value.is_graph_output() for value in node.outputs)
        if node.op_type == "Transpose" and not read and node.inputs[0] is not None and node.inputs[0].is_initializer():
            graph.remove(node, safe=True)
    drop_unused(graph, [value for value in graph.initializers.values() if not value.is_graph_input()])
