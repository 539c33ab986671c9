"""The count that the watchdog relies on: it moves with the worker's own thread and with nothing else."""

import threading
import time

from appliance.engine.worker import IDLE_SECONDS, Worker
from tests.api.fake_engine import wait_until
from tests.engine.test_onnx_engine import engine_over, request
from tests.fakes import FakeDecoder


class Step:
    """A work whose one step waits."""

    priority = "interactive"

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def advance(self) -> bool:
        self.began.set()
        return self.go_on.wait(30)

    def cancel_unstarted(self) -> None:
        """Nothing waits for it."""


def test_an_idle_loop_goes_round_about_once_a_second() -> None:
    worker = Worker("idle")
    start = time.monotonic()
    assert wait_until(lambda: worker.ticks >= 2, 10)
    assert time.monotonic() - start > 1.5 * IDLE_SECONDS  # it sleeps in between
    assert worker.stop() == []


def test_a_step_that_hangs_does_not_count() -> None:
    worker, step = Worker("hangs"), Step()
    worker.submit(step)
    assert step.began.wait(5)
    before = worker.ticks
    worker.submit(Step())  # what others do to it does not count either
    time.sleep(1.5 * IDLE_SECONDS)
    assert worker.ticks == before
    step.go_on.set()
    assert wait_until(lambda: worker.ticks == before + 1)
    threading.Thread(target=worker._current.go_on.set).start()  # type: ignore[union-attr]
    worker.stop()


def test_every_chunk_and_every_token_counts() -> None:
    with engine_over(FakeDecoder(script=b"Paris.", chunk=8)) as engine:
        before = engine.stats().ticks
        list(engine.stream(request("x" * 41)))
        assert wait_until(lambda: engine.stats().ticks >= before + 6 + 7)  # chunks of the prompt, tokens with the end's
