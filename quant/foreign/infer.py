"""What each weight of a graph is for, told from the graph's structure: for models that another exporter made.

Knows: how decoders are put together. Does not know: any architecture, names of weights, how exporters write a product
(`quant.foreign.products`) or attention (`quant.foreign.attentions`).

Every value is traced back to what it nearest comes from: the embedding, products with a weight, attentions.

    comes from                                     so the product that it enters is
    ----------                                     -------------------------------
    an attention and nothing else                  attn.o
    products and nothing else                      mlp.down; they are mlp.gate and mlp.up, the gate the one behind the
                                                   activation; a single one is mlp.up
    the embedding, with all that was added to it   attn.q, attn.k, attn.v where an attention says so; head where the logits
                                                   come from it; and the gate and up of the mlp above
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from appliance.errors import BadInput
from quant.foreign.attentions import Attention, find_attentions
from quant.foreign.others import refuse_unreadable, roles_of_others, unread
from quant.foreign.products import Matrix, behind, computed, product_of, table_of
from quant.foreign.rows import rows_of

EMBED = 0
"""The source of what comes from the embedding; a product's is the id of its node, attention i's is -1-i."""

NONLINEAR = frozenset(
    {
        "Sigmoid", "Tanh", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Silu", "Swish", "Relu", "LeakyRelu", "Elu", "Selu",
        "Celu", "Erf", "Exp", "Softplus", "Mish", "HardSwish", "HardSigmoid", "Clip", "Max", "Pow", "ThresholdedRelu",
    }
)  # fmt: skip
PASSED_ALONG = frozenset(
    {"Cast", "Expand", "Gather", "GatherND", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose first input's numbers come out unchanged."""

Sources = frozenset[int]


@dataclass(frozen=True)
class Inferred:
    """What one matrix is for.

    Attributes:
        matrix: its use; of a tied table the look-up, of any other its product.
        roles: all that it does, "attn.q" and "attn.k" and "attn.v" for one that is packed.
        rows: role -> (first, end), of a packed one where it can be told.
        layer: number of the layer, or None.
        stream: tag of the hidden state that enters it.
        because: what was seen.
    """

    matrix: Matrix
    roles: tuple[str, ...]
    layer: int | None
    stream: str
    because: str
    rows: Mapping[str, tuple[int, int]] | None = None


@dataclass(frozen=True)
class Unknown:
    """A weight whose role cannot be told."""

    name: str
    node: str
    why: str


@dataclass(frozen=True)
class Inference:
    """What was found out about a graph.

    Attributes:
        matrices: in the order of the graph.
        others: roles of what is no matrix: norms, biases, tables of positions and of angles.
        unknown: what is to be refused, or left as it is.
    """

    matrices: tuple[Inferred, ...]
    others: Mapping[str, str]
    unknown: tuple[Unknown, ...]


def infer(model: ir.Model) -> Inference:
    """Find out what each weight of a float decoder is for; nothing is changed. Nodes must stand in topological order.

    Raises:
        BadInput: the graph is quantized already, is not float32, or no output comes from a head; the node is named.
    """
    refuse_unreadable(model.graph)
    return _Reading(model.graph).result()


class _Reading:
    """One graph being read: every weight gets a role, or a reason why not."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        products = [one for node in graph if (one := product_of(node)) is not None]
        self.products = {id(one.node): one for one in products}
        self.tables = [one for node in graph if (one := table_of(node)) is not None and _asked_from_outside(one)]
        self.attentions = find_attentions(graph, self.products)
        self.roles: dict[int, Inferred] = {}
        self.unknown: list[Unknown] = []
        self.head, self.embedding = self._ends()
        self.sources: dict[int, Sources] = {}
        self.deepest: dict[int, int] = {}
        self._trace()

    def result(self) -> Inference:
        """Assign roles from what is surest to what follows from it."""
        for number, attention in enumerate(self.attentions):
            self._entering(number, attention)
        for one in self._left():
            self._leaving(one)
        for one in self._left():
            self._down(one)
        for one in self._left():
            self._not_known(one, "nothing shows what it is for")
        place = {id(node): number for number, node in enumerate(self.graph)}
        found = sorted(self.roles.values(), key=lambda one: place[id(one.matrix.node)])
        used = {id(one.matrix.weight) for one in found}
        width = None if self.embedding is None else self.embedding.shape[1]
        others = roles_of_others(self.graph, used, width, lambda value: bool(self._of(value)))
        left = [Unknown(*one) for one in unread(self.graph, set(self.products))]
        return Inference(tuple(found), others, tuple(self.unknown + left))

    def _left(self) -> list[Matrix]:
        named = {one.name for one in self.unknown}
        return [one for key, one in self.products.items() if key not in self.roles and one.name not in named]

    def _say(self, one: Matrix, role: str, layer: int | None, stream: str, because: str) -> None:
        """Give `one` a role; a second one where it serves several."""
        known = self.roles.get(id(one.node))
        roles = (role,) if known is None else tuple(dict.fromkeys((*known.roles, role)))
        if known is not None:
            layer, stream, because = known.layer, known.stream, known.because
        self.roles[id(one.node)] = Inferred(one, roles, layer, stream, because)

    def _not_known(self, one: Matrix, why: str) -> None:
        self.unknown.append(Unknown(one.name, one.node.name or str(one.node.outputs[0].name), why))

    def _ends(self) -> tuple[Matrix, Matrix | None]:
        """The head, and the table whose rows are the hidden states of tokens (None where those are given)."""
        heads = {str(output.name): one for output in self.graph.outputs if (one := self._before(output)) is not None}
        pairs: list[tuple[str, Matrix, Matrix | None]] = [
            (output, head, table) for output, head in heads.items() for table in self.tables if table.shape == head.shape
        ]
        if not self.tables:
            pairs = [(output, head, None) for output, head in heads.items()]
        named = pairs if len({id(head.node) for _, head, _ in pairs}) == 1 else [one for one in pairs if one[0] == "logits"]
        if not named:
            seen = ", ".join(str(output.name) for output in self.graph.outputs[:4])
            raise BadInput(
                f"no output ({seen} ...) comes from a product with a head of one row a token of the embedding",
                "quantize a decoder whose logits are an output",
            )
        _, head, table = named[0]
        self.roles[id(head.node)] = Inferred(head, ("head",), None, "head_in", f"the output comes from it, {head.shape[0]} rows")
        if table is not None:
            because = "rows of tokens" if table.weight is not head.weight else "rows of tokens, and the head itself: tied"
            self.roles[id(table.node)] = Inferred(table, ("embed",), None, "embed_in", because)
        return head, table

    def _before(self, output: ir.Value) -> Matrix | None:
        """The product that an output comes from through single values alone."""
        value: ir.Value | None = output
        while value is not None and (node := value.producer()) is not None:
            if id(node) in self.products:
                return self.products[id(node)]
            inputs = computed(node)
            if node.op_type in PASSED_ALONG and node.inputs[0] is not None:
                inputs = [node.inputs[0]]
            value = inputs[0] if len(inputs) == 1 else None
        return None

    def _trace(self) -> None:
        """Fill `sources` and `deepest` (the last attention above), value by value."""
        ends = {id(node): number for number, one in enumerate(self.attentions) for node in one.ends}
        for value in self.graph.inputs:
            if self.embedding is None and value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) == 3:
                self.sources[id(value)] = frozenset({EMBED})
        for node in self.graph:
            entering = computed(node)
            sources = frozenset[int]().union(*(self.sources.get(id(value), frozenset()) for value in entering))
            deepest = max((self.deepest.get(id(value), -1) for value in entering), default=-1)
            if self.embedding is not None and node is self.embedding.node:
                sources = frozenset({EMBED})
            elif id(node) in self.products:
                sources = frozenset({id(node)})
            elif id(node) in ends:
                deepest = max(deepest, ends[id(node)])
                sources = frozenset({-1 - ends[id(node)]})
            for output in node.outputs:
                self.sources[id(output)], self.deepest[id(output)] = sources, deepest

    def _of(self, *values: ir.Value) -> Sources:
        return frozenset[int]().union(*(self.sources.get(id(value), frozenset()) for value in values))

    def _entering(self, number: int, attention: Attention) -> None:
        """q, k and v of one attention."""
        words = {"attn.q": "query", "attn.k": "key", "attn.v": "value"}
        for role, values in attention.entering.items():
            sources = self._of(*values)
            if not sources and role != "attn.q":
                continue  # given from outside
            one = self.products.get(next(iter(sources))) if len(sources) == 1 else None
            if one is None:
                self.unknown.append(Unknown("", attention.name, f"its {words[role]} comes from {len(sources)} products, not one"))
                continue
            others = self.roles.get(id(one.node))
            if others is not None and others.layer != number:
                continue  # an earlier layer's key or value, used again
            self._say(one, role, number, f"layers.{number}.attn_in", f"enters attention {number}")
        packed = [known for known in self.roles.values() if known.layer == number and len(known.roles) > 1]
        for known in packed:
            parts = {role: attention.entering[role] for role in known.roles}
            rows = rows_of(known.matrix, parts, attention.heads)
            self.roles[id(known.matrix.node)] = replace(known, rows=rows)

    def _leaving(self, one: Matrix) -> None:
        """o, where an attention alone enters."""
        sources = self._of(one.entering)
        attentions = [source for source in sources if source < EMBED]
        if len(sources) == 1 and attentions:
            number = -1 - attentions[0]
            self._say(one, "attn.o", number, f"layers.{number}.attn_out", f"attention {number} enters it")
        elif attentions and EMBED not in sources:
            self._not_known(one, "an attention and something else enter it together")

    def _down(self, one: Matrix) -> None:
        """down, where products alone enter, and with it gate and up."""
        sources = self._of(one.entering)
        if not sources or any(source <= EMBED or source in self.roles for source in sources):
            return
        inner = [self.products[source] for source in sources]
        parts = self._gated(one, inner)
        if parts is None:
            return
        layer = self._layer(inner[0])
        for role, matrix in parts:
            self._say(matrix, role, layer, f"layers.{layer}.mlp_in", f"enters {one.name}" + (" gated" if len(parts) > 1 else ""))
        self._say(one, "mlp.down", layer, f"layers.{layer}.mlp_mid", "only products enter it")

    def _gated(self, down: Matrix, inner: list[Matrix]) -> list[tuple[str, Matrix]] | None:
        """(role, product) of what enters `down`; None, with the reason noted, when it cannot be told."""
        width = down.shape[1]
        if len(inner) == 1 and inner[0].shape[0] == width:
            return [("mlp.up", inner[0])]
        if len(inner) > 2 or sum(one.shape[0] for one in inner) != 2 * width:
            self._not_known(down, f"{len(inner)} products enter it in a way that is not known")
            return None
        for node in behind([down.entering], set(self.products)):
            sides = computed(node)
            if node.op_type != "Mul" or len(sides) != 2 or any(len(self._of(side)) != 1 for side in sides):
                continue
            active = [self._is_active(side) for side in sides]
            if active[0] == active[1] or (len(inner) == 2 and self._of(sides[0]) == self._of(sides[1])):
                continue
            gate, up = (sides[0], sides[1]) if active[0] else (sides[1], sides[0])
            return self._parts(gate, up)
        self._not_known(down, "of the two products that enter it, it cannot be told which is the gate")
        return None

    def _parts(self, gate: ir.Value, up: ir.Value) -> list[tuple[str, Matrix]]:
        found = [(role, self.products[next(iter(self._of(side)))]) for role, side in (("mlp.gate", gate), ("mlp.up", up))]
        if found[0][1] is found[1][1]:
            one = found[0][1]
            rows = rows_of(one, {"mlp.gate": (gate,), "mlp.up": (up,)}, None)
            layer = self._layer(one)
            stream = f"layers.{layer}.mlp_in"
            self.roles[id(one.node)] = Inferred(one, ("mlp.gate", "mlp.up"), layer, stream, "both halves of a gated mlp", rows)
            return []
        return found

    def _is_active(self, side: ir.Value) -> bool:
        return any(node.op_type in NONLINEAR for node in behind([side], set(self.products)))

    def _layer(self, one: Matrix) -> int:
        """The attention whose input this product shares, else the last one above."""
        for other in self.roles.values():
            if other.layer is not None and "attn_in" in other.stream and other.matrix.entering is one.entering:
                return other.layer
        return max(self.deepest.get(id(one.entering), -1), 0)


def _asked_from_outside(table: Matrix) -> bool:
    """Whether its ids are a graph input, reshaped at most."""
    value: ir.Value | None = table.entering
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.op_type in PASSED_ALONG - {"Gather", "GatherND"} else None
    return value is not None and value.is_graph_input()
