"""Keys and values in int8: every form of the graph against numpy's attention over integers and scales."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from appliance.bundle.manifest import StateTensor, Variant
from appliance.runtime.dynamic_decoder import DynamicDecoder
from appliance.runtime.providers import SessionChoice, cpu
from appliance.targets import load
from export import parity
from export.lower import lower
from quant import kv
from tests import static_pair
from tests.export.lower.attention_graph import POSITIONS, WORDS, AttentionGraph, random_graph

KINDS = {"plain": {}, "no rope": {"rope": False}, "window": {"window": 7}, "softcap": {"softcap": 3.0}, "heads": {"kv_heads": 6}}
PIECES = (8, 1, 3, 1, 1, 8, 5, 1, 8, 8, 1, 2)
LENGTH = sum(PIECES)


def drawn(kind: str) -> tuple[int, AttentionGraph, NDArray[np.int64]]:
    seed = static_pair.fresh_seed()
    print("seed", seed)
    return seed, random_graph(seed, **KINDS[kind]), np.random.default_rng(seed).integers(0, WORDS, LENGTH)  # type: ignore[arg-type]


def contrib(build: Callable[[], ir.Model], folder: Path) -> DynamicDecoder:
    """The dynamic form in the runtime's own decoder."""
    lowered = lower(build, load("cpu"), POSITIONS, 8)
    path = folder / "model.onnx"
    ir.save(lowered.graphs["model"], path)
    variant = Variant(
        target="cpu", form="dynamic", graphs={"model": path.name}, chunk=64, context=POSITIONS, activation="", state=lowered.state
    )
    opened = cpu.open_session(path, load("cpu"), SessionChoice(threads=1, forbid_fallback=True))
    return DynamicDecoder(opened, variant, 192)


def close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return bool(np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max())


def check_kept(found: dict[str, NDArray[np.int8]], graph: AttentionGraph, ids: NDArray[np.int64]) -> None:
    """The state's integers are numpy's, but where a number lay within float rounding of the middle between two."""
    for part, mine in zip(("key", "value"), graph.kept(ids), strict=True):
        ours = found[f"layers.0.{part}"][0, :, : len(ids)]
        assert np.abs(ours.astype(int) - mine).max() <= 1 and np.mean(ours != mine) < 2e-3, part
        assert ours.min() == -128 and ours.max() == 127, "some numbers lie beyond the range, where they stop"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(LENGTH,), PIECES], ids=["whole", "pieces"])
def test_the_contrib_form_attends_to_integers_times_scales(kind: str, pieces: tuple[int, ...], tmp_path: Path) -> None:
    seed, graph, ids = drawn(kind)
    decoder = contrib(graph.build, tmp_path)
    state = decoder.new_state(LENGTH)
    rows = [decoder.run(state, ids[state.length : state.length + count], count).copy() for count in pieces]
    check_kept(state._buffers, graph, ids)
    kept = (state._buffers[f"layers.0.{part}"][0, :, :LENGTH] for part in ("key", "value"))
    assert close(np.concatenate(rows), graph.attended(ids, *kept)), seed


@pytest.mark.parametrize("kind", KINDS)
def test_the_static_pair_attends_to_the_same(kind: str, tmp_path: Path) -> None:
    seed, graph, ids = drawn(kind)
    pair = static_pair.open_pair(graph.build, tmp_path, context=POSITIONS)
    state = pair.new_state(LENGTH)
    rows = [pair.run(state, ids[state.length : state.length + count], 1)[0].copy() for count in PIECES]
    check_kept(state.buffers, graph, ids)
    kept = (state.buffers[f"layers.0.{part}"][0, :, :LENGTH] for part in ("key", "value"))
    assert close(np.stack(rows), graph.attended(ids, *kept)[np.cumsum(PIECES) - 1]), seed


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_form_attends_to_the_same(kind: str) -> None:
    """Of plain operators and growing: what an ablation of the state alone runs through."""
    seed, graph, ids = drawn(kind)
    model = parity.open_lowered(lower(graph.build, parity.reference_target(), POSITIONS, 1), threads=1)
    for pieces in ((), PIECES):
        assert close(parity.logits(model, ids.tolist(), pieces), graph.attended(ids, *graph.kept(ids))), seed


def test_scales_in_each_others_place_are_seen(tmp_path: Path) -> None:
    seed, graph, ids = drawn("plain")
    swapped = kv.KvScales(graph.scales.value, graph.scales.key)
    decoder = contrib(lambda: graph.build(swapped), tmp_path)
    state = decoder.new_state(LENGTH)
    rows = decoder.run(state, ids, LENGTH)
    with pytest.raises(AssertionError):
        check_kept(state._buffers, graph, ids)
    assert not close(rows, graph.attended(ids, *graph.kept(ids))), seed
    pair = static_pair.open_pair(lambda: graph.build(swapped), tmp_path, context=POSITIONS)
    found = static_pair.take_all(pair, ids, PIECES)
    assert not close(found, graph.attended(ids, *graph.kept(ids))[np.cumsum(PIECES) - 1]), seed


def test_a_rewound_state_goes_on_as_a_fresh_one(tmp_path: Path) -> None:
    """What lay behind the new length is written over; nothing of it is seen."""
    seed, graph, ids = drawn("plain")
    decoder = contrib(graph.build, tmp_path)
    other = np.random.default_rng([seed, 1]).integers(0, WORDS, LENGTH)
    used, fresh = decoder.new_state(LENGTH), decoder.new_state(LENGTH)
    decoder.run(used, [*ids[:20], *other[20:]], 0)
    used.length = 20
    decoder.run(fresh, ids[:20], 0)
    for count in (5, 1, 1, 8):
        part = ids[used.length : used.length + count]
        assert np.array_equal(decoder.run(used, part, count).copy(), decoder.run(fresh, part, count)), seed


def test_the_state_says_how_it_is_kept() -> None:
    _, graph, _ = drawn("plain")
    for target, growing in ((load("cpu"), "batch"), (load("cpu-static"), 1)):
        key = lower(graph.build, target, POSITIONS, 8).state[0]
        wanted = StateTensor(
            name="layers.0.key", kind="kv.key", layer=0, input="past_key_values.0.key", output="present.0.key", dtype="int8",
            quantization="channel", shape=(growing, 2, "context", 32), growth="growing", update=key.update,
        )  # fmt: skip
        assert key == wanted
