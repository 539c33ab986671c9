"""Bundles with static activations, measured again from their files and their record alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appliance import cli
from appliance.bundle.record import EvaluationRecord, Record, read_record
from appliance.bundle.store import Bundle
from appliance.errors import TargetError
from appliance.targets import load
from export import arch
from export.build import BuildRequest, build
from export.checkpoint import open_checkpoint
from quant import restored, schemes
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(2, 64, 4, 2, 96, vocab=320, context=96)
TEXT = "Pack my box with five dozen liquor jugs, and mind the quick onyx goblin. " * 40


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return write_safetensors(tmp_path_factory.mktemp("source") / "tiny", replace(MODEL, seed=seed), "float32", tokenizer=True)


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    made: dict[str, Bundle] = {}

    def get(scheme: str) -> Bundle:
        if scheme not in made:
            folder = tmp_path_factory.mktemp(scheme)
            text = folder / "calibration.txt"
            text.write_text(TEXT, encoding="utf-8")
            request = BuildRequest(
                source, (load("cpu-static"),), schemes.find(scheme), folder / "tiny", "tiny", 0, "made up", windows=1,
                accept_loss=True, calibration=text, calibration_tokens=1000,
            )  # fmt: skip
            made[scheme] = build(request, quiet)
        return made[scheme]

    return get


def record_of(bundle: Bundle) -> Record:
    record = read_record(bundle)
    assert record is not None
    return record


@pytest.mark.parametrize("scheme", ["w4a8-static", "w4a16-static"])
def test_a_static_bundle_is_measured_again_with_its_own_ranges(
    scheme: str, built: Callable[[str], Bundle], source: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = built(scheme)
    assert cli.main(["evaluate", str(bundle.path), "--source", str(source), "--windows", "1", "--json"]) in (0, 4)
    again = EvaluationRecord.model_validate(json.loads(capsys.readouterr().out))
    found = record_of(bundle).evaluation
    assert found is not None and len(found.layers) == 4 and found.emulation is not None
    assert [one.name for one in found.ablations] == ["weights", "activations", "head"]
    aside: dict[str, object] = {"seconds": 0.0, "command": "", "output_loss": {}}
    assert again.model_copy(update=aside) == found.model_copy(update=aside)
    lost = {one.name: one.output_loss for one in record_of(bundle).matrices}
    assert again.output_loss == lost and len(lost) == 14 + 2 and found.output_loss == {}
    assert all(value is not None and 1e-6 < value < 0.2 for value in lost.values()), lost


def test_matrices_have_the_activations_of_their_streams(built: Callable[[str], Bundle]) -> None:
    """The streams' own account, found by the weight that the node's name says."""
    record = record_of(built("w4a8-static"))
    streams = {
        name.removeprefix("/").removesuffix("/Linear").replace("/", "."): one
        for one in record.ranges["cpu-static"]
        for name in one.outputs
    }
    matched = 0
    for matrix in record.matrices:
        stream = streams.get(matrix.name.removesuffix(".weight").replace("self_attn", "attn"))
        if stream is not None:
            matched += 1
            assert (matrix.activation, matrix.activation_reason) == (f"static-u{stream.bits}", stream.reason), matrix.name
    assert matched == 14
    widths = {matrix.activation for matrix in record.matrices if matrix.roles[0].startswith(("attn", "mlp"))}
    assert widths == {"static-u8", "static-u16"}
    assert any("static-u8" in said and "static-u16" in said for said in record.activations.values())
    assert any(matrix.activation_reason for matrix in record.matrices)


def test_a_record_that_does_not_tell_ranges_is_still_read(built: Callable[[str], Bundle]) -> None:
    bundle = built("w4a8-static")
    told = json.loads((bundle.path / "record.json").read_text(encoding="utf-8"))
    for one in told["ranges"]["cpu-static"]:
        assert one.pop("input") and one.pop("outputs")
    old = Record.model_validate_json(json.dumps(told))
    assert not restored.can_restore(old, "cpu-static") and restored.can_restore(record_of(bundle), "cpu-static")
    assert not restored.can_restore(record_of(bundle), "openvino"), "it has no ranges for that target"


def test_a_range_that_is_missing_is_named(built: Callable[[str], Bundle], source: Path) -> None:
    bundle = built("w4a8-static")
    whole = record_of(bundle)
    streams = whole.ranges["cpu-static"]
    less = whole.model_copy(update={"ranges": {"cpu-static": streams[1:]}})
    model = arch.open_model(open_checkpoint(source)).build()
    with pytest.raises(TargetError, match=f"no range was calibrated for ({'|'.join(streams[0].outputs)});"):
        restored.restore(model, bundle.file("cpu-static/decode.onnx"), less, "cpu-static")
