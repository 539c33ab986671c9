"""Builds with one scale a row: rotation, ranges and the record, end to end on a small random model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from appliance import cli
from export import arch
from export.checkpoint import open_checkpoint
from quant import calibrate, sensitivity
from tests.checkpoints import Llama, save, write_safetensors
from tests.quant.planting import plant
from tests.static_pair import fresh_seed

MODEL = Llama(2, 64, 4, 2, 96, vocab=512, tied=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channel")
    write_safetensors(folder / "tiny", MODEL, "float16", tokenizer=True)
    return folder / "tiny"


def build(source: Path, home: Path, scheme: str, *words: str, name: str = "m") -> dict[str, Any]:
    more = ["--accept-loss", "--windows", "1", "--calibration-tokens", "1024", *words]
    assert cli.main(["build", str(source), "--name", name, "--scheme", scheme, "--target", "cpu-static", *more]) == 0
    found: dict[str, Any] = json.loads((home / "models" / name / "record.json").read_text())
    return found


def weights(bundle: Path) -> dict[str, bytes]:
    """All files of weights and graphs."""
    return {path.name: path.read_bytes() for path in bundle.rglob("*") if path.suffix in (".bin", ".onnx")}


@pytest.mark.parametrize("scheme", ["w4a8-channel", "w4a8-static", "w4a16-static"])
def test_a_build_tells_what_it_did_and_every_operator_is_what_numpy_says(scheme: str, source: Path, home: Path) -> None:
    record = build(source, home, scheme)
    written = weights(home / "models" / "m")
    again = build(source, home, scheme, name="again")
    assert weights(home / "models" / "again") == written, "a rerun gives the same bytes"
    assert [{**one} for one in again["matrices"]] == record["matrices"] and again["ranges"] == record["ranges"]
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


def test_what_one_scheme_found_serves_another_that_differs_in_activations_alone(
    source: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--budget", "6", "--work", str(tmp_path / "kept")]
    channel = build(source, home, "w4a8-channel", *more)
    monkeypatch.setattr(calibrate, "walk", None)
    monkeypatch.setattr(sensitivity._Run, "measured", None)
    static = build(source, home, "w4a8-static", *more, name="static")
    assert [(one["name"], one["bits"], one["snr_db"]) for one in static["matrices"]] == [
        (one["name"], one["bits"], one["snr_db"]) for one in channel["matrices"]
    ]


def kl(record: dict[str, Any]) -> float:
    """Mean over the two texts."""
    return float(np.mean([one["kl_mean"] for one in record["evaluation"]["texts"]]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in float32, and the same function with outliers up to 200 times as large as their neighbours."""
    folder, seed = tmp_path_factory.mktemp("planted"), fresh_seed()
    print(f"seed {seed}")
    plain = write_safetensors(folder / "plain", MODEL, tokenizer=True)
    planted = write_safetensors(folder / "planted", MODEL, tokenizer=True)
    model = arch.open_model(open_checkpoint(plain)).build()
    plant(model, np.random.default_rng(seed))
    changed = {
        name: np.asarray(value.const_value.numpy(), np.float32)
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and name in MODEL.shapes()
    }
    assert set(changed) == set(MODEL.shapes())
    save(planted / "model.safetensors", changed)
    return plain, planted


@pytest.mark.parametrize("scheme", ["w4a8-channel", "w4a8-static"])
def test_planted_outliers_cost_a_build_next_to_nothing(scheme: str, pair: tuple[Path, Path], home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the box works while its owner sleeps. " * 60, encoding="utf-8")
    clean, after = (kl(build(source, home, scheme, "--calibration", str(text))) for source in pair)
    assert after < 1.1 * clean + 1e-4, (clean, after)
    bare = [kl(build(source, home, "w4a8-rtn")) for source in pair]
    assert bare[1] > 2 * bare[0], f"what is not reshaped must show them: {bare}"
