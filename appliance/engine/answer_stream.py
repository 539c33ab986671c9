"""One answer on its way from the worker to whoever asked: a buffer between two threads that never makes the worker wait.

Knows: events, their order, how they are joined when the reader is slow. Does not know: who makes or reads them.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from appliance.engine.protocol import Delta, Event, Finished
from appliance.errors import ApplianceError

PENDING = 32
"""Events that wait unread before further text is joined to the last of them. Nothing is dropped and nothing blocks:
what a slow reader costs is the text itself, which max_tokens bounds."""


class AnswerStream:
    """`appliance.engine.protocol.Stream`; also a context manager that cancels on the way out.

    Args:
        on_cancel: called once, by the thread that cancels.
    """

    def __init__(self, on_cancel: Callable[[], None]):
        self._on_cancel = on_cancel
        self._pending: deque[Event] = deque()
        self._failure: ApplianceError | None = None
        self._over = False
        self._cancelled = threading.Event()
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        """Hand over an event; never waits. What comes after the last event is ignored."""
        with self._changed:
            if self._over:
                return
            last = self._pending[-1] if len(self._pending) >= PENDING else None
            if isinstance(event, Delta) and isinstance(last, Delta):
                self._pending[-1] = Delta(last.text + event.text, last.logprobs + event.logprobs)
            else:
                self._pending.append(event)
            self._over = isinstance(event, Finished)
            self._changed.notify_all()

    def fail(self, failure: ApplianceError) -> None:
        """End the answer with an error, raised to the reader after the events before it."""
        with self._changed:
            if not self._over:
                self._over = True
                self._failure = failure
                self._changed.notify_all()

    @property
    def cancelled(self) -> bool:
        """Whether someone asked to stop."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        with self._changed:
            if self._cancelled.is_set() or self._over:
                return
            self._cancelled.set()
        self._on_cancel()

    def close(self) -> None:
        """Cancel unless it is over."""
        self.cancel()

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Event]:
        """Events until the last one; leaving the loop early cancels."""
        try:
            while True:
                event = self._take()
                if event is None:
                    return
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancel()

    def _take(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._over)
            if self._pending:
                return self._pending.popleft()
            if self._failure is not None:
                raise self._failure
            return None
