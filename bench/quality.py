"""What quantization costs, against llama.cpp's quants and onnxruntime-genai's builder, all made from the same float weights.

    python -m bench.quality --model smollm2-135m --model gemma3-270m [--windows 16] [--peers llama.cpp,genai,appliance]

A model is a GGUF file, or the name of one that `appliance pull` brought. Its weights are dequantized to float32 once, its
channels shuffled (bench/quality_source.py says why; --seed 0 leaves them), and everything is made from that file: this project's
bundles by `appliance build`, the peers' models by their own tools, with embedding and head at 8 bits. Both peers' float models
are checked to be the float graph before anything is compared. Then all read the same token ids of bench/data/prose-jargon.txt, in
windows of 1024; logits of every position are compared with the float graph's. What was measured is kept by content, window by
window: a run that was stopped goes on, and a new point costs only itself.

The peers get environments of their own under --work: onnxruntime-genai's builder needs torch (1 GB), llama-cpp-python compiles
for 8 minutes. A table, whether `w4a8-mixed` reaches 0.8 of the peers' KL, and a plot (--plot FILE.svg) first; the last line of
stdout is one JSON object.

Knows: the order of the work, what is cached. Does not know: how points are made (bench/quality_points.py), what a table says.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from appliance.bundle.store import open_bundle
from appliance.config import load_config
from appliance.runtime.tokenizer import load_tokenizer
from bench import quality_bytes, quality_points, quality_table
from bench.quality_environments import genai_python, llama_python
from bench.quality_plot import plot
from bench.quality_points import FLOATS, OURS, Point, Tools
from bench.quality_side import Side
from bench.quality_source import write_float
from bench.quality_table import Measured
from quant import windows
from quant.evaluate import Rows, Tally, compare, rows_at_once

SAME = 1e-5
"""Mean KL under which two float models are the same: measured are 4e-9 for both peers, a wrong norm is above 1e-2."""
FLAGSHIP = "w4a8-mixed"
"""Of ours, what the peers are held against."""
TEXT = Path(__file__).resolve().parent / "data" / "prose-jargon.txt"


def digest(*parts: str | bytes) -> str:
    """A short name for contents."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()[:16]


def digest_of(paths: list[Path]) -> str:
    """Of files' contents."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                found.update(block)
    return found.hexdigest()[:16]


def token_windows(bundle: Path, count: int) -> list[windows.Window]:
    """The text's windows in the model's own tokens, its begin token before each where it wants one."""
    tokenizer = load_tokenizer(open_bundle(bundle))
    bos = tokenizer.info.bos if tokenizer.info.add_bos else None
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), special=False)
    return windows.cut(TEXT.stem, ids, count=count, bos=bos)


class Store:
    """What was measured, one small file a point and window."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, key: str, window: windows.Window) -> Rows | None:
        """The rows of one window, if they are there."""
        path = self._path(key, window)
        if not path.exists():
            return None
        try:
            with path.open("rb") as file, np.load(file) as found:
                return Rows(*(found[field.name] for field in dataclasses.fields(Rows)))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # damaged: it is measured again

    def write(self, key: str, window: windows.Window, rows: Rows) -> None:
        """Keep them; whole or not at all."""
        path = self._path(key, window)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.savez(file, **{field.name: getattr(rows, field.name) for field in dataclasses.fields(Rows)})
        part.rename(path)

    def _path(self, key: str, window: windows.Window) -> Path:
        return self._folder / key / f"{digest(window.ids.tobytes())}.npz"


class Measurement:
    """All points of one model against its float graph.

    Args:
        source: the float weights.
        work: the model's folder.
        together: how many points share one pass of the float graph, each loaded in a process of its own.
    """

    def __init__(self, source: Path, work: Path, tools: Tools, cuts: list[windows.Window], together: int):
        self._source, self._work, self._tools, self._cuts, self._together = source, work, tools, cuts, together
        self._store = Store(work / "measured")
        self._keys: dict[Point, str] = {}
        self._identity = digest(digest_of([source]), importlib.metadata.version("onnxruntime"))

    def run(self, points: list[Point]) -> None:
        """Measure what has not been measured yet."""
        keys = {point: self.key(point) for point in points}
        for first in range(0, len(points), self._together):
            group = points[first : first + self._together]
            lacking = [
                (cut, todo)
                for cut in self._cuts
                if (todo := [point for point in group if self._store.read(keys[point], cut) is None])
            ]
            if lacking:
                self._pass(group, keys, lacking)

    def key(self, point: Point) -> str:
        """What its rows are kept under: its files, the float weights, who ran them."""
        if point not in self._keys:
            self._keys[point] = digest(point.side, digest_of(point.contents()), self._identity)
        return self._keys[point]

    def tally(self, point: Point) -> Tally:
        """What was measured of a point on all windows."""
        found, key = Tally(), self.key(point)
        for cut in self._cuts:
            rows = self._store.read(key, cut)
            assert rows is not None
            found.begin()
            found.add(rows)
        return found

    def _pass(self, group: list[Point], keys: dict[Point, str], lacking: list[tuple[windows.Window, list[Point]]]) -> None:
        with tempfile.TemporaryDirectory(prefix="logits-", dir=self._work) as scratch:
            self._measure(Path(scratch), group, keys, lacking)

    def _measure(
        self, scratch: Path, group: list[Point], keys: dict[Point, str], lacking: list[tuple[windows.Window, list[Point]]]
    ) -> None:
        wanted = [point for point in group if any(point in todo for _, todo in lacking)]
        command = [sys.executable, "-m", "bench.quality_appliance", "float", str(self._source), str(self._tools.threads)]
        with contextlib.ExitStack() as opened:

            def side(name: str, command: list[str], folder: Path) -> Side:
                made = Side(name, command, folder)
                opened.callback(made.close)
                return made

            reference = side("the float graph", command, scratch / "float")
            sides = {point: side(point.name, point.command(self._tools), scratch / f"{at}") for at, point in enumerate(wanted)}
            for done, (cut, todo) in enumerate(lacking):
                print(f"window {done + 1} of {len(lacking)}: {', '.join(one.name for one in todo)}", file=sys.stderr, flush=True)
                wanted_logits = reference.logits(cut.ids)
                for point in todo:
                    self._store.write(keys[point], cut, compared(wanted_logits, sides[point].logits(cut.ids), cut.ids))


def compared(reference: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> Rows:
    """The rows of one window; its last position predicts nothing."""
    size, parts = rows_at_once(reference.shape[1]), []
    for first in range(0, len(ids) - 1, size):
        last = min(first + size, len(ids) - 1)
        parts.append(compare(np.asarray(reference[first:last]), np.asarray(logits[first:last]), ids[first + 1 : last + 1]))
    fields = [field.name for field in dataclasses.fields(Rows)]
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


def measured(point: Point, tally: Tally, sizes: tuple[int, int]) -> Measured:
    """A point's numbers; `sizes` are the weights of the body and of the model."""
    quality = tally.quality()
    if quality.broken or quality.kl_mean is None or quality.delta is None:
        raise SystemExit(f"{point.name}: {quality.broken} of {quality.tokens} positions hold NaN or infinity")
    holding = (quality_bytes.of_gguf if point.side == "llama.cpp" else quality_bytes.of_onnx)(point.file)
    body, model = sizes
    return Measured(
        name=point.name,
        weights=holding.weights,
        computed=holding.made,
        body_bits=quality_table.bits_a_weight(holding.body, body),
        bits=quality_table.bits_a_weight(holding.weights + holding.made, model),
        forms=holding.forms,
        kl=quality.kl_mean,
        kl_median=quality.kl_median or 0.0,
        kl_p99=quality.kl_p99 or 0.0,
        delta=quality.delta,
        delta_se=quality.delta_se,
        same_top=quality.same_top or 0.0,
        windows=quality.windows,
    )


def check_floats(measurement: Measurement, floats: list[Point]) -> None:
    """`SystemExit` unless the peers' float models are the float graph."""
    measurement.run(floats)
    for point in floats:
        quality = measurement.tally(point).quality()
        if quality.kl_mean is None or quality.kl_mean > SAME:
            raise SystemExit(f"{point.name} is not the same float model: KL {quality.kl_mean}; nothing can be compared")
        print(f"{point.name} is the float graph: mean KL {quality.kl_mean:.1e} over {quality.tokens} tokens")


def compare_model(name: str, asked: argparse.Namespace, tools: Tools) -> dict[str, Any]:
    """Everything for one model: make, check the floats, measure, show."""
    checkpoint = found(name)
    folder = asked.work / "quality" / f"{checkpoint.stem}-{asked.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    source, note = folder / "float32.gguf", folder / "checkpoint"
    if not source.exists():
        write_float(checkpoint, source, asked.seed)
        note.write_text(digest_of([checkpoint]), encoding="utf-8")
    elif not note.exists() or note.read_text(encoding="utf-8") != digest_of([checkpoint]):
        raise SystemExit(f"{folder} is about another {checkpoint.name}; remove it, or choose another --work")
    points = quality_points.chosen(asked.peers, folder)
    ours = Point(f"{OURS}/w8a8", folder / f"{OURS}-w8a8")  # its tokenizer reads the text
    for point in [ours, *points]:
        quality_points.make(point, source, tools)
    cuts = token_windows(ours.path, asked.windows)
    floats = [point for point in points if point.name in FLOATS]
    check_floats(Measurement(source, folder, tools, cuts[:1], asked.together), floats)
    rest = [point for point in points if point not in floats]
    whole = Measurement(source, folder, tools, cuts, asked.together)
    whole.run(rest)
    sizes = quality_bytes.parameters(source)
    rows = [measured(point, whole.tally(point), sizes) for point in rest]
    held = quality_table.held_against(rows, f"{OURS}/{FLAGSHIP}")
    print(f"\n{name}, {len(cuts)} windows, channels {'shuffled' if asked.seed else 'as they were'}")
    print(quality_table.table(rows, held))
    print(quality_table.verdict(held), flush=True)
    return {"model": name, "windows": len(cuts), "seed": asked.seed, **quality_table.record(rows, held)}


def found(name: str) -> Path:
    """A GGUF file, or that of a pulled model."""
    if Path(name).is_file():
        return Path(name)
    folder = load_config().paths.cache / "checkpoints" / name
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"{name} is no GGUF file, and {folder} does not hold exactly one; fetch it: appliance pull {name}")
    return files[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="a GGUF file or a pulled model's name; may be given several times")
    parser.add_argument("--windows", type=int, default=16, help="of 1024 tokens, evenly spread over the text; 0 = all")
    parser.add_argument("--peers", default="llama.cpp,genai,appliance", help="sides, or patterns: 'llama.cpp/Q*,appliance/w4a8'")
    parser.add_argument("--seed", type=int, default=7, help="of the channels' new order; 0 = leave the checkpoint's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--together", type=int, default=4, help="points that share a pass of the float graph")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "appliance-bench")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--genai-python", type=Path, help="an environment that has onnxruntime-genai, torch and transformers")
    parser.add_argument("--llama-python", type=Path, help="an environment that has llama-cpp-python")
    asked = parser.parse_args()
    asked.work = asked.work.absolute()
    asked.work.mkdir(parents=True, exist_ok=True)
    tools = Tools(
        llama=asked.llama_python or llama_python(asked.work),
        genai=asked.genai_python or genai_python(asked.work),
        threads=asked.threads,
    )
    with contextlib.redirect_stdout(io.StringIO() if asked.json else sys.stdout):
        results = [compare_model(name, asked, tools) for name in asked.model or ["smollm2-135m", "gemma3-270m"]]
    if asked.plot:
        asked.plot.write_text(plot(results), encoding="utf-8")
    print(json.dumps({"bench": "quality", "text": TEXT.stem, "threads": asked.threads, "models": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
