"""Tools told in words, for templates that know none."""

import json

from appliance.runtime.tool_text import has_tools, write_tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tools_come_with_their_schema_after_the_systems_own_words() -> None:
    first, second = write_tools([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}], [TOOL])
    assert first["role"] == "system" and first["content"].startswith("Be brief.\n\n")
    assert json.dumps(TOOL["function"]) in first["content"] and second == {"role": "user", "content": "x"}


def test_a_conversation_without_a_system_turn_gets_one() -> None:
    messages = write_tools([{"role": "user", "content": "x"}], [TOOL])
    assert [one["role"] for one in messages] == ["system", "user"] and "<tool_call>" in messages[0]["content"]


def test_calls_and_results_become_words() -> None:
    history = [
        {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "user", "content": "so?"},
    ]
    assert has_tools(history) and not has_tools(history[3:])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert write_tools(history, []) == [
        {"role": "assistant", "content": f"Hm.\n{call}\n{call}"},
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"},
        {"role": "user", "content": "so?"},
    ]
    assert "answers" not in str(history)
