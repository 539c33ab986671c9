"""One log line a request, and an id that the client gets too.

Knows: method, path, status, time. Does not know: prompts or answers; those are never logged. Pure ASGI.
"""

import secrets
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestLog:
    """Adds the header `x-request-id` and writes a line when the response is over."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, watching how it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"req_{secrets.token_hex(12)}"
        start = time.monotonic()
        status = 0

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, marked)
        finally:
            seconds = round(time.monotonic() - start, 4)
            # Probes come every few seconds for years.
            tell = self._log.debug if scope["path"] in ("/healthz", "/readyz") else self._log.info
            tell("request", id=id, method=scope["method"], path=scope["path"], status=status, seconds=seconds)
