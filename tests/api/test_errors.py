"""Every refusal is one OpenAI error object that names the field and says what to do."""

import json
from typing import Any

import httpx
import openai
import pytest

from appliance.api.errors import field_name
from appliance.errors import DeviceError, Unavailable
from tests.api.conftest import Serve, Served
from tests.api.fake_engine import FakeEngine, install_bundle


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, its shape checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert "Traceback" not in response.text and "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
def served(shared_daemon: Served) -> Served:
    shared_daemon.engine.requests.clear()
    return shared_daemon


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "0.5"}, "temperature", "valid number"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_completion_tokens": True}, "max_completion_tokens", "valid integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradict"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": ["a"] * 65}, "stop", "65 strings"),
        ({"stop": 3}, "stop", "valid string"),
        ({"seed": 2**63}, "seed", "less than or equal"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "text or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "missing required field"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "has no text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1].content", "has no content"),
        ({"model": None}, "model", "valid string"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_its_field(served: Served, fields: dict[str, Any], param: str, says: str) -> None:
    error = error_of(served.chat(**fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert param.split(".")[0].split("[")[0] in error["message"]
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "stream": True}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"n": 2}, "n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    error = error_of(served.chat(**fields), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("field", "meant"), [("temperatur", "temperature"), ("stops", "stop"), ("max_token", "max_tokens"), ("logprob", "logprobs")]
)
def test_a_mistyped_field_is_not_ignored(served: Served, field: str, meant: str) -> None:
    error = error_of(served.chat(**{field: 1}), 400)
    assert (error["param"], error["message"]) == (field, f'unknown field "{field}"; did you mean "{meant}"?')
    assert not served.engine.requests


def test_fields_that_clients_of_other_servers_send_do_nothing(served: Served) -> None:
    """Also those of OpenAI's that are about its own service."""
    fields = (
        "user", "store", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "min_tokens", "best_of", "top_a",
        "ignore_eos", "stop_token_ids", "chat_template_kwargs", "cache_prompt", "repeat_penalty", "num_ctx", "think", "echo",
    )  # fmt: skip
    assert served.chat(**dict.fromkeys(fields)).status_code == 200


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [('"architecture"', '"architectur"', 'unknown key "architectur"; did you mean "architecture"?'), ("{", "", "not valid JSON")],
)
def test_a_damaged_bundle_is_400_and_says_what_and_where(served: Served, before: str, after: str, says: str) -> None:
    manifest = install_bundle(served.config.paths.models, "damaged").path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(before, after, 1))
    error = error_of(served.chat(model="damaged"), 400)
    assert str(manifest) in error["message"] and says in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "bad_bundle")


def test_harmless_values_of_the_same_fields_pass(served: Served) -> None:
    fields = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
        "reasoning_effort": "none", "audio": None, "n": 1, "parallel_tool_calls": True,
    }  # fmt: skip
    assert served.chat(**fields).status_code == 200


def test_an_image_is_refused_because_the_model_has_no_vision(served: Served) -> None:
    parts: list[Any] = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    with pytest.raises(openai.BadRequestError, match='model "fake/model" has no vision') as caught:
        served.openai.chat.completions.create(model="fake/model", messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[1]"


def test_a_prompt_that_is_too_long_names_both_numbers(served: Served) -> None:
    for stream in (False, True):
        error = error_of(served.chat(messages=[{"role": "user", "content": "word " * 150}], stream=stream), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "150" in error["message"] and "100" in error["message"]


def test_an_unknown_model_names_the_installed_ones(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="installed: fake/model") as caught:
        served.openai.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert 'did you mean "fake/model"' in error_of(served.chat(model="fake/modle", stream=True), 404)["message"]


def test_routes_and_methods(served: Served) -> None:
    error = error_of(served.http.get("/v1/nothing"), 404)
    assert (error["code"], error["type"]) == ("unknown_url", "invalid_request_error")
    assert "GET /v1/nothing" in error["message"]
    response = served.http.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_supported"
    assert response.headers["allow"] == "POST"
    error_of(served.http.post("/healthz"), 405)


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b"{", "application/json", "not valid JSON"),
        (b"", "application/json", "JSON object"),
        (b"[1]", "application/json", "JSON object"),
        (b"\xff\xfe", "application/json", ""),
        (b'{"model": "x"}', "text/plain", "Content-Type: application/json"),
        (b'{"model": "x"}', "application/json", "messages"),
        (
            b'{"model": "x", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
            "application/json",
            "temperature",
        ),
    ],
)
def test_bodies_that_are_no_request(served: Served, content: bytes, kind: str, says: str) -> None:
    response = served.http.post("/v1/chat/completions", content=content, headers={"content-type": kind})
    assert says in error_of(response, 400)["message"]


def test_a_body_over_the_limit(serve: Serve) -> None:
    served = serve(max_body_mib=0.01)
    error = error_of(served.chat(user="x" * 20_000), 413)
    assert error["code"] == "request_too_large"
    pieces = (b"x" * 1000 for _ in range(50))
    response = served.http.post("/v1/chat/completions", content=pieces, headers={"content-type": "application/json"})
    assert error_of(response, 413)["code"] == "request_too_large"
    assert served.chat(user="x" * 5_000).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_failure_shows_no_detail(serve: Serve, stream: bool, capfd: pytest.CaptureFixture[str]) -> None:
    response = serve(FakeEngine(fail_at=0)).chat(stream=stream)
    error = error_of(response, 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    assert "secret detail" in capfd.readouterr().out  # but the log tells


@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token_are_http_errors(serve: Serve, stream: bool) -> None:
    served = serve(FakeEngine(fail_at=0, failure=DeviceError("the device is gone", "restart the appliance")))
    assert error_of(served.chat(stream=stream), 503)["code"] == "device"
    served.engine.refusal = Unavailable("no slot is free", "ask again")
    response = served.chat(stream=stream)
    assert error_of(response, 503)["message"] == "no slot is free; ask again"
    assert int(response.headers["retry-after"]) > 0


def test_a_failure_inside_a_stream_is_an_event_and_then_the_end(serve: Serve) -> None:
    served = serve(FakeEngine(delay=0.02, fail_at=2, failure=DeviceError("the device is gone", "restart")))
    events = served.chat(stream=True).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "device"
    assert "[DONE]" not in events[-1]
    stream = served.openai.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.APIError, match="the device is gone"):
        list(stream)


def test_a_cancel_on_this_side_is_no_answer(serve: Serve) -> None:
    served = serve(FakeEngine(["a"] * 1000, delay=0.01))
    stream = served.openai.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], stream=True)
    next(iter(stream))
    served.engine.streams[0].cancel()
    with pytest.raises(openai.APIError, match="stopped by the appliance"):
        list(stream)


def test_field_names_are_written_as_openai_does() -> None:
    assert field_name(("messages", 0, "content", "<parts>", 1, "type")) == "messages[0].content[1].type"
    assert field_name(("stop", "list[str]", 0)) == "stop[0]"
    assert field_name(()) == ""
