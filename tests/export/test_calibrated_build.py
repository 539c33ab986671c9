"""`appliance build --scheme w4a8-gptq`: text, calibration, solving and the record, in one go and after a kill."""

import base64
import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from appliance import cli
from appliance.bundle.store import open_bundle
from quant import calibrate, schemes, selfwritten, sensitivity
from quant.band import Band
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(3, 64, 2, 1, 96, vocab=512)
TOKENS = ["--calibration-tokens", "1024"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    write_safetensors(folder / "tiny", MODEL, "float16", tokenizer=True)
    return folder / "tiny"


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of an undisturbed build."""
    home = tmp_path_factory.mktemp("whole")
    (home / "appliance.toml").write_text(f'[paths]\nmodels = "{home / "models"}"\ncache = "{home / "cache"}"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APPLIANCE_CONFIG", str(home / "appliance.toml"))
        assert build(source, "whole") == 0
    assert not list((home / "models").glob(".*")), "the work folder is gone"
    return home / "models" / "whole"


def build(source: Path, name: str, *more: str, scheme: str = "w4a8-gptq") -> int:
    return cli.main(["build", str(source), "--name", name, "--scheme", scheme, "--accept-loss", "--windows", "1", *TOKENS, *more])


def record(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "record.json").read_text())
    return found


def weights(bundle: Path) -> bytes:
    return (bundle / "cpu" / "weights.bin").read_bytes()


def levels(graph: Path) -> set[tuple[int, int]]:
    """(bits, accuracy level) of every MatMulNBits."""
    nodes = [node for node in onnx.load(graph, load_external_data=False).graph.node if node.op_type == "MatMulNBits"]
    told = [{one.name: one.i for one in node.attribute} for node in nodes]
    return {(one["bits"], one["accuracy_level"]) for one in told}


def test_the_record_holds_the_text_and_what_each_matrix_lost(whole: Path) -> None:
    told = record(whole)
    text = told["calibration"]
    ids = np.frombuffer(base64.b64decode(text["ids"]), "<u4").reshape(text["windows"], text["window"])
    assert (text["kind"], text["tokens"], text["seed"]) == ("self-written", ids.size, 1) and ids.max() < 512
    assert 900 < ids.size <= 1024 and len({tuple(row) for row in ids.tolist()}) == len(ids)
    body = [one for one in told["matrices"] if one["roles"][0] not in ("embed", "head")]
    assert len(body) == 7 * MODEL.layers and all(one["solver"] == "gptq" and 0 < one["proxy"] < 0.2 for one in body)
    assert {one["solver"] for one in told["matrices"] if one not in body} == {"fit"}


def test_a_rerun_and_the_records_own_text_give_identical_bytes(whole: Path, source: Path, home: Path) -> None:
    assert build(source, "again") == 0
    again = home / "models" / "again"
    assert weights(again) == weights(whole) and record(again)["calibration"] == record(whole)["calibration"]
    assert build(source, "given", "--calibration", str(whole / "record.json")) == 0
    given = home / "models" / "given"
    assert weights(given) == weights(whole)
    assert record(given)["calibration"]["sha256"] == record(whole)["calibration"]["sha256"]
    assert record(given)["calibration"]["kind"] == "record"
    assert build(source, "plain", scheme="w4a8-rtn") == 0
    assert weights(home / "models" / "plain") != weights(whole)


@pytest.mark.parametrize("stage", ["write text", "calibrate"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_build_goes_on_and_gives_identical_bytes(
    stage: str, how: signal.Signals, whole: Path, source: Path, home: Path
) -> None:
    call = [
        sys.executable, "-m", "appliance", "build", str(source), "--name", "stopped", "--scheme", "w4a8-gptq", "--accept-loss",
        "--windows", "1", *TOKENS,
    ]  # fmt: skip
    child = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(stage):
            break
    work = home / "models" / ".stopped.work"
    if stage == "calibrate":
        until = time.monotonic() + 60
        while child.poll() is None and not list(work.glob("*.q.npy")) and time.monotonic() < until:
            time.sleep(0.01)
    child.send_signal(how)
    child.communicate()
    assert child.returncode in (130, -how), f"it had ended before: {child.returncode}"
    assert work.is_dir() and not (home / "models" / "stopped").exists()
    done = {path.name: path.stat().st_mtime_ns for path in work.glob("*.npy")}
    assert subprocess.run(call, capture_output=True).returncode == 0
    stopped = home / "models" / "stopped"
    assert weights(stopped) == weights(whole) and (stage != "calibrate" or done)
    assert record(stopped)["calibration"] == record(whole)["calibration"]


def test_a_persons_own_text_is_taken(source: Path, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The quick brown fox jumps over the lazy dog, and then it rests. " * 60, encoding="utf-8")
    (folder / "b.md").write_text(
        "# Was sonst noch geschah\n\nÜber den Wolken muß die Freiheit wohl grenzenlos sein.\n" * 40, encoding="utf-8"
    )
    (folder / "c.bin").write_bytes(bytes(range(256)))
    assert build(source, "own", "--calibration", str(folder)) == 0
    told = record(home / "models" / "own")
    assert told["calibration"]["kind"] == "text" and [one["name"] for one in told["calibration"]["files"]] == ["a.txt", "b.md"]
    assert "--calibration texts" in told["command"] and "--calibration-tokens 1024" in told["command"]


BAD = {
    "missing": (lambda at: at / "nowhere.txt", "there is no file or folder"),
    "not text": (lambda at: _file(at / "a.txt", b"\xff\xfe\x00\x01" * 900), "is no UTF-8 text: byte 0 cannot be read"),
    "nul": (lambda at: _file(at / "a.txt", b"abc\0" * 900), "holds NUL characters"),
    "short": (lambda at: _file(at / "a.txt", b"only this"), "tokens; calibrate on at least 1024"),
    "empty folder": (lambda at: at, "holds no text"),
    "no record": (lambda at: _file(at / "record.json", b'{"calibration": null}'), "is no record of a calibrated bundle"),
    "damaged record": (
        lambda at: _file(at / "r.json", b'{"calibration": {"ids": "AAAA", "windows": 1, "window": 1, "sha256": ""}}'),
        "holds no whole calibration text",
    ),
}


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", BAD)
def test_bad_text_is_one_line_and_leaves_nothing(
    kind: str, source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = BAD[kind]
    place = tmp_path / "given"
    place.mkdir()
    assert build(source, "bad", "--calibration", str(make(place))) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert message in line, line
    assert not (home / "models").exists() or not list((home / "models").iterdir())


def test_what_a_scheme_cannot_use_is_said(source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _file(tmp_path / "a.txt", b"some words and more of them " * 400)
    assert build(source, "no", "--calibration", str(text), scheme="w4a8") == 2
    assert "scheme w4a8 is not calibrated" in capsys.readouterr().err
    assert build(source, "no", "--budget", "5", scheme="w4a8") == 2
    assert "so nothing can be chosen" in capsys.readouterr().err


def test_zero_points_come_with_asymmetric(source: Path, home: Path) -> None:
    assert build(source, "uneven", "--asymmetric", scheme="w4a8") == 0
    told = record(home / "models" / "uneven")
    assert all(one["symmetric"] == (one["roles"][0] in ("embed", "head")) for one in told["matrices"])
    assert all(one["reason"] == ("" if one["symmetric"] else "asked for: --asymmetric") for one in told["matrices"])
    assert "--asymmetric" in told["command"] and told["options"]["symmetric"] is False
    assert not open_bundle(home / "models" / "uneven").manifest.scheme.roles["attn.q"].symmetric


def test_a_calibrated_build_that_lost_too_much_keeps_its_results_for_the_next(
    source: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = dataclasses.replace(schemes.find("w4a8-gptq"), band=Band(kl=1e-9))
    monkeypatch.setattr(schemes, "find", lambda name, options=None: narrow)
    call = ["build", str(source), "--name", "lost", "--scheme", "w4a8-gptq", "--windows", "1", *TOKENS]
    assert cli.main(call) == 4
    kept = {path: path.stat().st_mtime_ns for path in (home / "models" / ".lost.work").glob("*.q.npy")}
    assert kept and not (home / "models" / "lost").exists()
    monkeypatch.setattr(calibrate, "walk", None)
    assert cli.main([*call, "--accept-loss"]) == 0, "nothing is calibrated again"
    assert not (home / "models" / ".lost.work").exists()


def test_a_build_that_clipped_too_much_is_refused_with_the_weight(
    source: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = dataclasses.replace(schemes.find("w4a8"), band=Band(kl=9, delta=9, layer_snr_db=-99, cosine=-1, saturation=0.0))
    monkeypatch.setattr(schemes, "find", lambda name, options=None: narrow)
    assert cli.main(["build", str(source), "--name", "clipped", "--scheme", "w4a8", "--windows", "1"]) == 4
    assert (
        re.search(r"of the weights of \S+ were clipped", capsys.readouterr().err) and not (home / "models" / "clipped").exists()
    )


def test_what_is_kept_serves_the_next_build(source: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "kept"
    assert build(source, "first", "--budget", "6", "--work", str(place), scheme="w4a8-mixed") == 0
    assert build(source, "apart", "--budget", "5.5", scheme="w4a8-mixed") == 0
    monkeypatch.setattr(selfwritten, "write_text", None)
    monkeypatch.setattr(sensitivity._Run, "measured", None)
    assert build(source, "second", "--budget", "5.5", "--work", str(place), scheme="w4a8-mixed") == 0
    assert weights(home / "models" / "second") == weights(home / "models" / "apart") != weights(home / "models" / "first")
    assert levels(home / "models" / "second" / "cpu" / "model.onnx") == {(4, 4), (8, 4)}
    shipped = [record(home / "models" / name)["bits_per_body_weight"] for name in ("first", "second")]
    assert 5.7 < shipped[0] <= 6 and 5.2 < shipped[1] <= 5.5, "what the files hold is what was to be spent"
    assert "--work" not in record(home / "models" / "second")["command"], "a folder of this machine says nothing elsewhere"


def test_a_folder_to_keep_things_in_that_is_a_file_is_one_line(
    source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(source, "no", "--work", str(_file(tmp_path / "a.txt", b"words"))) == 2
    assert "a.txt" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "a.txt").read_bytes() == b"words" and not list((home / "models").glob("*"))


def test_two_builds_do_not_share_a_work_folder_at_once(
    source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "kept"
    place.mkdir()
    with open(place / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert build(source, "second", "--work", str(place)) == 3
        assert "another build works in" in capsys.readouterr().err.splitlines()[-1]
    assert not (home / "models").exists() or not list((home / "models").iterdir())


def test_another_configuration_of_the_same_weights_shares_nothing(source: Path, home: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "kept", tmp_path / "other"
    shutil.copytree(source, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0}))
    assert build(source, "one", "--work", str(place)) == 0
    assert build(other, "two", "--work", str(place)) == 0
    assert build(other, "apart") == 0
    assert weights(home / "models" / "two") == weights(home / "models" / "apart")
