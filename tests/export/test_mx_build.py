"""A build for an accelerator with Microscaling units: written, checked, and measured by a stand-in: nothing here runs it."""

import json
from pathlib import Path

import onnx
import pytest

from appliance import cli
from tests.checkpoints import Llama, write_safetensors
from tests.quant.test_emit_mx import FILE


def test_a_build_for_a_vendors_target_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_safetensors(home / "llama", Llama(), tokenizer=True)
    (home / "targets").mkdir()
    (home / "targets" / "microscale.toml").write_text(FILE.replace("[flags]", "chunk = 64\n[flags]", 1))
    words = [
        "build",
        str(folder),
        "--target",
        "microscale",
        "--scheme",
        "mxfp4a8",
        "--name",
        "m",
        "--windows",
        "1",
        "--accept-loss",
    ]
    assert cli.main(words) == 0, capsys.readouterr().err
    record = json.loads((home / "models" / "m" / "record.json").read_text())
    found = {one["name"]: one for one in record["matrices"]}
    assert len(found) == 14 and {(one["element"], one["activation"], one["bits"]) for one in found.values()} == {
        ("mxfp4", "mxfp8", 4)
    }
    assert all(15 < one["snr_db"] < 25 for one in found.values())
    evaluation = record["evaluation"]
    assert evaluation["ran"].startswith("the graphs cannot run here")
    assert evaluation["emulation"]["matrices"] == 14 and evaluation["emulation"]["worst"] < 1e-5
    assert evaluation["texts"][0]["kl_mean"] > 0
    for name in ("prefill", "decode"):
        graph = onnx.load(home / "models" / "m" / "microscale" / f"{name}.onnx", load_external_data=False)
        onnx.checker.check_model(str(home / "models" / "m" / "microscale" / f"{name}.onnx"))
        kinds = [one.data_type for one in graph.graph.initializer]
        assert kinds.count(onnx.TensorProto.FLOAT4E2M1) == kinds.count(onnx.TensorProto.FLOAT8E8M0) == 14


def test_a_target_without_such_operators_says_so_in_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_safetensors(home / "llama", Llama(), tokenizer=True)
    assert cli.main(["build", str(folder), "--target", "cpu", "--scheme", "mxfp4a8", "--name", "m"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("appliance: scheme mxfp4a8 keeps attn.q in MXFP4; target cpu takes int weights")
    assert not (home / "models" / "m").exists()
