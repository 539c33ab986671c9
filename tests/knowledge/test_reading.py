"""The reading child: whatever a file does to its reader is a condition with a reason, and the next file is read."""

import dataclasses
import hashlib
import os
import time
from pathlib import Path

import pytest

from appliance.errors import NotFound
from appliance.knowledge import reading
from appliance.knowledge.document import DocumentError
from appliance.knowledge.reader_process import Limits
from appliance.knowledge.reading import locate, open_reader, read_document
from tests.knowledge import documents

LIMITS = Limits(file_bytes=2**20, characters=5000, seconds=2, memory=2**30)

EVIL: dict[str, tuple[str, bool]] = {
    "hang": ("took over 2 s", False),
    "deaf": ("took over 2 s", False),
    "crash": ("crashed .SIGSEGV.", True),
    "leave": ("crashed .exit code 7.", True),
    "swell": ("over 1024 MiB of memory", False),
    "fail": ("ValueError: odd file", True),
}


@pytest.mark.parametrize("word", EVIL)
def test_a_misbehaving_reader_is_survived(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason, lasting = EVIL[word]
    monkeypatch.setattr(reading, "PROGRAM", ("-m", "tests.knowledge.evil_reader"))
    monkeypatch.setattr(reading, "GRACE", 1.0)
    (tmp_path / "evil.txt").write_text(word)
    (tmp_path / "good.txt").write_text("good")
    begun = time.monotonic()
    with open_reader(LIMITS) as reader:
        with pytest.raises(DocumentError, match=reason) as caught:
            reader.read(tmp_path / "evil.txt")
        assert caught.value.condition == "unreadable" and caught.value.lasting is lasting
        assert reader.read(tmp_path / "good.txt").text == "good"
    assert time.monotonic() - begun < 20


def test_what_a_library_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PROGRAM", ("-m", "tests.knowledge.evil_reader"))
    (tmp_path / "a.txt").write_text("print me")
    document = read_document(tmp_path / "a.txt", LIMITS)
    assert document.text == "print me" and document.sha256 == hashlib.sha256(b"print me").hexdigest()


def test_large_files_and_long_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_bytes(b"x" * (2**20 + 1))
    (tmp_path / "long.txt").write_bytes(b"x" * 5001)
    (tmp_path / "fits.txt").write_bytes(b"x" * 5000)
    with open_reader(LIMITS) as reader:
        for name, reason in (("large", "1.0 MiB, the limit is 1 MiB"), ("long", "5001 characters of text, the limit is 5000")):
            with pytest.raises(DocumentError, match=reason):
                reader.read(tmp_path / f"{name}.txt")
        assert len(reader.read(tmp_path / "fits.txt").text) == 5000


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "target").write_text("secret")
    (tmp_path / "link.txt").symlink_to(tmp_path / "target")
    with open_reader(LIMITS) as reader:
        for name in ("pipe.txt", "link.txt"):
            with pytest.raises(DocumentError, match=r"no regular file|cannot be opened"):
                reader.read(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_a_file_without_text_is_empty(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(content)
    with pytest.raises(DocumentError) as caught:
        read_document(tmp_path / "a.md")
    assert caught.value.condition == "empty"


def test_places_are_read_from_disk_again(tmp_path: Path) -> None:
    note, page, name = tmp_path / "a.md", tmp_path / "b.pdf", tmp_path / "заметка 三.txt"
    note.write_text("# One\nfirst\n## Two\nsecond\n")
    page.write_bytes(documents.pdf(["front", "back"]))
    name.write_text("eins\nzwei\ndrei\n")
    assert locate(note, "One > Two") == "## Two\nsecond\n"
    assert locate(page, "page 2").strip() == "back"
    assert locate(name, "lines 2-3") == "zwei\ndrei"
    note.write_text("# One\nfirst\n## Two\nchanged\n")
    assert locate(note, "One > Two") == "## Two\nchanged\n"
    for path, anchor in ((note, "One > Three"), (page, "page 3"), (name, "lines 3-9"), (name, "lines 0-1"), (note, "lines 1-2")):
        with pytest.raises(NotFound, match="no place"):
            locate(path, anchor)
    with pytest.raises(NotFound, match="does not exist"):
        locate(tmp_path / "gone.md", "One")


def test_limits_go_to_the_child_whole() -> None:
    assert all(value > 0 for value in dataclasses.asdict(Limits()).values())
