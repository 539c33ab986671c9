"""The daemon, as the terminal sees it: one method a question, every failure a sentence with a next step.

Knows: routes, HTTP, server-sent events. Does not know: Textual, or what is done with an answer.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from tui.address import Address
from tui.job_shapes import Jobs, Run, Slot, to_jobs, to_run, to_slot
from tui.shapes import Conversation, Head, Json, Model, Turn, from_turn, to_conversation, to_head, to_model

OWN = "/appliance/v1"
CONNECT_SECONDS = 3.0
CALL_SECONDS = 30.0
START = "start it: appliance serve"


class Failure(Exception):
    """A call that failed: what happened, and what to do next."""

    def __init__(self, what: str, fix: str):
        super().__init__(f"{what}; {fix}" if fix else what)
        self.what = what
        self.fix = fix


class Unreachable(Failure):
    """No daemon answers."""


class BrokenOff(Failure):
    """The daemon answered and then went away."""


class Refused(Failure):
    """The daemon answered with an error; its sentence holds the next step already."""

    def __init__(self, message: str, status: int, code: str | None):
        super().__init__(message, "")
        self.status = status
        self.code = code


class NoSuchRoute(Refused):
    """The daemon is too old for the question, or was built without that part."""


@dataclass(frozen=True)
class Opened:
    """First event of an answer: the daemon took the question."""

    provider: str
    fallback: str  # what ran elsewhere and why; empty = nothing did


@dataclass(frozen=True)
class Piece:
    """Some more of the answer's text."""

    text: str


@dataclass(frozen=True)
class Closed:
    """Last event of an answer."""

    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


AnswerEvent = Opened | Piece | Closed


class Client:
    """Asks a daemon at the first of `addresses` that answers; finds it anew after it was away.

    Every method may raise `Failure`.
    """

    def __init__(self, addresses: Sequence[Address]):
        self._addresses = tuple(addresses)
        self._http: httpx.AsyncClient | None = None
        self._finding = asyncio.Lock()
        self.address: Address | None = None
        """Where the daemon was found the last time."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of every connection."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def models(self) -> list[Model]:
        """Every installed model."""
        return [to_model(one) for one in (await self._call("GET", "/v1/models"))["data"]]

    async def default_model(self) -> str:
        """Id of the model that answers when none is named; "" when there is none."""
        return str((await self._call("GET", f"{OWN}/device"))["default"] or "")

    async def conversations(self) -> list[Head]:
        """Every kept conversation, newest first."""
        return [to_head(one) for one in (await self._call("GET", f"{OWN}/conversations"))["data"]]

    async def conversation(self, id: str) -> Conversation:
        """One conversation with its messages."""
        return to_conversation(await self._call("GET", f"{OWN}/conversations/{id}"))

    async def create_conversation(self, id: str, title: str, model: str) -> None:
        """Begin to keep a conversation; saying it twice begins one."""
        await self._call("POST", f"{OWN}/conversations", {"id": id, "title": title, "model": model})

    async def rename_conversation(self, id: str, title: str) -> None:
        """Give a conversation another title."""
        await self._call("PATCH", f"{OWN}/conversations/{id}", {"title": title})

    async def delete_conversation(self, id: str) -> None:
        """Forget a conversation for ever."""
        await self._call("DELETE", f"{OWN}/conversations/{id}")

    async def append_turn(self, id: str, position: int, turn: Turn) -> None:
        """Keep a message of a conversation, its `position`-th from 0; saying it twice keeps it once."""
        await self._call("POST", f"{OWN}/conversations/{id}/messages", {"position": position, **from_turn(turn)})

    async def jobs(self) -> Jobs:
        """Every job."""
        return to_jobs(await self._call("GET", f"{OWN}/jobs"))

    async def ledger(self) -> list[Slot]:
        """What became of every slot, newest first."""
        return [to_slot(one) for one in (await self._call("GET", f"{OWN}/ledger"))["entries"]]

    async def run(self, run: str) -> Run:
        """One run with its trace and report."""
        return to_run(await self._call("GET", f"{OWN}/runs/{quote(run, safe='')}"))

    async def start_run(self, job: str) -> tuple[Slot, bool]:
        """Have a job run now: its slot, and whether it is new; two wishes within a minute are one."""
        body = await self._call("POST", f"{OWN}/jobs/{quote(job, safe='')}/runs", {"slot": None})
        return to_slot(body), bool(body["created"])

    async def answer(self, model: str, turns: Sequence[Turn]) -> AsyncGenerator[AnswerEvent, None]:
        """Ask; the events of the answer as they come. Closing the iterator early frees the model within a step."""
        body = {
            "model": model,
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        http = await self._found()
        started = False
        try:
            # No limit on the wait for the next token: a long prompt takes minutes on a small box, and Esc ends it.
            async with http.stream("POST", "/v1/chat/completions", json=body, timeout=_timeout(None)) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                headers = response.headers
                yield Opened(headers.get("x-appliance-provider", "unknown"), headers.get("x-appliance-fallback", ""))
                started = True
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield event
        except (httpx.TransportError, OSError) as failure:
            raise await self._lost(http, failure, started) from None

    async def _found(self) -> httpx.AsyncClient:
        """The daemon; `Unreachable` names every place that was tried."""
        async with self._finding:
            if self._http is None:
                self._http = await self._find()
            return self._http

    async def _find(self) -> httpx.AsyncClient:
        for address in self._addresses:
            http = _open(address)
            try:
                await http.get("/healthz")
            except (httpx.TransportError, OSError):
                await http.aclose()
            except BaseException:
                await http.aclose()
                raise
            else:
                self.address = address
                return http
        tried = " and ".join(str(address) for address in self._addresses)
        raise Unreachable(f"no daemon answers at {tried}", START)

    async def _call(self, method: str, path: str, body: Json | None = None) -> Any:
        http = await self._found()
        try:
            response = await http.request(method, path, json=body)
        except (httpx.TransportError, OSError) as failure:
            raise await self._lost(http, failure, started=False) from None
        if response.is_error:
            raise _refusal(response)
        return response.json()

    async def _lost(self, http: httpx.AsyncClient, failure: Exception, started: bool) -> Failure:
        """What a failed connection means; the next call looks for the daemon again."""
        address = self.address
        if isinstance(failure, httpx.ReadTimeout):
            what = f"the daemon at {address} takes over {CALL_SECONDS:.0f} s to answer"
            return Unreachable(what, "look at its log, then try again")
        if http is self._http:
            await self.close()
        if started:
            return BrokenOff("the daemon went away in the middle of the answer; what came is kept", START)
        return Unreachable(f"the daemon at {address} has gone", START)


def _open(address: Address) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(address.socket)) if address.socket else httpx.AsyncHTTPTransport()
    # A transport of our own also keeps proxies out, which the environment may name and which no local daemon is behind.
    return httpx.AsyncClient(base_url=address.url, transport=transport, timeout=_timeout(CALL_SECONDS))


def _timeout(read: float | None) -> httpx.Timeout:
    return httpx.Timeout(CALL_SECONDS, connect=CONNECT_SECONDS, read=read)


def _refusal(response: httpx.Response) -> Refused:
    """An error response as one sentence."""
    message, code = f"the daemon answered {response.status_code}", None
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        pass  # another program answers there; the status is all there is to say
    if response.status_code == 404 and (code in (None, "unknown_url")):
        return NoSuchRoute(message, 404, code)
    return Refused(message, response.status_code, code)


async def _events(response: httpx.Response) -> AsyncGenerator[AnswerEvent, None]:
    """Read OpenAI's chunks. `BrokenOff` when the stream ends without its [DONE], `Refused` for an error inside it."""
    reason, model = "", ""
    usage: Json = {}
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            yield Closed(model, reason, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
            return
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise Refused(chunk["error"]["message"], response.status_code, chunk["error"].get("code"))
        model = chunk["model"]
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            if text := choice["delta"].get("content"):
                yield Piece(text)
    raise BrokenOff("the answer ended before its end; what came is kept", "look at the daemon's log and ask again")
