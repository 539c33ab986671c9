"""Calibrated ranges of a decided model's static linears, and which of them need 16 bits. Layer by layer.

Knows: what enters and leaves the linears of a part, what 8 bits there do to the part's hidden state. Does not know: how a
part is opened (`quant.layers.Opener`), where the text comes from, how ranges are written (`quant.static`, `quant.emit`).

    hidden states - layer k, activations float -+- histograms of what enters and leaves its linears - ranges
                                                +- hidden states of layer k+1
    a few of them - layer k, 8 bits at one stream after the other - how far the hidden state moves: the stream's cost

Streams, not linears, get a width: q, k and v read the same integers, and both sides of a product have one width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from appliance.bundle.vocabulary import QUANT_LINEAR
from quant.arrays import dequantize
from quant.graph import canonical, sizes, tensor_of
from quant.histogram import Histogram
from quant.layers import Hidden, Opener, Part, Running, cut, width_of
from quant.static import STATIC_BITS, Range, Ranges, attach
from quant.turns import Turns, digest, each_of

VERSION = 1
"""Raised whenever the same model and text would give other ranges."""

_TOKENS = 2048
"""Tokens that go through a part at once."""
_PROBE = 2048
"""Tokens that a stream's cost is measured on."""
_TAIL_WINDOW, _TAIL_TOKENS = 32, 4096
"""The last part gives out numbers by the vocabulary (Gemma: 1 MB a token): it sees fewer tokens, in short windows."""
_ROWS = 4096
"""Rows of a weight whose squares are summed at once."""

Ids = npt.NDArray[np.int64]
Progress = Callable[[int, int, str], None]
Choose = Callable[[Histogram, int], Range]
"""The range of a histogram for so many bits."""


@dataclass(frozen=True)
class Side:
    """What enters or leaves a linear, in both widths."""

    narrow: Range
    wide: Range


@dataclass(frozen=True)
class Stream:
    """The linears that one stream enters.

    Attributes:
        name: the stream's tag.
        width: bits that the scheme gives.
        outputs: node name of each linear -> what leaves it.
        products: multiplications a token.
        cost: mean square change of a token's hidden state that 8 bits at this stream make, relative to its square; 0 where
            the scheme gives 16.
    """

    name: str
    width: int
    input: Side
    outputs: Mapping[str, Side]
    products: int
    cost: float

    def ranges(self, bits: int, reason: str = "") -> dict[str, Ranges]:
        """Of all its linears, by node name."""

        def pick(side: Side) -> Range:
            return side.wide if bits == 16 else side.narrow

        return {name: Ranges(pick(self.input), pick(side), reason) for name, side in self.outputs.items()}


@dataclass(frozen=True)
class Setup:
    """What the collection works with.

    Attributes:
        ids: [W,S], windows of the calibration text.
        opener: opens parts, their decided matrices as the target has them.
        work: folder for hidden states.
        choose: the range of a histogram.
        key: what the streams depend on beside the text; a stopped run with an equal one is gone on with.
    """

    ids: Ids
    opener: Opener
    work: Path
    key: str
    choose: Choose = Histogram.best


def collect(model: ir.Model, setup: Setup, progress: Progress | None = None) -> tuple[Stream, ...]:
    """Ranges and costs of every stream that enters static linears, in order.

    Args:
        model: decided canonical model whose static linears have no ranges yet; not changed.

    A run that was stopped goes on with the part it was in.

    Raises:
        BadInput: the model cannot be cut into layers.
    """
    parts = cut(model)
    shape = (*setup.ids.shape, width_of(parts[0]))
    files = Turns(setup.work, f"ranges.{_print(setup)}", {"": shape})
    stopped = files.resume()
    done, found = (stopped[0], each_of(stopped[1], _stream)) if stopped is not None else (0, [])
    if stopped is None or done >= len(parts) or not found:
        files.begin()
        done, found = 0, []
    for index, part in enumerate(parts[done:], done):
        if progress:
            progress(index, len(parts), part.name)
        entering = setup.ids if not index else files.entering(index).read(slice(None))
        last = index == len(parts) - 1
        if last:
            entering = entering.reshape(-1, _TAIL_WINDOW if entering.shape[1] % _TAIL_WINDOW == 0 else 1, shape[-1])
            entering = entering[:: max(1, entering.shape[0] * entering.shape[1] // _TAIL_TOKENS)]
        found += _Measuring(part, setup.opener, setup.choose, entering, None if last else files.leaving(index)).run()
        files.finish(index + 1, [asdict(one) for one in found])
    files.end()
    if progress:
        progress(len(parts), len(parts), "")
    return tuple(found)


def choose_widths(streams: Sequence[Stream], budget: float) -> dict[str, Ranges]:
    """Ranges of every static linear: 16 bits for the streams whose 8 bits cost most, while their products stay in budget.

    Args:
        budget: share of the products of all 8-bit streams that may have 16 bits instead.
    """
    narrow = [stream for stream in streams if stream.width == 8]
    left = budget * sum(stream.products for stream in narrow)
    total = max(sum(stream.cost for stream in narrow), 1e-300)
    reasons: dict[str, str] = {}
    for stream in sorted(narrow, key=lambda one: one.cost / one.products, reverse=True):
        if stream.products <= left:
            left -= stream.products
            reasons[stream.name] = (
                f"8 bits here move the hidden state by {stream.cost**0.5:.1%}, {stream.cost / total:.0%} of what all streams do"
            )
    found: dict[str, Ranges] = {}
    for stream in streams:
        reason = reasons.get(stream.name, "")
        found.update(stream.ranges(16 if reason else stream.width, reason))
    return found


def _print(setup: Setup) -> str:
    said = f"{VERSION} {setup.ids.shape} {setup.key}"
    return digest(setup.ids, said)[:32]


def _stream(told: dict[str, Any]) -> Stream:
    """What `dataclasses.asdict` made of a stream."""
    outputs = {name: _side(one) for name, one in told["outputs"].items()}
    return Stream(**{**told, "input": _side(told["input"]), "outputs": outputs})


def _side(told: dict[str, Any]) -> Side:
    return Side(Range(**told["narrow"]), Range(**told["wide"]))


class _Measuring:
    """One part: a run with float activations, then one for each stream in 8 bits."""

    def __init__(self, part: Part, opener: Opener, choose: Choose, entering: np.ndarray, leaving: Hidden | None):
        self._part, self._opener, self._choose = part, opener, choose
        self._entering, self._leaving = entering, leaving
        streams = {weight: stream for stream, weights in part.streams.items() for weight in weights}
        self._streams: dict[str, list[ir.Node]] = {}
        for node in part.linears:
            if _is_static(node) and node.inputs[1] is not None:
                self._streams.setdefault(streams[str(node.inputs[1].name)], []).append(node)
        self._probe = min(len(entering), max(1, _PROBE // entering.shape[1]))

    def run(self) -> list[Stream]:
        """Write the part's hidden states to `leaving`; its static streams."""
        model = self._part.build(streams=True)
        _float_but(model, ())
        tags = _give_out_products(model)
        running, plain = Running(model, self._opener), []
        weights = {stream: np.sum([_column_weights(node) for node in nodes], 0) for stream, nodes in self._streams.items()}
        seen = {name: Histogram() for name in (*self._streams, *tags.values())}
        for rows, given in self._batches(len(self._entering)):
            out = running.run(given)
            if self._leaving is not None:
                self._leaving.write(rows, out.hidden)
            if rows.start < self._probe:
                plain.append(out.hidden[: self._probe - rows.start].copy())
            for name, histogram in seen.items():
                histogram.add(out.streams[name], weights.get(name))
        found = [self._stream(name, seen, tags) for name in self._streams]
        return [replace(one, cost=self._cost(one, np.concatenate(plain))) if one.width == 8 else one for one in found]

    def _stream(self, name: str, seen: Mapping[str, Histogram], tags: Mapping[str, str]) -> Stream:
        nodes = self._streams[name]
        outputs = {str(node.name): self._side(seen[tags[str(node.name)]]) for node in nodes}
        products = sum(int(np.prod(sizes(tensor_of(node.inputs[1], node)))) for node in nodes)
        width = STATIC_BITS[nodes[0].attributes["activation"].as_string()]
        return Stream(name, width, self._side(seen[name]), outputs, products, 0.0)

    def _side(self, seen: Histogram) -> Side:
        return Side(self._choose(seen, 8), self._choose(seen, 16))

    def _cost(self, stream: Stream, plain: np.ndarray) -> float:
        model = self._part.build(streams=False)
        _float_but(model, stream.outputs)
        attach(model, stream.ranges(8))
        running, lost = Running(model, self._opener), 0.0
        for rows, given in self._batches(self._probe):
            change = running.run(given).hidden - plain[rows]
            size = np.maximum((plain[rows] ** 2).sum(-1), 1e-12)
            lost += float(((change**2).sum(-1) / size).sum(dtype=np.float64))
        return lost / plain[..., 0].size

    def _batches(self, end: int) -> Iterator[tuple[slice, np.ndarray]]:
        size = max(1, _TOKENS // self._entering.shape[1])
        for start in range(0, end, size):
            rows = slice(start, min(start + size, end))
            yield rows, self._entering[rows]


def _is_static(node: ir.Node) -> bool:
    return node.op_type == QUANT_LINEAR and node.attributes["activation"].as_string() in STATIC_BITS


def _float_but(model: ir.Model, keep: Mapping[str, Side] | tuple[()]) -> None:
    """Float activations for every static linear but those named in `keep`."""
    for node in canonical(model.graph, QUANT_LINEAR):
        if _is_static(node) and str(node.name) not in keep:
            node.attributes["activation"] = ir.AttrString("activation", "float")


def _give_out_products(model: ir.Model) -> dict[str, str]:
    """Give out what leaves each QuantLinear; node name -> name of the graph output."""
    found: dict[str, str] = {}
    for index, node in enumerate(canonical(model.graph, QUANT_LINEAR)):
        name = found[str(node.name)] = f"leaves.{index}"
        output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "sequence", f"size.{name}"]))
        model.graph.append(ir.node("Identity", [node.outputs[0]], name=f"/parts/{name}", outputs=[output]))
        model.graph.outputs.append(output)
    return found


def _column_weights(node: ir.Node) -> np.ndarray:
    """[K]: how much the square of an error in each column of the input counts in the output: squares of the weight's columns."""
    q, scales = tensor_of(node.inputs[1], node).numpy(), tensor_of(node.inputs[2], node).numpy()
    group, total = node.attributes["group"].as_int(), np.zeros(q.shape[1])
    for start in range(0, len(q), _ROWS):
        part = dequantize(q[start : start + _ROWS], scales[start : start + _ROWS], group)
        total += (part**2).sum(0, dtype=np.float64)
    return total
