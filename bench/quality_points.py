"""What bench/quality.py compares: every point's name, how its files are made from the float weights, how they are run.

Knows: the command lines of the three builders. Does not know: windows, statistics, tables.

onnxruntime-genai's builder ignores options that it does not know. These are honoured by 0.18 (seen in its graphs): `algo_config`
rtn, k_quant and the names with _last and _mixed; `matmul_mixed_precision`; `block_size`; `is_symmetric`;
`accuracy_level`. Its tied embedding takes the head's bits, with float32 scales. Its `default` method with the
head at 8 bits makes a graph that does not load (the embedding asks for a tensor by another method's name), so it is left out.
"""

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from quant import budget, calibrate, selfwritten, sensitivity, solvers

HERE = Path(__file__).resolve().parent
FLOATS = ("llama.cpp/F32", "genai/fp32")
"""The peers' own float models: they must agree with ours before anything is compared."""
OURS = "appliance"

LLAMA = ("F32", "Q4_0", "IQ4_NL", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
LAST = "matmul_mixed_precision=last_matmul:int8"
MIXED = f"{LAST},mixed_layers:int8"
GENAI: dict[str, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "rtn": ("int4", "algo_config=rtn", LAST),
    "rtn_asymmetric": ("int4", "algo_config=rtn", LAST, "is_symmetric=false"),
    "rtn_mixed": ("int4", "algo_config=rtn", MIXED),
    "k_quant_last": ("int4", "algo_config=k_quant_last"),
    "k_quant_last_16": ("int4", "algo_config=k_quant_last", "block_size=16"),
    "k_quant_mixed": ("int4", "algo_config=k_quant_mixed"),
    "k_quant_mixed_128": ("int4", "algo_config=k_quant_mixed", "block_size=128"),
    "int8": ("int8", "algo_config=rtn"),
}
APPLIANCE: dict[str, tuple[str, ...]] = {
    "w4a8-rtn": ("w4a8-rtn",),
    "w4a8": ("w4a8", "--group", "32"),
    "w4a8_g64": ("w4a8", "--group", "64"),
    "w4a8-gptq": ("w4a8-gptq", "--group", "32"),
    **{f"w4a8-mixed_{size}": ("w4a8-mixed", "--budget", size) for size in ("4.5", "5.0", "5.6", "6.5", "8.0")},
    "w8a8": ("w8a8",),
}


@dataclass(frozen=True)
class Tools:
    """Environments of the peers, and what they may use."""

    llama: Path
    genai: Path
    threads: int


@dataclass(frozen=True)
class Point:
    """One thing to compare: `name` is side/what."""

    name: str
    path: Path

    @property
    def side(self) -> str:
        return self.name.split("/")[0]

    @property
    def what(self) -> str:
        return self.name.split("/")[1]

    @property
    def file(self) -> Path:
        """The file whose tensors are counted."""
        if self.side == "llama.cpp":
            return self.path
        return self.path / ("model.onnx" if self.side == "genai" else "cpu/model.onnx")

    def contents(self) -> list[Path]:
        """All files that decide what it computes."""
        return (
            [self.path] if self.path.is_file() else sorted(self.file.parent.glob("*.onnx*")) + sorted(self.path.glob("*/*.bin"))
        )

    def command(self, tools: Tools) -> list[str]:
        """The process that runs it (bench/quality_side.py)."""
        if self.side == "llama.cpp":
            return [str(tools.llama), str(HERE / "quality_llama.py"), "serve", str(self.path), str(tools.threads)]
        if self.side == "genai":
            return [sys.executable, "-m", "bench.quality_onnx", str(self.path), str(tools.threads)]
        return [sys.executable, "-m", "bench.quality_appliance", "bundle", str(self.path), str(tools.threads)]


def chosen(patterns: str, folder: Path) -> list[Point]:
    """The points whose name fits one of the patterns ("llama.cpp/*,appliance/w4a8"), floats first."""
    names = [f"llama.cpp/{one}" for one in LLAMA] + [f"genai/{one}" for one in GENAI] + [f"{OURS}/{one}" for one in APPLIANCE]
    wanted = [pattern if "/" in pattern else f"{pattern}/*" for pattern in patterns.split(",")]
    found = [name for name in names if any(fnmatch(name, pattern) for pattern in wanted)]
    if not found:
        raise SystemExit(f"no point fits {patterns}; there are {', '.join(names)}")
    sides = {name.split("/")[0] for name in found}
    found += [name for name in FLOATS if name.split("/")[0] in sides and name not in found]
    suffix = {"llama.cpp": ".gguf"}
    return [
        Point(name, folder / f"{name.replace('/', '-')}{suffix.get(name.split('/')[0], '')}")
        for name in sorted(found, key=lambda name: (name not in FLOATS, names.index(name)))
    ]


def make(point: Point, source: Path, tools: Tools) -> None:
    """Make the point's files from the float weights, unless they are there and would come out the same."""
    told = json.dumps(_told(point, tools), sort_keys=True)
    note = point.path.with_name(f"{point.path.name}.made")
    if point.path.exists():
        if note.exists() and note.read_text(encoding="utf-8") == told:
            return
        shutil.rmtree(point.path) if point.path.is_dir() else point.path.unlink()
    print(f"making {point.name} in {point.path} ...", file=sys.stderr, flush=True)
    point.path.parent.mkdir(parents=True, exist_ok=True)
    part = point.path.with_name(f"{point.path.stem}.part{point.path.suffix}")
    if point.side == "llama.cpp":
        if point.what == "F32":
            point.path.symlink_to(source)
            note.write_text(told, encoding="utf-8")
            return
        _run([tools.llama, HERE / "quality_llama.py", "quantize", source, part, point.what])
    elif point.side == "genai":
        _make_genai(point, source, tools, part)
    else:
        scheme, *more = APPLIANCE[point.what]
        command = [sys.executable, "-m", "appliance", "build", source, "--target", "cpu", "--scheme", scheme, *more]
        # What one build works out (the text, what each weight costs) serves the next.
        shared = point.path.parent / f"{OURS}.work"
        _run([*command, "--accept-loss", "--windows", "1", "--name", "point", "--output", part, "--work", shared])
    part.rename(point.path)
    note.write_text(told, encoding="utf-8")


def _told(point: Point, tools: Tools) -> list[object]:
    """What a point is made with: its options, and what would make other integers of them: the peer's version, our own code's."""
    if point.side == "llama.cpp":
        return [point.what, _version(tools.llama, "llama_cpp_python")]
    if point.side == "genai":
        return [*GENAI[point.what], _version(tools.genai, "onnxruntime_genai")]
    found = {name: solvers.find(name).VERSION for name in ("fit", "gptq", "nearest")}
    return [*APPLIANCE[point.what], found, calibrate.VERSION, sensitivity.VERSION, selfwritten.VERSION, budget.VERSION]


@functools.cache
def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} has no {package}:\n{done.stderr[-1000:]}")
    return done.stdout.strip()


def _make_genai(point: Point, source: Path, tools: Tools, part: Path) -> None:
    plain = source.with_suffix(".hf")
    if not plain.exists():
        raw = plain.with_suffix(".part")
        _run([tools.genai, HERE / "decode_genai_source.py", source, raw])
        raw.rename(plain)
    precision, *options = GENAI[point.what]
    builder = [tools.genai, HERE / "quality_genai_build.py", "-i", plain, "-o", part, "-p", precision, "-e", "cpu"]
    fixed = [] if any("block_size" in one for one in options) else ["block_size=32"]
    _run([*builder, "-c", source.parent / "cache", "--extra_options", "accuracy_level=4", *fixed, *options])


def _run(command: list[str | Path]) -> None:
    words = [str(one) for one in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE.parent)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}")
