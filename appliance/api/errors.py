"""The one place where a failure becomes an HTTP error in OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Knows: every kind of failure that can reach the edge. Does not know: routes. No trace leaves the machine: a failure that is
not one of ours is logged in full and answered with one plain sentence.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.errors import ApplianceError, BadInput, Unavailable

RETRY_AFTER = "5"  # seconds


@dataclass(frozen=True)
class WireError:
    """An error as it goes over the wire."""

    status: int
    message: str
    type: str = BadInput.kind
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """The HTTP response."""
        retry = {"retry-after": RETRY_AFTER} if self.status == 503 else {}
        return JSONResponse(self.body(), self.status, {**retry, **(headers or {})})


def wire_error(failure: Exception) -> WireError:
    """What the client is told of any failure. One that is no `ApplianceError` is logged here with its trace."""
    if isinstance(failure, ApplianceError):
        return WireError(failure.status, str(failure), failure.kind, failure.param, failure.code)
    structlog.get_logger().error("unexpected failure", exc_info=failure)
    return WireError(
        500, "the appliance failed unexpectedly; its log has the details", ApplianceError.kind, None, "internal_error"
    )


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in the one shape."""
    app.add_exception_handler(ApplianceError, _on_failure)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_routing)


class CatchAll:
    """Answers 500 to what no handler takes. Starlette's own would raise it again after answering, and log it twice."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; after a response has begun, only the connection's end can tell of a failure."""
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # the daemon stops, and has waited as long as it may
            if not begun and scope["type"] == "http":
                await wire_error(stopping()).response()(scope, receive, send)
        except Exception as failure:
            error = wire_error(failure)
            if begun or scope["type"] != "http":
                raise
            await error.response()(scope, receive, send)


def stopping() -> Unavailable:
    """What a request is told that a stop cuts short."""
    return Unavailable("the daemon stops and has cut this request short", "send it again when the daemon is back")


async def _on_failure(request: Request, failure: Exception) -> JSONResponse:
    return wire_error(failure).response()


async def _on_invalid(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, RequestValidationError)
    return _invalid(failure.errors()).response()


async def _on_routing(request: Request, failure: Exception) -> JSONResponse:
    """Unknown routes and methods; FastAPI's own refusals, such as a body that is not UTF-8."""
    assert isinstance(failure, HTTPException)
    headers = dict(failure.headers or {})
    asked = f"{request.method} {request.url.path}"
    if failure.status_code == 404:
        return WireError(
            404, f"there is no {asked}; there are POST /v1/chat/completions and GET /v1/models", code="unknown_url"
        ).response(headers)
    if failure.status_code == 405:
        allowed = headers.get("allow", "another method")
        message = f"there is no {asked}; this path takes {allowed}"
        return WireError(405, message, code="method_not_supported").response(headers)
    kind = BadInput.kind if failure.status_code < 500 else ApplianceError.kind
    return WireError(failure.status_code, str(failure.detail), kind, code="bad_request").response(headers)


def _invalid(errors: Sequence[Any]) -> WireError:
    """One sentence for the first thing that is wrong with a body."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return WireError(400, f"the body is not valid JSON: {reason} at character {first['loc'][-1]}", code="invalid_json")
    name = field_name(first["loc"][1:])
    if not name:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return WireError(400, message, code="invalid_json")
    if first["type"] == "missing":
        return WireError(400, f"missing required field: {name}", param=name, code="missing_required_parameter")
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return WireError(400, f"invalid {name}: {reason}", param=name, code="invalid_value")


def field_name(location: Sequence[int | str]) -> str:
    """Write a place in a body as OpenAI does: ("messages", 0, "<text>", "content") -> "messages[0].content".

    Pieces in angle brackets are tags of unions, and names of types that pydantic adds for untagged ones; both are left out.
    """
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("str", "int", "[key]") and not part.startswith(("<", "list[", "function-")):
            name += f".{part}" if name else part
    return name
