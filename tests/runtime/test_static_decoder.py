"""The static pair's runtime: masks against a plain loop, padding that leaves no trace, states, refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bundle.manifest import StateTensor
from appliance.bundle.vocabulary import MASKED
from appliance.errors import BundleError, ContextLengthError
from appliance.runtime.providers import SessionChoice, cpu
from appliance.runtime.session import OpenSession, Placement
from appliance.runtime.static_decoder import StaticDecoder, fill_mask
from export import arch, lower
from export.arch import llama
from tests.static_pair import CHUNK, CONTEXT, STATIC, fresh_seed, open_pair, random_checkpoint, take_all

CONFIG: dict[str, Any] = llama.TINY["all"]
TOLERANCE = 1e-4


def builder(seed: int) -> Callable[[], ir.Model]:
    return arch.open_model(random_checkpoint(CONFIG, seed)).build


@pytest.fixture(scope="module")
def seed() -> int:
    return fresh_seed()


@pytest.fixture(scope="module")
def decoder(seed: int, tmp_path_factory: pytest.TempPathFactory) -> StaticDecoder:
    return open_pair(builder(seed), tmp_path_factory.mktemp("pair"))


@pytest.fixture
def ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], CONTEXT)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.integers(1, 9), st.integers(0, 14))
def test_mask_says_who_sees_whom(tokens: int, context: int, past: int, new: int, window: int) -> None:
    past, new = min(past, context), min(new, tokens)
    mask = np.full((tokens, context + tokens), np.nan, np.float32)
    fill_mask(mask, past, new, window)
    for row in range(new):
        for column in range(context + tokens):
            if column < context:
                real, position = column < past, column
            else:
                real, position = column - context < new, past + column - context
            back = past + row - position
            seen = real and back >= 0 and (window == 0 or back < window)
            assert mask[row, column] == (0 if seen else np.float32(MASKED)), (row, column)
    # Padding rows see what the last token sees: none is a softmax over nothing.
    assert (mask[new:] == mask[new - 1]).all()


def test_padding_leaves_no_trace(decoder: StaticDecoder, ids: np.ndarray, seed: int) -> None:
    one_by_one = take_all(decoder, ids[:13], [1] * 13)
    for pieces in ([8, 5], [3, 3, 7], [5, 8], [2, 8, 3]):
        delta = np.abs(take_all(decoder, ids[:13], pieces) - one_by_one[np.cumsum(pieces) - 1]).max()
        assert delta < TOLERANCE, f"seed {seed}, pieces {pieces}: {delta}"


def test_rows_of_padding_are_not_kept(decoder: StaticDecoder, ids: np.ndarray) -> None:
    state = decoder.new_state(CONTEXT)
    decoder.run(state, ids[:5], 0)
    assert state.length == 5
    for buffer in state.buffers.values():
        assert buffer[:, :, :5].any(axis=(0, 1, 3)).all()
        assert not buffer[:, :, 5:].any()


def test_rows_past_the_length_are_never_seen(decoder: StaticDecoder, ids: np.ndarray, seed: int) -> None:
    """What a longer sequence left in a buffer must not leak into a shorter one."""
    clean, dirty = decoder.new_state(CONTEXT), decoder.new_state(CONTEXT)
    for piece in (ids[:8], ids[8:11], ids[11:12], ids[12:18]):
        for buffer in dirty.buffers.values():
            buffer[:, :, dirty.length :] = 1e3
        first = decoder.run(clean, piece, 1).copy()
        assert (decoder.run(dirty, piece, 1) == first).all(), f"seed {seed}"


def test_state_can_be_filled_to_the_last_row(decoder: StaticDecoder, ids: np.ndarray, seed: int) -> None:
    chunks = take_all(decoder, ids, [8] * 5 + [7, 1])
    steps = take_all(decoder, ids, [8] * 4 + [1] * 16)
    assert np.abs(chunks[-1] - steps[-1]).max() < TOLERANCE, f"seed {seed}"


def test_keep_gives_the_logits_of_the_last_tokens(decoder: StaticDecoder, ids: np.ndarray, seed: int) -> None:
    wanted = take_all(decoder, ids[:11], [4] + [1] * 7)[1:]
    for keep in (0, 1, 2, 6, 7):
        state = decoder.new_state(CONTEXT)
        decoder.run(state, ids[:4], 0)
        found = decoder.run(state, ids[4:11], keep)
        assert found.shape == (keep, CONFIG["vocab_size"])
        assert state.length == 11
        if keep:
            assert np.abs(found - wanted[-keep:]).max() < TOLERANCE, f"seed {seed}, keep {keep}"


def test_two_states_do_not_mix(decoder: StaticDecoder, ids: np.ndarray) -> None:
    alone = [take_all(decoder, part, [8, 1, 3]) for part in (ids[:12], ids[12:24])]
    states = [decoder.new_state(12), decoder.new_state(12)]
    for row, (first, end) in enumerate([(0, 8), (8, 9), (9, 12)]):
        for which, state in enumerate(states):
            found = decoder.run(state, ids[12 * which + first : 12 * which + end], 1)
            assert (found[0] == alone[which][row]).all()


def test_too_long_is_refused(decoder: StaticDecoder, ids: np.ndarray) -> None:
    with pytest.raises(ContextLengthError, match=f"{CONTEXT + 1} tokens do not fit the context of {CONTEXT}"):
        decoder.new_state(CONTEXT + 1)
    state = decoder.new_state(10)
    decoder.run(state, ids[:8], 0)
    with pytest.raises(ContextLengthError, match="3 more tokens after 8 do not fit a state for 10"):
        decoder.run(state, ids[:3], 0)


def test_says_what_it_is(decoder: StaticDecoder) -> None:
    assert (decoder.chunk, decoder.context, decoder.vocab_size) == (CHUNK, CONTEXT, CONFIG["vocab_size"])
    assert decoder.placement.provider == "CPUExecutionProvider"
    assert not decoder.placement.fallbacks


@pytest.fixture(scope="module")
def opened(seed: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenSession, OpenSession, tuple[StateTensor, ...]]:
    lowered = lower.lower(builder(seed), STATIC, CONTEXT, CHUNK)
    folder = tmp_path_factory.mktemp("sessions")
    for kind, model in lowered.graphs.items():
        ir.save(model, folder / f"{kind}.onnx")
    prefill, decode = (cpu.open_session(folder / f"{kind}.onnx", STATIC, SessionChoice(threads=1)) for kind in lowered.graphs)
    return prefill, decode, lowered.state


def test_a_manifest_that_does_not_fit_the_graphs_is_refused(
    opened: tuple[OpenSession, OpenSession, tuple[StateTensor, ...]],
) -> None:
    prefill, decode, spec = opened
    StaticDecoder(prefill, decode, spec, CHUNK, CONTEXT)
    with pytest.raises(BundleError, match=r"graph of 4 tokens: .* has shape .*, the manifest asks for"):
        StaticDecoder(prefill, decode, spec, 4, CONTEXT)
    with pytest.raises(BundleError, match=r"graph of 8 tokens: mask has shape \[1, 1, 8, 56\]"):
        StaticDecoder(prefill, decode, spec, CHUNK, CONTEXT + 1)
    with pytest.raises(BundleError, match=r"past_key_values\.1\.value has shape .*, the manifest asks for None"):
        StaticDecoder(prefill, decode, spec[:-1], CHUNK, CONTEXT)
    with pytest.raises(BundleError, match="growing with update inplace is not known in the static form"):
        StaticDecoder(prefill, decode, [one.model_copy(update={"update": "inplace"}) for one in spec], CHUNK, CONTEXT)


def test_a_pair_of_which_one_half_fell_back_says_so(
    opened: tuple[OpenSession, OpenSession, tuple[StateTensor, ...]],
) -> None:
    prefill, decode, spec = opened
    fell = replace(decode, placement=Placement("CPUExecutionProvider", (("CPUExecutionProvider", 9),), ("9 of 9 nodes ...",)))
    wanted = replace(prefill, placement=Placement("OpenVINOExecutionProvider", (("OpenVINOExecutionProvider", 9),), ()))
    placement = StaticDecoder(wanted, fell, spec, CHUNK, CONTEXT).placement
    assert placement.provider == "CPUExecutionProvider"
    assert placement.fallbacks == ("9 of 9 nodes ...",)
