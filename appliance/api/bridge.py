"""The bridge: an engine's blocking stream, awaited from the event loop.

    engine worker --events--> pump thread --queue--> event loop
                                  (one wakeup for everything that came within a window)

Knows: threads and the loop. Does not know: HTTP or what events mean.
The queue is bounded: when a slow client lets it fill, the pump stops taking events, and the engine's own buffer does what
it does for a slow reader. Neither holds up a decode step.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from appliance.engine.protocol import Delta, Event, Stream

PENDING = 64  # events that wait for the loop
SMOOTH = 0.02
"""Seconds between two batches of a stream. Waking the loop and sending cost 0.3 ms on a machine whose cores the decode
threads keep busy: 6% of a step at 200 tokens/s if each token did it, 1.5% so. The first token and the end never wait."""
WHOLE = 3600.0
"""For an answer that is sent in one piece: only its end, or a full queue, wakes the loop."""


class Bridge:
    """One answer under way. Made, awaited and closed on the event loop; opened and iterated on a thread of its own.

    Args:
        open_stream: called on the thread; may load a model, tokenize a prompt, and raise a refusal.
        window: least seconds from one batch to the next.
    """

    def __init__(self, open_stream: Callable[[], Stream], window: float = SMOOTH):
        self._open = open_stream
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()
        # Guards _stream and _cancelled, for cancel may come before the stream is there; tells the pump of room.
        self._changed = threading.Condition()
        self._stream: Stream | None = None
        self._cancelled = False
        self._woken = False  # nobody need wake the loop now: it has been, or it will look by itself
        self._window = window
        self._pause_until = 0.0
        self._ended = False
        self._failure: BaseException | None = None
        threading.Thread(target=self._pump, name="answer", daemon=True).start()

    async def events(self) -> list[Event]:
        """Everything that is ready, at least one event; empty after the last one. Raises what the engine raised."""
        await self._pause()
        while True:
            self._ready.clear()
            self._woken = False  # before the drain: an event that comes later wakes again
            ended = self._ended  # before the drain too: what came before the end is then in it
            batch = []
            while self._events:
                batch.append(self._events.popleft())
            if len(batch) >= PENDING:
                with self._changed:
                    self._changed.notify()
            if batch:
                if isinstance(batch[-1], Delta):
                    self._pause_until = self._loop.time() + self._window
                    self._woken = True
                return batch
            if ended:
                if self._failure is not None:
                    raise self._failure
                return []
            await self._ready.wait()

    async def _pause(self) -> None:
        """Let the window since the last batch pass, unless the answer ends or the queue fills first."""
        rest = self._pause_until - self._loop.time()
        if rest > 0 and not self._ended:  # an end from here on wakes; one before has, and must not be waited for again
            timer = self._loop.call_later(rest, self._ready.set)
            try:
                await self._ready.wait()
            finally:
                timer.cancel()

    def cancel(self) -> None:
        """Ask the engine to stop within a step; the events then end. Harmless when it is over."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def _pump(self) -> None:
        try:
            stream = self._open()
            with self._changed:
                self._stream = stream
                cancelled = self._cancelled
            if cancelled:
                stream.cancel()
            for event in stream:
                if len(self._events) >= PENDING:
                    self._wake(always=True)
                    with self._changed:
                        self._changed.wait_for(lambda: len(self._events) < PENDING or self._cancelled)
                self._events.append(event)
                self._wake()
        except BaseException as failure:  # handed over whole: `events` raises it on the loop
            self._failure = failure
        self._ended = True
        self._wake(always=True)

    def _wake(self, always: bool = False) -> None:
        """Wake the loop, unless it has been woken and has not looked yet, or is letting a window pass."""
        if self._woken and not always:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.cancel()
