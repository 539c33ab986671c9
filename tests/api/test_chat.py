"""Chat over a running daemon, with the real client and with bare HTTP."""

import json
from typing import Any

import openai
import pytest

from appliance.api.wire.chat import ChatCompletion, ChatCompletionChunk
from appliance.engine.protocol import ChatPrompt
from tests.api.conftest import Serve, Served
from tests.api.fake_engine import PROVIDER, FakeEngine, wait_until

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
ANSWER = "The capital of France is Paris."


def events(served: Served, **fields: object) -> list[str]:
    """The data of each server-sent event of a streamed answer."""
    response = served.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    lines = response.text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_whole_answer(serve: Serve) -> None:
    served = serve()
    raw = served.openai.chat.completions.with_raw_response.create(model="fake/model", messages=HELLO)
    answer = raw.parse()
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "fake/model"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 4, 6)
    assert raw.headers["x-appliance-provider"] == PROVIDER
    assert "x-appliance-fallback" not in raw.headers
    assert raw.headers["server-timing"] == "queued;dur=1.000, prefill;dur=20.000, decode;dur=300.000"
    assert raw.headers["x-request-id"].startswith("req_")


def test_whole_answer_on_the_wire(serve: Serve) -> None:
    body = serve().chat().json()
    ChatCompletion.model_validate(body)
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"]
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["system_fingerprint"].startswith("fp_") and len(body["system_fingerprint"]) == 15
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 0}


def test_streamed_answer(serve: Serve) -> None:
    served = serve(FakeEngine(delay=0.01))
    stream = served.openai.chat.completions.create(model="fake/model", messages=HELLO, stream=True)
    assert stream.response.headers["x-appliance-provider"] == PROVIDER
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1


def test_streamed_answer_on_the_wire(serve: Serve) -> None:
    served = serve()
    *data, done = events(served)
    assert done == "[DONE]"
    chunks = [json.loads(one) for one in data]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert list(chunk) == ["id", "object", "created", "model", "service_tier", "system_fingerprint", "choices"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1:-1] == [{"content": piece} for piece in served.engine.pieces]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


def test_usage_in_a_last_chunk_without_choices(serve: Serve) -> None:
    *data, done = events(serve(), stream_options={"include_usage": True}, max_tokens=2)
    assert done == "[DONE]"
    chunks = [json.loads(one) for one in data]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    ChatCompletionChunk.model_validate(chunks[-1])


def test_text_of_any_kind_survives_both_ways(serve: Serve) -> None:
    pieces = ['"quoted"\n', "\\n", "日本", "\u2028\u0085\x1c", "🙂", "\x00", "data: [DONE]\n\n", ""]
    served = serve(FakeEngine(pieces))
    whole = served.openai.chat.completions.create(model="fake/model", messages=HELLO)
    assert whole.choices[0].message.content == "".join(pieces)
    stream = served.openai.chat.completions.create(model="fake/model", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "".join(pieces)
    # httpx cuts lines at every Unicode line end; events must not break there.
    with served.http.stream("POST", "/v1/chat/completions", json={"model": "", "messages": HELLO, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)


def test_logprobs(serve: Serve) -> None:
    served = serve(FakeEngine(["a", "é"]))
    whole = served.openai.chat.completions.create(model="fake/model", messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(token.token, token.logprob, token.bytes) for token in logprobs.content] == [
        ("a", -0.25, [97]),
        ("é", -0.25, [195, 169]),
    ]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("t0", -0.5), ("t1", -1.5)]
    stream = served.openai.chat.completions.create(model="fake/model", messages=HELLO, logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs.content for chunk in stream if chunk.choices[0].logprobs]
    assert [token.token for part in parts for token in part or []] == ["a", "é"]
    assert [request.logprobs for request in served.engine.requests] == [2, 0]


def test_every_field_reaches_the_engine(serve: Serve) -> None:
    served = serve()
    served.openai.chat.completions.create(
        model="gpt-4o-mini",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1.5, seed=-1, stop=["x", "y"], max_completion_tokens=3,
        logit_bias={"5": -100}, n=1, user="u", metadata={"k": "v"}, store=True, service_tier="auto",
        extra_body={"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2, "made_up": {"x": 1}, "tools": []},
    )  # fmt: skip
    (request,) = served.engine.requests
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ann"},
    )
    chosen = request.sampling
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0.5, 40, 0.9, 0.1)
    assert (chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty) == (1.2, 1, -1.5)
    assert (chosen.logit_bias, chosen.seed) == (((5, -100),), 2**64 - 1)
    assert (request.stop, request.max_tokens, request.logprobs) == (("x", "y"), 3, None)
    assert request.priority == "interactive"


def test_silence_leaves_the_choice_to_the_model(serve: Serve) -> None:
    served = serve()
    served.chat(temperature=None, top_k=-1, stop=None, max_tokens=None, stream=False, n=None)
    (request,) = served.engine.requests
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (None, 0, None)
    assert (request.max_tokens, request.stop) == (None, ())
    served.chat(stop="one", max_tokens=7, top_p=0)
    assert 0 < (served.engine.requests[1].sampling.top_p or 0) < 1e-5
    assert (served.engine.requests[1].stop, served.engine.requests[1].max_tokens) == (("one",), 7)


def test_what_did_not_run_on_the_provider_is_said(serve: Serve) -> None:
    response = serve(FakeEngine(fallbacks=("3 Softmax on CPU",))).chat()
    assert response.headers["x-appliance-fallback"] == "3 Softmax on CPU"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_answer(serve: Serve, stream: bool) -> None:
    served = serve(FakeEngine(["a"] * 10_000, delay=0.02))
    impatient = served.openai.with_options(timeout=0.3)
    if stream:
        chunks = impatient.chat.completions.create(model="fake/model", messages=HELLO, stream=True)
        next(iter(chunks))
        chunks.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(model="fake/model", messages=HELLO)
    (asked,) = served.engine.streams
    assert wait_until(asked.over.is_set, 1)
    assert asked.cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_before_the_first_token(serve: Serve, stream: bool) -> None:
    served = serve(FakeEngine(delay=30))
    with pytest.raises(openai.APITimeoutError):
        served.openai.with_options(timeout=0.2).chat.completions.create(model="fake/model", messages=HELLO, stream=stream)
    (asked,) = served.engine.streams
    assert wait_until(asked.over.is_set, 1)


def test_answers_under_way_do_not_hold_each_other_up(serve: Serve) -> None:
    served = serve(FakeEngine(delay=0.02))
    streams = [served.openai.chat.completions.create(model="fake/model", messages=HELLO, stream=True) for _ in range(8)]
    texts = ["".join(chunk.choices[0].delta.content or "" for chunk in stream) for stream in streams]
    assert texts == [ANSWER] * 8
