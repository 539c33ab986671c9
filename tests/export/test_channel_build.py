"""Builds with one scale a row: rotation, ranges and the record, end to end on a small random model."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from appliance import cli
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(2, 64, 4, 2, 96, vocab=512, tied=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channel")
    write_safetensors(folder / "tiny", MODEL, "float16", tokenizer=True)
    return folder / "tiny"


def build(source: Path, home: Path, scheme: str, *words: str) -> dict[str, Any]:
    more = ["--accept-loss", "--windows", "1", "--calibration-tokens", "1024", *words]
    assert cli.main(["build", str(source), "--name", "m", "--scheme", scheme, "--target", "cpu-static", *more]) == 0
    found: dict[str, Any] = json.loads((home / "models" / "m" / "record.json").read_text())
    return found


@pytest.mark.parametrize("scheme", ["w4a8-channel", "w4a8-static", "w4a16-static"])
def test_a_build_tells_what_it_did_and_every_operator_is_what_numpy_says(scheme: str, source: Path, home: Path) -> None:
    record = build(source, home, scheme)
    body = [one for one in record["matrices"] if one["roles"][0] not in ("embed", "head")]
    assert len(body) == 14 and all((one["bits"], one["group"], one["symmetric"]) == (4, 0, True) for one in body)
    assert {one["solver"] for one in body} == {"gptq"}
    reshaped = record["reshaped"]
    assert reshaped["residual"] == "hadamard 64" and reshaped["tied"] and reshaped["gated"] == 2 and not reshaped["obstacle"]
    assert record["evaluation"]["emulation"]["worst"] < 1e-3
    streams = record["ranges"].get("cpu-static", [])
    if scheme == "w4a8-channel":
        assert not streams
        return
    assert len(streams) == 2 * 4 + 2
    wide = [one["stream"] for one in streams if one["bits"] == 16]
    assert {"head_in", "norm_out"} <= set(wide)
    assert len(wide) == 10 if scheme == "w4a16-static" else 2 < len(wide) < 10
    assert all(one["reason"] for one in streams if one["bits"] == 16 and one["cost_8_bits"])
    graph = onnx.load(home / "models" / "m" / "cpu-static" / "decode.onnx", load_external_data=False).graph
    made_by = {node.output[0]: node.op_type for node in graph.node}
    products = [node for node in graph.node if node.op_type == "MatMul" and made_by.get(node.input[1]) == "DequantizeLinear"]
    assert len(products) == 14 + 2
    for node in products:
        assert made_by[node.input[0]] == "DequantizeLinear", f"{node.name}: its input is not quantized"
        readers = [one.op_type for one in graph.node if node.output[0] in one.input]
        assert readers == ["QuantizeLinear"], f"{node.name}: its output is not quantized"


def test_a_budget_buys_eight_bits_with_one_scale_a_row(source: Path, home: Path) -> None:
    record = build(source, home, "w4a8-channel", "--budget", "6.5")
    body = [one for one in record["matrices"] if one["roles"][0] not in ("embed", "head")]
    assert {(one["bits"], one["group"]) for one in body} == {(4, 0), (8, 0)}
    assert all("with one scale a row" in one["reason"] for one in body if one["bits"] == 8)
