"""`POST /v1/chat/completions`.

Knows: one request's way from JSON to the engine and back, streamed or whole, and what a client that leaves means.
Does not know: how fields are judged (`chat_request`), how answers look (`answer`), how models are found (`engine.pool`).
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.api.answer import AnswerHead, ChunkWriter, error_event, to_completion
from appliance.api.bridge import SMOOTH, WHOLE, Bridge
from appliance.api.chat_request import to_engine
from appliance.api.errors import stopping, wire_error
from appliance.api.settings import ApiSettings
from appliance.api.wire.chat import ChatCompletion, ChatRequest
from appliance.engine.pool import LoadedModel, ModelPool
from appliance.engine.protocol import Delta, Event, Finished, GenerateRequest, Priority, Started, Stream
from appliance.errors import ContextLengthError

PRIORITY_HEADER = "x-appliance-priority"


class Asking:
    """One question to one model; `open` runs on the bridge's thread, `model` is set before its first event."""

    def __init__(self, pool: ModelPool, name: str, request: GenerateRequest):
        self._pool = pool
        self._name = name
        self._request = request
        self.created = int(time.time())
        self.model: LoadedModel | None = None

    def open(self) -> Stream:
        """Find the model, load it if need be, queue the request; raises what either refuses."""
        self.model = self._pool.model(self._name)
        try:
            return self.model.engine.stream(self._request)
        except ContextLengthError as failure:
            failure.param = "messages"  # what the engine calls the prompt, as OpenAI names it on this route
            raise

    def head(self) -> AnswerHead:
        """Only after the first event."""
        assert self.model is not None
        return AnswerHead(self._request.id, self.created, self.model.id, f"fp_{self.model.fingerprint}")

    def headers(self, events: list[Event]) -> dict[str, str]:
        """What ran it, and the engine's own times when the answer is whole."""
        assert self.model is not None
        started = next(event for event in events if isinstance(event, Started))
        headers = {"x-appliance-provider": started.provider}
        if fallbacks := self.model.engine.stats().fallbacks:
            headers["x-appliance-fallback"] = "; ".join(fallbacks).encode("ascii", "replace").decode()
        for event in events:
            if isinstance(event, Finished):
                times = event.timings
                headers["server-timing"] = ", ".join(
                    f"{name};dur={seconds * 1000:.3f}"
                    for name, seconds in (("queued", times.queued), ("prefill", times.prefill), ("decode", times.decode))
                )
        return headers


class EventStream(Response):
    """A streamed answer whose first token is already there, so whatever could be refused has been."""

    media_type = "text/event-stream"

    def __init__(
        self, bridge: Bridge, watch: "asyncio.Task[None]", writer: ChunkWriter, first: list[Event], headers: dict[str, str]
    ):
        # A proxy that buffered events would turn a stream into one late answer.
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._bridge = bridge
        self._watch = watch
        self._writer = writer
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one piece for everything that is ready, until the answer ends, fails, or the client leaves."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = await self._send_events(send)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._watch.cancel()
            self._bridge.cancel()

    async def _send_events(self, send: Send) -> bytes:
        """Send all but the last piece, and return that."""
        piece, batch = self._writer.open(), self._first
        try:
            while batch:
                piece += self._writer.write(batch)
                if isinstance(batch[-1], Finished):
                    break
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    piece = b""
                batch = await self._bridge.events()
        except asyncio.CancelledError:  # the daemon stops, and has waited as long as it may
            piece += error_event(wire_error(stopping()).body())
        except Exception as failure:  # told to the client inside the stream, logged by wire_error
            piece += error_event(wire_error(failure).body())
        return piece


def chat_router(pool: ModelPool, settings: ApiSettings) -> APIRouter:
    """The route over the models of `pool`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        asked = to_engine(body, f"chatcmpl-{secrets.token_hex(12)}", priority_of(request.headers, settings.job_key))
        asking = Asking(pool, body.model, asked)
        if body.stream:
            return await _stream(asking, request, bool(body.stream_options and body.stream_options.include_usage))
        async with _bridge(asking, request.receive, WHOLE) as (bridge, _):
            events: list[Event] = []
            while batch := await bridge.events():
                events += batch
        answer = to_completion(asking.head(), events, bool(body.logprobs), bool(body.tools))
        return Response(answer.model_dump_json(), media_type="application/json", headers=asking.headers(events))

    return router


def priority_of(headers: Mapping[str, str], job_key: str) -> Priority:
    """ "job" only for a request that asks for it and brings the key that this daemon gave its own jobs."""
    asked = headers.get(PRIORITY_HEADER) == "job"
    given = headers.get("authorization", "").removeprefix("Bearer ").encode()
    return "job" if asked and job_key and secrets.compare_digest(given, job_key.encode()) else "interactive"


async def _stream(asking: Asking, request: Request, include_usage: bool) -> EventStream:
    """Wait for the first token, so that every failure before it is an HTTP error; then stream."""
    async with _bridge(asking, request.receive, SMOOTH, keep=True) as (bridge, watch):
        events = await bridge.events()
        while events and not isinstance(events[-1], Delta | Finished):
            events += await bridge.events()
        writer = ChunkWriter(asking.head(), include_usage)
        return EventStream(bridge, watch, writer, events, asking.headers(events))


@asynccontextmanager
async def _bridge(
    asking: Asking, receive: Receive, window: float, keep: bool = False
) -> AsyncIterator[tuple[Bridge, "asyncio.Task[None]"]]:
    """A bridge that is cancelled when the client leaves or the block fails; with `keep`, it outlives a block that succeeds."""
    bridge = Bridge(asking.open, window)
    watch = asyncio.create_task(_cancel_when_gone(bridge, receive))
    done = False
    try:
        yield bridge, watch
        done = keep
    finally:
        if not done:
            watch.cancel()
            bridge.cancel()


async def _cancel_when_gone(bridge: Bridge, receive: Receive) -> None:
    """Cancel the answer once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    bridge.cancel()
