"""The generate loop on the fake decoder, whose every token depends on the whole history."""

import random
import time

import numpy as np
import pytest

from appliance.errors import ContextLengthError, RequestError
from appliance.runtime.detokenizer import Detokenizer
from appliance.runtime.generate import Ended, Piece, Prefilled, Step, Task, generate, plan
from appliance.runtime.sampling import Choice
from appliance.runtime.stop_strings import StopStrings
from tests.fakes import EOS, VOCAB, ByteTokenizer, FakeDecoder

GREEDY = Choice(temperature=0)


def task(prompt: bytes = b"hello", **changes: object) -> Task:
    options: dict[str, object] = {"context": 512, "vocab_size": VOCAB, "stop_tokens": frozenset({EOS}), **changes}
    return plan(list(prompt), options.pop("choice", GREEDY), **options)  # type: ignore[arg-type]


def run(decoder: FakeDecoder, what: Task, stop: tuple[str, ...] = (), cancelled: object = None) -> list[Step]:
    watch = cancelled if callable(cancelled) else (lambda: False)
    return list(generate(decoder, Detokenizer(ByteTokenizer()), StopStrings(stop), what, watch))


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps if isinstance(step, Piece | Ended))


def ended(steps: list[Step]) -> Ended:
    assert isinstance(steps[-1], Ended)
    assert not any(isinstance(step, Ended) for step in steps[:-1])
    return steps[-1]


def expected(decoder: FakeDecoder, prompt: bytes, count: int) -> list[int]:
    """Greedy tokens, one call over the whole history each: no state, no chunks."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(decoder.logits_after(history).argmax()))
        if history[-1] == EOS:
            break
    return history[len(prompt) :]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 100])
def test_chunks_do_not_change_the_answer(length: int) -> None:
    seed = time.time_ns()
    prompt = random.Random(seed).randbytes(length)
    decoder = FakeDecoder(chunk=8)
    steps = run(decoder, task(prompt, max_tokens=12))
    assert [step.token for step in steps if isinstance(step, Piece)] == expected(decoder, prompt, 12), seed
    assert sum(step.tokens for step in steps if isinstance(step, Prefilled)) == length
    assert ended(steps) == Ended("length", ended(steps).text, 12)


def test_the_head_is_wanted_only_where_its_logits_are_used() -> None:
    decoder = FakeDecoder(chunk=8)
    run(decoder, task(b"x" * 20, max_tokens=3))
    assert decoder.runs == [(8, 0), (8, 0), (4, 1), (1, 1), (1, 1)]


def test_an_end_token_stops_and_is_no_text() -> None:
    decoder = FakeDecoder(script=b"Paris.")
    steps = run(decoder, task())
    assert (text_of(steps), ended(steps).reason, ended(steps).completion_tokens) == ("Paris.", "stop", 7)
    endless = run(FakeDecoder(script=b"Paris."), task(stop_tokens=frozenset(), max_tokens=9))
    assert (text_of(endless), ended(endless).reason, ended(endless).completion_tokens) == ("Paris.", "length", 9)


@pytest.mark.parametrize(
    ("said", "stop", "shown"), [(b"one two", "t", "one "), (b"abcabd", "abd", "abc"), (b"so END", "END", "so ")]
)
def test_a_stop_string_cuts_the_text(said: bytes, stop: str, shown: str) -> None:
    steps = run(FakeDecoder(script=said + b" and more"), task(), stop=(stop,))
    assert (text_of(steps), ended(steps).reason) == (shown, "stop")


def test_text_held_back_comes_when_it_was_no_stop_string() -> None:
    steps = run(FakeDecoder(script=b"all is EN"), task(), stop=("END",))
    assert text_of(steps) == "all is EN"
    assert ended(steps).text == "EN"


def test_no_half_characters() -> None:
    said = "aé€😀".encode()
    steps = run(FakeDecoder(script=said), task())
    assert text_of(steps) == "aé€😀"
    assert all("\ufffd" not in step.text for step in steps if isinstance(step, Piece))
    cut = run(FakeDecoder(script=said), task(max_tokens=len(said) - 1))
    assert text_of(cut) == "aé€\ufffd"


def test_room_limits_max_tokens() -> None:
    assert task(b"x" * 500).max_tokens == 12
    assert task(b"x" * 500, max_tokens=50).max_tokens == 12
    assert task(b"x" * 511).max_tokens == 1
    steps = run(FakeDecoder(), task(b"x" * 500, max_tokens=50))
    assert (ended(steps).reason, ended(steps).completion_tokens) == ("length", 12)


@pytest.mark.parametrize("length", [512, 513, 9999])
def test_a_prompt_without_room_for_an_answer_names_both_numbers(length: int) -> None:
    with pytest.raises(ContextLengthError, match=rf"{length} tokens .* 512"):
        task(b"x" * length)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"max_tokens": 0}, "max_tokens"), ({"logprobs": -1}, "logprobs"), ({"logprobs": VOCAB + 1}, "logprobs")],
)
def test_bad_values_are_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        task(**changes)


def test_an_empty_prompt_and_a_foreign_token_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        task(b"")
    for token in (-1, VOCAB):
        with pytest.raises(RequestError, match=str(token)):
            plan([1, token], GREEDY, context=10, vocab_size=VOCAB)


def test_cancelling_in_prefill_runs_no_further_chunk() -> None:
    decoder = FakeDecoder(chunk=8)
    steps = run(decoder, task(b"x" * 100), cancelled=lambda: len(decoder.runs) >= 3)
    assert ended(steps) == Ended("cancelled", "", 0)
    assert len(decoder.runs) == 3


def test_cancelling_in_decode_runs_no_further_step() -> None:
    decoder = FakeDecoder(chunk=8)
    steps = run(decoder, task(), cancelled=lambda: len(decoder.runs) >= 4)
    assert (ended(steps).reason, len(decoder.runs)) == ("cancelled", 4)


def test_log_probabilities_ignore_penalties_and_bias() -> None:
    choice = Choice(temperature=0, logit_bias=((65, 100.0),), repetition_penalty=1.3)
    decoder = FakeDecoder()
    steps = run(decoder, task(choice=choice, max_tokens=4, logprobs=3))
    history = list(b"hello")
    for step in steps:
        if isinstance(step, Piece):
            logits = decoder.logits_after(history).astype(np.float64)
            exact = logits - np.log(np.exp(logits).sum())
            assert step.token == 65
            assert step.ranked is not None
            assert abs(step.ranked.chosen - exact[65]) < 1e-5
            assert [token for token, _ in step.ranked.top] == list(np.argsort(-exact)[:3])
            history.append(step.token)


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    decoder = FakeDecoder()
    small = 100
    what = plan([40, 41], Choice(temperature=5.0, seed=1), context=512, vocab_size=small, max_tokens=40)
    steps = run(decoder, what)
    assert all(step.token < small for step in steps if isinstance(step, Piece))


def test_two_answers_can_take_turns_on_one_decoder() -> None:
    decoder = FakeDecoder(chunk=8)
    alone = [text_of(run(decoder, task(prompt, max_tokens=10))) for prompt in (b"first one", b"second")]
    streams = [
        generate(decoder, Detokenizer(ByteTokenizer()), StopStrings(()), task(prompt, max_tokens=10))
        for prompt in (b"first one", b"second")
    ]
    steps: list[list[Step]] = [[], []]
    draw = random.Random(time.time_ns())
    while live := [at for at in (0, 1) if not (steps[at] and isinstance(steps[at][-1], Ended))]:
        at = draw.choice(live)
        steps[at].append(next(streams[at]))
    assert [text_of(one) for one in steps] == alone
