"""The checks of what a written file holds beside quantized matrices: each sees the one thing that is spoiled for it."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from appliance.bundle.vocabulary import QUANT_LINEAR
from appliance.errors import BundleError
from export.save import save
from quant import structure
from quant.decide import decide
from quant.emit import emit
from quant.graph import canonical
from quant.static import Range, Ranges, attach
from tests.quant.canonical import Weight, linear_model, target, tied_model
from tests.quant.test_keep import drawn, riding
from tests.quant.test_static import scheme, static
from tests.quant.test_structure import Built, built, flip, rewire, spoil
from tests.static_pair import fresh_seed


def ranged(folder: Path, width: int, seed: int, *, bias: bool) -> tuple[Built, Ranges]:
    """A static linear with 8- or 16-bit ranges, and whether with a bias."""
    rng = np.random.default_rng(seed)
    extra = rng.standard_normal(24).astype(np.float32) if bias else None
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 96)).astype(np.float32)), extra)
    decision = decide(model, scheme(f"static-u{width}"), static(), folder / "work")
    low, high = -rng.uniform(1, 3, 2), rng.uniform(4, 9, 2)
    ranges = Ranges(*(Range.over(float(low[side]), float(high[side]), width) for side in (0, 1)))
    attach(model, {str(canonical(model.graph, QUANT_LINEAR)[0].name): ranges})
    wanted = structure.expected(model)
    emit(model, static())
    return Built(save(model, folder, "model"), wanted, decision), ranges


def put(name: str, array: np.ndarray, path: Path) -> None:
    """Other numbers for a small initializer."""

    def change(graph: onnx.GraphProto) -> None:
        next(one for one in graph.initializer if one.name == name).CopyFrom(onnx.numpy_helper.from_array(array, name))

    rewire(path, change)


def read(name: str, path: Path) -> np.ndarray:
    model = onnx.load(path, load_external_data=False)
    return onnx.numpy_helper.to_array(next(one for one in model.graph.initializer if one.name == name))


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("side", "what"), [("input", "scale"), ("input", "zero point"), ("output", "scale"), ("output", "zero point")]
)
def test_a_static_range_is_compared(side: str, what: str, bias: bool, width: int, tmp_path: Path) -> None:
    seed = fresh_seed()
    one, _ = ranged(tmp_path, width, seed, bias=bias)
    one.check()
    nodes = [node for node in onnx.load(one.path).graph.node if node.op_type == "QuantizeLinear"]
    assert len(nodes) == 2
    name = nodes[0 if side == "input" else 1].input[1 if what == "scale" else 2]
    was = read(name, one.path)
    put(name, was * np.float32(7) if what == "scale" else was + was.dtype.type(1), one.path)
    with pytest.raises(BundleError, match=rf"weight proj\.weight: QuantizeLinear of its {side} has the {what}"):
        one.check()
    put(name, was, one.path)
    one.check()


@pytest.mark.parametrize("side", ["input", "output"])
def test_both_nodes_of_a_pair_are_compared(side: str, tmp_path: Path) -> None:
    """Only what turns the steps back reads another scale."""
    one, ranges = ranged(tmp_path, 8, fresh_seed(), bias=False)

    def part(graph: onnx.GraphProto) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(np.float32(7 * ranges.input.scale), "other"))
        pairs = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] not in held(graph)]
        pairs[0 if side == "input" else 1].input[1] = "other"

    rewire(one.path, part)
    with pytest.raises(BundleError, match=f"DequantizeLinear of its {side} has the scale"):
        one.check()


def held(graph: onnx.GraphProto) -> set[str]:
    return {one.name for one in graph.initializer}


def test_an_output_that_is_not_quantized_is_missed(tmp_path: Path) -> None:
    one, _ = ranged(tmp_path, 8, fresh_seed(), bias=False)
    rewire(one.path, lambda graph: [graph.node.pop() for _ in range(2)])
    with pytest.raises(BundleError, match=r"weight proj\.weight: its output is not quantized"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
def test_a_norm_gain_is_compared(form: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    one = built(tied_model(rng.standard_normal((50, 64)).astype(np.float32)), target(form), tmp_path)
    one.check()
    was, at = read("norm.weight", one.path), int(rng.integers(64))
    other = was.copy()
    other[at] = np.nextafter(other[at], np.float32(9))
    put("norm.weight", other, one.path)
    with pytest.raises(BundleError, match=rf"1 numbers of norm\.weight are not what they were, the first at \[{at}\]"):
        one.check()
    put("norm.weight", was.astype(np.float64), one.path)
    with pytest.raises(BundleError, match=r"norm\.weight is float64 \[64\], not float32 \[64\]"):
        one.check()

    def rename(graph: onnx.GraphProto) -> None:
        next(one for one in graph.initializer if one.name == "norm.weight").name = "other"
        for node in graph.node:
            node.input[:] = ["other" if name == "norm.weight" else name for name in node.input]

    rewire(one.path, rename)
    with pytest.raises(BundleError, match=r"norm\.weight is not in the file"):
        one.check()


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
@pytest.mark.parametrize("offsets", [True, False])
def test_a_bias_is_compared_where_it_is_added(form: str, offsets: bool, tmp_path: Path) -> None:
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    stored = drawn(rng, "Q4_1", 24, 96)
    bias = rng.standard_normal(24).astype(np.float32)
    model = linear_model(Weight("proj.weight", "attn.q", stored.grid.values(4)), bias)
    one = built(riding(model, {"proj.weight": stored}) if offsets else model, target(form), tmp_path)
    one.check()
    spoil(one.path, "proj.bias", flip)
    with pytest.raises(BundleError, match=r"1 numbers of proj\.bias are not what they were"):
        one.check()
    spoil(one.path, "proj.bias", flip)

    def other(graph: onnx.GraphProto) -> None:
        """The same initializer is there, and another one is added."""
        graph.initializer.append(onnx.numpy_helper.from_array(bias[::-1].copy(), "other"))
        for node in graph.node:
            node.input[:] = ["other" if name == "proj.bias" else name for name in node.input]

    rewire(one.path, other)
    with pytest.raises(BundleError, match=r"numbers of proj\.bias are not what they were"):
        one.check()

    def leave_out(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if "other" in node.input and node.op_type == "Add":
                node.op_type, node.input[:] = "Identity", [name for name in node.input if name != "other"]
            node.input[:] = ["" if name == "other" else name for name in node.input]

    rewire(one.path, leave_out)
    with pytest.raises(BundleError, match=r"lost the bias proj\.bias"):
        one.check()


def plain_linear(folder: Path) -> Built:
    """One matrix without a bias, as the processor has it."""
    rng = np.random.default_rng(fresh_seed())
    model = linear_model(Weight("proj.weight", "attn.q", rng.standard_normal((24, 96)).astype(np.float32)))
    return built(model, target("cpu"), folder)


def test_a_bias_that_nobody_decided_is_refused(tmp_path: Path) -> None:
    one = plain_linear(tmp_path)

    def add(graph: onnx.GraphProto) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(np.ones(24, np.float32), "extra"))
        node = next(node for node in graph.node if node.op_type == "MatMulNBits")
        node.input.extend(["", "", "extra"])

    rewire(one.path, add)
    with pytest.raises(BundleError, match="got the bias extra"):
        one.check()


def test_another_accuracy_level_is_seen(tmp_path: Path) -> None:
    one = plain_linear(tmp_path)

    def lower(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == "MatMulNBits")
        next(one for one in node.attribute if one.name == "accuracy_level").i = 1

    rewire(one.path, lower)
    with pytest.raises(
        BundleError, match=r"weight proj\.weight is read at accuracy level 1, block-dynamic activations are level 4"
    ):
        one.check()
