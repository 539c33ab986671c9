"""bench/quality.py as it is run: one point of each peer against one of ours, in the environments that make deps-full made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".appliance" / "bench"


@pytest.mark.slow
@pytest.mark.model
def test_one_point_of_each_side_on_two_windows(starter_gguf: Path, tmp_path: Path) -> None:
    pythons = {name: PEERS / f"{name}-env" / "bin" / "python" for name in ("llama", "genai")}
    for python in pythons.values():
        assert python.exists(), f"{python} is missing: make deps-full"
    command = [sys.executable, "-m", "bench.quality", "--model", str(starter_gguf), "--windows", "2", "--work", str(tmp_path)]
    command += [
        "--peers",
        "llama.cpp/Q4_0,llama.cpp/Q8_0,genai/rtn,appliance/w4a8,appliance/w4a8-mixed_8.0",
        "--plot",
        str(tmp_path / "plot.svg"),
    ]
    command += [word for name, python in pythons.items() for word in (f"--{name}-python", str(python))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "llama.cpp/F32 is the float graph" in done.stdout and "genai/fp32 is the float graph" in done.stdout
    (model,) = json.loads(done.stdout.splitlines()[-1])["models"]
    points = {one["name"]: one for one in model["points"]}
    assert set(points) == {"llama.cpp/Q4_0", "llama.cpp/Q8_0", "genai/rtn", "appliance/w4a8", "appliance/w4a8-mixed_8.0"}
    assert points["llama.cpp/Q4_0"]["body_bits"] == pytest.approx(4.5) and points["genai/rtn"]["body_bits"] == pytest.approx(5)
    assert points["llama.cpp/Q4_0"]["forms"] == {"Q4_0": 210} and points["genai/rtn"]["forms"] == {"int4 g32": 120}
    # Rounding to the nearest loses more than a fitted scale, 8 bits next to nothing; a wrong norm or token would be above 1.
    assert points["appliance/w4a8"]["kl"] < points["genai/rtn"]["kl"] < 1
    assert points["appliance/w4a8-mixed_8.0"]["kl"] < 0.01 and points["llama.cpp/Q8_0"]["kl"] < 0.01
    assert [one["ours"] for one in model["held"] if one["peer"] == "llama.cpp/Q8_0"] == ["appliance/w4a8-mixed_8.0"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert "window" not in again.stderr, "a second run measured again"
    assert (tmp_path / "plot.svg").stat().st_size > 1000
