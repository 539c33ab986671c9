"""Scales of keys and values: found on a text, good at every position, refused where a target cannot carry them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.errors import CheckpointError, TargetError
from appliance.targets import load
from export import arch, parity
from export.lower import lower
from export.slices import opener
from quant import kv, kv_ranges
from quant.kv_ranges import Setup, collect, scale_of
from tests.golden import recipe
from tests.static_pair import fresh_seed

HEADS, SIZE, PAIRS = 24, 16, 8
EARLY, LATE = 64, 8000


def opened(kind: str, seed: int, family: str = "llama") -> arch.Opened:
    config: dict[str, Any] = arch.find(family).TINY[kind]
    return arch.open_model(recipe.Memory(config, recipe.tensors(config, seed)))


def ready(model: arch.Opened, work: Path, seed: int, key: str = "") -> Setup:
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (5, 24))
    return Setup(ids, opener(64, work / "parts", threads=1), work, key)


def whole(model: arch.Opened, ids: np.ndarray) -> Mapping[str, np.ndarray]:
    """Keys and values of all windows, by name of the state, out of the whole float graph."""
    running = parity.open_lowered(lower(model.build, parity.reference_target(), 0, 1), threads=1)
    state = running.lowered.state
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "logits_to_keep": np.array([1])}
    past = {one.input: np.zeros((len(ids), one.shape[1], 0, one.shape[3]), np.float32) for one in state}  # type: ignore[arg-type]
    found = running.session.run([one.output for one in state], {**feeds, **past})
    return dict(zip([one.name for one in state], found, strict=True))


@pytest.mark.parametrize("family, kind", [("llama", "all"), ("llama", "tied"), ("gemma3_text", "all")])
def test_scales_are_the_largest_that_occurs_over_127(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_ranges, "_TOKENS", 48)  # two windows at once
    seed = fresh_seed()
    model = opened(kind, seed, family)
    setup = ready(model, tmp_path, seed)
    found, state = collect(model.build(), setup), whole(model, setup.ids)
    assert [one.layer for one in found] == list(range(len(state) // 2))
    for one in found:
        key, value = state[f"layers.{one.layer}.key"], state[f"layers.{one.layer}.value"]
        half = key.shape[-1] // 2
        length = np.sqrt(key[..., :half] ** 2 + key[..., half:] ** 2).max(axis=(0, 2)) / 127
        wanted = np.concatenate([length, length], axis=-1)[:, None]
        assert np.allclose(one.scales.key, wanted, rtol=1e-4, atol=1e-7), seed
        assert np.allclose(one.scales.value, (np.abs(value).max(axis=(0, 2)) / 127)[:, None], rtol=1e-4, atol=1e-7), seed
        assert one.scales.key.dtype == one.scales.value.dtype == np.float32
        for x, scale, said in ((key, one.scales.key, one.key_snr_db), (value, one.scales.value, one.value_snr_db)):
            first = x[:2].astype(np.float64)
            noise = first - np.rint(first / scale) * scale
            assert abs(said - 10 * np.log10((first**2).sum() / (noise**2).sum())) < 0.05, seed
            assert said > 30


def turned(first: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys [1,HEADS,P,SIZE] of vectors [HEADS,P,SIZE] at `positions` [P], the slowest pair at 1/8000 of a turn a position."""
    speeds = 2 * np.pi / 4.0 ** np.linspace(1, 6.5, PAIRS)
    angle = positions[:, None] * speeds
    a, b = first[..., :PAIRS], first[..., PAIRS:]
    both = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    made: np.ndarray = np.concatenate(both, axis=-1)[None].astype(np.float32)
    return made


def noise_late(pairs: int, seed: int) -> tuple[float, float]:
    """Mean square error of keys near the calibration's positions and far beyond, with scales found on the first alone."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(0, 1, (HEADS, 1, SIZE)) * 3  # keys gather around one direction, as those of trained models do

    def keys(positions: np.ndarray) -> np.ndarray:
        return turned(centre + rng.normal(0, 0.5, (HEADS, len(positions), SIZE)), positions)

    early = keys(np.tile(np.arange(EARLY), 40))
    scale = scale_of(kv.envelope(early, pairs).max(axis=(0, 2)))
    found = []
    for start in (0, LATE - EARLY):
        x = keys(np.tile(np.arange(start, start + EARLY), 40))
        found.append(float(((np.clip(np.rint(x / scale), -128, 127) * scale - x) ** 2).mean()))
    return found[0], found[1]


def test_the_error_does_not_grow_with_the_position() -> None:
    """And it does when the two channels that turn into each other are looked at one by one, as values are."""
    seed = fresh_seed()
    near, far = noise_late(PAIRS, seed)
    assert far < 1.2 * near, seed
    near, far = noise_late(0, seed)
    assert far > 5 * near, seed


def test_the_envelope_is_the_length_of_a_pair_and_leaves_other_channels_alone() -> None:
    seed = fresh_seed()
    key = np.random.default_rng(seed).normal(0, 1, (2, 3, 5, 12)).astype(np.float32)
    before = key.copy()
    found = kv.envelope(key, 4)
    assert np.array_equal(key, before)
    for channel in range(12):
        pair = (channel, channel + 4) if channel < 4 else (channel - 4, channel) if channel < 8 else (channel,)
        wanted = np.sqrt(sum(key[..., one].astype(np.float64) ** 2 for one in pair))
        assert np.allclose(found[..., channel], wanted, rtol=1e-6), (seed, channel)


def test_a_channel_that_never_stirred_gets_a_scale_of_its_layers_size() -> None:
    most = np.array([[0, 4.0], [2.0, 1.0]], np.float32)
    assert scale_of(most).shape == (2, 1, 2) and np.isclose(scale_of(most)[0, 0, 0], 4e-3 / 127)
    assert np.isfinite(1 / scale_of(np.zeros((1, 4), np.float32))).all()


def test_a_second_run_reads_the_result_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    seed = fresh_seed()
    model = opened("tied", seed)
    setup = ready(model, tmp_path, seed)
    first = collect(model.build(), setup)
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".json"], "hidden states are gone"

    def closed(model: ir.Model) -> Any:
        raise AssertionError("nothing is to be run again")

    again = Setup(setup.ids, closed, tmp_path, "")
    for ours, theirs in zip(first, collect(model.build(), again), strict=True):
        assert np.array_equal(ours.scales.key, theirs.scales.key) and np.array_equal(ours.scales.value, theirs.scales.value)
        assert (ours.layer, ours.key_snr_db, ours.value_snr_db) == (theirs.layer, theirs.key_snr_db, theirs.value_snr_db)
    for other in (Setup(setup.ids, closed, tmp_path, "other"), Setup(setup.ids[:, ::-1], closed, tmp_path, "")):
        with pytest.raises(AssertionError, match="run again"):
            collect(model.build(), other)
    path = next(one for one in tmp_path.glob("kv.*.json") if "note" not in one.name and one.read_text()[:2] == "[{")
    whole = path.read_text()
    for damaged in (whole[:300], "{}", "null", whole.replace('"key": [[', '"key": [["x", ', 1), whole.replace('"snr"', '"snd"')):
        path.write_text(damaged)
        repaired = collect(model.build(), setup)
        assert np.array_equal(repaired[0].scales.key, first[0].scales.key)
    path.unlink()


@pytest.mark.parametrize("damage", ["", "note", "hidden"])
def test_a_stopped_run_goes_on_with_its_layer(damage: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    model = opened("all", seed)
    wanted = collect(model.build(), ready(model, tmp_path / "whole", seed))

    def stop(done: int, total: int, name: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    setup, told = ready(model, tmp_path / "stopped", seed), []
    with pytest.raises(KeyboardInterrupt):
        collect(model.build(), setup, stop)
    note = next((tmp_path / "stopped").glob("*.note.json"))
    if damage == "note":
        note.write_text(note.read_text().replace("[[", "[", 1))
    elif damage == "hidden":
        next((tmp_path / "stopped").glob("*.npy")).write_bytes(b"short")
    found = collect(model.build(), setup, lambda done, total, name: told.append(done))
    assert told[0] == (0 if damage else 1), "begun anew only when something is missing"
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.array_equal(ours.scales.key, theirs.scales.key) and np.array_equal(ours.scales.value, theirs.scales.value)
    assert not list((tmp_path / "stopped").glob("*.npy")) and not note.exists()


def test_keys_that_are_no_numbers_name_their_layer(tmp_path: Path) -> None:
    seed = fresh_seed()
    config: dict[str, Any] = arch.find("llama").TINY["tied"]
    tensors = dict(recipe.tensors(config, seed))
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    model = arch.open_model(recipe.Memory(config, tensors))
    with pytest.raises(CheckpointError, match=r"values of layers\.1 are not finite"):
        collect(model.build(), ready(model, tmp_path, seed))


def test_a_target_that_carries_floats_alone_says_so() -> None:
    kv.check_held(kv.INT8, load("cpu"))
    kv.check_held(kv.FLOAT, load("openvino"))
    with pytest.raises(TargetError, match="int8 were asked for; target openvino carries float32"):
        kv.check_held(kv.INT8, load("openvino"))
