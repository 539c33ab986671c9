"""show, models, bench and doctor: what they print of what is there, and what they say of what is broken."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from appliance import cli, diagnosis
from appliance.bundle.record import Record, VerdictRecord
from appliance.bundle.store import Bundle
from appliance.commands import bench
from appliance.engine.protocol import Delta, EngineStats, Event, Finished, GenerateRequest, Started, Timings, TokenPrompt
from appliance.errors import BadInput
from tests.api.fake_engine import install_bundle
from tests.report import records


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(list(arguments)) == code
    return capsys.readouterr().out


def test_show_prints_manifest_and_record(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = install_bundle(home / "models", "small")
    facts = json.loads(output(capsys, "show", "small", "--json"))
    assert facts["hash"] == bundle.hash
    assert facts["manifest"] == json.loads((bundle.path / "manifest.json").read_text())
    assert facts["record"] is None
    table = output(capsys, "show", "small", "--verify")
    for word in ("small", "llama", "4096", "w4a8", "block-dynamic", "every file checked", "made up", "record: none"):
        assert word in table
    assert output(capsys, "show", str(bundle.path), "--json")


def with_record(bundle: Bundle, told: Record) -> Bundle:
    (bundle.path / "record.json").write_text(told.model_dump_json())
    return bundle


def test_show_tells_the_loss_in_a_line_and_layers_when_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_record(install_bundle(home / "models", "small"), records.record())
    shown = output(capsys, "show", "small")
    for said in (
        "It lost noticeably: with 5.22 bits a weight it is 24.0% more perplexed by human text", "5.22, 4.26 without embedding",
        "prose-jargon: delta ln PPL +0.2154 ± 0.0113, KL mean 0.190", "weights +0.2100, head -0.0010", "7 tokens (median of 1",
        "the same 1000 tokens (against another reader)", "3.1e-07 at most from numpy's", "appliance evaluate small --windows 2",
        "norm: 1 tensors",
    ):  # fmt: skip
        assert said in shown, said
    assert len(shown.partition("It lost")[2].splitlines()) < 14 and "layers.3" not in shown
    whole = output(capsys, "show", "small", "--layers")
    for said in ("layers.3", "17.0 dB", "layers.3.mlp.down_proj", "8 / 32", "sensitive", "23.0 dB"):
        assert said in whole, said
    assert json.loads(output(capsys, "show", "small", "--json"))["record"] == json.loads(records.record().model_dump_json())


def test_show_tells_how_it_was_quantized(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_record(install_bundle(home / "models", "small"), records.record(**records.conditions()))
    shown = output(capsys, "show", "small")
    for said in records.SAID:
        assert said in shown, said
    whole = output(capsys, "show", "small", "--layers")
    for said in ("block-dynamic", "static-u16", "0.0123", "8 bits cost 7% there", "layers.3.mlp_in", "8 bits in layer 3 cost 7%",
                 "38.0 dB", "32.5 dB"):  # fmt: skip
        assert said in whole, said
    assert "layers.3.mlp_in" not in shown


def test_show_says_what_left_the_band(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = VerdictRecord(band={"kl": 0.1}, complaint="the mean KL is 0.190; look at layers.3", accepted=True)
    with_record(install_bundle(home / "models", "small"), records.record(verdict=verdict))
    assert "out of band  the mean KL is 0.190; look at layers.3 (accepted: --accept-loss)" in output(capsys, "show", "small")


def test_show_writes_the_report(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_record(install_bundle(home / "models", "small"), records.record())
    output(capsys, "show", "small", "--report", str(tmp_path / "page.html"))
    assert "24.0% more perplexed" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert cli.main(["show", "small", "--report", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_show_of_a_bundle_that_was_never_measured(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_record(install_bundle(home / "models", "small"), records.record(evaluation=None, verdict=None, sizes={}))
    assert "Nobody has measured yet what was lost" in output(capsys, "show", "small", "--layers")


def test_an_unknown_key_of_a_record_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = install_bundle(home / "models", "small")
    told = json.loads(records.record().model_dump_json())
    told["evaluation"]["ablation"] = told["evaluation"].pop("ablations")
    (bundle.path / "record.json").write_text(json.dumps(told))
    assert cli.main(["show", "small"]) == 2
    err = capsys.readouterr().err
    assert 'unknown key "evaluation.ablation"; did you mean "ablations"?' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("damage", ["altered", "gone", "key"])
def test_show_refuses_a_damaged_bundle_in_one_line(home: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    bundle = install_bundle(home / "models", "small")
    if damage == "altered":
        (bundle.path / "tokenizer.json").write_text("[]")
    elif damage == "gone":
        (bundle.path / "tokenizer.json").unlink()
    else:
        text = (bundle.path / "manifest.json").read_text()
        (bundle.path / "manifest.json").write_text(text.replace('"architecture"', '"architectur"'))
    assert cli.main(["show", str(bundle.path), "--verify"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert {"altered": "sha256", "gone": "missing", "key": "architectur"}[damage] in err


def test_a_damaged_bundle_is_not_measured(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = install_bundle(home / "models", "small")
    (bundle.path / "tokenizer.json").write_text("[]")  # as long as before
    assert cli.main(["bench", "small"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "tokenizer.json has sha256" in err


def test_show_names_what_is_installed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_bundle(home / "models", "small")
    assert cli.main(["show", "smal"]) == 2
    assert 'did you mean "small"' in capsys.readouterr().err


def test_models_lists_bundles_checkpoints_and_trouble(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "appliance pull" in output(capsys, "models")
    bundle = install_bundle(home / "models", "small")
    install_bundle(home / "models", "broken")
    (home / "models" / "broken" / "tokenizer.json").unlink()
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert cli.main(["pull", str(tmp_path / "tiny.gguf"), "--yes"]) == 0
    capsys.readouterr()
    facts = json.loads(output(capsys, "models", "--json"))
    assert [one["name"] for one in facts["bundles"]] == ["small"]
    assert facts["bundles"][0]["path"] == str(bundle.path)
    assert [one["name"] for one in facts["checkpoints"]] == ["tiny"]
    assert "tokenizer.json" in facts["problems"][0]
    table = output(capsys, "models")
    assert "small" in table and "tiny" in table and "damaged: " in table


@dataclass
class TimedEngine:
    """Claims that prefill takes 1 ms a token and decode 10 ms, more in later requests."""

    context: int = 1000
    asked: int = 0
    unloaded: bool = False

    def load(self) -> None:
        """Nothing to do."""

    def unload(self) -> None:
        self.unloaded = True

    def stream(self, request: GenerateRequest) -> Iterator[Event]:
        assert isinstance(request.prompt, TokenPrompt) and request.ignore_eos and request.max_tokens is not None
        self.asked += 1
        length, slower = len(request.prompt.ids), 1 + (self.asked % 3) / 10
        timings = Timings(0.0, 0.001 * length * slower, 0.01 * (request.max_tokens - 1) * slower)
        yield Started(length, "Fake")
        yield Delta("x")
        yield Finished("length", length, request.max_tokens, 0, timings)

    def stats(self) -> EngineStats:
        return EngineStats("small", "Fake", (), self.context, 0, 0, 0, 0, 0, 0)


def test_bench_takes_the_median_and_says_what_does_not_fit(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_bundle(home / "models", "small")
    engine = TimedEngine()
    monkeypatch.setattr("appliance.engine.pool.open_onnx", lambda target, threads: lambda bundle: engine)
    facts = json.loads(output(capsys, "bench", "small", "--context", "16,990", "--tokens", "21", "--json"))
    assert engine.unloaded
    assert facts["left_out"] == [990]
    [result] = facts["results"]
    assert result["decode"] == pytest.approx(100 / 1.1)
    assert result["prefill"] == pytest.approx(1000 / 1.1)
    assert "does not fit" in output(capsys, "bench", "small", "--context", "16,990", "--tokens", "21")


@pytest.mark.parametrize("text", ["", "a", "16,,3", "-4", "0", "1.5", "²"])
def test_bench_refuses_what_is_no_list(home: Path, text: str) -> None:
    with pytest.raises(BadInput, match="no list of lengths"):
        bench.read_lengths(text)


def rows(home: Path) -> dict[str, diagnosis.Row]:
    return {row.name: row for row in diagnosis.examine()}


@pytest.fixture
def serve_json(home: Path) -> Iterator[Callable[[int, bytes], None]]:
    """Something on the configured port that answers every GET with the given status and body."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Silence."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        config = home / "appliance.toml"
        config.write_text(config.read_text() + f'listen = ["127.0.0.1:{server.server_port}"]\n')

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def free_port(home: Path) -> None:
    config = home / "appliance.toml"
    config.write_text(config.read_text() + 'listen = ["127.0.0.1:9"]\n')


def test_doctor_says_what_is_wrong_and_what_mends_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free_port(home)
    answers = rows(home)
    assert answers["onnxruntime"].state == "ok"
    assert answers["models"].state == "warn" and "pull" in answers["models"].fix
    assert answers["daemon"].state == "warn" and "serve" in answers["daemon"].fix
    assert all(row.fix for row in answers.values() if row.state != "ok")
    assert json.loads(output(capsys, "doctor", "--json"))["ok"] is True
    install_bundle(home / "models", "small")
    assert rows(home)["models"] == diagnosis.Row("models", "ok", "small")
    (home / "models" / "small" / "tokenizer.json").unlink()
    assert rows(home)["models"].state == "fail"
    table = output(capsys, "doctor", code=1)
    assert "tokenizer.json" in table and "-> " in table


def test_doctor_lives_with_a_broken_settings_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "appliance.toml").write_text("[servr]\n")
    answers = rows(home)
    assert answers["settings"].state == "fail" and "servr" in answers["settings"].found
    assert "python" in answers and "daemon" not in answers
    output(capsys, "doctor", code=1)


def test_doctor_names_an_unfinished_pull_and_an_unknown_target(home: Path) -> None:
    (home / "cache" / "checkpoints" / ".half.partial").mkdir(parents=True)
    config = home / "appliance.toml"
    config.write_text(config.read_text() + '\n[engine]\ntarget = "cpuu"\n')
    answers = rows(home)
    assert answers["checkpoints"].state == "warn" and "half" in answers["checkpoints"].found
    assert answers["target"].state == "fail" and "known targets" in answers["target"].fix


@pytest.mark.parametrize(
    ("status", "body", "state", "said"),
    [
        (200, b'{"status": "ready", "model": "small"}', "ok", "small"),
        (503, b'{"error": {"message": "being loaded"}}', "warn", "being loaded"),
        (200, b"<html>", "fail", "something else"),
    ],
)
def test_doctor_asks_the_daemon(
    serve_json: Callable[[int, bytes], None], home: Path, status: int, body: bytes, state: str, said: str
) -> None:
    serve_json(status, body)
    row = rows(home)["daemon"]
    assert row.state == state
    assert said in row.found


@pytest.mark.parametrize(
    ("machine", "line", "state", "said"),
    [
        ("x86_64", "flags\t\t: fpu avx2 avx512_vnni", "ok", "avx512_vnni"),
        ("x86_64", "flags\t\t: fpu avx2", "warn", "avx2"),
        ("x86_64", "flags\t\t: fpu", "warn", "no int8"),
        ("aarch64", "Features\t: fp asimddp", "ok", "asimddp"),
        ("riscv64", "isa : rv64", "ok", "cannot be read"),
    ],
)
def test_doctor_reads_the_processor(tmp_path: Path, machine: str, line: str, state: str, said: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    row = diagnosis.processor(cpuinfo, machine)
    assert (row.state, said in row.found) == (state, True), row


@pytest.mark.parametrize(("free", "state"), [(3_000_000, "ok"), (1_000_000, "warn")])
def test_doctor_reads_the_memory(tmp_path: Path, free: int, state: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       8000000 kB\nMemFree: 5 kB\nMemAvailable:   {free} kB\n")
    assert diagnosis.memory(meminfo).state == state
