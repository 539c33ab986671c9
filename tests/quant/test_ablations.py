"""One thing quantized alone, operators against numpy, heads in pieces: each against loops of its own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from appliance.targets import load
from export import arch
from export.checkpoint import open_checkpoint
from export.slices import opener
from quant import ablations, decide, emit, head
from quant.ablations import ACTIVATIONS, WEIGHTS, model_of, rounded, values_of
from quant.emit import blocks
from quant.emulate import difference, emulate_part, in_numpy, run_alone
from quant.evaluate import Floats
from quant.graph import tensor_of
from quant.layers import Part, Running, cut
from quant.scheme import Form, Scheme
from quant.schemes import find
from tests.checkpoints import Llama, write_safetensors
from tests.quant.canonical import Weight, emulate, linear_model

MODEL = Llama(2, 96, 4, 2, 112, vocab=300, context=64)  # 96 and 112: the last group of 64 is a partial one
CPU = load("cpu")


def fresh() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The float model and the decided one, in parts."""
    folder = tmp_path_factory.mktemp("model")
    source = write_safetensors(folder / "source", replace(MODEL, seed=int(fresh().integers(1 << 30))), "float32")
    opened = arch.open_model(open_checkpoint(source))
    plain, decided = opened.build(), opened.build()
    decide.decide(decided, find("w4a8"), CPU, folder / "work")
    return cut(plain), cut(decided)


def run(model: ir.Model, entering: np.ndarray, folder: Path) -> np.ndarray:
    return Running(model, opener(64, folder, emit.emit)).run(entering).hidden


def slow_values(node: ir.Node) -> np.ndarray:
    """Loops over groups."""
    q, scales = (tensor_of(node.inputs[at], node).numpy() for at in (1, 2))
    group, found = node.attributes["group"].as_int(), np.zeros(q.shape)
    for block in range(scales.shape[1]):
        part = slice(block * group, (block + 1) * group)
        found[:, part] = q[:, part] * scales[:, block : block + 1].astype(np.float64)
    return found


def slow_rounded(x: np.ndarray, group: int) -> np.ndarray:
    found = np.zeros_like(x, np.float64)
    for row in np.ndindex(x.shape[:-1]):
        for start in range(0, x.shape[-1], group):
            block = x[row][start : start + group].astype(np.float64)
            scale = np.abs(block).max() / 127
            found[row][start : start + group] = np.round(block / scale) * scale if scale else 0
    return found


def test_values_of_integers(models: tuple[tuple[Part, ...], tuple[Part, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablations, "_PIECE", 700)  # some rows at a time, the last piece a short one
    for part in models[1]:
        for node in part.nodes:
            if node.op_type in ("QuantLinear", "QuantEmbedding"):
                assert np.array_equal(values_of(node), slow_values(node).astype(np.float32)), node.name


def test_what_enters_a_product_is_rounded_per_block(models: tuple[tuple[Part, ...], tuple[Part, ...]]) -> None:
    down = models[1][1].linears[-1]
    x = fresh().standard_normal((2, 3, 112)).astype(np.float32)
    x[0, 0, :64] = 0
    assert rounded(x, down) == pytest.approx(slow_rounded(x, 64), abs=1e-6)
    assert not np.array_equal(rounded(x, down), x)


def as_pieces(part: Part, decided: Part, change: str) -> ir.Model:
    """The float part rebuilt by hand: its weights' arrays replaced in the graph."""
    model = part.build(streams=False)
    nodes = {str(node.name): node for node in decided.nodes}
    for value in model.graph.initializers.values():
        for usage in value.uses():
            other = nodes.get(str(usage.node.name))
            if usage.idx == 1 and other is not None and other.op_type == "QuantLinear" and change == WEIGHTS:
                value.const_value = ir.tensor(slow_values(other).astype(np.float32), name=value.name)
    return model


def test_weights_alone_are_the_integers_values_in_float(
    models: tuple[tuple[Part, ...], tuple[Part, ...]], tmp_path: Path
) -> None:
    plain, decided = models[0][1], models[1][1]
    x = fresh().standard_normal((1, 9, 96)).astype(np.float32)
    found = run(model_of(WEIGHTS, plain, decided), x, tmp_path)
    wanted = run(as_pieces(plain, decided, WEIGHTS), x, tmp_path)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert np.abs(found - run(plain.build(streams=False), x, tmp_path)).max() > 1e-3


def test_activations_alone_round_what_enters_each_product(
    models: tuple[tuple[Part, ...], tuple[Part, ...]], tmp_path: Path
) -> None:
    """The part's last product by hand: what enters it in the graph, rounded, times the float weight."""
    plain, decided = models[0][1], models[1][1]
    x = fresh().standard_normal((1, 9, 96)).astype(np.float32)
    found = run(model_of(ACTIVATIONS, plain, decided), x, tmp_path)
    exact = run(plain.build(streams=False), x, tmp_path)
    error = np.abs(found - exact).max() / np.abs(exact - x).max()
    assert 1e-4 < error < 0.05
    model = model_of(ACTIVATIONS, plain, decided)
    assert sum(node.op_type == "Round" for node in model.graph) == 4, "q, k and v share one; so do gate and up"


def test_the_head_in_pieces_is_the_head_at_once(
    models: tuple[tuple[Part, ...], tuple[Part, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = fresh().standard_normal((1, 7, 96)).astype(np.float32)
    for parts in models:
        node = head.node_of(parts[-1])
        whole = head.Head(node, tmp_path / "whole")
        monkeypatch.setattr(head, "IN_MEMORY", 1000)
        monkeypatch.setattr(head, "_PIECE", 96 * 4 * 70)  # 300 rows: 70 at a time, 20 at the end
        pieces = head.Head(node, tmp_path / "below" / "pieces")
        assert (tmp_path / "below" / "pieces").stat().st_size == 300 * 96 * 4
        found = np.concatenate(list(pieces.of_window(x, node)))
        assert found == pytest.approx(np.concatenate(list(whole.of_window(x, node))), abs=1e-5)
        weight = slow_values(node) if node.op_type == "QuantLinear" else tensor_of(node.inputs[1], node).numpy()
        entering = slow_rounded(x[0], 64) if node.op_type == "QuantLinear" else x[0]
        assert found == pytest.approx(entering @ weight.T, abs=2e-4)
        pieces.close()
        assert not (tmp_path / "below" / "pieces").exists()
        monkeypatch.undo()


def test_operators_compute_what_their_integers_stand_for(
    models: tuple[tuple[Part, ...], tuple[Part, ...]],
) -> None:
    rng = fresh()
    part = models[1][1]
    streams = {tag: rng.standard_normal((1, 20, 112 if "mid" in tag else 96)).astype(np.float32) for tag in part.streams}
    found = emulate_part(part, streams, CPU)
    assert [one.name for one in found] == [f"model.layers.0.{name}.weight" for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj")]  # fmt: skip
    assert max(one.error for one in found) < 2e-6


def test_halves_between_two_steps_are_no_difference(models: tuple[tuple[Part, ...], tuple[Part, ...]]) -> None:
    """Every input in the middle between two steps, where the last bit of a division decides."""
    rng = fresh()
    steps = rng.integers(-126, 126, (1, 8, 112)) + 0.5
    steps[..., ::64] = 127
    x = (steps * rng.uniform(0.001, 0.1, (1, 8, 1))).astype(np.float32)
    assert difference(models[1][1].linears[-1], x, CPU) < 5e-6


def test_an_operator_that_computes_something_else_is_seen(
    models: tuple[tuple[Part, ...], tuple[Part, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emission with scales of the neighbouring group, as a wrong layout would have it."""
    whole = blocks.pack_rows
    node = models[1][1].linears[0]
    x = fresh().standard_normal((1, 8, 96)).astype(np.float32)
    assert difference(node, x, CPU) < 2e-6
    monkeypatch.setattr(blocks, "pack_rows", lambda q, bits, group: whole(np.roll(q, 1, axis=1), bits, group))
    assert difference(node, x, CPU) > 0.1


def test_numpys_account_is_that_of_the_tests(models: tuple[tuple[Part, ...], tuple[Part, ...]]) -> None:
    node = models[1][1].linears[-1]
    x = fresh().standard_normal((1, 5, 112)).astype(np.float32)
    q, scales = (tensor_of(node.inputs[at], node).numpy() for at in (1, 2))
    assert in_numpy(node, x)[0] == pytest.approx(emulate(x[0], q, scales, 64), abs=1e-4)
    assert run_alone(node, x, CPU).shape == (1, 5, 96)


def one_linear(form: Form, columns: int, folder: Path) -> tuple[ir.Node, Floats]:
    """A decided linear of that form, and what enters it."""
    rng = fresh()
    model = linear_model(Weight("proj.weight", "mlp.up", rng.standard_normal((24, columns)).astype(np.float32)))
    decide.decide(model, Scheme("test", "", form), CPU, folder)
    (node,) = [node for node in model.graph if node.op_type == "QuantLinear"]
    return node, rng.standard_normal((1, 6, columns)).astype(np.float32)


@pytest.mark.parametrize(("bits", "activation"), [(4, "float"), (4, "block-dynamic"), (8, "block-dynamic")])
def test_every_form_of_activation_is_emulated(bits: int, activation: str, tmp_path: Path) -> None:
    node, x = one_linear(Form(bits, 32, activation), 80, tmp_path)
    assert difference(node, x, CPU) < 5e-6
