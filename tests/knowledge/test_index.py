"""The index over real folders: what is read, kept, replaced and forgotten, and what a bad file or folder leaves."""

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from appliance.errors import NotFound, StorageError, Unavailable
from appliance.knowledge import update, vectors
from appliance.knowledge.index import Knowledge
from appliance.knowledge.reading import Reader
from appliance.knowledge.walk import LINK_IN, LINK_NOWHERE, LINK_OUT
from tests.knowledge import documents
from tests.knowledge.fake_embedder import FakeEmbedder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four kinds of documents, one with a name that is not ASCII."""
    path = tmp_path / "docs"
    (path / "unter ordner").mkdir(parents=True)
    (path / "guide.md").write_text(
        "# Guide\n## Router\nHold the reset button for ten seconds.\n## Cat\nFeed the cat twice a day.\n"
    )
    (path / "page.html").write_text("<h1>Weather</h1><p>It will rain.<script>alert('hidden')</script></p>")
    documents.docx(path / "unter ordner" / "Übersicht März.docx", [(1, "Rechnung"), (0, "Zahlbar bis 30. November.")])
    (path / "scan.pdf").write_bytes(documents.pdf(["First page about nothing.", "The warranty lasts two years."]))
    return path


@pytest.fixture
def index(tmp_path: Path) -> Knowledge:
    return Knowledge(tmp_path / "state" / "knowledge.db")


def found(index: Knowledge, query: str) -> list[str]:
    return [hit.path.name for hit in index.search(query)]


def test_every_kind_is_found_with_its_place(index: Knowledge, folder: Path) -> None:
    report = index.index(folder)
    assert report.problem == "" and not report.failed and (report.added, report.read) == (4, 4)
    places = {
        "reset button": ("guide.md", "Guide > Router", "## Router\nHold the reset button for ten seconds."),
        "rain": ("page.html", "Weather", "Weather\nIt will rain."),
        "zahlbar november": ("Übersicht März.docx", "Rechnung", "Rechnung\nZahlbar bis 30. November."),
        "warranty": ("scan.pdf", "page 2", "The warranty lasts two years."),
    }
    for query, (name, anchor, text) in places.items():
        hit = index.search(query)[0]
        assert (hit.path.name, hit.anchor, hit.text) == (name, anchor, text)
        document = index.document(hit.path)
        assert document.text[hit.start : hit.end] == hit.text and document.sha256 == hit.sha256
        assert hit.text in index.locate(hit.path, hit.anchor)
        assert hit.rankers == ("lexical",) and hit.vector is None and hit.lexical and hit.lexical > 0
    assert found(index, "alert hidden") == []


def test_unchanged_files_are_not_opened(index: Knowledge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.index(folder)
    opened: list[str] = []
    real = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, path: opened.append(path.name) or real(self, path))
    report = index.index(folder)
    assert opened == [] and (report.read, report.unchanged, len(report.files)) == (0, 4, 4)
    os.utime(folder / "guide.md", ns=(1, 1))  # touched, not changed
    report = index.index(folder)
    assert opened == ["guide.md"] and (report.changed, report.unchanged) == (0, 4)
    status = index.status()
    (folder / "guide.md").write_text("# Guide\nNow it is about submarines.\n")
    report = index.index(folder)
    assert (report.read, report.changed, report.unchanged) == (1, 1, 3)
    assert found(index, "submarines") == ["guide.md"] and found(index, "reset button") == []
    assert [one.sha256 for one in index.status() if one.path.name != "guide.md"] == [
        one.sha256 for one in status if one.path.name != "guide.md"
    ]


def test_a_change_that_sets_the_time_back_is_seen(index: Knowledge, folder: Path) -> None:
    index.index(folder)
    path = folder / "page.html"
    before = path.stat()
    path.write_text(path.read_text().replace("rain", "snow"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert index.index(folder).changed == 1 and found(index, "snow") == ["page.html"]


def test_deleted_files_leave_the_index(index: Knowledge, folder: Path) -> None:
    index.index(folder)
    (folder / "scan.pdf").unlink()
    report = index.index(folder)
    assert report.removed == 1 and len(report.files) == 3
    assert found(index, "warranty") == []
    with pytest.raises(NotFound, match="not in the knowledge index"):
        index.document(folder / "scan.pdf")


def test_a_folder_that_went_away_is_not_found_until_it_is_back(index: Knowledge, folder: Path) -> None:
    index.index(folder)
    away = folder.rename(folder.parent / "elsewhere")
    report = index.index(folder)
    assert "No such file" in report.problem and report.files == ()
    assert found(index, "warranty") == []
    assert {one.condition for one in index.status()} == {"unreadable"}
    assert "No such file" in index.folders()[0].problem
    away.rename(folder)
    report = index.index(folder)
    assert (report.problem, report.read, report.unchanged) == ("", 0, 4)
    assert found(index, "warranty") == ["scan.pdf"] and index.folders()[0].problem == ""


def test_bad_files_have_a_status_and_a_reason(index: Knowledge, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("outside of the folder")
    bad = folder / "bad"
    bad.mkdir()
    (bad / "empty.md").write_text("")
    (bad / "blank.pdf").write_bytes(documents.pdf([None]))
    (bad / "broken.pdf").write_bytes(b"%PDF-1.7\nnothing")
    (bad / "broken.docx").write_bytes(b"PK\x03\x04 no package")
    (bad / "photo.jpg").write_bytes(bytes(range(256)) * 8)
    (bad / "out.txt").symlink_to(secret)
    (bad / "outfolder").symlink_to(tmp_path)
    (bad / "in.md").symlink_to(folder / "guide.md")
    (bad / ".hidden.md").write_text("never seen")
    (bad / "loop.md").symlink_to("loop.md")
    (bad / "gone.md").symlink_to("not-there.md")
    os.mkfifo(bad / "pipe.txt")
    report = index.index(folder)
    conditions = {one.path.name: (one.condition, one.reason) for one in report.failed}
    assert {name: condition for name, (condition, _) in conditions.items()} == {
        "empty.md": "empty", "blank.pdf": "needs OCR", "broken.pdf": "unreadable", "broken.docx": "unreadable",
        "photo.jpg": "unsupported", "out.txt": "unsupported", "outfolder": "unsupported", "in.md": "unsupported",
        "pipe.txt": "unsupported", "loop.md": "unsupported", "gone.md": "unsupported",
    }  # fmt: skip
    assert all(reason for _, reason in conditions.values())
    assert conditions["out.txt"][1] == conditions["outfolder"][1] == LINK_OUT and conditions["in.md"][1] == LINK_IN
    assert conditions["loop.md"][1] == conditions["gone.md"][1] == LINK_NOWHERE
    assert found(index, "outside") == [] and found(index, "never") == []
    assert found(index, "warranty") == ["scan.pdf"]
    again = index.index(folder)
    assert (again.read, again.changed) == (0, 0) and len(again.failed) == 11


def test_what_failed_for_now_is_tried_again(index: Knowledge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.knowledge.document import DocumentError

    def fail(self: Reader, path: Path) -> None:
        raise DocumentError("unreadable", "reading it took over 60 s", lasting=False)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", fail)
        assert len(index.index(folder).failed) == 4
    report = index.index(folder)
    assert (report.read, report.failed) == (4, ())


def test_names_that_are_no_text_are_said_and_harm_nothing(index: Knowledge, folder: Path) -> None:
    name = os.fsencode(folder) + b"/\xff\xfe.txt"
    with open(name, "w") as file:
        file.write("x")
    report = index.index(folder)
    assert [(one.path.name, one.reason) for one in report.failed] == [("\\xff\\xfe.txt", "its name is not valid UTF-8")]
    assert len(report.files) == 5


def test_a_new_reader_reads_its_files_again(index: Knowledge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.knowledge.readers import markdown

    index.index(folder)
    monkeypatch.setattr(markdown, "VERSION", markdown.VERSION + 1)
    report = index.index(folder)
    assert (report.read, report.changed) == (1, 1)


def test_an_interrupted_run_leaves_whole_files_and_goes_on(index: Knowledge, folder: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.index(folder, stop)
    assert len(index.status()) == 2
    report = index.index(folder)
    assert (report.added, report.read, report.unchanged) == (2, 2, 2)


def test_a_file_is_replaced_in_one_transaction(index: Knowledge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of writing the new passages, the old ones are all there."""
    index.index(folder)
    (folder / "guide.md").write_text("# New\nfirst\n# Other\nsecond\n")
    real = update.segmented

    def fail(text: str) -> str:
        if "second" in text:
            raise RuntimeError("killed")
        return real(text)

    with monkeypatch.context() as patch:
        patch.setattr(update, "segmented", fail)
        with pytest.raises(RuntimeError, match="killed"):
            index.index(folder)
    assert {hit.anchor for hit in index.search("reset button feed cat")} == {"Guide > Router", "Guide > Cat"}
    assert found(index, "first") == ["scan.pdf"]
    assert index.index(folder).changed == 1 and found(index, "second") == ["guide.md"]


def test_progress_counts_every_file(index: Knowledge, folder: Path) -> None:
    told: list[tuple[int, int, str]] = []
    index.index(folder, lambda *step: told.append(step))
    names = ["guide.md", "page.html", "scan.pdf", "unter ordner/Übersicht März.docx", ""]
    assert told == [(at, 4, name) for at, name in enumerate(names)]


def test_two_runs_at_once_are_refused(index: Knowledge, folder: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(done: int, total: int, name: str) -> None:
        inside.set()
        assert go_on.wait(30)

    thread = threading.Thread(target=index.index, args=(folder, wait))
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(Unavailable, match="being indexed already"):
            index.index(folder)
        index.search("warranty")  # a reader does not wait for a writer
    finally:
        go_on.set()
        thread.join()


def test_another_process_reads_what_this_one_wrote(index: Knowledge, folder: Path, tmp_path: Path) -> None:
    index.index(folder)
    code = (
        "import sys; from pathlib import Path; from appliance.knowledge.index import Knowledge\n"
        "print(Knowledge(Path(sys.argv[1])).search('warranty')[0].anchor)"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "state" / "knowledge.db")]
    assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == "page 2\n"


def test_a_damaged_index_is_said(index: Knowledge, folder: Path, tmp_path: Path) -> None:
    index.index(folder)
    (tmp_path / "state" / "knowledge.db").write_bytes(b"no database at all" * 1000)
    for name in ("-wal", "-shm"):
        (tmp_path / "state" / f"knowledge.db{name}").unlink(missing_ok=True)
    with pytest.raises(StorageError, match="no SQLite database"):
        index.search("x")


def test_folders_inside_each_other_share_their_files(index: Knowledge, folder: Path) -> None:
    index.index(folder)
    assert index.index(folder / "unter ordner").unchanged == 1
    assert len(index.status()) == 4 and len(index.folders()) == 2
    (folder.parent / "docs2").mkdir()  # a name that begins like the folder's is no part of it
    (folder.parent / "docs2" / "x.txt").write_text("neighbour")
    index.index(folder.parent / "docs2")
    assert len(index.index(folder).files) == 4 and len(index.status()) == 5 and len(index.status(folder)) == 4


def words_of(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(path)
    try:
        counts = {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("chunks", "words_docsize")
        }
        vectors_there = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'vectors_rowids'").fetchone()
        if vectors_there:
            counts["vectors_rowids"] = connection.execute("SELECT count(*) FROM vectors_rowids").fetchone()[0]
        return counts
    finally:
        connection.close()


def test_vectors_follow_their_passages(tmp_path: Path, folder: Path) -> None:
    """No passage is without words or vector, and none of those without passage, after every kind of change."""
    path, embed = tmp_path / "k.db", FakeEmbedder()
    index = Knowledge(path, embed, embedder="a")
    assert all(one.embedded == one.chunks > 0 for one in index.index(folder).files)
    (folder / "guide.md").write_text("# Only one\nabout a cat\n")
    (folder / "scan.pdf").unlink()
    (folder / "page.html").write_text("")
    report = index.index(folder)
    assert (report.changed, report.removed) == (2, 1)
    assert set(words_of(path).values()) == {2}
    asked = len(embed.asked)
    index.index(folder)
    assert len(embed.asked) == asked


def test_an_embedder_that_comes_later_or_changes_makes_all_vectors(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "k.db"
    Knowledge(path).index(folder)
    for name, width in (("a", 5), ("b", 7)):
        index = Knowledge(path, FakeEmbedder(width), embedder=name)
        report = index.index(folder)
        assert report.read == 0 and all(one.embedded == one.chunks for one in report.files)
        assert index.search("feline", mode="vector")[0].anchor == "Guide > Cat"
    assert Knowledge(path, FakeEmbedder(5), embedder="a").search("feline") == []  # another's vectors are not compared


def test_a_broken_embedder_leaves_words_and_says_so(tmp_path: Path, folder: Path) -> None:
    embed = FakeEmbedder()
    index = Knowledge(tmp_path / "k.db", embed)
    embed.broken = True
    report = index.index(folder)
    assert "the fake is broken" in report.vectors and not report.failed
    assert sum(one.embedded for one in report.files) == 0
    embed.broken = False
    report = index.index(folder)
    assert report.vectors == "" and all(one.embedded == one.chunks for one in report.files)


def test_a_passage_that_the_embedder_finds_too_long_is_halved(tmp_path: Path, folder: Path) -> None:
    (folder / "long.txt").write_text(("0123456789" * 10 + " rain ") * 4)
    embed = FakeEmbedder(longest=200)
    report = Knowledge(tmp_path / "k.db", embed).index(folder)
    assert report.vectors == "" and all(one.embedded == one.chunks for one in report.files)
    assert max(map(len, embed.asked)) <= 200
    assert abs(sum(one * one for one in vectors._unit(vectors._embedded(embed, "cat" * 200)).tolist()) - 1) < 1e-6
