"""Peak memory follows the largest tensor, not the model: 8 and 32 layers of the same width, each read in its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import Llama, write_gguf, write_safetensors

ROOT = Path(__file__).resolve().parents[3]
# VmHWM and not ru_maxrss: the latter survives exec, so a child would report what its parent weighed when it forked.
READ = """
import sys
from pathlib import Path
from export.checkpoint import open_checkpoint

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1])

checkpoint = open_checkpoint(Path(sys.argv[1]))
opened = peak()
for name in checkpoint.names():
    checkpoint.read(name)
print(opened, peak())
"""
WIDTH = Llama(hidden=256, heads=4, kv_heads=2, intermediate=768, vocab=16384)
LARGEST = 4 * WIDTH.vocab * WIDTH.hidden // 1024
"""KiB of the largest tensor in float32."""
NOISE = 4096
"""KiB by which two runs of one program differ."""


def peaks(path: Path) -> tuple[int, int]:
    """Peak KiB after opening and after reading every tensor."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    opened, read = done.stdout.split()
    return int(opened), int(read)


@pytest.mark.parametrize("kind", ["float16", "sharded", "Q8_0"])
def test_peak_memory(tmp_path: Path, kind: str) -> None:
    found = {}
    for layers in (8, 32):
        model = Llama(layers, WIDTH.hidden, WIDTH.heads, WIDTH.kv_heads, WIDTH.intermediate, WIDTH.vocab)
        path = tmp_path / str(layers)
        if kind == "Q8_0":
            path = write_gguf(path / "x.gguf", model, kind)
        else:
            write_safetensors(path, model, "float16", 4 if kind == "sharded" else 1)
        found[layers] = peaks(path)
    print(kind, found)
    (opened_8, read_8), (opened_32, read_32) = found[8], found[32]
    assert opened_32 - opened_8 < NOISE, found
    assert read_32 - read_8 < NOISE, found
    assert read_8 - opened_8 < LARGEST + 2 * NOISE, found
