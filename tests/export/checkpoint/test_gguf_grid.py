"""Integers of a GGUF as its file holds them: with their scales they are, bit for bit, what the `gguf` package dequantizes."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.bundle.vocabulary import STORED_GRID
from appliance.errors import CheckpointError
from export import arch
from export.checkpoint import open_checkpoint
from export.checkpoint.source import Grid
from export.checkpoint.tensors import PIECE
from tests.checkpoints import Llama, write_gguf
from tests.export.checkpoint.test_gguf import Kind, random_blocks, write

FORMS = {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}


def value_of(grid: Grid, bits: int) -> np.ndarray:
    """Float32 [N,K], in the order of operations that the format's own tools use."""
    wide = [None if part is None else np.repeat(part.astype(np.float32), 32, axis=1) for part in (grid.scales, grid.offsets)]
    if wide[1] is None:
        return grid.q.astype(np.float32) * wide[0]
    return (grid.q.astype(np.float32) + 2 ** (bits - 1)) * wide[0] + wide[1]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("rows", [37, 2 * PIECE // 96 + 5])
def test_the_grid_is_what_the_package_dequantizes(kind: str, rows: int, tmp_path: Path) -> None:
    seed = np.random.SeedSequence().entropy
    raw = random_blocks(np.random.default_rng(seed), Kind[kind], rows, 96)
    write(tmp_path / "x.gguf", {"first": (np.ones(3, np.float32), Kind.F32), "x": (raw, Kind[kind])})
    stored = open_checkpoint(tmp_path / "x.gguf").stored_grid("x")
    assert stored is not None
    assert (stored.kind, stored.bits, stored.group, stored.has_offsets) == (kind, FORMS[kind][0], 32, FORMS[kind][1])
    grid, low = stored.read(), 1 << (stored.bits - 1)
    assert (grid.q.dtype, grid.q.shape, grid.scales.shape) == (np.int8, (rows, 96), (rows, 3))
    assert grid.q.min() >= -low and grid.q.max() < low and (grid.offsets is not None) == stored.has_offsets
    wanted = gguf.dequantize(raw, Kind[kind])
    assert np.array_equal(value_of(grid, stored.bits).view(np.uint32), wanted.view(np.uint32)), f"seed {seed}"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_nibbles_in_the_order_of_neighbours_are_other_weights(kind: str, tmp_path: Path) -> None:
    """GGUF keeps values 0..15 of a block in the low nibbles; most other formats put neighbours into one byte."""
    seed = np.random.SeedSequence().entropy
    raw = random_blocks(np.random.default_rng(seed), Kind[kind], 4, 64)
    write(tmp_path / "x.gguf", {"x": (raw, Kind[kind])})
    grid = open_checkpoint(tmp_path / "x.gguf").stored_grid("x").read()  # type: ignore[union-attr]
    halves = grid.q.reshape(-1, 2, 16)
    neighbours = Grid(halves.swapaxes(1, 2).reshape(grid.q.shape), grid.scales, grid.offsets)
    assert not np.array_equal(value_of(neighbours, 4), gguf.dequantize(raw, Kind[kind])), f"seed {seed}"


@pytest.mark.parametrize("kind", ["F32", "F16", "Q5_0", "Q5_1"])
def test_other_types_have_no_grid(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", Llama(), kind))
    assert all(checkpoint.stored_grid(name) is None for name in checkpoint.names())


def test_a_vector_has_no_grid(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", {"x": (gguf.quantize(np.ones(64, np.float32), Kind.Q8_0), Kind.Q8_0)})
    assert open_checkpoint(tmp_path / "x.gguf").stored_grid("x") is None


@pytest.mark.parametrize(("kind", "byte"), [("Q4_0", 0), ("Q4_1", 2), ("Q8_0", 0)])
def test_a_scale_that_is_no_number_is_named(kind: str, byte: int, tmp_path: Path) -> None:
    raw = gguf.quantize(np.ones((4, 64), np.float32), Kind[kind])
    raw[1, byte : byte + 2] = np.array([np.nan], np.float16).view(np.uint8)
    write(tmp_path / "x.gguf", {"x": (raw, Kind[kind])})
    with pytest.raises(CheckpointError, match=r"tensor 'x', (scales|offsets), holds nan at element 2"):
        open_checkpoint(tmp_path / "x.gguf").stored_grid("x").read()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", FORMS)
def test_a_models_weights_carry_their_grids_with_rows_in_the_checkpoints_order(kind: str, tmp_path: Path) -> None:
    """q and k lie permuted in the file, and their integers must be moved as their values are."""
    opened = arch.open_model(open_checkpoint(write_gguf(tmp_path / "x.gguf", Llama(tied=False), kind)))
    found = 0
    for value in opened.build().graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        stored = tensor.meta.get(STORED_GRID)
        if len(tensor.shape) != 2 or value.metadata_props.get("role") == "rope":
            assert stored is None
            continue
        found += 1
        assert np.array_equal(value_of(stored.read(), stored.bits), tensor.numpy()), value.name
    assert found == 7 * 2 + 2


def test_a_restore_that_is_more_than_an_order_of_rows_leaves_no_grid(tmp_path: Path) -> None:
    import onnx_ir as ir

    from export.weights import Stored, Tag, Weights

    raw = gguf.quantize(np.ones((4, 64), np.float32), Kind.Q8_0)
    write(tmp_path / "x.gguf", {"x": (raw, Kind.Q8_0)})
    layout = {"plus": Stored("x", lambda array: array + 1), "turned": Stored("x", lambda array: array[::-1], moves_rows=True)}
    weights = Weights(open_checkpoint(tmp_path / "x.gguf"), layout)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21})
    values = {name: weights.take(graph, name, (4, 64), Tag("mlp.up")).const_value for name in layout}
    assert {name: STORED_GRID in value.meta for name, value in values.items() if value is not None} == {
        "plus": False,
        "turned": True,
    }
