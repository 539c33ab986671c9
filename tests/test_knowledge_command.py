"""`appliance knowledge` as a person and as a program see it."""

import json
from pathlib import Path

import pytest

from appliance import cli
from tests import tiny_embedder

Output = pytest.CaptureFixture[str]


@pytest.fixture
def docs(home: Path) -> Path:
    folder = home / "docs"
    folder.mkdir()
    (folder / "häuser.md").write_text("# Houses\nThe roof is red.\n")
    (folder / "blank.txt").write_text(" ")
    return folder


def run(*arguments: str) -> int:
    return cli.main(["knowledge", *arguments])


def test_index_search_and_status_for_a_person(docs: Path, capsys: Output) -> None:
    assert run("index", str(docs)) == 0
    said = capsys.readouterr()
    assert "1 of 2 files can be searched (2 new, 0 changed, 0 gone, 0 unchanged)" in said.out
    assert f"  empty: {docs / 'blank.txt'}: it has no text" in said.out and "Indexing" in said.err
    assert run("search", "red roof") == 0
    assert f"{docs / 'häuser.md'}, Houses  (lexical" in capsys.readouterr().out
    assert run("search", "submarine") == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert run("status") == 0
    said = capsys.readouterr()
    assert "embedding model: none, search is by words alone" in said.out and "1 passages, 0 with vectors" in said.out


def test_programs_get_one_object(docs: Path, home: Path, capsys: Output) -> None:
    tiny_embedder.install(home / "models", home)
    assert run("index", str(docs), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["added"], report["vectors"]) == (2, "") and report["files"][1]["embedded"] == 1
    assert run("search", "roof", "--json", "--mode", "hybrid", "--folder", str(docs), "--limit", "1") == 0
    (hit,) = json.loads(capsys.readouterr().out)["hits"]
    assert hit["path"] == str(docs / "häuser.md") and hit["rankers"] == ["lexical", "vector"]
    assert run("status", str(docs), "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert status["embedder"].startswith("tiny-embedder") and len(status["files"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("index",), "a folder is missing"),
        (("search",), "what to look for is missing"),
        (("search", "x", "--mode", "vector"), "no embedder is installed"),
        (("read", "x"), "invalid value for 'action'"),
    ],
)
def test_mistakes_are_one_line(home: Path, capsys: Output, arguments: tuple[str, ...], words: str) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_missing_folder_is_said_and_fails(home: Path, capsys: Output) -> None:
    assert run("index", str(home / "gone")) == 2
    assert "No such file" in capsys.readouterr().out
