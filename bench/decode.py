"""Decode and prefill speed against onnxruntime-genai's int4 model of the same weights, in one interleaved run.

    python bench/decode.py BUNDLE CHECKPOINT [--contexts 16,512,2048,8000] [--threads 2] [--rounds 5] [--steps 64]

BUNDLE is a folder made by `appliance build`, CHECKPOINT the GGUF file or safetensors folder it was made from. The peer gets
an environment of its own under --work (about 1 GB: its model builder needs torch and transformers) and builds its model there,
once. Both run the same prompts of random tokens greedily, taking turns at every round; medians are shown. First token and
prompt count as prefill, the steps after it as decode. A human table first; the last line of stdout is one JSON object.

Knows: how the runs take turns and what is counted. Does not know: how either side is asked (bench/decode_*.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ["onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "torch", "transformers", "gguf", "accelerate", "sentencepiece"]


class Runner:
    """One side: a process that answers one line with one line."""

    def __init__(self, name: str, command: list[str]):
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # loaded

    def run(self, context: int, steps: int) -> dict[str, float]:
        """Prefill and decode tokens/s, peak RSS in MiB."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"context": context, "steps": steps}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


def peer_python(work: Path) -> Path:
    """The peer's own environment, made when it is not there."""
    folder = work / "genai-env"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing onnxruntime-genai and its model builder into {folder} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (folder / "complete").touch()
    return python


def peer_model(work: Path, python: Path, checkpoint: Path, threads: int) -> Path:
    """The peer's int4 model of the checkpoint, built when it is not there, set to `threads`."""
    folder = work / f"genai-{checkpoint.stem}"
    if not (folder / "genai_config.json").exists():
        plain = work / f"plain-{checkpoint.stem}"
        print(f"building the peer's int4 model in {folder} ...", file=sys.stderr)
        subprocess.run([python, HERE / "decode_genai_source.py", checkpoint, plain], check=True, stdout=sys.stderr)
        builder = [python, "-m", "onnxruntime_genai.models.builder", "-i", plain, "-o", folder, "-p", "int4", "-e", "cpu"]
        subprocess.run([*builder, "--extra_options", "int4_accuracy_level=4"], check=True, stdout=sys.stderr)
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config, indent=1))
    return folder


def measure(runners: list[Runner], contexts: list[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Medians of each runner at each context; every runner has one unmeasured round first."""
    rows: list[dict[str, Any]] = []
    for context in contexts:
        found: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
        for turn in range(rounds + 1):
            # The one that goes first alternates, so that a drifting clock or a warm cache favours neither.
            for runner in runners if turn % 2 else runners[::-1]:
                values = runner.run(context, steps)
                if turn:
                    found[runner.name].append(values)
        for name, values in found.items():
            row: dict[str, Any] = {"peer": name, "context": context}
            row |= {key: round(statistics.median(one[key] for one in values), 1) for key in ("prefill", "decode", "peak_rss_mib")}
            rows.append(row)
            print(f"{name:>10} {context:>8} {row['prefill']:>10} {row['decode']:>10} {row['peak_rss_mib']:>10}", flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Ours over the peer's, by context; above 1 is faster."""
    found = []
    for ours in (row for row in rows if row["peer"] == "appliance"):
        (peer,) = (row for row in rows if row["context"] == ours["context"] and row is not ours)
        ratio = {key: round(ours[key] / peer[key], 2) for key in ("prefill", "decode", "peak_rss_mib")}
        print(f"{'ratio':>10} {ours['context']:>8} {ratio['prefill']:>10} {ratio['decode']:>10} {ratio['peak_rss_mib']:>10}")
        found.append({"context": ours["context"], **ratio})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--contexts", default="16,512,2048,8000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "appliance-bench")
    parser.add_argument("--genai-python", type=Path, help="an environment that has the peer already")
    parser.add_argument("--genai-model", type=Path, help="the peer's model, built already")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    python = asked.genai_python or peer_python(asked.work)
    model = asked.genai_model or peer_model(asked.work, python, asked.checkpoint, asked.threads)
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    print(f"{'':>10} {'context':>8} {'prefill/s':>10} {'decode/s':>10} {'peak MiB':>10}")
    runners = [
        Runner("appliance", [sys.executable, str(HERE / "decode_appliance.py"), str(asked.bundle), str(asked.threads)]),
        Runner("genai", [str(python), str(HERE / "decode_genai.py"), str(model)]),
    ]
    try:
        rows = measure(runners, [int(one) for one in asked.contexts.split(",")], asked.rounds, asked.steps)
    finally:
        for runner in runners:
            runner.close()
    settings = {"threads": asked.threads, "rounds": asked.rounds, "steps": asked.steps}
    print(json.dumps({"bench": "decode", **settings, "ratios": ratios(rows), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
