"""Who answers a chat at the terminal: the daemon when it is there, else a model loaded into this process.

Knows: the endpoint as a client sees it, the pool as a caller does. Does not know: terminals.
"""

import json
import secrets
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx

from appliance.client import find_daemon, refusal
from appliance.config import Config
from appliance.engine.pool import ModelPool, open_onnx
from appliance.engine.protocol import ChatPrompt, Delta, Finished, GenerateRequest, Sampling, Started
from appliance.errors import ApplianceError, ModelNotFound, Unavailable


@dataclass(frozen=True)
class Question:
    """One turn asked of a model; "" = the default model, None = the model's own choice."""

    model: str
    messages: tuple[dict[str, Any], ...]
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How an answer ended. Times are wall-clock seconds as the asker saw them; the speed is the engine's own, because a
    stream comes in batches, and an answer of a few tokens in one or two."""

    model: str
    provider: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_token: float
    total: float
    tokens_per_second: float  # decode, tokens after the first; 0 for a single token


Answer = Generator[str | Outcome, None, None]


class Answerer(Protocol):
    """Answers questions; closing the generator early cancels the answer."""

    where: str  # "daemon" or "in-process"

    def knows(self, model: str) -> bool:
        """Whether there is a model of that id or alias."""

    def models(self) -> list[str]:
        """Ids of the installed models."""

    def check(self, model: str) -> None:
        """Raise `ModelNotFound` when nothing could answer as `model`, before anything is said or loaded."""

    def answer(self, question: Question) -> Answer:
        """Pieces of text, then the outcome."""

    def close(self) -> None:
        """Let go of connections or models."""


class DaemonAnswerer:
    """Asks a running daemon over HTTP."""

    where = "daemon"

    def __init__(self, client: httpx.Client):
        self._client = client

    def knows(self, model: str) -> bool:
        return self._client.get(f"/v1/models/{model}").status_code == 200

    def models(self) -> list[str]:
        return [model["id"] for model in self._client.get("/v1/models").json()["data"]]

    def check(self, model: str) -> None:
        """The daemon says it itself, in its answer."""

    def answer(self, question: Question) -> Answer:
        body = {
            "model": question.model, "messages": list(question.messages), "stream": True,
            "stream_options": {"include_usage": True}, "max_completion_tokens": question.max_tokens,
            "temperature": question.temperature, "seed": question.seed,
        }  # fmt: skip
        clock = _Clock()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise refusal(response)
                for part in _read_events(response, clock):
                    yield part if isinstance(part, str) else replace(part, tokens_per_second=self._speed(part))
        except httpx.TransportError as failure:
            reason = str(failure) or type(failure).__name__
            raise Unavailable(f"the daemon went away: {reason}", "look at its log and start it again: appliance serve") from None

    def _speed(self, outcome: Outcome) -> float:
        """What the engine measured of its newest answer; 0 for one that had nothing to measure."""
        if outcome.completion_tokens < 2:
            return 0.0
        models = self._client.get("/appliance/v1/device").raise_for_status().json()["models"]
        (work,) = (model["work"] for model in models if model["card"]["id"] == outcome.model)
        return (work and work["tokens_per_second"]) or 0.0

    def close(self) -> None:
        self._client.close()


class LocalAnswerer:
    """Loads the model into this process."""

    where = "in-process"

    def __init__(self, pool: ModelPool):
        self._pool = pool

    def knows(self, model: str) -> bool:
        try:
            self._pool.find(model)
        except ModelNotFound:
            return False
        return True

    def models(self) -> list[str]:
        return list(self._pool.catalog().bundles)

    def check(self, model: str) -> None:
        self._pool.find(model)

    def answer(self, question: Question) -> Answer:
        model = self._pool.model(question.model)
        sampling = Sampling(temperature=question.temperature, seed=question.seed)
        request = GenerateRequest(secrets.token_hex(8), ChatPrompt(question.messages), sampling, question.max_tokens)
        clock = _Clock()
        stream = model.engine.stream(request)
        provider = ""
        try:
            for event in stream:
                if isinstance(event, Started):
                    provider = event.provider
                elif isinstance(event, Delta):
                    clock.tick()
                    yield event.text
                elif isinstance(event, Finished):
                    outcome = clock.outcome(model.id, provider, event.reason, event.prompt_tokens, event.completion_tokens)
                    measured = event.completion_tokens > 1 and event.timings.decode > 0
                    speed = (event.completion_tokens - 1) / event.timings.decode if measured else 0.0
                    yield replace(outcome, tokens_per_second=speed)
        finally:
            stream.cancel()

    def close(self) -> None:
        self._pool.close()


class _Clock:
    """Times one answer from the moment it is made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None

    def tick(self) -> None:
        """A piece of text came."""
        if self._first is None:
            self._first = time.monotonic() - self._start

    def outcome(self, model: str, provider: str, reason: str, prompt: int, completion: int) -> Outcome:
        """The outcome of an answer that is over now."""
        total = time.monotonic() - self._start
        return Outcome(model, provider, reason, prompt, completion, total if self._first is None else self._first, total, 0.0)


def find_answerer(config: Config, *, local: bool = False) -> Answerer:
    """The daemon of these settings if it answers, unless `local`; else the models in this process."""
    if not local and (client := find_daemon(config)) is not None:
        return DaemonAnswerer(client)
    engine, models = config.engine, config.models
    open_engine = open_onnx(engine.target, engine.threads, config.paths.targets)
    return LocalAnswerer(ModelPool(config.paths.models, open_engine, default=models.default, aliases=models.aliases))


def _read_events(response: httpx.Response, clock: _Clock) -> Answer:
    reason = ""
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ApplianceError(event["error"]["message"])
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            if choice["delta"].get("content"):
                clock.tick()
                yield choice["delta"]["content"]
        if usage := event.get("usage"):
            provider = response.headers.get("x-appliance-provider", "")
            yield clock.outcome(event["model"], provider, reason, usage["prompt_tokens"], usage["completion_tokens"])
            return
    raise ApplianceError("the daemon ended the answer before it was over", "look at its log")
