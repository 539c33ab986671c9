"""The model, as a job reaches it: the appliance's own endpoint.

Knows: HTTP to this machine, the key that marks a request as a job's. Does not know: engines, or what is asked.
People come first: a request with the key and the header waits whenever somebody else's is there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from appliance.errors import ApplianceError, Unavailable
from appliance.jobs.record import Outcome, Parked

PRIORITY_HEADER = "x-appliance-priority"
PATIENCE = 120.0  # seconds that a model may take to be loaded
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

    def async_client(self) -> httpx.AsyncClient:
        """The same for an event loop."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket)) if self.socket else httpx.AsyncHTTPTransport()
        return httpx.AsyncClient(base_url=self.url, transport=transport, headers=self.headers, trust_env=False, timeout=None)


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
        body = {"model": model, "messages": messages, "max_completion_tokens": max_tokens, "temperature": 0}
        response = self._post("/v1/chat/completions", body, time.monotonic() + seconds)
        answer = response.json()
        usage = answer["usage"]
        return Outcome(
            output=answer["choices"][0]["message"]["content"],
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            model=answer["model"],
            provider=response.headers.get("x-appliance-provider", ""),
        )

    def _post(self, path: str, body: dict[str, Any], end: float) -> httpx.Response:
        patience = min(time.monotonic() + PATIENCE, end)
        while True:
            if self._stopping():
                raise Parked
            left = max(end - time.monotonic(), 0.01)
            try:
                response = self._client.post(path, json=body, timeout=httpx.Timeout(left, connect=min(left, 5.0)))
            except httpx.TimeoutException:
                raise Unavailable(f"the model gave no answer in {left:.0f} s", "give the job more seconds") from None
            except (httpx.TransportError, RuntimeError) as failure:  # RuntimeError: the client was closed meanwhile
                if self._stopping():
                    raise Parked from None
                if time.monotonic() > patience:
                    raise Unavailable(f"the endpoint cannot be reached: {failure}", "look at the daemon's log") from None
            else:
                if response.status_code == 200:
                    return response
                if self._stopping():
                    raise Parked
                if response.status_code != 503 or time.monotonic() > patience:
                    raise ApplianceError(_message(response))
            time.sleep(PAUSE)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the endpoint answered with HTTP {response.status_code}"
