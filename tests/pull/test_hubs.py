"""Pulling from hubs: files, hashes, licence, broken connections, refusals, no network. The hubs are on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import cli
from tests.pull.hubs import COMMIT, Hub, serving
from tests.pull.packages import gguf_bytes

FILES = {
    "model.safetensors": bytes(range(256)) * 400,
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "README.md": b"# small",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"import os",
    "onnx/model.onnx": b"x",
}
TAKEN = {"model.safetensors", "config.json", "tokenizer.json", "README.md", "pulled.json"}
HUBS = ("hf", "ms")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with serving(Hub(dict(FILES))) as hub:
        yield hub


def pull(hub: Hub, source: str, *more: str) -> int:
    return cli.main(["pull", source, "--endpoint", hub.base, "--yes", *more])


def store(home: Path) -> Path:
    return home / "cache" / "checkpoints"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def left(home: Path) -> set[str]:
    return {path.name for path in store(home).glob("*") if path.name != ".lock"} if store(home).exists() else set()


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("appliance: ")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("kind", HUBS)
def test_a_model_is_taken_without_pickles_and_code(home: Path, hub: Hub, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(hub, f"{kind}:owner/small", "--json") == 0
    out, err = capsys.readouterr()
    assert "licence: apache-2.0" in err
    assert names(store(home) / "small") == TAKEN
    assert (store(home) / "small" / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert json.loads(out)["origin"].startswith(f"{kind}:owner/small@")
    assert not [path for path in hub.asked if "pytorch_model.bin" in path or "modeling.py" in path]


@pytest.mark.parametrize("kind", HUBS)
def test_a_second_pull_asks_no_network(home: Path, hub: Hub, kind: str) -> None:
    assert pull(hub, f"{kind}:owner/small") == 0
    before = len(hub.asked)
    assert cli.main(["pull", f"{kind}:owner/small"]) == 0
    assert len(hub.asked) == before


@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_hash_is_refused_and_leaves_nothing(
    home: Path, hub: Hub, kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    real = FILES[name]
    hub.promised[name] = real[:-1] + bytes([real[-1] ^ 1])
    assert pull(hub, f"{kind}:owner/small") == 2
    assert name in error_line(capsys)
    assert left(home) == set()


@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize("name", ["../evil.gguf", "a/../../evil.gguf", "/evil.gguf"])
def test_a_name_that_leaves_the_folder_is_refused(home: Path, hub: Hub, kind: str, name: str) -> None:
    hub.files = {name: b"evil", "config.json": b"{}"}
    assert pull(hub, f"{kind}:owner/small") in (2, 3)
    assert not list(home.rglob("evil.gguf"))
    assert left(home) <= {".small.partial"}


@pytest.mark.parametrize("kind", HUBS)
def test_a_model_that_is_not_there_is_named(home: Path, hub: Hub, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(hub, f"{kind}:owner/absent") == 2
    assert "absent" in error_line(capsys)
    assert left(home) == set()


@pytest.mark.parametrize("kind", HUBS)
def test_no_network_is_one_line(home: Path, hub: Hub, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", f"{kind}:owner/small", "--endpoint", "http://127.0.0.1:9", "--yes"]) == 3
    assert "cannot be reached" in error_line(capsys)


@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize("status", [500, 503])
def test_a_hub_out_of_order_is_one_line(home: Path, kind: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Hub(dict(FILES), status=status)) as hub:
        assert pull(hub, f"{kind}:owner/small") == 3
    error_line(capsys)


@pytest.mark.parametrize("kind", HUBS)
def test_only_one_of_several_gguf_models_is_taken(home: Path, hub: Hub, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files = {"m-Q4_K_M.gguf": gguf_bytes(), "m-Q8_0.gguf": b"x", "mmproj-m.gguf": b"y", "config.json": b"{}"}
    assert pull(hub, f"{kind}:owner/small") == 2
    assert "--include 'm-Q4_K_M.gguf'" in error_line(capsys)
    assert pull(hub, f"{kind}:owner/small", "--include", "*Q4_K_M*") == 0
    assert names(store(home) / "small") == {"m-Q4_K_M.gguf", "config.json", "pulled.json"}


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_gone_on_with(home: Path, ranges: bool) -> None:
    with serving(Hub(dict(FILES), break_after=50_000, ranges=ranges)) as hub:
        assert pull(hub, "ms:owner/small") == 0
        assert hub.broken == {"model.safetensors"}
    assert (store(home) / "small" / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_second_try_goes_on_where_the_first_stopped(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.pull import download

    monkeypatch.setattr(download, "TRIES", 1)
    first = store(home) / ".small.partial" / "files" / "model.safetensors"
    first.parent.mkdir(parents=True)
    first.write_bytes(FILES["model.safetensors"][:60_000])
    hub.break_after = 1000  # were it begun anew, a break after 1000 bytes would show in the number of requests
    assert pull(hub, "ms:owner/small") == 0
    assert len([path for path in hub.asked if "FilePath=model.safetensors" in path]) == 2
    assert (store(home) / "small" / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_hugging_face_is_meant_by_a_bare_name_and_its_revision_is_recorded(home: Path, hub: Hub) -> None:
    assert pull(hub, f"owner/small@{COMMIT}") == 0
    assert json.loads((store(home) / "small" / "pulled.json").read_text())["origin"] == f"hf:owner/small@{COMMIT}"


@pytest.mark.parametrize("source", ["hf:small", "hf:owner/../small", "ms:owner/small/more", "hf:owner/small?x=1", "ms:"])
def test_a_name_that_would_change_the_address_is_refused(home: Path, hub: Hub, source: str) -> None:
    assert pull(hub, source) == 2
    assert hub.asked == []
