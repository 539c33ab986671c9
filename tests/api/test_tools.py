"""Tool calls over HTTP, with the real client."""

import json
from typing import Any

import pytest

from appliance.api.tool_calls import parse_calls
from tests.api.conftest import Serve
from tests.api.fake_engine import FakeEngine

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'


def ask(serve: Serve, *pieces: str, **fields: Any) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(pieces=pieces)
    messages = fields.pop("messages", [{"role": "user", "content": "x"}])
    return serve(engine).openai.chat.completions.create(model="fake/model", messages=messages, **fields), engine


def test_a_call_in_the_answer_is_a_tool_call(serve: Serve) -> None:
    answer, engine = ask(serve, "Let me see. ", CALL, tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": "é"}
    assert engine.requests[0].prompt.tools == (TOOL,)


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_the_marks_are_text(serve: Serve, fields: dict[str, Any]) -> None:
    answer, engine = ask(serve, CALL, **fields)
    assert engine.requests[0].prompt.tools == ()
    if not fields:
        assert answer.choices[0].message.content == CALL and answer.choices[0].message.tool_calls is None


def test_history_of_calls_and_results_reaches_the_model(serve: Serve) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    _, engine = ask(serve, "Three.", tools=[TOOL], messages=messages)
    assert engine.requests[0].prompt.messages == (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_bad_tools_are_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    answer = serve().chat(**fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("text", "rest", "names"),
    [
        ("plain", "plain", []),
        (f"{CALL}\n{CALL}", "", ["add", "add"]),
        ('<tool_call>\n{"name": "f"}\n', "", ["f"]),  # cut off, or the end mark was the stop token
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', '<tool_call>{"name": "f", "arguments": []}</tool_call>', []),
    ],
)
def test_calls_are_parsed(text: str, rest: str, names: list[str]) -> None:
    found, calls = parse_calls(text)
    assert (found, [call.function.name for call in calls]) == (rest, names)
