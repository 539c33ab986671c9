"""`/appliance/v1/knowledge` over a real daemon: index, overview, search, refusals; with and without an embedder."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from appliance.daemon import Daemon
from appliance.engine.pool import ModelPool, open_onnx
from appliance.library import open_library
from tests import tiny_embedder
from tests.api.conftest import make_config, running
from tests.api.fake_engine import FakeEngine, install_bundle

Start = Callable[[], httpx.Client]
ROUTE = "/appliance/v1/knowledge"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a daemon with its index."""
    with contextlib.ExitStack() as cleanup:

        def go() -> httpx.Client:
            config = make_config(tmp_path)
            install_bundle(config.paths.models)
            real = open_onnx("cpu", 1)
            pool = ModelPool(
                config.paths.models, lambda bundle: real(bundle) if bundle.manifest.task == "embed" else FakeEngine()
            )
            daemon = Daemon(config, pool, knowledge=open_library(config.paths.state, pool))
            url = cleanup.enter_context(running(daemon))
            return cleanup.enter_context(httpx.Client(base_url=url, timeout=60))

        yield go


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "docs"
    path.mkdir()
    (path / "größe.md").write_text("# Sizes\nThe crate measures two metres.\n")
    (path / "empty.txt").write_text("")
    return path


def test_index_look_and_search(start: Start, folder: Path) -> None:
    http = start()
    assert http.get(ROUTE).json() == {"embedder": None, "folders": [], "files": []}
    report = http.post(f"{ROUTE}/index", json={"folder": str(folder)}).json()
    assert (report["problem"], report["added"], report["vectors"]) == ("", 2, "")
    assert [(Path(one["path"]).name, one["condition"]) for one in report["files"]] == [
        ("empty.txt", "empty"),
        ("größe.md", "ready"),
    ]
    overview = http.get(ROUTE).json()
    assert overview["files"] == report["files"] and overview["folders"][0]["path"] == str(folder)
    hits = http.post(f"{ROUTE}/search", json={"query": "crate", "folders": [str(folder)]}).json()["data"]
    assert [(hit["path"], hit["anchor"], hit["rankers"]) for hit in hits] == [(str(folder / "größe.md"), "Sizes", ["lexical"])]
    assert hits[0]["text"] == "# Sizes\nThe crate measures two metres." and hits[0]["vector"] is None


def test_an_embedder_that_is_installed_later_is_used_without_a_restart(start: Start, folder: Path, tmp_path: Path) -> None:
    http = start()
    http.post(f"{ROUTE}/index", json={"folder": str(folder)})
    tiny_embedder.install(tmp_path / "models", tmp_path / "work")
    report = http.post(f"{ROUTE}/index", json={"folder": str(folder)}).json()
    assert (report["read"], report["vectors"]) == (0, "")
    assert http.get(ROUTE).json()["embedder"].startswith("tiny-embedder ")
    hit = http.post(f"{ROUTE}/search", json={"query": "crate"}).json()["data"][0]
    assert hit["rankers"] == ["lexical", "vector"] and -1 <= hit["vector"] <= 1
    assert http.post(f"{ROUTE}/search", json={"query": "zzz", "mode": "vector"}).json()["data"]


REFUSED: dict[str, tuple[str, dict[str, object], str | None]] = {
    "a relative folder": ("index", {"folder": "docs"}, "folder"),
    "no folder": ("index", {}, "folder"),
    "an unknown key": ("search", {"query": "x", "limits": 3}, "limits"),
    "an empty query": ("search", {"query": " "}, "query"),
    "a limit": ("search", {"query": "x", "limit": 0}, "limit"),
    "a mode": ("search", {"query": "x", "mode": "fuzzy"}, "mode"),
    "vectors without an embedder": ("search", {"query": "x", "mode": "vector"}, "mode"),
    "a relative filter": ("search", {"query": "x", "folders": ["docs"]}, "folders"),
}


def test_refusals_name_the_field_and_a_missing_folder_is_in_the_report(start: Start, tmp_path: Path) -> None:
    http = start()
    for case, (action, body, param) in REFUSED.items():
        answer = http.post(f"{ROUTE}/{action}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), case
    answer = http.post(f"{ROUTE}/index", json={"folder": str(tmp_path / "gone")})
    assert answer.status_code == 200 and "No such file" in answer.json()["problem"]
    assert "No such file" in http.get(ROUTE).json()["folders"][0]["problem"]


def test_folders_that_no_path_leads_to(start: Start, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    client = start()
    for route, body in (("index", {"folder": "/a\0b"}), ("search", {"query": "x", "folders": ["/a\0b"]})):
        refused = client.post(f"{ROUTE}/{route}", json=body)
        assert refused.status_code == 400 and "is no path" in refused.json()["error"]["message"]
    report = client.post(f"{ROUTE}/index", json={"folder": str(tmp_path / "loop")}).json()
    assert report["problem"].endswith("Too many levels of symbolic links")
    assert client.post(f"{ROUTE}/search", json={"query": "x", "folders": [str(tmp_path / "loop")]}).json() == {"data": []}
