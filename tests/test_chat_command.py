"""`appliance chat` as a process: words, pipes, signals, with and without a daemon."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from appliance import answerer, cli
from tests.api.fake_engine import FakeEngine, install_bundle
from tests.test_daemon import ROOT, command, daemon, settings

ANSWER = "The capital of France is Paris."


class Box:
    """A machine with one model; runs `appliance chat` in this process, which is 20 times faster than in another."""

    def __init__(self, environment: dict[str, str], folder: Path):
        self.environment = environment
        self.folder = folder

    def chat(self, *words: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        """Exit code, standard output, standard error; without `stdin`, standard input is /dev/null."""
        given = self.folder / "stdin"
        given.write_bytes(stdin or b"")
        out, errors = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            open(os.devnull if stdin is None else given) as source,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
        ):
            patch.setenv("APPLIANCE_CONFIG", self.environment["APPLIANCE_CONFIG"])
            patch.setattr(answerer, "open_onnx", lambda target, threads, targets: lambda bundle: FakeEngine())
            patch.setattr("sys.stdin", source)
            code = cli.main(["chat", *words])
        return code, out.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A machine without a daemon."""
    folder = tmp_path_factory.mktemp("box")
    install_bundle(folder / "models")
    return Box(settings(folder, "127.0.0.1:9", '[models.aliases]\ngpt = "fake/model"\n'), folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A machine whose daemon runs, reached through its Unix socket."""
    folder = tmp_path_factory.mktemp("served")
    install_bundle(folder / "models")
    environment = settings(folder)
    with daemon(environment):
        yield Box(environment, folder)


def test_without_a_daemon_it_says_that_the_model_runs_here(box: Box) -> None:
    code, out, errors = box.chat("hello there")
    assert (code, out) == (0, ANSWER + "\n")
    assert "no daemon answers, so the model runs in this process" in errors
    assert "FakeExecutionProvider" in errors and "tokens/s" in errors
    assert "no daemon" not in box.chat("--local", "hello there")[2]


def test_with_a_daemon_it_asks_that(served: Box) -> None:
    code, out, errors = served.chat("hello", "there")
    assert (code, out) == (0, ANSWER + "\n")
    assert "this process" not in errors and "FakeExecutionProvider" in errors


@pytest.mark.parametrize("machine", ["box", "served"])
def test_json_is_one_object(request: pytest.FixtureRequest, machine: str) -> None:
    chosen: Box = request.getfixturevalue(machine)
    answer = json.loads(chosen.chat("--json", "--max-tokens", "2", "fake/model", "hello there")[1])
    assert answer.pop("tokens_per_second") >= 0 and answer.pop("seconds_to_first_token") >= 0
    assert answer == {
        "model": "fake/model",
        "answer": "The capital of France",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "provider": "FakeExecutionProvider",
        "where": "daemon" if machine == "served" else "in-process",
    }


@pytest.mark.parametrize(
    ("words", "stdin", "tokens"),
    [
        (["one two"], None, 2),
        (["fake/model", "one", "two", "three"], None, 3),
        (["gpt", "one"], None, 1),
        (["--model", "gpt", "gpt", "one"], None, 2),
        ([], b"one two three four\n", 4),
        (["summarize"], b"one two\n", 3),
        (["--system", "be brief", "one"], None, 3),
        (["hello", "there"], b"", 2),
    ],
)
def test_what_is_prompt_and_what_is_model(box: Box, words: list[str], stdin: bytes | None, tokens: int) -> None:
    _, out, errors = box.chat("--json", *words, stdin=stdin)
    assert json.loads(out)["usage"]["prompt_tokens"] == tokens, errors


@pytest.mark.parametrize("machine", ["box", "served"])
@pytest.mark.parametrize(
    ("words", "stdin", "says"),
    [
        ([], None, "there is nothing to ask"),
        (["fake/model"], None, "there is nothing to ask"),
        ([" \n "], None, "there is nothing to ask"),
        (["fake/modle", "hi"], None, "installed: fake/model"),
        (["--model", "gone", "hi"], None, 'there is no model "gone" here'),
        (["word " * 150], None, "150"),
        (["--temperature", "3", "hi"], None, "less than or equal to 2"),
        ([], b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    request: pytest.FixtureRequest, machine: str, words: list[str], stdin: bytes | None, says: str
) -> None:
    chosen: Box = request.getfixturevalue(machine)
    code, out, errors = chosen.chat(*words, stdin=stdin)
    assert code == 2 and out == ""
    assert says in errors.splitlines()[-1]
    assert "Traceback" not in errors


def start(environment: dict[str, str], *words: str, **fake: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("chat", *words, **fake), cwd=ROOT, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_ctrl_c_in_process(box: Box) -> None:
    process = start(box.environment, "go", pieces=1000, delay=0.02)
    assert process.stdout is not None and process.stdout.read(3) == "The"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "appliance: interrupted" and "Traceback" not in errors


def test_ctrl_c_frees_the_daemon(tmp_path: Path) -> None:
    install_bundle(tmp_path / "models")
    environment = settings(tmp_path)
    file = Path(environment["APPLIANCE_CONFIG"])
    file.write_text(file.read_text().replace("stop_seconds = 1\n", "stop_seconds = 20\n"))
    with daemon(environment, pieces=5000, delay=0.02) as (server, url):
        process = start(environment, "go")
        assert process.stdout is not None and process.stdout.read(3) == "The"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130 and "Traceback" not in errors
        begun = time.monotonic()
        server.terminate()
        server.communicate(timeout=30)
        assert time.monotonic() - begun < 15  # nothing was left to wait for; stop_seconds is 20, the answer takes 100
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


def test_a_daemon_that_dies_is_one_line_and_code_3(tmp_path: Path) -> None:
    install_bundle(tmp_path / "models")
    environment = settings(tmp_path)
    with daemon(environment, pieces=1000, delay=0.02) as (server, _):
        process = start(environment, "go")
        assert process.stdout is not None and process.stdout.read(3) == "The"
        server.kill()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert errors.splitlines()[-1].startswith("appliance: the daemon went away")


def test_a_conversation_on_a_terminal(box: Box) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("chat"), cwd=ROOT, env=box.environment, text=True, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.write(ours, b"one two\n\nthree\n\x04")
    out, errors = process.communicate(timeout=10)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert out.count(ANSWER) == 2
    assert errors.count("tokens/s") == 2


def test_without_a_model_one_line_says_so(tmp_path: Path) -> None:
    code, out, errors = Box(settings(tmp_path, "127.0.0.1:9"), tmp_path).chat("hello there")
    assert (code, out) == (2, "")
    assert errors.count("\n") == 1 and "no model is installed" in errors
