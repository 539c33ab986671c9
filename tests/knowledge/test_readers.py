"""Each reader: text and anchors of good files, a condition and a reason for the others."""

import zipfile
from pathlib import Path

import pytest

from appliance.knowledge import readers
from appliance.knowledge.document import DocumentError, Extract
from appliance.knowledge.encoding import decode
from appliance.knowledge.readers import docx, html, markdown, pdf, text
from tests.knowledge import documents


def places(extract: Extract) -> dict[str, str]:
    """Text by anchor, white space at the ends apart."""
    return {one.anchor: extract.text[one.start : one.end].strip() for one in extract.sections}


def test_files_go_to_their_readers() -> None:
    assert readers.known() == ["docx", "html", "markdown", "pdf", "text"]
    names = {"a.MD": "markdown", "Straße.html": "html", "a.pdf": "pdf", "b.docx": "docx", "main.py": "text", "README": "text"}
    assert {name: readers.kind_of(name) for name in names} == names


def test_markdown_headings_make_paths() -> None:
    source = (
        "before\n\n# Guide *to* `x`\nintro\n## Setup\none\n```\n# a comment\n```\n    # indented code\nSecond\n------\ntwo\n"
        "## Setup\nagain\n# Setup\nother\n> # quoted\n"
    )
    assert places(markdown.read(source.encode())) == {
        "": "before",
        "Guide to x": "# Guide *to* `x`\nintro",
        "Guide to x > Setup": "## Setup\none\n```\n# a comment\n```\n    # indented code",
        "Guide to x > Second": "Second\n------\ntwo",
        "Guide to x > Setup [2]": "## Setup\nagain",
        "Setup": "# Setup\nother\n> # quoted",
    }


def test_front_matter_is_no_heading_and_shifts_no_line() -> None:
    found = places(markdown.read(b"---\ntitle: x\n---\nfirst\n# One\ntext\n"))
    assert found == {"": "---\ntitle: x\n---\nfirst", "One": "# One\ntext"}


def test_html_is_what_a_browser_shows() -> None:
    source = """<!doctype html><html><head><title>t</title><style>p{}</style></head><body>
      <script>var secret = "run"</script><h1>Top <i>one</i></h1><p>Some   <b>bold</b>\n text.</p>
      <div hidden>unseen</div><noscript>no</noscript><!-- a comment --><template>tpl</template>
      <h2>Table</h2><table><tr><th>Name</th><th>Price</th></tr><tr><td>Nut</td><td>3&nbsp;&euro;</td></tr></table>
      <pre>a\n  b</pre><h2>Table</h2>twice<svg><text>drawn</text></svg></body></html>"""
    found = places(html.read(source.encode()))
    assert list(found) == ["Top one", "Top one > Table", "Top one > Table [2]"]
    assert found["Top one"] == "Top one\nSome bold text."
    assert found["Top one > Table"].startswith("Table\nName Price \nNut 3\xa0€ \na\n  b")
    assert found["Top one > Table [2]"] == "Table\ntwice"


@pytest.mark.parametrize(("text", "encoding"), [("5 € à Paris", "iso-8859-15"), ("Цена: 5 руб.", "koi8-r")])
def test_html_says_its_encoding_itself(text: str, encoding: str) -> None:
    source = f'<html><head><meta charset="{encoding}"></head><body>{text}</body></html>'.encode(encoding)
    assert places(html.read(source)) == {"": text}


def test_headings_without_a_title_have_places_of_their_own() -> None:
    found = markdown.read(b"before\n\n#\nfirst\n\n#\nsecond\n")
    assert [one.anchor for one in found.sections] == ["", " [2]", " [3]"]


def test_html_of_any_depth_is_read() -> None:
    assert "deep" in html.read(b"<div>" * 20000 + b"deep").text


def test_word_headings_make_paths(tmp_path: Path) -> None:
    path = documents.docx(tmp_path / "a.docx", [(0, "before"), (1, "Vertrag"), (0, "Text & mehr."), (2, "§ 1"), (0, "Frist")])
    assert places(docx.read(path.read_bytes())) == {
        "": "before", "Vertrag": "Vertrag\nText & mehr.", "Vertrag > § 1": "§ 1\nFrist",
    }  # fmt: skip


def test_pdf_pages_are_counted_as_viewers_do() -> None:
    found = places(pdf.read(documents.pdf(["Erste Seite für alle.", None, "Third (page).\nTwo lines."])))
    assert found == {"page 1": "Erste Seite für alle.", "page 3": "Third (page).\nTwo lines."}


def test_text_is_one_place() -> None:
    assert places(text.read(b"eins\nzwei\n")) == {"lines 1-2": "eins\nzwei"}


REFUSED: dict[str, tuple[str, bytes, str, str]] = {
    "a PDF without text": ("pdf", documents.pdf([None, None]), "needs OCR", "2 pages"),
    "half a PDF": ("pdf", documents.pdf(["x"])[:60], "unreadable", "no sound PDF"),
    "no PDF": ("pdf", b"hello", "unreadable", "no sound PDF"),
    "no package": ("docx", b"hello", "unreadable", "not a zip"),
    "bytes": ("text", bytes(range(256)) * 20, "unsupported", "neither"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_has_a_condition_and_a_reason(case: str) -> None:
    kind, data, condition, reason = REFUSED[case]
    with pytest.raises(DocumentError, match=reason) as caught:
        readers.find(kind).read(data)
    assert caught.value.condition == condition


def test_a_zip_bomb_is_refused_before_it_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "bomb.docx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package, package.open("word/document.xml", "w") as entry:
        for _ in range(docx.MOST_UNPACKED // 2**20 + 1):
            entry.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    with pytest.raises(DocumentError, match="unpacks to 257 MiB"):
        docx.read(path.read_bytes())


def test_a_package_without_a_document_is_unreadable(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.docx", "w") as package:
        package.writestr("other.txt", "x")
    with pytest.raises(DocumentError, match="no sound Word document"):
        docx.read((tmp_path / "x.docx").read_bytes())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_encodings_are_found(encoding: str) -> None:
    sample = "Die Größe des Gehäuses beträgt 12 cm – für Übergrößen gilt: „auf Anfrage“.\r\nZweite Zeile.\rDritte.\n" * 4
    assert decode(sample.encode(encoding)) == sample.replace("\r\n", "\n").replace("\r", "\n")
