"""The dynamic decoder on a hand-made graph, against numpy arithmetic over the whole sequence."""

import random
import time
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import BundleError, ContextLengthError, DeviceError
from appliance.runtime import dynamic_decoder, providers
from appliance.runtime.dynamic_decoder import DynamicDecoder
from appliance.runtime.providers import SessionChoice, cpu
from appliance.targets import load
from tests.runtime.gqa_model import GqaModel, random_model


def decoder_of(model: GqaModel, folder: Path, chunk: int = 16, update: str = "inplace") -> DynamicDecoder:
    opened = cpu.open_session(model.save(folder / "model.onnx"), load("cpu"), SessionChoice(threads=1, forbid_fallback=True))
    return DynamicDecoder(opened, model.variant(chunk, update), model.vocab)


@pytest.mark.parametrize("update", ["inplace", "replace"])
def test_logits_are_those_of_the_whole_sequence_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    monkeypatch.setattr(dynamic_decoder, "FIRST_CAPACITY", 8)  # so that 64 tokens grow the buffers three times
    seed = time.time_ns()
    draw = random.Random(seed)
    model = random_model(draw.randrange(2**32))
    decoder = decoder_of(model, tmp_path, update=update)
    for _ in range(6):
        ids = [draw.randrange(model.vocab) for _ in range(draw.randint(1, model.context))]
        wanted = model.logits(ids)
        state = decoder.new_state(len(ids))
        while state.length < len(ids):
            count = min(draw.choice([1, 1, 2, 5, 16]), len(ids) - state.length)
            keep = draw.randint(0, count)
            part = ids[state.length : state.length + count]
            found = decoder.run(state, part, keep)
            assert found.shape == (keep, model.vocab)
            rows = wanted[state.length - keep : state.length]
            assert np.allclose(found, rows, atol=2e-4), f"seed {seed}, length {state.length}, keep {keep}"


def test_states_take_turns_without_seeing_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_decoder, "FIRST_CAPACITY", 4)
    seed = time.time_ns()
    draw = random.Random(seed)
    model = random_model(draw.randrange(2**32))
    decoder = decoder_of(model, tmp_path)
    texts = [[draw.randrange(model.vocab) for _ in range(20)] for _ in range(3)]
    wanted = [model.logits(ids) for ids in texts]
    states = [decoder.new_state(20) for _ in texts]
    while live := [at for at in range(3) if states[at].length < 20]:
        at = draw.choice(live)
        length = states[at].length
        found = decoder.run(states[at], texts[at][length : length + 1])
        assert np.allclose(found[0], wanted[at][length], atol=2e-4), seed


def test_the_one_token_step_reuses_its_logits_buffer(tmp_path: Path) -> None:
    model = random_model(1)
    decoder = decoder_of(model, tmp_path)
    state = decoder.new_state(10)
    first = decoder.run(state, [1])
    kept = first.copy()
    second = decoder.run(state, [2])
    assert np.shares_memory(first, second)
    assert not np.allclose(kept, second)
    assert second.flags.writeable


def test_no_more_tokens_than_asked_for_and_no_more_than_the_context(tmp_path: Path) -> None:
    decoder = decoder_of(random_model(1), tmp_path)
    with pytest.raises(ContextLengthError, match=r"65 .* 64"):
        decoder.new_state(65)
    state = decoder.new_state(4)
    decoder.run(state, [1, 2, 3])
    with pytest.raises(ContextLengthError, match="4 tokens"):
        decoder.run(state, [1, 2])
    for ids, keep in (([], 0), ([1], 2), ([1], -1), ([1] * 17, 1)):
        with pytest.raises(ValueError, match="a run takes"):
            decoder.run(decoder.new_state(64), ids, keep)


def test_a_graph_that_does_not_fit_its_manifest_is_refused(tmp_path: Path) -> None:
    model = random_model(1)
    opened = cpu.open_session(model.save(tmp_path / "model.onnx"), load("cpu"), SessionChoice(threads=1))
    variant = model.variant(16)
    with pytest.raises(BundleError, match=r"has past_key_values.1.value, which the manifest does not name"):
        DynamicDecoder(opened, variant.model_copy(update={"state": variant.state[:-1]}), model.vocab)
    odd = variant.state[0].model_copy(update={"name": "more", "input": "more", "output": "more_out"})
    with pytest.raises(BundleError, match="lacks more"):
        DynamicDecoder(opened, variant.model_copy(update={"state": (*variant.state, odd)}), model.vocab)
    with pytest.raises(BundleError, match="append"):
        DynamicDecoder(opened, model.variant(16, "append"), model.vocab)


def test_placement_is_read_back_and_a_closed_decoder_says_so(tmp_path: Path) -> None:
    decoder = decoder_of(random_model(1), tmp_path)
    placement = decoder.placement
    assert placement.provider == "CPUExecutionProvider"
    assert placement.fallbacks == ()
    assert placement.nodes[0][1] > 5
    decoder.close()
    with pytest.raises(DeviceError, match="closed"):
        decoder.new_state(4)


def test_a_damaged_graph_is_a_bundle_error(tmp_path: Path) -> None:
    for content in (b"", b"not a graph", random_model(1).save(tmp_path / "whole.onnx").read_bytes()[:1000]):
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        with pytest.raises(BundleError, match="not a graph"):
            cpu.open_session(path, load("cpu"), SessionChoice())
    with pytest.raises(BundleError, match="not a graph"):
        cpu.open_session(tmp_path / "missing.onnx", load("cpu"), SessionChoice())


def test_providers_are_found_by_their_files() -> None:
    assert "cpu" in providers.names()
    assert providers.find("cpu") is cpu
