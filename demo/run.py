"""The demo: python -m demo.run. From nothing to an answered chat and a night job's report, as a person would type it.

Knows: the order of the steps, and to stop what it started. Does not know: anything of the appliance but its command
line and its HTTP interface.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from demo.place import DATA, MINILM, ROOT, SAMPLES, STARTER, environment, write_config

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
TARGET = "cpu"
QUICK = ("--scheme", "w4a8")
"""The default scheme is closer to the float model, and takes ten minutes more."""
JOB = "nightly-digest"
ASKED_BEFORE = "was asked for before"
"""What `appliance job run` says of a slot that has its run."""
START_SECONDS = 60
STOP_SECONDS = 15
GRACE_SECONDS = 3


class Failed(Exception):
    """A step failed; the text is the one line for the person, empty when the step has said it itself."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer: seconds to its first piece, and tokens/s as the engine measured them.

    The pieces' own times would not do: the daemon sends what came within 20 ms as one, half of an answer as short as this.
    """

    text: str
    tokens: int
    first: float
    speed: float
    provider: str


def run(config: Path, *arguments: str, quiet: bool = False) -> str:
    """Run one `appliance` command; its progress goes to the terminal. Returns what it printed."""
    if not quiet:
        print(f"\n$ appliance {shlex.join(arguments)}", flush=True)
    call = [sys.executable, "-m", "appliance", *arguments]
    errors = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(call, env=environment(config), stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        text, _ = process.communicate()
    except KeyboardInterrupt:
        # A terminal's Ctrl-C has reached it too, and it may be clearing up: a second signal would break that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        stop(process)
        raise
    if process.returncode:
        raise Failed
    return text


def follow(config: Path, *arguments: str) -> tuple[int, str]:
    """Run one `appliance` command and show what it prints as it comes. Its exit code and what it printed."""
    print(f"\n$ appliance {shlex.join(arguments)}", flush=True)
    call = [sys.executable, "-m", "appliance", *arguments]
    process = subprocess.Popen(call, env=environment(config), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    finally:
        if sys.exc_info()[0] is not None:
            stop(process)
    return process.wait(), "".join(lines)


def work(config: Path) -> dict[str, Any]:
    """Index the sample papers and run the job over them; the finished slot as the ledger has it.

    The slot is the last one that fell due, last night's. A slot runs once, so the next demo of the same day is shown the
    report that is there; a slot that failed or was missed stays so, and then a slot of this minute is run instead.
    """
    print(run(config, "knowledge", "index", str(SAMPLES.relative_to(ROOT))), end="")
    code, text = follow(config, "job", "run", JOB, "--slot", "due")
    if code and ASKED_BEFORE in text:
        code, text = follow(config, "job", "run", JOB)
    if code:
        raise Failed(f"the job did not get done: appliance job ledger {JOB} says why")
    slot = text.split(maxsplit=1)[0]
    entries = json.loads(run(config, "job", "ledger", JOB, "--json", quiet=True))["entries"]
    return next(entry for entry in entries if entry["run"] == slot)


def build_once(config: Path, model: str, *options: str) -> None:
    """Build a model of the catalogue, unless a whole bundle of it is there."""
    try:
        bundle = json.loads(run(config, "show", model, "--json", "--verify", quiet=True))
        print(f"\nkept the bundle that is there: {bundle['path']} (make clean removes it)")
        return
    except Failed:
        pass  # not there, or damaged: the build replaces it, and says so when it cannot
    print(run(config, "pull", model, "--yes"), end="")
    print(run(config, "build", model, "--target", TARGET, *options, "--windows", "1"), end="")


def build_embedder(config: Path) -> None:
    """Build the embedding model. Without it the demo goes on: papers are then found by their words alone."""
    try:
        build_once(config, MINILM)
    except Failed:
        print(f"\nno {MINILM}: the papers are found by their words alone, not by meaning")


@contextmanager
def daemon(config: Path) -> Iterator[str]:
    """The running daemon's base URL; stopped when the block ends, however it ends."""
    log_path = DATA / "daemon.log"
    print(f"\n$ appliance serve --model {STARTER} --port 0", flush=True)
    with open(log_path, "wb") as log:
        call = [sys.executable, "-m", "appliance", "serve", "--model", STARTER, "--port", "0"]
        process = subprocess.Popen(call, env=environment(config), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield wait_ready(process, log_path)
        finally:
            stop(process)


def wait_ready(process: "subprocess.Popen[bytes]", log_path: Path) -> str:
    """Base URL of the daemon once it says it is ready."""
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        if process.poll() is not None:
            raise Failed(f"the daemon stopped at once: {lines[-1] if lines else 'it said nothing'}")
        address = next((found for line in lines if (found := listening(line))), None)
        if address:
            try:
                if httpx.get(f"{address}/readyz", timeout=5).is_success:
                    return address
            except httpx.TransportError:
                pass  # bound, but not serving yet
        time.sleep(0.05)
    raise Failed(f"the daemon was not ready after {START_SECONDS} s; see {log_path}")


def listening(line: str) -> str | None:
    """The base URL in the daemon's log line that says where it listens."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return str(event["address"]) if event.get("event") == "listening" else None


def stop(process: "subprocess.Popen[Any]") -> None:
    """End a process: politely, then not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(base: str) -> Answer:
    """Stream the answer to the question onto the terminal."""
    import httpx

    body = {
        "model": STARTER,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"\n> {QUESTION}\n< ", end="", flush=True)
    text, tokens, first, provider = "", 0, 0.0, "unknown"
    start = time.perf_counter()
    try:
        with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=60) as answer:
            if not answer.is_success:
                raise Failed(f"the daemon refused: {answer.read().decode('utf-8', 'replace')}")
            provider = answer.headers.get("x-appliance-provider", provider)
            for event in events(answer.iter_lines()):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if piece and not text:
                    first = time.perf_counter() - start
                text += piece
                print(piece, end="", flush=True)
        models = httpx.get(f"{base}/appliance/v1/device", timeout=60).raise_for_status().json()["models"]
    except httpx.HTTPError as failure:
        raise Failed(f"the daemon went away: {failure}; see {DATA / 'daemon.log'}") from None
    print()
    (speed,) = (model["work"]["tokens_per_second"] for model in models if model["card"]["id"] == STARTER)
    return Answer(text, tokens, first, speed or 0.0, provider)


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of an event stream up to its end; an error among them is a failure."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed(f"the daemon failed: {event['error'].get('message')}")
            yield event


def report(answer: Answer) -> None:
    first = f"the first after {1000 * answer.first:.0f} ms"
    print(f"\n{answer.tokens} tokens, {first}, decoded at {answer.speed:.1f} tokens/s on {answer.provider}")


def conclude(job: dict[str, Any]) -> None:
    """Where the job's report is, and what a person can do now."""
    place = Path(job["report"])
    print(f"\n{job['run']}: {job['state']}, every citation checked against its source\nThe report: {place.relative_to(ROOT)}")
    command = f"APPLIANCE_CONFIG={shlex.quote(str((DATA / 'appliance.toml').relative_to(ROOT)))} .venv/bin/appliance"
    print("\nThe daemon is stopped. What to do next, from this folder:")
    steps = {
        "serve": "serve it: OpenAI's API on 127.0.0.1",
        "tui": "meanwhile in another terminal: chats, jobs and their reports",
        'chat "Hello"': "talk to it",
        f"show {STARTER}": "what the model is made of",
        "--help": "everything else",
    }
    for words, meaning in steps.items():
        print(f"  {command} {words:<20} # {meaning}")


def main() -> int:
    """Exit code: 0, or 1 when a step failed."""
    signal.signal(signal.SIGTERM, _interrupt)
    os.chdir(ROOT)
    began = time.monotonic()
    try:
        config = write_config()
        build_once(config, STARTER, *QUICK)
        build_embedder(config)
        with daemon(config) as base:
            answer = ask(base)
            if EXPECTED not in answer.text:
                raise Failed(f"the answer does not name {EXPECTED}: the model was not built right")
            report(answer)
            job = work(config)
        conclude(job)
    except Failed as failure:
        if str(failure):
            print(f"demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; nothing was left running", file=sys.stderr)
        return 130
    print(f"\nDone in {time.monotonic() - began:.0f} s.")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
