"""A body that is too large is refused before it is in memory, and once."""

import asyncio
import socket
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from appliance.api.body_limit import BodyLimit
from tests.api.conftest import Served


def test_a_declared_length_is_refused_before_the_body_comes(shared_daemon: Served) -> None:
    host, port = shared_daemon.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {10**9}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_an_app_that_goes_on_reading_changes_nothing() -> None:
    sent: list[Message] = []

    async def stubborn(scope: Scope, receive: Receive, send: Send) -> None:
        seen = [(await receive())["type"] for _ in range(3)]
        assert seen == ["http.request", "http.disconnect", "http.disconnect"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"12345", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BodyLimit(stubborn, 9)({"type": "http", "headers": []}, receive, send))
    assert [message.get("status") for message in sent] == [413, None]
