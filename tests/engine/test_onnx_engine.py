"""The engine over the fake decoder: order, priority, cancellation, slow readers, failures."""

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from appliance.bundle.generation import GenerationDefaults
from appliance.engine.answer_stream import PENDING
from appliance.engine.onnx import OnnxEngine, OpenModel
from appliance.engine.protocol import (
    ChatPrompt,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    Sampling,
    Started,
    TextPrompt,
    TokenPrompt,
)
from appliance.errors import ContextLengthError, DeviceError, RequestError, Unavailable
from tests.fakes import VOCAB, ByteTokenizer, FakeDecoder, PlainTemplate


@contextmanager
def engine_over(
    decoder: FakeDecoder, defaults: GenerationDefaults | None = None, most_waiting: int = 64, template: bool = True
) -> Iterator[OnnxEngine]:
    model = OpenModel("fake", decoder, ByteTokenizer(), PlainTemplate() if template else None, defaults or GenerationDefaults())
    engine = OnnxEngine(None, target="fake", most_waiting=most_waiting, open_with=lambda: model)
    engine.load()
    try:
        yield engine
    finally:
        engine.unload()


def request(text: str = "hello", **changes: object) -> GenerateRequest:
    values: dict[str, object] = {"id": text, "prompt": TextPrompt(text), "sampling": Sampling(temperature=0), "max_tokens": 20}
    return GenerateRequest(**(values | changes))  # type: ignore[arg-type]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_an_answer_from_first_event_to_last() -> None:
    with engine_over(FakeDecoder(script=b"Paris.")) as engine:
        events = list(engine.stream(request("capital?")))
        assert events[0] == Started(8, "FakeExecutionProvider")
        assert text_of(events) == "Paris."
        end = finished(events)
        assert (end.reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == ("stop", 8, 7, 0)
        assert min(end.timings.queued, end.timings.prefill, end.timings.decode) > 0
        stats = engine.stats()
        assert (stats.steps, stats.prompt_tokens, stats.completion_tokens, stats.waiting) == (7, 8, 7, 0)
        assert (stats.model, stats.provider, stats.fallbacks, stats.context_length) == ("fake", "FakeExecutionProvider", (), 512)


def test_the_speed_is_that_of_the_newest_answer_with_more_than_one_token() -> None:
    with engine_over(FakeDecoder(script=b"0123456789", delay=0.01)) as engine:
        assert engine.stats().tokens_per_second is None
        list(engine.stream(request(max_tokens=1)))
        assert engine.stats().tokens_per_second is None  # prefill made that one
        end = finished(list(engine.stream(request(max_tokens=10))))
        speed = engine.stats().tokens_per_second
        assert speed == pytest.approx(9 / end.timings.decode) and 5 < speed < 100
        list(engine.stream(request(max_tokens=1)))
        assert engine.stats().tokens_per_second == speed


@pytest.mark.parametrize("round_", range(6))
def test_whatever_happens_around_it_a_request_gets_its_own_text(round_: int) -> None:
    """Random interleavings of submit, cancel, slow reading and priorities."""
    seed = time.time_ns()
    draw = random.Random(seed)
    settings = [
        Sampling(temperature=0),
        Sampling(temperature=1.0, seed=draw.randrange(99)),
        Sampling(temperature=0.8, top_p=0.7, repetition_penalty=1.2, seed=3),
    ]
    requests = [
        request(
            "".join(draw.choice("abc xyz") for _ in range(draw.randint(1, 60))),
            sampling=draw.choice(settings),
            max_tokens=draw.randint(1, 40),
            priority=draw.choice(["interactive", "job"]),
            stop=draw.choice([(), ("e",), ("ab", "x")]),
            logprobs=draw.choice([None, 2]),
        )
        for _ in range(14)
    ]
    with engine_over(FakeDecoder(eos=30)) as alone:
        wanted = [list(alone.stream(one)) for one in requests]
    found: dict[int, list[Event]] = {}
    cancelled: set[int] = set()

    def ask(at: int, engine: OnnxEngine, rest: random.Random) -> None:
        time.sleep(rest.random() * 0.01)
        stream = engine.stream(requests[at])
        events = found[at] = []
        limit = rest.choice([None, None, 0, 1, 5])
        if limit == 0:
            cancelled.add(at)
            stream.cancel()
        for event in stream:
            events.append(event)
            if limit is not None and len(events) == limit:
                cancelled.add(at)
                stream.cancel()
            if rest.random() < 0.1:
                time.sleep(0.002)

    with engine_over(FakeDecoder(eos=30, delay=0.0002)) as engine:
        threads = [threading.Thread(target=ask, args=(at, engine, random.Random(seed + at))) for at in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), f"seed {seed}: an answer never ended"
    for at, events in found.items():
        whole = text_of(wanted[at])
        message = f"seed {seed}, request {at}: {requests[at]}"
        if at in cancelled and finished(events).reason == "cancelled":
            assert whole.startswith(text_of(events)), message
        else:
            assert text_of(events) == whole, message
            assert finished(events).reason == finished(wanted[at]).reason, message
            assert finished(events).completion_tokens == finished(wanted[at]).completion_tokens, message
            said = [one for event in events if isinstance(event, Delta) for one in event.logprobs]
            assert said == [one for event in wanted[at] if isinstance(event, Delta) for one in event.logprobs], message


def test_interactive_goes_before_job_at_every_step_and_each_kind_in_order() -> None:
    decoder = FakeDecoder(delay=0.002, chunk=4)
    order: list[str] = []
    with engine_over(decoder) as engine:

        def read(name: str, stream: Iterator[Event]) -> None:
            for _ in stream:
                pass
            order.append(name)

        job = engine.stream(request("job one", priority="job", max_tokens=60))
        second = engine.stream(request("job two", priority="job", max_tokens=2))
        readers = [threading.Thread(target=read, args=(name, iter(one))) for name, one in (("job 1", job), ("job 2", second))]
        for reader in readers:
            reader.start()
        while len(decoder.runs) < 5:
            time.sleep(0.001)
        for at in range(3):
            stream = engine.stream(request(f"person {at}", max_tokens=5))
            readers.append(threading.Thread(target=read, args=(f"person {at}", iter(stream))))
            readers[-1].start()
        for reader in readers:
            reader.join(10)
    assert order == ["person 0", "person 1", "person 2", "job 1", "job 2"]


def test_a_reader_who_does_not_read_blocks_nobody_and_loses_nothing() -> None:
    decoder = FakeDecoder()
    with engine_over(decoder) as engine:
        slow = engine.stream(request("slow", max_tokens=400, logprobs=0))
        quick = list(engine.stream(request("quick")))
        assert finished(quick).reason == "length"
        events = list(slow)
        assert len(events) <= PENDING + 2
        assert text_of(events) == text_of(list(engine.stream(request("slow", max_tokens=400))))
        assert len(text_of(events)) == 400
        said = [one for event in events if isinstance(event, Delta) for one in event.logprobs]
        assert b"".join(one.bytes for one in said).decode() == text_of(events)


@pytest.mark.parametrize("when", ["prefill", "decode", "waiting", "parked"])
def test_cancel_ends_an_answer_wherever_it_is(when: str) -> None:
    decoder = FakeDecoder(delay=0.005, chunk=4)
    with engine_over(decoder) as engine:
        other = engine.stream(request("first in line " * 9, max_tokens=60)) if when == "waiting" else None
        stream = engine.stream(request("x" * 200, max_tokens=100, priority="job" if when == "parked" else "interactive"))
        reached = {"prefill": 3, "decode": 55, "waiting": 1, "parked": 3}[when]
        while len(decoder.runs) < reached:
            time.sleep(0.001)
        if when == "parked":
            other = engine.stream(request("person", max_tokens=60))
            time.sleep(0.02)
        stream.cancel()
        begun = len(decoder.runs)
        end = finished(list(stream))
        assert end.reason == "cancelled"
        if other is None:
            assert len(decoder.runs) - begun <= 1  # the step that was under way, and no other
        assert (end.completion_tokens > 0) == (when == "decode")
        if other is not None:
            assert finished(list(other)).reason == "length"
        else:
            runs = len(decoder.runs)
            time.sleep(0.03)
            assert len(decoder.runs) == runs, "steps went on after the end"


@pytest.mark.parametrize("how", ["close", "with", "break", "forget"])
def test_a_reader_who_leaves_cancels(how: str) -> None:
    decoder = FakeDecoder(delay=0.002)
    with engine_over(decoder) as engine:
        stream = engine.stream(request(max_tokens=400))
        if how == "close":
            stream.close()
        elif how == "with":
            with stream:
                pass
        elif how == "break":
            for _ in stream:
                break
        else:
            events = iter(stream)
            next(events)
            del events
        gc.collect()
        deadline = time.monotonic() + 2
        while engine.stats().running or engine.stats().waiting:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert len(decoder.runs) < 100


def test_refusals_are_raised_before_anything_runs() -> None:
    decoder = FakeDecoder()
    with engine_over(decoder, template=False) as engine:
        with pytest.raises(ContextLengthError, match=r"600 .* 512"):
            engine.stream(request("x" * 600))
        with pytest.raises(RequestError, match="empty"):
            engine.stream(request(""))
        with pytest.raises(RequestError, match="stop"):
            engine.stream(request(stop=("",)))
        with pytest.raises(RequestError, match="temperature"):
            engine.stream(request(sampling=Sampling(temperature=-1)))
        with pytest.raises(RequestError, match=str(VOCAB)):
            engine.stream(request(prompt=TokenPrompt((VOCAB,))))
        with pytest.raises(RequestError, match="no chat template"):
            engine.stream(request(prompt=ChatPrompt(({"role": "user", "content": "hi"},))))
        with pytest.raises(RequestError, match="embed"):
            engine.embed(["text"])
    assert decoder.runs == []


def test_too_many_waiting_are_refused_and_room_comes_back() -> None:
    with engine_over(FakeDecoder(delay=0.002), most_waiting=2) as engine:
        running = engine.stream(request("running", max_tokens=200))
        while not engine.stats().running:
            time.sleep(0.001)
        waiting = [engine.stream(request(f"waiting {at}", max_tokens=2)) for at in range(2)]
        with pytest.raises(Unavailable, match="2 requests wait"):
            engine.stream(request("one too many"))
        running.cancel()
        assert [finished(list(one)).reason for one in waiting] == ["length", "length"]
        assert finished(list(engine.stream(request("again")))).reason == "length"


def test_a_step_that_fails_ends_its_own_answer_only() -> None:
    with engine_over(FakeDecoder(fail_at=4)) as engine:
        stream = engine.stream(request("unlucky"))
        after = engine.stream(request("lucky"))
        with pytest.raises(DeviceError, match="the fake device is gone") as caught:
            list(stream)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert finished(list(after)).reason == "length"


def test_unload_cancels_everything_and_closes_the_decoder() -> None:
    decoder = FakeDecoder(delay=0.002)
    with engine_over(decoder) as engine:
        streams = [engine.stream(request(f"number {at}", max_tokens=300)) for at in range(3)]
        time.sleep(0.02)
        engine.unload()
        assert decoder.closed
        assert [finished(list(one)).reason for one in streams] == ["cancelled"] * 3
        with pytest.raises(Unavailable, match="not loaded"):
            engine.stream(request())
        engine.unload()


def test_what_a_request_leaves_open_the_model_decides() -> None:
    defaults = GenerationDefaults(temperature=0.0, stop_token_ids=(ord("."),))
    with engine_over(FakeDecoder(script=b"One. Two."), defaults) as engine:
        assert text_of(list(engine.stream(request(sampling=Sampling())))) == "One"
        endless = list(engine.stream(request(sampling=Sampling(), ignore_eos=True, max_tokens=12)))
        assert (text_of(endless), finished(endless).completion_tokens) == ("One. Two.", 12)
    with engine_over(FakeDecoder()) as engine:  # no default: temperature 1, a fresh seed each time
        texts = {text_of(list(engine.stream(request(sampling=Sampling())))) for _ in range(3)}
        assert len(texts) == 3
        texts = {text_of(list(engine.stream(request(sampling=Sampling(seed=4))))) for _ in range(3)}
        assert len(texts) == 1


def test_log_probabilities_name_tokens_and_bytes() -> None:
    with engine_over(FakeDecoder(script="é".encode())) as engine:
        events = list(engine.stream(request(logprobs=2)))
        said = [one for event in events if isinstance(event, Delta) for one in event.logprobs]
        assert [one.bytes for one in said] == [b"\xc3", b"\xa9"]
        assert [one.text for one in said] == ["\ufffd", "\ufffd"]
        assert all(len(one.top) == 2 and one.top[0].id == one.id and one.logprob > -0.01 for one in said)
        assert text_of(events) == "é"


def test_a_conversation_goes_through_the_template() -> None:
    with engine_over(FakeDecoder()) as engine:
        chat = ChatPrompt(({"role": "user", "content": "hi"},))
        first = list(engine.stream(request(prompt=chat)))
        assert first[0] == Started(len("user: hi\nassistant: "), "FakeExecutionProvider")
        assert text_of(first) == text_of(list(engine.stream(request("user: hi\nassistant: "))))


def test_an_idle_engine_burns_no_processor_time() -> None:
    with engine_over(FakeDecoder()):
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.02
