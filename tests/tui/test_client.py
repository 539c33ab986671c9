"""What the client makes of answers that break off or are no answers, and of calls that were heard but not confirmed."""

import json

import httpx
import pytest

from tests.tui.terminal import Box
from tui.address import parse_host
from tui.client import BrokenOff, Client, Closed, NoSuchRoute, Opened, Piece, Refused, Unreachable
from tui.shapes import Turn
from tui.talk import Talk, title_of

pytestmark = pytest.mark.anyio


def client_of(body: bytes, status: int = 200) -> Client:
    """A client whose daemon always says the same."""
    client = Client(())
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    client._http = httpx.AsyncClient(transport=transport, base_url="http://daemon")
    return client


def chunk(text: str | None = None, reason: str | None = None) -> bytes:
    """One event of a streamed answer."""
    delta = {} if text is None else {"content": text}
    body = {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def test_an_answer_without_its_end_is_broken_off() -> None:
    events = []
    async with client_of(chunk("Par") + b": a comment\n\n" + chunk("is")) as client:
        with pytest.raises(BrokenOff, match="ended before its end"):
            async for event in client.answer("", ()):
                events.append(event)  # noqa: PERF401 (a comprehension would lose them when it raises)
    assert events == [Opened("unknown", ""), Piece("Par"), Piece("is")]


async def test_an_answer_with_its_end_and_no_usage() -> None:
    async with client_of(chunk("Paris") + chunk(reason="length") + b"data: [DONE]\n\n") as client:
        assert [event async for event in client.answer("", ())][-1] == Closed("m", "length", 0, 0)


async def test_an_error_inside_the_stream_is_a_refusal() -> None:
    error = b'data: {"error": {"message": "out of memory; use a smaller model", "code": "device"}}\n\n'
    async with client_of(chunk("Par") + error) as client:
        with pytest.raises(Refused, match="out of memory; use a smaller model"):
            [event async for event in client.answer("", ())]


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        (b"<html>", 502, Refused, "the daemon answered 502"),
        (b"<html>", 404, NoSuchRoute, "the daemon answered 404"),
        (b'{"detail": "no"}', 404, NoSuchRoute, "the daemon answered 404"),
        (b'{"error": {"message": "there is no run", "code": "not_found"}}', 404, Refused, "there is no run"),
    ],
)
async def test_refusals(body: bytes, status: int, kind: type[Refused], says: str) -> None:
    async with client_of(body, status) as client:
        with pytest.raises(Refused, match=says) as caught:
            await client.models()
        assert type(caught.value) is kind


async def test_every_place_that_was_tried_is_named() -> None:
    async with Client((parse_host("unix:/nonexistent/a.sock"), parse_host("127.0.0.1:9"))) as client:
        with pytest.raises(Unreachable, match=r"unix:/nonexistent/a\.sock and http://127\.0\.0\.1:9; start it: appliance serve"):
            await client.models()


class Deaf(Client):
    """Hands every call on and then, the first time each, claims that the connection broke."""

    broke: set[str]

    async def _call(self, method: str, path: str, body: dict[str, object] | None = None) -> object:
        answer = await super()._call(method, path, body)
        key = f"{method} {path} {body and body.get('position')}"
        if method == "POST" and key not in self.broke:
            self.broke.add(key)
            raise Unreachable("the daemon has gone", "")
        return answer


async def test_what_was_heard_but_not_confirmed_is_kept_once(box: Box) -> None:
    talk = Talk()
    talk.turns += [Turn("user", "one"), Turn("assistant", "two")]
    async with Deaf((parse_host(box.url),)) as client:
        client.broke = set()
        for _ in range(3):  # the beginning and two messages
            with pytest.raises(Unreachable):
                await talk.keep(client, "")
        await talk.keep(client, "")
        (head,) = await client.conversations()
        assert (await client.conversation(head.id)).turns == tuple(talk.turns)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("What is\n\n this?", "What is this?"),
        ("word " * 40, "word word word word word word word word word…"),
        ("x" * 200, "x" * 48 + "…"),
    ],
)
async def test_titles(text: str, title: str) -> None:
    assert title_of(text) == title
