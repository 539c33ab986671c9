"""Tools for models whose chat template knows none: told in words, called in marks.

    tools         -> a text for the system's turn, with each tool's JSON schema
    tool calls    -> <tool_call>{"name": ..., "arguments": {...}}</tool_call> in the assistant's turn
    tool results  -> <tool_response>...</tool_response> in a user's turn

Knows: OpenAI's messages and tool objects. Does not know: templates, tokens, who runs a tool.
Source: the marks of the Hermes function-calling format, which many models of other makers were trained on too.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = (
    "You may call functions. To call one, answer with a JSON object between marks, and nothing after it:\n"
    '<tool_call>{"name": "the function\'s name", "arguments": {}}</tool_call>\n'
    "Its result comes in the next turn between <tool_response> marks. The functions, each with the schema of its arguments:\n"
)


def write_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation in words alone: no tools, no tool calls, no turns of tools."""
    found: list[dict[str, Any]] = []
    for message in messages:
        plain = _plain(message)
        if found and message["role"] == "tool" and found[-1].pop("answers", None):
            found[-1]["content"] += "\n" + plain["content"]  # answers to one turn's calls stand in one turn
            found[-1]["answers"] = True
        else:
            found.append(plain)
    for message in found:
        message.pop("answers", None)
    if tools:
        described = _HEAD + "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        if found and found[0]["role"] in ("system", "developer"):
            found[0]["content"] = f"{found[0]['content']}\n\n{described}"
        else:
            found.insert(0, {"role": "system", "content": described})
    return found


def has_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the conversation holds tool calls or their results."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>", "answers": True}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call["function"]
        texts.append(f'<tool_call>{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}</tool_call>')
    return {"role": "assistant", "content": "\n".join(texts)}
