"""What the daemon costs: HTTP, SSE and detokenization against the bare decode loop, first token, memory at rest.

    python bench/daemon.py BUNDLE [--threads 2] [--rounds 9] [--tokens 160]

Both sides run the same bundle on the same threads and take turns: a round streams one greedy answer over HTTP and then
runs the bare loop (bench/decode_appliance.py) over as many tokens at the same context. A human table first; the last line
of stdout is one JSON object.

Knows: turns, clocks, one process's memory. Does not know: anything of the appliance but its command line and its HTTP.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from decode import Runner

HERE = Path(__file__).resolve().parent
WORDS = ("red", "green", "river", "stone", "seven", "paper", "cloud", "north", "quiet", "iron", "salt", "glass")
START_SECONDS = 60


@contextlib.contextmanager
def daemon(bundle: Path, threads: int) -> Iterator[tuple[str, int]]:
    """A daemon that serves just this bundle; its base URL and process id."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        models.mkdir()
        (models / bundle.name).symlink_to(bundle.resolve())
        settings = Path(folder) / "appliance.toml"
        paths = "\n".join(f'{name} = "{folder}/{name}"' for name in ("models", "cache", "state", "runtime", "targets"))
        settings.write_text(f"[paths]\n{paths}\n[server]\nsocket = false\n[engine]\nthreads = {threads}\n")
        log_path = Path(folder) / "log"
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "appliance", "serve", "--port", "0"],
                env=os.environ | {"APPLIANCE_CONFIG": str(settings)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _ready(process, log_path), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, httpx.TransportError):
                event = json.loads(line)
                if event.get("event") == "listening":
                    base = str(event["address"])
                    if httpx.get(f"{base}/readyz").is_success:
                        return base
        time.sleep(0.05)
    raise SystemExit(f"the daemon did not get ready:\n{log.read_text(errors='replace')}")


def stream(client: httpx.Client, model: str, user: str, tokens: int) -> dict[str, float]:
    """One greedy answer: prompt and answer tokens, seconds to the first piece of text, seconds from there to the last."""
    body = {
        "model": model,
        "messages": [{"role": "system", "content": ""}, {"role": "user", "content": user}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, last, usage = time.perf_counter(), 0.0, 0.0, {}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in event["choices"]):
                last = time.perf_counter()
                first = first or last
            usage = event.get("usage") or usage
    return {
        "prompt": usage["prompt_tokens"],
        "completion": usage["completion_tokens"],
        "first": first - start,
        "rest": last - first,
    }


def resident_mib(pid: int) -> float:
    """VmRSS of a process, MiB (proc_pid_status(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=160)
    asked = parser.parse_args()
    bare = Runner("bare loop", [sys.executable, str(HERE / "decode_appliance.py"), str(asked.bundle), str(asked.threads)])
    overheads, firsts, speeds = [], [], []
    with daemon(asked.bundle, asked.threads) as (base, pid), httpx.Client(base_url=base, timeout=120) as client:
        idle = resident_mib(pid)
        model = client.get("/v1/models").json()["data"][0]["id"]
        stream(client, model, "Hello", 16)
        print(f"{'round':>5} {'HTTP tok/s':>11} {'bare tok/s':>11} {'overhead':>9} {'first ms':>9} {'prompt':>7}")
        for turn in range(asked.rounds):
            story = f"Write a long story about a {' and a '.join(random.sample(WORDS, 4))}."
            answer = stream(client, model, story, asked.tokens)
            loop = bare.run(int(answer["prompt"]), int(answer["completion"]))
            http = (answer["completion"] - 1) / answer["rest"]
            short = stream(client, model, " ".join(random.sample(WORDS, 5)), 1)
            overheads.append(1 - http / loop["decode"])
            firsts.append(1000 * short["first"])
            speeds.append((http, loop["decode"]))
            row = f"{turn:>5} {http:>11.1f} {loop['decode']:>11.1f} {100 * overheads[-1]:>8.1f}%"
            print(f"{row} {firsts[-1]:>9.1f} {short['prompt']:>7.0f}", flush=True)
        after = resident_mib(pid)
    bare.close()
    result = {
        "bench": "daemon",
        "threads": asked.threads,
        "http_tokens_per_second": round(statistics.median(http for http, _ in speeds), 1),
        "bare_tokens_per_second": round(statistics.median(loop for _, loop in speeds), 1),
        "overhead_percent": round(100 * statistics.median(overheads), 2),
        "first_token_ms": round(statistics.median(firsts), 1),
        "idle_rss_mib": round(idle),
        "rss_after_mib": round(after),
    }
    print(
        f"median overhead {result['overhead_percent']} %, first token {result['first_token_ms']} ms, "
        f"idle {result['idle_rss_mib']} MiB, after the run {result['rss_after_mib']} MiB"
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
