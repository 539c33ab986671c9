"""Rotations folded into the weights of a canonical float model: exactly the same function, easier numbers.

Knows: which weights take which side of an orthogonal matrix, gains of norms, ties. Does not know: how a rotation is made
(`quant.hadamard`), how the residual stream is found (`quant.residual`), integers, targets.

R1 turns the residual stream, which needs every norm on it without gain (a norm commutes with R only then):

    embedding E -> E R      reader W -> W diag(gain) R, gain -> 1      writer W -> R^T W, bias b -> b R

R2 turns the values of each key-value head, between v and o, attention being linear in them:

    rows of v, head h -> R_h^T V_h, bias likewise      columns of o, each query head of h -> O R_h

A tied head reads the embedding, and the gain g of the final norm would break the tie: E R for the one, E diag(g) R for
the other. Storing both would cost V x D weights. But E diag(g) R = (E R) (R^T diag(g) R), so a square linear of D x D
before the head does it (SmolLM2: 0.33 MB at 8 bits for 28 MB). Where the gains are alike, R^T diag(g) R is close to
their mean c; the norm keeps c as its gain and only the rest is stored, which 8 bits then hold well:

    RMSNorm(gain c) - h -+- Linear (R^T diag(g) R / c - 1) -(+)- Linear (E R) - logits
                         +-----------------------------------+

Sources: R1 and R2 as in SpinQuant (Liu et al. 2024), norms folded as in SliceGPT (Ashkboos et al. 2024) and QuaRot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import ATTENTION, DOMAIN, LINEAR, ROLE, STREAM
from quant import residual
from quant.arrays import Floats
from quant.graph import add_initializer, canonical, lazy, sizes, tensor_of
from quant.hadamard import Rotation, rotation
from quant.pairs import linear_after, linear_before
from quant.residual import Reader, Residual

_R1, _R2 = 1, 2
"""First number of a rotation's path under the seed."""


@dataclass(frozen=True)
class Rotated:
    """What was done, for the record.

    Attributes:
        seed: chose all rotations.
        residual: the rotation of the residual stream, e.g. "hadamard 12x12x4"; "" = not rotated.
        obstacle: why the residual stream was not rotated; "" = it was, or nobody asked.
        heads: the rotation of each value head; "" = none was rotated.
        layers: layers whose value heads were rotated.
        folded: norms whose gain went into the weights behind them.
        tied: whether a square linear before the head carries the final norm's gain.
    """

    seed: int
    residual: str = ""
    obstacle: str = ""
    heads: str = ""
    layers: int = 0
    folded: int = 0
    tied: bool = False

    @property
    def fingerprint(self) -> str:
        """Changes with the weights that this makes of given ones."""
        return f"rotated:{self.seed}:{self.residual}:{self.heads}:{self.layers}:{self.folded}:{self.tied}"


@dataclass(frozen=True, eq=False)
class Edit:
    """What happens to one weight [N,K]: gain on its columns, rotations of blocks of columns, of blocks of rows."""

    gain: ir.TensorProtocol | None = None
    columns: tuple[Rotation, ...] = ()
    rows: tuple[Rotation, ...] = ()

    def weight(self, array: np.ndarray) -> Floats:
        """The new weight, [N,K] float32."""
        made = array.astype(np.float32, copy=False)
        if self.gain is not None:
            made = made * self.gain.numpy().astype(np.float32)
        if self.columns:
            made = _blocks(made.T, self.columns).T
        return np.ascontiguousarray(_blocks(made, self.rows) if self.rows else made, np.float32)

    def bias(self, array: np.ndarray) -> Floats:
        """The new bias, [N] float32."""
        return _blocks(array.astype(np.float32, copy=False), self.rows) if self.rows else array


def _blocks(array: np.ndarray, rotations: Sequence[Rotation]) -> Floats:
    """R^T on each block of rows."""
    parts = np.split(array, len(rotations))
    return np.concatenate([one.turn_rows(part) for one, part in zip(rotations, parts, strict=True)])


def rotate(model: ir.Model, seed: int, *, stream: bool = True, heads: bool = True) -> Rotated:
    """Rotate `model` in place, before it is decided. Weights stay lazy: each is read, one at a time, when it is wanted.

    Args:
        model: canonical float model.
        seed: equal seeds give equal weights.
        stream: R1, where the graph allows it; the answer says why not. Gains of norms are folded for it.
        heads: R2, in every layer whose values go from one linear to one linear.
    """
    graph, edits = model.graph, _Edits()
    done = Rotated(seed)
    if stream:
        found = residual.find(graph)
        obstacle = found.obstacle or _bad_tie(found)
        done = replace(done, obstacle=obstacle) if obstacle else _turn_stream(graph, found, edits, done)
    if heads:
        done = _turn_heads(graph, edits, done)
    edits.apply()
    return done


def fold_norms(model: ir.Model) -> int:
    """Move the gain of every norm into the linears behind it, in place, where no weight has another use; how many."""
    edits, count = _Edits(), 0
    for reader in residual.readers_of_norms(model.graph):
        weights = [node.inputs[1] for node in reader.linears]
        if all(weight is not None and len(weight.uses()) == 1 for weight in weights):
            _fold(reader, (), edits)
            count += 1
    edits.apply()
    return count


class _Edits:
    """Edits by node, gathered first and applied together, so that each weight is wrapped once."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[ir.Node, Edit]] = {}
        self._gains: list[tuple[ir.Value, float]] = []

    def add(self, node: ir.Node, edit: Edit) -> None:
        """One more edit of a node's weight; the sides of the two must not meet."""
        old = self._of.get(id(node), (node, Edit()))[1]
        assert not (old.columns and edit.columns) and not (old.rows and edit.rows) and not (old.gain and edit.gain)
        self._of[id(node)] = (node, Edit(old.gain or edit.gain, old.columns or edit.columns, old.rows or edit.rows))

    def gain(self, weight: ir.Value, number: float) -> None:
        """The norm's gain becomes `number` everywhere."""
        self._gains.append((weight, number))

    def apply(self) -> None:
        done: set[int] = set()
        for node, edit in self._of.values():
            for index, value in enumerate(node.inputs[1:3], start=1):
                if value is not None and id(value) not in done:
                    done.add(id(value))
                    _wrap(value, tensor_of(value, node), edit.weight if index == 1 else edit.bias)
        for weight, number in self._gains:
            assert weight.const_value is not None
            shape = sizes(weight.const_value)
            weight.const_value = lazy(str(weight.name), ir.DataType.FLOAT, shape, _Constant(shape, number))


@dataclass(frozen=True)
class _Constant:
    shape: tuple[int, ...]
    number: float

    def __call__(self) -> Floats:
        return np.full(self.shape, self.number, np.float32)


def _wrap(value: ir.Value, tensor: ir.TensorProtocol, change: Callable[[np.ndarray], Floats]) -> None:
    value.const_value = lazy(str(value.name), ir.DataType.FLOAT, sizes(tensor), lambda: change(tensor.numpy()))
    value.dtype = ir.DataType.FLOAT


def _bad_tie(found: Residual) -> str:
    """Why weights with several uses cannot be turned alike; a head that shares the embedding's is fine."""
    tied = {id(node.inputs[1]) for node in found.embeddings}
    ends = [*found.writers, *(node for reader in found.readers for node in reader.linears)]
    for node in ends:
        weight = node.inputs[1]
        assert weight is not None
        if len(weight.uses()) > 1 and id(weight) not in tied:
            return f"weight {weight.name} of {node.name} is read by several nodes"
    shared = [reader for reader in found.readers if any(id(node.inputs[1]) in tied for node in reader.linears)]
    if any(id(node.inputs[1]) in tied for node in found.writers) or any(len(one.linears) > 1 for one in shared):
        return "the embedding's weight has another use than as head"
    return ""


def _turn_stream(graph: ir.Graph, found: Residual, edits: _Edits, done: Rotated) -> Rotated:
    turn = rotation(found.size, done.seed, _R1)
    tied = {id(node.inputs[1]) for node in found.embeddings}
    for node in found.embeddings:
        edits.add(node, Edit(columns=(turn,)))
    for node in found.writers:
        edits.add(node, Edit(rows=(turn,)))
    folded, mixed = 0, False
    for reader in found.readers:
        if any(id(node.inputs[1]) in tied for node in reader.linears):
            mixed = _keep_tie(graph, reader, turn, edits)
        else:
            _fold(reader, (turn,), edits)
            folded += reader.norm is not None
    return replace(done, residual=turn.name, folded=folded, tied=mixed)


def _fold(reader: Reader, columns: tuple[Rotation, ...], edits: _Edits) -> None:
    gain = None
    if reader.norm is not None:
        weight = reader.norm.inputs[1]
        assert weight is not None
        gain = tensor_of(weight, reader.norm)
        edits.gain(weight, 1.0)
    for node in reader.linears:
        edits.add(node, Edit(gain=gain, columns=columns))


def _keep_tie(graph: ir.Graph, reader: Reader, turn: Rotation, edits: _Edits) -> bool:
    """The final norm's gain as a square linear before a head that shares the embedding's weight (see the top)."""
    if reader.norm is None:
        return False
    weight = reader.norm.inputs[1]
    assert weight is not None
    tensor = tensor_of(weight, reader.norm)
    gains = tensor.numpy().astype(np.float32)
    middle = float(gains.mean())
    if abs(middle) < 0.1 * float(np.abs(gains).max()):
        middle = float(np.abs(gains).max()) or 1.0
    if np.ptp(gains) == 0:
        return False  # one number commutes with the rotation: the norm keeps it
    edits.gain(weight, middle)

    def square() -> Floats:
        own = np.diag(tensor.numpy().astype(np.float32) / np.float32(middle) - 1)
        return turn.turn(turn.turn_rows(own))

    shape = (turn.size, turn.size)
    tags = {ROLE: "head", STREAM: "norm_out"}
    added = add_initializer(graph, lazy(f"{weight.name}.turned", ir.DataType.FLOAT, shape, square), tags)
    head, path = reader.linears[0], str(reader.norm.name).rpartition("/")[0]
    entering = head.inputs[0]
    mix = ir.node(
        LINEAR, [entering, added], domain=DOMAIN, name=f"{path}/turned/{LINEAR}",
        outputs=[ir.Value(name=f"{path}/turned/output_0")], metadata_props=tags,
    )  # fmt: skip
    total = ir.Value(name=f"{path}/turned/Add/output_0")
    both = ir.node("Add", [entering, mix.outputs[0]], name=f"{path}/turned/Add", outputs=[total])
    graph.insert_before(head, [mix, both])
    head.replace_input_with(0, both.outputs[0])
    return True


def _turn_heads(graph: ir.Graph, edits: _Edits, done: Rotated) -> Rotated:
    name, layers = "", 0
    for index, node in enumerate(canonical(graph, ATTENTION)):
        entering, leaving = linear_before(node.inputs[2]), linear_after(node.outputs[0])
        if entering is None or leaving is None:
            continue
        size, heads, kv_heads = (node.attributes[key].as_int() for key in ("head_dim", "heads", "kv_heads"))
        turns = tuple(rotation(size, done.seed, _R2, index, head) for head in range(kv_heads))
        edits.add(entering, Edit(rows=turns))
        edits.add(leaving, Edit(columns=tuple(turns[head * kv_heads // heads] for head in range(heads))))
        name, layers = turns[0].name, layers + 1
    return replace(done, heads=name, layers=layers)
