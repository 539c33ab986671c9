"""Tools over the wire: what a request may say of them, and the calls in a model's answer.

Knows: OpenAI's tool objects and the marks that models put around a call. Does not know: engines, or who runs a tool.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.api.wire.chat import ToolCall, ToolCallFunction
from appliance.errors import RequestError, UnsupportedField

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def check_tools(tools: Any, choice: Any, stream: bool) -> tuple[dict[str, Any], ...]:
    """The tools a model is told of; none when the request has none or chooses none.

    Raises:
        RequestError, UnsupportedField: with the field in `param`.
    """
    if choice not in (None, "none", "auto"):
        raise UnsupportedField("a model cannot be made to call a tool here", 'use "auto"', param="tool_choice")
    if tools is None or tools == []:
        return ()
    if not isinstance(tools, list):
        raise RequestError("tools is no list", "give a list of tool objects", param="tools")
    found = tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools))
    if stream:
        raise UnsupportedField("tools and stream do not go together here", "set stream to false", param="tools")
    return () if choice == "none" else found


def check_calls(calls: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """The calls in an assistant's turn of the history."""
    found = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        given = isinstance(function, Mapping) and isinstance(function.get("arguments"), str)
        if not given or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}[{at}] is no tool call",
                "give it a name and arguments, both as texts",
                param=f"{where}[{at}]",
            )
        plain = {"name": function["name"], "arguments": function["arguments"]}
        found.append({"id": str(call.get("id", "")), "type": "function", "function": plain})
    return found


def parse_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text around the calls, and the calls. What stands between marks and is no call stays text."""
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        call = _call(found[1])
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(take, text)
    return rest.strip() if calls else rest, calls


def _call(text: str) -> ToolCall | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = ToolCallFunction(name=data["name"], arguments=json.dumps(arguments, ensure_ascii=False))
    return ToolCall(id=f"call_{secrets.token_hex(12)}", function=function)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{where} is no function", 'give it "type": "function" and "function"', param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where} has no name", "letters, digits, _ . and -", param=f"{where}.function.name")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise RequestError(f"{where}: parameters is no JSON schema", "give an object", param=f"{where}.function.parameters")
    return {"type": "function", "function": dict(function)}
