"""Commands in records: run as they stand there, they make the same bundle and the same figures again."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from appliance import cli
from appliance.bundle.store import open_bundle
from appliance.errors import BadInput
from export.build import BuildRequest, Progress
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(2, 64, 2, 1, 96, vocab=512)
QUICK = ["--accept-loss", "--windows", "1", "--calibration-tokens", "1024"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in the folder that commands are run in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return write_safetensors(tmp_path / "here" / "tiny", MODEL, "float16", tokenizer=True)


def build(source: Path | str, name: str, *more: str, scheme: str = "w4a8-gptq") -> int:
    return cli.main(["build", str(source), "--name", name, "--scheme", scheme, *QUICK, *more])


def record(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "record.json").read_text())
    return found


def again(command: str) -> int:
    return cli.main(shlex.split(command)[1:])


def test_a_build_on_a_records_text_names_its_own_record(source: Path, home: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and then it rests. " * 60, encoding="utf-8")
    assert build(source, "first", "--calibration", str(text)) == 0
    told = tmp_path / "elsewhere.json"
    told.write_bytes((home / "models" / "first" / "record.json").read_bytes())
    assert build(source, "second", "--calibration", str(told)) == 0
    told.unlink()
    bundle = home / "models" / "second"
    found = record(bundle)
    assert "--calibration second/record.json" in found["command"] and str(tmp_path) not in found["command"]
    before = {path.name: path.read_bytes() for path in (bundle / "cpu").iterdir()}
    assert again(found["command"]) == 0
    assert {path.name: path.read_bytes() for path in (bundle / "cpu").iterdir()} == before
    assert record(bundle)["command"] == found["command"] and record(bundle)["calibration"] == found["calibration"]


def test_a_record_that_lies_here_comes_before_an_installed_models(
    source: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "record.json").write_text("{}", encoding="utf-8")
    assert build(source, "new", "--calibration", "tiny/record.json") == 2
    assert f"{source / 'record.json'} is no record of a calibrated bundle" in capsys.readouterr().err
    assert build(source, "new", "--calibration", "gone/record.json") == 2
    assert "there is no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("by_name", [True, False])
def test_a_pulled_model_is_named_by_its_name(
    by_name: bool, source: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["pull", str(source), "--yes", "--name", "pulled"]) == 0
    folder = home / "cache" / "checkpoints" / "pulled"
    assert build("pulled" if by_name else folder, "new", scheme="w4a8") == 0
    found = record(home / "models" / "new")
    assert found["command"].startswith("appliance build pulled --target cpu ")
    assert found["evaluation"]["command"] == "appliance evaluate new --source pulled --windows 1"
    monkeypatch.chdir(tmp_path)
    assert again(found["command"]) == 0 and again(found["evaluation"]["command"]) == 0


def test_a_checkpoint_that_is_a_file_is_measured_again_from_its_folder(
    source: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(source, "new", scheme="w4a8") == 0
    told = record(home / "models" / "new")["evaluation"]
    assert told["command"] == "appliance evaluate new --source tiny --windows 1"
    capsys.readouterr()
    assert again(f"{told['command']} --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == told["texts"] and found["command"] == told["command"]


def test_a_budget_and_a_whole_row_are_told_to_the_last_digit(source: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def asked(request: BuildRequest, progress: Progress) -> None:
        commands.append(request.command)
        raise BadInput("that is all", "nothing")

    monkeypatch.setattr("export.build.build", asked)
    assert build(source, "new", "--budget", "5.1234567", "--group", "0", scheme="w4a8-mixed") == 2
    assert "--budget 5.1234567" in commands[0] and "--group 0" in commands[0]


def test_exceptions_have_their_reason_and_stand_in_the_command(source: Path, home: Path) -> None:
    wishes = ["--exception", "*.v_proj.weight=8/32", "--exception", "model.layers.1.mlp.down_proj.weight=0"]
    assert build(source, "new", *wishes, scheme="w4a8") == 0
    found = record(home / "models" / "new")
    reasons = {one["name"]: (one["bits"], one["group"], one["reason"]) for one in found["matrices"] if one["reason"]}
    name = "model.layers.{}.self_attn.v_proj.weight"
    assert reasons == {name.format(layer): (8, 32, "asked for: --exception *.v_proj.weight=8/32") for layer in range(2)}
    assert {one["name"]: one["reason"] for one in found["float"] if one["role"].startswith("mlp.")} == {
        "model.layers.1.mlp.down_proj.weight": "asked for: --exception model.layers.1.mlp.down_proj.weight=0"
    }
    before = (home / "models" / "new" / "cpu" / "weights.bin").read_bytes()
    assert again(found["command"]) == 0
    assert (home / "models" / "new" / "cpu" / "weights.bin").read_bytes() == before
    assert record(home / "models" / "new")["matrices"] == found["matrices"]


def test_a_budget_leaves_what_was_asked_for(source: Path, home: Path) -> None:
    assert build(source, "new", "--exception", "*.v_proj.weight=4/128", "--budget", "8", scheme="w4a8-mixed") == 0
    told = record(home / "models" / "new")
    matrices = told["matrices"]
    values = {(one["bits"], one["group"], one["reason"]) for one in matrices if one["roles"] == ["attn.v"]}
    assert values == {(4, 128, "asked for: --exception *.v_proj.weight=4/128")}
    assert any(one["bits"] == 8 and one["reason"].startswith("measured") for one in matrices), "the budget bought some"
    assert told["budget"] == 8.0
    looked = {one["roles"][0] for one in matrices if one["cost_kl"] is not None}
    assert looked == {"attn.q", "attn.k", "attn.o", "mlp.gate", "mlp.up", "mlp.down"}, "what was asked for is no choice"
    query = next(one for one in matrices if one["name"] == "model.layers.1.self_attn.q_proj.weight")
    assert query["cost_with"] == ["model.layers.1.self_attn.k_proj.weight"] and "8/32" in query["cost_by_form"]


def test_a_bundle_that_lies_elsewhere_is_named_by_its_folder(
    source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run from the folder that it lies in, where the checkpoint lies too."""
    assert build(source, "new", "--output", "else/where", scheme="w4a8") == 0
    told = record(source.parent / "else" / "where")["evaluation"]
    assert told["command"] == "appliance evaluate where --source tiny --windows 1" and not (home / "models" / "new").exists()
    assert build(source, "own/new", "--output", "own/new", scheme="w4a8") == 0
    assert (
        record(source.parent / "own" / "new")["evaluation"]["command"] == "appliance evaluate own/new --source tiny --windows 1"
    )
    (source.parent / "else" / "where").rename(source.parent / "where")
    capsys.readouterr()
    assert again(f"{told['command']} --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == told["texts"] and found["command"] == told["command"]


def test_the_record_says_what_it_was_made_from_and_with(source: Path, home: Path) -> None:
    assert build(source, "new", scheme="w4a8") == 0
    told, manifest = record(home / "models" / "new"), open_bundle(home / "models" / "new").manifest.provenance
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.glob("*.safetensors")}
    assert told["source"]["name"] == "tiny" and digests.items() <= told["source"]["files"].items()
    assert told["source"]["files"] == manifest.source_sha256
    assert told["versions"] == manifest.versions and {"python", "onnxruntime"} <= set(told["versions"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--exception", "*.v_prj.weight=8"], "no weight is called so; near to it: model.layers.0.self_attn.v_proj.weight"),
        (["--exception", "*.v_proj.weight=7"], "is no PATTERN=BITS or PATTERN=BITS/GROUP"),
        (["--exception", "*.v_proj.weight=8/33"], "in 8 bits, group 33; target cpu takes groups of 16, 32, 64, 128"),
        (["--asymmetric"], "scheme w8a8 has no 4-bit weights that could have zero points; leave out --asymmetric"),
    ],
)
def test_a_wish_that_cannot_be_is_one_line(
    words: list[str], says: str, source: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(source, "new", *words, scheme="w8a8") == 2
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1] and not (home / "models" / "new").exists()


def test_four_bits_that_were_asked_for_can_have_zero_points(source: Path, home: Path) -> None:
    assert build(source, "new", "--asymmetric", "--exception", "*.up_proj.weight=4", scheme="w8a8") == 0
    found = record(home / "models" / "new")
    assert {one["roles"][0] for one in found["matrices"] if not one["symmetric"]} == {"mlp.up"}
