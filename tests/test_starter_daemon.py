"""The starter model, built, served by a daemon process and asked by the real client."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.starter import StarterBuilt, placed
from tests.test_daemon import ROOT, settings

pytestmark = pytest.mark.model
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "starter"


@dataclass(frozen=True)
class Box:
    """A machine whose daemon serves the starter model."""

    url: str
    openai: openai.OpenAI
    environment: dict[str, str]
    pid: int


def appliance(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run one command of the appliance to its end."""
    return subprocess.run(
        [sys.executable, "-m", "appliance", *words], cwd=ROOT, env=environment, text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=280,
    )  # fmt: skip


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, starter_built: StarterBuilt) -> Iterator[Box]:
    """Serve, wait until ready, stop."""
    folder = tmp_path_factory.mktemp("starter")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = settings(folder, f"127.0.0.1:{port}")
    del environment["PYTHONWARNINGS"]  # the libraries' own warnings at import are not ours to mend
    placed(starter_built, folder / "models", MODEL)
    daemon = subprocess.Popen([sys.executable, "-m", "appliance", "serve"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, daemon)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield Box(url, client, environment, daemon.pid)
        daemon.terminate()
        assert daemon.wait(10) == 0
    finally:
        daemon.kill()
        daemon.wait()


def wait_ready(url: str, daemon: subprocess.Popen[bytes]) -> None:
    """Until /readyz says so; at most a minute, with a last word from the daemon when it fails."""
    answer = "no answer"
    for _ in range(600):
        assert daemon.poll() is None, "the daemon has ended"
        try:
            response = httpx.get(f"{url}/readyz")
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if response.status_code == 200:
            return
        answer = response.text
        time.sleep(0.1)
    raise AssertionError(answer)


def test_it_knows_the_capital_streamed_and_whole(box: Box) -> None:
    whole = box.openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    text = whole.choices[0].message.content
    assert text is not None and "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens > 3
    stream = box.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    assert stream.response.headers["x-appliance-provider"] == "CPUExecutionProvider"
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage


def test_a_seed_fixes_the_answer_and_sampling_differs_without(box: Box) -> None:
    def ask(seed: int) -> str | None:
        answer = box.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Tell a story."}], temperature=1.5, seed=seed, max_tokens=20
        )
        return answer.choices[0].message.content

    assert ask(-3) == ask(-3)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_a_stop_string_is_never_sent(box: Box) -> None:
    whole = box.openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    text = whole.choices[0].message.content
    assert text is not None and len(text) >= 5, "there is something to stop in"
    stop = text[2:5]
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stop": [stop]}
    stopped = box.openai.chat.completions.create(**asked)
    assert stopped.choices[0].message.content == text[: text.index(stop)] and stopped.choices[0].finish_reason == "stop"
    pieces = [piece.choices for piece in box.openai.chat.completions.create(**asked, stream=True)]
    assert "".join(choice.delta.content or "" for choices in pieces for choice in choices) == text[: text.index(stop)]


def test_logprobs_are_those_of_the_answer(box: Box) -> None:
    answer = box.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == answer.choices[0].message.content
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token  # greedy takes the likeliest


def test_a_prompt_over_the_context_names_both_numbers(box: Box) -> None:
    (card,) = box.openai.models.list().data
    context = (card.model_extra or {})["context_length"]
    with pytest.raises(openai.BadRequestError, match=str(context)) as caught:
        box.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * (context + 5)}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_model(box: Box, stream: bool) -> None:
    """In the middle of a long prefill: the next short question must not wait for its end, 25 s on an idle machine."""
    long: Any = [{"role": "user", "content": "word " * 7000}]
    with pytest.raises(openai.APITimeoutError):
        box.openai.with_options(timeout=1).chat.completions.create(model=MODEL, messages=long, stream=stream)
    start = time.monotonic()
    box.openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert time.monotonic() - start < 15


def test_chat_asks_the_daemon(box: Box) -> None:
    done = appliance(box.environment, "chat", "--json", "--temperature", "0", QUESTION[0]["content"])
    answer = json.loads(done.stdout)
    assert "Paris" in answer["answer"] and answer["where"] == "daemon" and answer["provider"] == "CPUExecutionProvider"
    assert answer["tokens_per_second"] > 1


def test_chat_in_this_process_says_the_same(box: Box) -> None:
    words = ("chat", "--json", "--temperature", "0", QUESTION[0]["content"])
    here = json.loads(appliance(box.environment, *words, "--local").stdout)
    there = json.loads(appliance(box.environment, *words).stdout)
    assert here["where"] == "in-process"
    assert here["answer"] == there["answer"] and here["usage"] == there["usage"]


def test_the_idle_daemon_is_small(box: Box) -> None:
    """Under 450 MB with the model loaded and after a short answer."""
    box.openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8)
    status = Path(f"/proc/{box.pid}/status").read_text()
    kilobytes = int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])
    assert kilobytes < 450_000
