"""Search: words and vectors joined by rank, folders, limits, refusals."""

import random
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import BadInput
from appliance.knowledge.index import Knowledge
from appliance.knowledge.search import fuse
from tests.knowledge.fake_embedder import FakeEmbedder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "docs"
    for name, text in {
        "a/animals.txt": "The feline sleeps all day.",
        "a/weather.txt": "Regen und Wind, it will be wet.",
        "b/office.txt": "The bill is due. Pay the bill.",
        "b/cat.txt": "A cat and an invoice.",
        "b/other.txt": "Nothing of that kind. Nothing at all.",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture
def index(tmp_path: Path, folder: Path) -> Knowledge:
    made = Knowledge(tmp_path / "k.db", FakeEmbedder())
    made.index(folder)
    return made


def test_vectors_find_what_words_do_not(index: Knowledge) -> None:
    assert [hit.path.name for hit in index.search("katze", mode="lexical")] == []
    hits = index.search("katze", mode="vector")
    assert hits[0].path.name == "animals.txt" and hits[0].rankers == ("vector",)
    assert hits[0].vector == pytest.approx(1.0, abs=1e-5) and hits[0].lexical is None


def test_what_both_find_comes_first(index: Knowledge) -> None:
    hits = index.search("bill")
    assert hits[0].path.name == "office.txt" and hits[0].rankers == ("lexical", "vector")
    assert hits[0].score == pytest.approx(2 / 61)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_cosines_are_those_of_the_vectors(index: Knowledge) -> None:
    embed = FakeEmbedder()
    asked = np.array(embed(["cat invoice rain"])[0])
    for hit in index.search("cat invoice rain", mode="vector"):
        assert hit.vector == pytest.approx(float(asked @ np.array(embed([hit.text])[0])), abs=1e-5)


def test_folders_are_kept_apart(index: Knowledge, folder: Path) -> None:
    for mode in ("lexical", "vector", "hybrid"):
        names = {hit.path.name for hit in index.search("cat invoice bill", folders=[folder / "b"], mode=mode)}
        assert names and names <= {"office.txt", "cat.txt", "other.txt"}
    assert [hit.path.name for hit in index.search("cat", folders=[folder / "b" / "cat.txt"])] == ["cat.txt"]
    assert index.search("cat", folders=[]) == [] == index.search("cat", folders=[folder / "c"])
    both = index.search("feline bill", folders=[folder / "a", folder / "b"])
    assert {"animals.txt", "office.txt"} <= {hit.path.name for hit in both}


def test_the_limit_holds(index: Knowledge) -> None:
    assert len(index.search("cat", limit=2)) == 2 and len(index.search("cat", limit=100)) == 5


def test_a_file_is_found_by_its_name(index: Knowledge) -> None:
    assert [hit.path.name for hit in index.search("office", mode="lexical")] == ["office.txt"]


@pytest.mark.parametrize(
    ("query", "limit", "word"), [("", 8, "empty"), ("  ", 8, "empty"), ("x", 0, "limit"), ("x", 101, "limit")]
)
def test_bad_questions_are_refused(index: Knowledge, query: str, limit: int, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        index.search(query, limit)


def test_words_rank_by_how_much_a_passage_is_about_them(index: Knowledge, folder: Path) -> None:
    (folder / "b" / "z.txt").write_text("Walnut, walnut and walnut.")
    (folder / "b" / "y.txt").write_text("One walnut among " + "many other words of no account " * 10)
    index.index(folder)
    hits = index.search("walnut", mode="lexical")
    assert [hit.path.name for hit in hits] == ["z.txt", "y.txt"]
    assert hits[0].lexical and hits[1].lexical and hits[0].lexical > hits[1].lexical > 0


def test_without_an_embedder_words_alone_answer(tmp_path: Path, folder: Path) -> None:
    index = Knowledge(tmp_path / "words.db")
    report = index.index(folder)
    assert report.vectors == "" and index.embedder is None
    assert [hit.path.name for hit in index.search("bill")] == ["office.txt"]
    for mode in ("vector", "hybrid"):
        with pytest.raises(BadInput, match="no embedder is installed"):
            index.search("bill", mode=mode)


def test_an_embedder_whose_vectors_are_not_there_yet_is_said(tmp_path: Path, folder: Path) -> None:
    Knowledge(tmp_path / "words.db").index(folder)
    index = Knowledge(tmp_path / "words.db", FakeEmbedder())
    assert index.search("bill")[0].rankers == ("lexical",)
    with pytest.raises(BadInput, match="no vectors of the installed embedder"):
        index.search("bill", mode="vector")


def test_ranks_are_joined_as_the_paper_says() -> None:
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    lists = [chance.sample(range(30), 12) for _ in range(2)]
    found = fuse({"lexical": lists[0], "vector": lists[1]})
    for number, score in found.items():
        wanted = sum(1 / (60 + ranked.index(number) + 1) for ranked in lists if number in ranked)
        assert score == pytest.approx(wanted), seed
    assert list(found) == sorted(found, key=lambda one: (-found[one], one)), seed
    assert set(found) == set(lists[0]) | set(lists[1])
