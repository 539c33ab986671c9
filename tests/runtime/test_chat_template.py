"""Chat templates: equal to transformers' rendering, what a request may hold, and templates that mean harm."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import BundleError, RequestError
from appliance.runtime.chat_template import ChatTemplate
from tests.runtime.tokenizer_samples import golden

CASES = golden("chat_cases.json")
USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def render_case(case: dict[str, Any], source: str) -> str:
    options = {**case.get("options", {}), "add_generation_prompt": case.get("add_generation_prompt", True)}
    return ChatTemplate(source, CASES["tokens"]).render(case["messages"], case.get("tools") or (), options)


@pytest.mark.parametrize("at", [at for at, case in enumerate(CASES["cases"]) if case["template"] != "carried"])
def test_rendering_equals_the_reference(at: int) -> None:
    case = CASES["cases"][at]
    assert render_case(case, "\n".join(CASES["templates"][case["template"]])) == case["text"]


def render(source: str, *messages: dict[str, Any], **more: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages or (USER,), **more)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(PLAIN, {"role": "user", "content": parts}) == "[user:one\ntwo]"


def test_a_template_that_wants_parts_gets_them() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }};{% endfor %}{% endfor %}"
    assert render(source, USER, USER) == "Hi;Hi;"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        [{"type": "text"}],
        [{"type": "text", "text": 7}],
        ["text"],
        {"type": "text", "text": "x"},
        7,
    ],
)
def test_content_that_is_no_text_is_refused(content: object) -> None:
    with pytest.raises(RequestError, match="message 1"):
        render(PLAIN, USER, {"role": "user", "content": content})


def test_a_message_without_a_role_is_refused() -> None:
    with pytest.raises(RequestError, match="no role"):
        render(PLAIN, {"content": "x"})


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    message = {"role": "developer", "content": "x"}
    assert render(PLAIN, message) == "[system:x]"
    assert render(PLAIN + "{# developer #}", message) == "[developer:x]"


def test_missing_content_is_empty() -> None:
    assert render(PLAIN, {"role": "assistant"}, {"role": "user", "content": None}) == "[assistant:][user:]"


def test_tools_that_would_vanish_are_refused() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(RequestError, match="knows no tools"):
        render(PLAIN, tools=TOOLS)
    with pytest.raises(RequestError, match="knows no tool calls"):
        render(PLAIN, {"role": "assistant", "content": None, "tool_calls": [call]})


@pytest.mark.parametrize(("sent", "shown"), [('{"a": "é"}', '{"a": "é"}'), ("{bad", '"{bad"'), ("[1]", '"[1]"')])
def test_arguments_sent_as_text_are_shown_as_objects(sent: str, shown: str) -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": sent}}
    assert render(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == shown


def test_messages_are_not_changed() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}], "tool_calls": [call]}]
    before = json.dumps(messages)
    render(PLAIN + "{# tool_calls #}", *messages)
    assert json.dumps(messages) == before


def test_options_and_the_clock() -> None:
    assert render("{{ x }}{{ add_generation_prompt }}{{ bos_token }}", options={"x": 1}) == "1True<s>"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    for name in ("messages", "render budget"):
        with pytest.raises(RequestError, match="no template option"):
            render(PLAIN, options={name: 1})


def test_a_refusal_by_the_template_says_why() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as failure:
        render("{{ raise_exception('roles must alternate') }}")
    assert failure.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in y",
        "{% generation %}",
        "{{ 'a' | nope }}",
        "{{ 'a' | pprint }}",
        "{% include 'other' %}",
        "{% if x is nope %}{% endif %}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "+".join("1" * 20000) + " }}",
        "x" * (1 << 21),
    ],
)
def test_a_template_that_does_not_compile_is_a_bundle_error(source: str) -> None:
    with pytest.raises(BundleError) as failure:
        ChatTemplate(source, {}, "the template")
    assert str(failure.value).startswith("the template: ") and "\n" not in str(failure.value)


GROW = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}STEP{% endfor %}{{ ns.s }}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(1000000000) %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1,2] recursive %}{% if loop.depth < 50 %}{{ loop([1,2]) }}{% endif %}{% endfor %}",
    "times": "{{ 'a' * 1000000000 }}",
    "list times": "{{ 1000000000 * [0] }}",
    "power": "{{ 10 ** 1000000000 }}",
    "growing number": GROW.replace("'aaaaaaaa'", "7").replace("STEP", "{% set ns.s = ns.s * ns.s %}"),
    "doubling with ~": GROW.replace("STEP", "{% set ns.s = ns.s ~ ns.s %}"),
    "doubling with +": GROW.replace("STEP", "{% set ns.s = ns.s + ns.s %}"),
    "doubling block": GROW.replace("STEP", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    "doubling list": GROW.replace("STEP", "{% set ns.s = [ns.s, ns.s] %}"),
    "doubling tuple": GROW.replace("STEP", "{% set ns.s = (ns.s, ns.s) %}"),
    "doubling dict": GROW.replace("STEP", "{% set ns.s = {1: ns.s, 2: ns.s} %}"),
    "doubling dict()": GROW.replace("STEP", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "much text": "{% for i in range(90000) %}" + "x" * 1000 + "{% endfor %}",
    "much text unseen": "{% macro m() %}{% for i in range(90000) %}"
    + "x" * 1000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "much text filtered": "{% filter upper %}{% for i in range(90000) %}" + "x" * 1000 + "{% endfor %}{% endfilter %}",
    "center": "{{ 'x' | center(1000000000) }}",
    "indent": "{{ 'x' | indent(1000000000, true) }}",
    "batch": "{{ [1] | batch(1000000000, 1) | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "tojson": "{{ messages | tojson(indent=1000000000) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "many widths": "{{ ('%9999d' * 100000) | format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "many places": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('a' * 100000).join(range(99999) | map('string') | list) }}",
    "join filter": "{{ range(99999) | join('a' * 100000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "strftime": "{{ strftime_now('%c' * 1000000) }}",
    "slow comparisons": "{% set a = range(99999) | list %}{% for i in range(99999) %}{{ a | sort == a }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_run_for_ever_or_fill_the_memory_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.runtime.template_limits.MAX_SECONDS", 0.3)
    before = time.thread_time()
    with pytest.raises(RequestError) as failure:
        render(HOSTILE[name])
    assert time.thread_time() - before < 5, "stopped late"
    assert "MemoryError" not in str(failure.value), "stopped by the machine, not by a limit"
    assert "\n" not in str(failure.value)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].__mro__ }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__globals__.json }}",
    "{{ dict.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% macro g() %}{% endmacro %}{{ g._func.__globals__ }}",
    "{{ [messages]|map(attribute='__class__')|map(attribute='__mro__')|first|length }}{{ 1 // 0 }}",
    "{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_what_the_sandbox_hides_is_empty() -> None:
    assert render("{{ messages.__class__ }}{{ ''|attr('__class__') }}{{ raise_exception.__globals__ }}") == ""
    assert "object" not in render("{{ ['{0.__class__}']|map('replace', '0', '1')|list }}{{ namespace(a=1) }}")


def test_a_long_chat_stays_far_below_the_limits() -> None:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": "word " * 200} for at in range(1000)]
    source = "\n".join(CASES["templates"]["qwen-like"])
    before = time.thread_time()
    assert len(render(source, *messages)) > 1_000_000
    assert time.thread_time() - before < 1


@pytest.mark.model
def test_the_starter_model_writes_and_reads_as_the_reference(starter_gguf: Path, tmp_path: Path) -> None:
    from tests.export.test_tokenizer_golden import written

    files = written(starter_gguf, tmp_path)
    source = (tmp_path / ".bundle.partial" / str(files.chat_template)).read_text(encoding="utf-8")
    carried = [case for case in CASES["cases"] if case["template"] == "carried"]
    assert len(carried) == 4
    for case in carried:
        assert render_case(case, source) == case["text"]
