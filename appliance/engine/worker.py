"""One thread over one loaded model: who goes next, one small step at a time.

Knows: order, priority, cancellation, stopping. Does not know: what a step does.

    interactive: FIFO ---\\
                          +--> current --advance--> current --advance--> ... over
    job: FIFO -----------/        ^ a job steps aside, its state kept, as soon as something interactive waits
"""

import threading
from collections import deque
from typing import Protocol

from appliance.engine.protocol import Priority
from appliance.errors import Unavailable

IDLE_SECONDS = 1.0
"""How long the thread sleeps at most, so that an idle loop can be told from one that hangs."""


class Work(Protocol):
    """Something to be done in steps."""

    @property
    def priority(self) -> Priority: ...

    def advance(self) -> bool:
        """Do one step; true when it was the last. Errors are its own business: it must not raise."""

    def cancel_unstarted(self) -> None:
        """It was cancelled between two steps and will not be advanced again. Called by the thread that cancels."""


class Worker:
    """Runs works one after another on a thread of its own.

    Args:
        name: of the thread.
        most_waiting: works that may wait; one more is refused.
    """

    def __init__(self, name: str, most_waiting: int = 64):
        self._most_waiting = most_waiting
        self._interactive: deque[Work] = deque()
        self._jobs: deque[Work] = deque()
        self._current: Work | None = None
        self._stopping = False
        self._ticks = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Works in the queues, parked jobs included."""
        return len(self._interactive) + len(self._jobs)

    @property
    def running(self) -> int:
        """1 while something runs."""
        return int(self._current is not None)

    @property
    def ticks(self) -> int:
        """Rounds of the thread: one a step, and one a second while there is nothing to do."""
        return self._ticks

    def submit(self, work: Work) -> None:
        """Queue `work`. `Unavailable` when too much waits or the worker stops."""
        with self._changed:
            if self._stopping:
                raise Unavailable("the model is being unloaded", "load it again")
            if self.waiting >= self._most_waiting:
                raise Unavailable(f"{self.waiting} requests wait already", "try again later")
            self._queue_of(work).append(work)
            self._changed.notify_all()

    def cancel(self, work: Work) -> None:
        """Take `work` out of its queue. Nothing happens when it runs (it reads its own flag at every step) or is over."""
        with self._changed:
            queue = self._queue_of(work)
            if work not in queue:
                return
            queue.remove(work)
        work.cancel_unstarted()

    def stop(self) -> list[Work]:
        """Take no more steps and end the thread. Returns the works that were not over."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            left = [*([self._current] if self._current else []), *self._interactive, *self._jobs]
            self._current = None
            self._interactive.clear()
            self._jobs.clear()
        return left

    def _queue_of(self, work: Work) -> deque[Work]:
        return self._interactive if work.priority == "interactive" else self._jobs

    def _run(self) -> None:
        while (work := self._choose()) is not None:
            over = work.advance()
            self._ticks += 1
            if over:
                with self._changed:
                    self._current = None
            del work  # the thread's frame must not keep an answer's state alive while it waits for the next one

    def _has_work(self) -> bool:
        return bool(self._stopping or self._current or self._interactive or self._jobs)

    def _choose(self) -> Work | None:
        """Whose step comes next; waits until there is one. None = stop."""
        with self._changed:
            while not self._changed.wait_for(self._has_work, IDLE_SECONDS):
                self._ticks += 1
            if self._stopping:
                return None
            if self._current is not None and self._current.priority == "job" and self._interactive:
                self._jobs.appendleft(self._current)
                self._current = None
            if self._current is None:
                self._current = (self._interactive or self._jobs).popleft()
            return self._current
