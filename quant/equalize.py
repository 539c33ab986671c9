"""Cross-layer equalization: every column of a weight gets the same root mean square, what is taken from it goes to whoever
makes the number that meets it. The model stays the same function; a channel that stuck out no longer does.

Knows: which channels are scaled by a linear path, by structure. Does not know: integers, targets, calibration.

    norm gain g, then W      c = rms of the columns of all W diag(g) behind it, each row at length 1:  gain c, W diag(g / c)
    v - attention - o        c = rms of the columns of o, all query heads of a key-value head together:  c V, O diag(1 / c)
    act x up - down          c = rms of the columns of down:  c Up, Down diag(1 / c)

With one scale a row the rows of v and up may have any size: their scales take it up, so the equalized side is free. The
result depends on no scaling that was there before, so a checkpoint whose outliers were made by one (a gain times 200, the
weights behind it divided by 200) gives the integers of the checkpoint without it. c is brought near 1 by a power
of two.

Why equal columns: with error feedback the loss hardly depends on the exponent between the activations' size and the weights'
(docs/LOG.md has the figures); this one needs no calibration text. As Nagel et al. 2019, with the weight's side alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import ATTENTION
from quant import residual
from quant.arrays import Floats
from quant.graph import canonical, lazy, sizes, tensor_of
from quant.pairs import linear_after, linear_before, linear_factor_of

VERSION = 1
"""Raised whenever other weights would come out."""


@dataclass(frozen=True)
class Equalized:
    """What was done, for the record: how many norms, value paths and gated paths."""

    norms: int = 0
    values: int = 0
    gated: int = 0

    @property
    def fingerprint(self) -> str:
        """Changes with the weights that this makes of given ones."""
        return f"equalized:{VERSION}:{self.norms}:{self.values}:{self.gated}"


@dataclass
class Factors:
    """c of every path by name of its weight: found at first need, kept, so that the graphs of one build share them."""

    known: dict[str, Floats] = field(default_factory=dict)

    def of(self, name: str, find: Callable[[], Floats]) -> Floats:
        """The factors called `name`."""
        if name not in self.known:
            self.known[name] = find()
        return self.known[name]


def equalize(model: ir.Model, factors: Factors, *, norms: bool = True, values: bool = True, gated: bool = True) -> Equalized:
    """Equalize `model` in place, before it is decided. Weights stay lazy.

    Reading a weight whose factors are not known yet reads the weight behind it too.

    Args:
        factors: of this very step; equal graphs share them.
        norms: gains of norms; leave them where a rotation has mixed the channels already.
        values: between v and o.
        gated: between up and down.
    """
    graph = model.graph
    found = residual.readers_of_norms(graph) if norms else ()
    return Equalized(
        values=sum(_values(node, factors) for node in canonical(graph, ATTENTION)) if values else 0,
        gated=sum(_gated(node, factors) for node in list(graph)) if gated else 0,
        norms=sum(_norm(reader, factors) for reader in found),  # last: they look at the rows that the others have changed
    )


def _norm(reader: residual.Reader, factors: Factors) -> bool:
    gain = reader.norm.inputs[1] if reader.norm is not None else None
    weights = [node.inputs[1] for node in reader.linears]
    if gain is None or any(weight is None or len(weight.uses()) > 1 for weight in weights) or len(gain.uses()) > 1:
        return False
    assert reader.norm is not None
    old, before = tensor_of(gain, reader.norm), [tensor_of(node.inputs[1], node) for node in reader.linears]

    def find() -> Floats:
        return _factors(np.mean([_columns(one.numpy() * old.numpy().astype(np.float32)) for one in before], 0))

    def c() -> Floats:
        return factors.of(str(gain.name), find)

    for weight, tensor in zip(weights, before, strict=True):
        assert weight is not None
        _change(weight, tensor, lambda array: array * old.numpy().astype(np.float32) / c())
    _change(gain, old, lambda _: c())
    return True


def _values(node: ir.Node, factors: Factors) -> bool:
    entering, leaving = linear_before(node.inputs[2]), linear_after(node.outputs[0])
    if entering is None or leaving is None:
        return False
    size, heads, kv_heads = (node.attributes[key].as_int() for key in ("head_dim", "heads", "kv_heads"))

    def shared(squares: np.ndarray) -> np.ndarray:
        """Query heads of one key-value head see the same values."""
        mean: np.ndarray = squares.reshape(kv_heads, heads // kv_heads, size).mean(1)
        return mean.reshape(-1)

    def spread(c: Floats) -> np.ndarray:
        return np.concatenate([one for one in np.split(c, kv_heads) for _ in range(heads // kv_heads)])

    _path(entering, leaving, factors, shared, spread)
    return True


def _gated(node: ir.Node, factors: Factors) -> bool:
    found = linear_factor_of(node)
    if found is None:
        return False
    _path(*found, factors, lambda squares: squares, lambda c: c)
    return True


def _path(
    entering: ir.Node,
    leaving: ir.Node,
    factors: Factors,
    shared: Callable[[np.ndarray], np.ndarray],
    spread: Callable[[Floats], np.ndarray],
) -> None:
    """Rows of `entering` take what columns of `leaving` lose."""
    weight = leaving.inputs[1]
    assert weight is not None
    after = tensor_of(weight, leaving)

    def find() -> Floats:
        return _factors(shared((after.numpy().astype(np.float64) ** 2).mean(0)))

    def c() -> Floats:
        return factors.of(str(weight.name), find)

    _change(weight, after, lambda array: array / spread(c()))
    for value in entering.inputs[1:3]:
        if value is not None:
            _change(value, tensor_of(value, entering), lambda array: (array.T * c()).T)


def _change(value: ir.Value, tensor: ir.TensorProtocol, change: Callable[[np.ndarray], np.ndarray]) -> None:
    def read() -> np.ndarray:
        return np.ascontiguousarray(change(tensor.numpy().astype(np.float32, copy=False)), np.float32)

    value.const_value = lazy(str(value.name), ir.DataType.FLOAT, sizes(tensor), read)
    value.dtype = ir.DataType.FLOAT


def _columns(weight: Floats) -> np.ndarray:
    """Mean squares of the columns, every row at length 1: a row's own scale takes up its length."""
    squares = weight.astype(np.float64) ** 2
    mean: np.ndarray = (squares / np.maximum(squares.sum(1, keepdims=True), 1e-300)).mean(0)
    return mean


def _factors(squares: np.ndarray) -> Floats:
    """Root mean squares over a power of two near theirs; a channel of zeros is left as it is."""
    c = np.sqrt(squares)
    middle = float(np.median(c))
    c = c / 2.0 ** round(np.log2(middle)) if middle > 0 else c
    found: Floats = np.where(c > 0, c, 1).astype(np.float32)
    return found
