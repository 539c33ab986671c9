"""Refuses a request body that is too large, before it is in memory.

Knows: sizes. Does not know: routes. Pure ASGI.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.errors import wire_error
from appliance.errors import TooLarge


class BodyLimit:
    """Answers 413 once a body is over `limit` bytes: by its declared length, or as soon as that much has come."""

    def __init__(self, app: ASGIApp, limit: int):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(declared) > self._limit:  # the server has checked that it is a number
            await self._refuse(scope, receive, send)
            return
        seen, refused = 0, False

        async def counted() -> Message:
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen <= self._limit:
                return message
            if not refused:
                refused = True
                await self._refuse(scope, receive, send)
            return {"type": "http.disconnect"}

        async def guarded(message: Message) -> None:
            if not refused:
                await send(message)

        await self._app(scope, counted, guarded)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = TooLarge(f"the body is over {self._limit} bytes", "send less, or raise server.max_body_mib")
        await wire_error(failure).response({"connection": "close"})(scope, receive, send)
