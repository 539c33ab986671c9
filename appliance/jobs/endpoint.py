"""The model, as a job reaches it: the appliance's own endpoint.

Knows: HTTP to this machine, the key that marks a request as a job's. Does not know: engines, or what is asked.
People come first: a request with the key and the header waits whenever somebody else's is there.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2

from appliance.errors import ApplianceError, Unavailable
from appliance.jobs.record import Outcome, Parked

PRIORITY_HEADER = "x-appliance-priority"
PATIENCE = 120.0  # seconds that a model may take to be loaded
CONNECT_SECONDS = 5.0
TIME_OVER, MORE_TIME = "the job's time is over", "raise budget.seconds"
PAUSE = 0.5  # seconds between two tries


@dataclass(frozen=True)
class Endpoint:
    """Where the appliance answers, and the key made at its start."""

    url: str
    socket: Path | None
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """What marks a request as a job's."""
        return {"authorization": f"Bearer {self.key}", PRIORITY_HEADER: "job"}

    def client(self) -> httpx.Client:
        """A connection; the caller closes it."""
        transport = httpx.HTTPTransport(uds=str(self.socket)) if self.socket else httpx.HTTPTransport()
        return httpx.Client(base_url=self.url, transport=transport, headers=self.headers, trust_env=False, timeout=None)

    def async_client(self) -> httpx2.AsyncClient:
        """The same for an event loop and for the openai client, which takes clients of this successor of httpx."""
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket)) if self.socket else httpx2.AsyncHTTPTransport()
        return httpx2.AsyncClient(base_url=self.url, transport=transport, headers=self.headers, trust_env=False, timeout=None)


class ChatModel:
    """Asks the endpoint one thing at a time. Thread-safe as httpx's client is.

    Args:
        endpoint: where to ask.
        stopping: whether the daemon stops: then a broken connection is no failure of the run's.
    """

    def __init__(self, endpoint: Endpoint, stopping: Callable[[], bool]):
        self._client = endpoint.client()
        self._stopping = stopping

    def close(self) -> None:
        """Let go of the connection; a request under way breaks off."""
        self._client.close()

    def ask(self, model: str, messages: list[dict[str, Any]], max_tokens: int, seconds: float) -> Outcome:
        """One answer, greedy, so that a call that is made again after a crash says the same.

        Raises:
            ApplianceError: the endpoint refuses, or there is no answer within `seconds`.
            Parked: the daemon stops.
        """
        body = {
            "model": model,
            "messages": messages,
            "max_completion_tokens": max_tokens,
            "temperature": 0,
            "stream": True,  # so that a stop, or the end of the time, is seen between two tokens
            "stream_options": {"include_usage": True},
        }
        end = time.monotonic() + seconds
        patience = min(time.monotonic() + PATIENCE, end)
        while True:
            try:
                return self._try(body, end)
            except (httpx.TransportError, Unavailable) as failure:
                if self._stopping():
                    raise Parked from None
                if time.monotonic() >= end:
                    raise ApplianceError(TIME_OVER, MORE_TIME) from None
                if time.monotonic() > patience:
                    raise Unavailable(f"the model gave no answer: {failure}", "look at the daemon's log") from None
            time.sleep(PAUSE)

    def _try(self, body: dict[str, Any], end: float) -> Outcome:
        """One request. `Unavailable` = it may work later."""
        wait = max(end - time.monotonic(), 0.01)
        timeout = httpx.Timeout(wait, connect=min(wait, CONNECT_SECONDS))
        with self._client.stream("POST", "/v1/chat/completions", json=body, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                failure = Unavailable if response.status_code == 503 else ApplianceError
                raise failure(_message(response))
            return self._read(response, end)

    def _read(self, response: httpx.Response, end: float) -> Outcome:
        text = ""
        for line in response.iter_lines():
            if self._stopping():
                raise Parked
            if time.monotonic() > end:
                raise ApplianceError(TIME_OVER, MORE_TIME)
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Unavailable(event["error"]["message"])
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if usage := event.get("usage"):
                provider = response.headers.get("x-appliance-provider", "")
                return Outcome(text, usage["prompt_tokens"], usage["completion_tokens"], event["model"], provider)
        raise Unavailable("the answer broke off")


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the endpoint answered with HTTP {response.status_code}"
