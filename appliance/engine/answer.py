"""One request under way: steps of the generate loop go in, events of the protocol come out.

Knows: events, times, totals. Does not know: who decides which answer takes the next step (`appliance.engine.worker`).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from appliance.engine.answer_stream import AnswerStream
from appliance.engine.protocol import Delta, Finished, FinishReason, Priority, Timings, TokenLogprob
from appliance.errors import ApplianceError, DeviceError
from appliance.runtime.generate import Piece, Prefilled, Step, Task
from appliance.runtime.sampling import Ranked
from appliance.runtime.tokenizer import Tokenizer


@dataclass
class Counts:
    """Totals since the engine was made, and the newest speed; written by the worker thread alone."""

    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_per_second: float | None = None


class Answer:
    """One request under way: `appliance.engine.worker.Work` that feeds a stream."""

    def __init__(
        self,
        priority: Priority,
        task: Task,
        steps: Iterator[Step],
        tokenizer: Tokenizer,
        counts: Counts,
        on_cancel: Callable[[], None],
    ):
        self.priority: Priority = priority
        self.stream = AnswerStream(on_cancel)
        self._steps: Iterator[Step] | None = steps
        self._prompt_tokens = len(task.prompt)
        self._completion_tokens = 0
        self._tokenizer = tokenizer
        self._counts = counts
        self._submitted = time.perf_counter()
        self._started: float | None = None
        self._prefill = 0.0
        self._decode = 0.0

    def advance(self) -> bool:
        """One prefill chunk or one token. Whatever goes wrong ends this answer and no other."""
        if self._started is None:
            self._started = time.perf_counter()
        try:
            assert self._steps is not None, "advanced after its end"
            return self._take(next(self._steps))
        except ApplianceError as failure:
            self._fail(failure)
        except Exception as failure:
            error = DeviceError(f"the model failed in a step: {type(failure).__name__}: {failure}", "see the log; try again")
            error.__cause__ = failure
            self._fail(error)
        return True

    def cancel_unstarted(self) -> None:
        """Between two steps: in the queue, parked, or the engine unloads."""
        self._finish("cancelled")

    def _take(self, step: Step) -> bool:
        if isinstance(step, Prefilled):
            self._prefill += step.seconds
            self._counts.prompt_tokens += step.tokens
            return False
        if isinstance(step, Piece):
            self._decode += step.seconds
            self._counts.steps += 1
            self._counts.completion_tokens += 1
            self._completion_tokens += 1
            self._send(step.text, step.token, step.ranked)
            return False
        self._send(step.text, 0, None)
        self._finish(step.reason)
        return True

    def _send(self, text: str, token: int, ranked: Ranked | None) -> None:
        logprobs = () if ranked is None else (self._logprob(token, ranked),)
        if text or logprobs:
            self.stream.put(Delta(text, logprobs))

    def _logprob(self, token: int, ranked: Ranked) -> TokenLogprob:
        top = tuple(self._named(one, value) for one, value in ranked.top)
        return replace(self._named(token, ranked.chosen), top=top)

    def _named(self, token: int, logprob: float) -> TokenLogprob:
        data = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, data.decode("utf-8", "replace"), data, logprob)

    def _finish(self, reason: FinishReason) -> None:
        self._steps = None  # lets go of the state at once, not when the reader is done
        began = time.perf_counter() if self._started is None else self._started
        timings = Timings(began - self._submitted, self._prefill, self._decode)
        if self._completion_tokens > 1 and self._decode > 0:
            self._counts.tokens_per_second = (self._completion_tokens - 1) / self._decode
        self.stream.put(Finished(reason, self._prompt_tokens, self._completion_tokens, 0, timings))

    def _fail(self, failure: ApplianceError) -> None:
        self._steps = None
        self.stream.fail(failure)
