"""The bridge between a blocking stream and the event loop."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from appliance.api.bridge import PENDING, WHOLE, Bridge
from appliance.engine.protocol import Delta, Event
from tests.api.fake_engine import wait_until


class Counting:
    """Numbers for ever or up to `end`; counts how many were taken."""

    def __init__(self, end: int | None = None, failure: Exception | None = None):
        self.taken = 0
        self.end = end
        self.failure = failure
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[Event]:
        for number in itertools.count():
            if number == self.end or self.cancelled.is_set():
                break
            self.taken += 1
            yield Delta(str(number))
        if self.failure is not None:
            raise self.failure

    def cancel(self) -> None:
        self.cancelled.set()


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Delta)]


@pytest.mark.parametrize("end", [0, 1, PENDING - 1, PENDING, PENDING + 1, 5000])
def test_every_event_arrives_once_and_in_order(end: int) -> None:
    async def read() -> list[str]:
        bridge = Bridge(lambda: Counting(end))
        seen: list[str] = []
        while batch := await asyncio.wait_for(bridge.events(), 5):
            seen += texts(batch)
        assert await bridge.events() == []
        return seen

    assert asyncio.run(read()) == [str(number) for number in range(end)]


def test_a_slow_reader_holds_up_the_pump_and_not_memory() -> None:
    async def read() -> None:
        stream = Counting()
        bridge = Bridge(lambda: stream)
        await asyncio.sleep(0.1)
        assert stream.taken == PENDING + 1  # one waits in the pump's hand
        assert len(await bridge.events()) >= PENDING
        await asyncio.sleep(0.05)
        assert stream.taken > PENDING + 1
        bridge.cancel()
        while await asyncio.wait_for(bridge.events(), 5):
            pass

    asyncio.run(read())


def test_what_was_said_before_a_failure_comes_before_it() -> None:
    async def read() -> list[str]:
        bridge = Bridge(lambda: Counting(100, RuntimeError("boom")))
        seen: list[str] = []
        with pytest.raises(RuntimeError, match="boom"):
            while batch := await asyncio.wait_for(bridge.events(), 5):
                seen += texts(batch)
        return seen

    assert len(asyncio.run(read())) == 100


def test_a_refusal_to_open_is_raised() -> None:
    async def read() -> None:
        def refuse() -> Counting:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await Bridge(refuse).events()

    asyncio.run(read())


def test_cancel_reaches_a_stream_that_is_still_being_opened() -> None:
    async def read() -> None:
        gate = threading.Event()
        stream = Counting()

        def slow() -> Counting:
            gate.wait(5)
            return stream

        bridge = Bridge(slow)
        bridge.cancel()
        gate.set()
        while await asyncio.wait_for(bridge.events(), 5):
            pass
        assert stream.cancelled.is_set() and stream.taken <= PENDING

    asyncio.run(read())


def test_a_loop_that_is_gone_cancels() -> None:
    stream, gate = Counting(), threading.Event()

    def slow() -> Counting:
        gate.wait(5)
        return stream

    async def leave() -> None:
        Bridge(slow)

    asyncio.run(leave())
    gate.set()
    assert wait_until(stream.cancelled.is_set)


class Slow(Counting):
    """One number each 5 ms."""

    def __iter__(self) -> Iterator[Event]:
        for event in super().__iter__():
            time.sleep(0.005)
            yield event


@pytest.mark.parametrize(("window", "least", "most"), [(0.0, 30, 40), (0.05, 3, 10), (WHOLE, 1, 2)])
def test_tokens_of_one_window_come_together_and_the_end_at_once(window: float, least: int, most: int) -> None:
    async def read() -> None:
        bridge = Bridge(lambda: Slow(40), window)
        first = await asyncio.wait_for(bridge.events(), 5)
        assert texts(first) == ["0"]  # the first token waits for nobody
        batches = [first]
        while batch := await asyncio.wait_for(bridge.events(), 5):
            batches.append(batch)
        assert [text for batch in batches for text in texts(batch)] == [str(number) for number in range(40)]
        assert least <= len(batches) <= most

    asyncio.run(read())


def test_an_answer_in_one_piece_may_be_longer_than_the_queue() -> None:
    async def read() -> int:
        bridge = Bridge(lambda: Counting(10 * PENDING), WHOLE)
        seen = 0
        while batch := await asyncio.wait_for(bridge.events(), 5):
            seen += len(batch)
        return seen

    assert asyncio.run(read()) == 10 * PENDING
