"""The environments of bench/quality.py's peers, made when they are not there: python -m bench.quality_environments FOLDER

Knows: what each peer needs, how llama.cpp is compiled. Does not know: what is done with them.
"""

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

GENAI = ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "torch", "transformers", "gguf", "accelerate", "sentencepiece")
LLAMA = ("llama-cpp-python",)
INSTRUCTIONS = ("avx", "avx2", "avx512f", "avx512_vbmi", "avx512_vnni", "f16c", "fma", "bmi2")
OPTIONS = {"avx512f": "AVX512"}
"""What ggml calls an instruction set where it is not the kernel's word."""


def genai_python(work: Path) -> Path:
    """onnxruntime-genai with its model builder; the one that bench/decode.py makes."""
    return _environment(work / "genai-env", GENAI, {}, "onnxruntime-genai and its model builder")


def llama_python(work: Path) -> Path:
    """llama-cpp-python, compiled here (8 minutes on two cores)."""
    return _environment(work / "llama-env", LLAMA, {"CMAKE_ARGS": cmake_arguments()}, "llama-cpp-python")


def cmake_arguments(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This machine's instruction sets by name and without AMX: built for "native" it crashes there in every decode (gcc 12)."""
    found = ["-DGGML_NATIVE=OFF", "-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_BF16=OFF"]
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return " ".join(found)
    flags = next((line.split(":")[1].split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), [])
    known = [OPTIONS.get(one, one.upper()) for one in INSTRUCTIONS if one in flags]
    return " ".join(found + [f"-DGGML_{one}=ON" for one in known])


def _environment(folder: Path, packages: tuple[str, ...], more: dict[str, str], what: str) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {what} into {folder} ...", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, env=os.environ | more)
        (folder / "complete").touch()
    return python


if __name__ == "__main__":  # make deps-full: the folder
    llama_python(Path(sys.argv[1]).absolute())
    genai_python(Path(sys.argv[1]).absolute())
