"""The generate loop: a prompt's tokens go in, text comes out, one small step after another.

Knows: prefill in chunks, one token a step, stop tokens, stop strings, limits, cancellation between steps.
Does not know: requests, threads, queues (`appliance.engine`), or what runs the steps (`appliance.runtime.decoder`).

Written as an iterator so that whoever drives it decides between any two steps who goes next:

    prompt ids --chunks--> Prefilled, Prefilled, ... --sample, run--> Piece, Piece, ... --> Ended
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from appliance.errors import ContextLengthError, RequestError
from appliance.runtime.decoder import Decoder, DecoderState, Logits
from appliance.runtime.sampling import Choice, Ranked, Sampler, rank

Reason = Literal["stop", "length", "cancelled"]


class TextSource(Protocol):
    """Tokens to text, whole characters only; `appliance.runtime.detokenizer.Detokenizer`."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class StopWatch(Protocol):
    """Text to text without stop strings; `appliance.runtime.stop_strings.StopStrings`."""

    def push(self, text: str) -> tuple[str, bool]: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What to generate. `plan` makes one that fits."""

    prompt: tuple[int, ...]
    choice: Choice
    max_tokens: int  # at least 1, and prompt + max_tokens <= context
    vocab_size: int  # ids that the tokenizer knows; a model's rows of logits are often padded beyond them
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One chunk of the prompt went in."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """One token was chosen."""

    token: int
    text: str  # final; empty while characters are incomplete or a stop string may be under way
    ranked: Ranked | None  # of `token`; None when not asked for, or when it is a stop token
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Last event."""

    reason: Reason
    text: str  # what had been held back and turned out to be no stop string
    completion_tokens: int


Step = Prefilled | Piece | Ended


def plan(
    prompt: Sequence[int],
    choice: Choice,
    *,
    context: int,
    vocab_size: int,
    max_tokens: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    logprobs: int | None = None,
) -> Task:
    """Check what can be checked before anything runs.

    Args:
        prompt: token ids.
        choice: how tokens are chosen.
        context: tokens that prompt and answer may take together.
        vocab_size: number of token ids that the tokenizer knows.
        max_tokens: None = up to the context's end; more than there is room for is limited to the room.
        stop_tokens: ids that end the answer and are no part of it.
        logprobs: None = none; n = the chosen token's and the n likeliest.

    Raises:
        ContextLengthError: the prompt leaves no room for a single token.
        RequestError: an empty prompt, an id outside the vocabulary, or a value out of range.
    """
    choice.check(vocab_size)
    if not prompt:
        raise RequestError("the prompt is empty", "send at least one token", param="prompt")
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(f"the prompt holds token {outside}", f"token ids here go from 0 to {vocab_size - 1}", param="prompt")
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}", "ask for at least one token", param="max_tokens")
    if logprobs is not None and not 0 <= logprobs <= vocab_size:
        raise RequestError(f"logprobs is {logprobs}", f"it must be between 0 and {vocab_size}", param="logprobs")
    room = context - len(prompt)
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the model's context holds {context}, the answer's included",
            "shorten the prompt",
        )
    limit = room if max_tokens is None else min(max_tokens, room)
    return Task(tuple(prompt), choice, limit, vocab_size, stop_tokens, logprobs)


def generate(
    decoder: Decoder, text: TextSource, stops: StopWatch, task: Task, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[Step]:
    """Run `task`, one chunk or one token each time the iterator is advanced.

    Args:
        decoder: runs the steps; it may serve other iterators between two steps of this one.
        text: a fresh detokenizer.
        stops: a fresh watch for stop strings.
        task: what to generate.
        cancelled: read before every step; once true, the next event is `Ended("cancelled")`.
    """
    sampler = Sampler(task.choice, task.vocab_size, task.prompt)
    state = decoder.new_state(len(task.prompt) + task.max_tokens)
    logits = yield from _prefill(decoder, state, task.prompt, cancelled)
    token = -1
    for count in range(task.max_tokens):
        if logits is None or cancelled():
            yield Ended("cancelled", "", count)
            return
        began = time.perf_counter()
        if count > 0:
            logits = decoder.run(state, (token,), 1)
        row = logits[-1, : task.vocab_size]
        original = row.copy() if task.logprobs is not None else None
        token = sampler.pick(row)
        if token in task.stop_tokens:
            yield Piece(token, "", None, time.perf_counter() - began)
            yield Ended("stop", _rest(text, stops), count + 1)
            return
        shown, stopped = stops.push(text.push(token))
        ranked = None if original is None else rank(original, token, task.logprobs or 0)
        yield Piece(token, shown, ranked, time.perf_counter() - began)
        if stopped:
            yield Ended("stop", "", count + 1)
            return
    yield Ended("length", _rest(text, stops), task.max_tokens)


def _prefill(
    decoder: Decoder, state: DecoderState, prompt: tuple[int, ...], cancelled: Callable[[], bool]
) -> Generator[Step, None, Logits | None]:
    """Run the prompt in chunks; the logits after its last token, or None when cancelled on the way."""
    ids = np.asarray(prompt, np.int64)
    for first in range(0, len(ids), decoder.chunk):
        if cancelled():
            return None
        began = time.perf_counter()
        chunk = ids[first : first + decoder.chunk]
        last = first + len(chunk) == len(ids)
        logits = decoder.run(state, chunk, 1 if last else 0)
        yield Prefilled(len(chunk), time.perf_counter() - began)
    return logits


def _rest(text: TextSource, stops: StopWatch) -> str:
    """What is still held back at the end; a stop string that only now is whole cuts it."""
    shown, stopped = stops.push(text.flush())
    return shown if stopped else shown + stops.flush()
