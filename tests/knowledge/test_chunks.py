"""Passages: within one section, whole sentences where they fit, nothing lost, and never too long."""

import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from appliance.knowledge.chunks import MOST, TARGET, cut, tokens
from appliance.knowledge.document import AnchorKind, Document, Section

SENTENCE = "The warranty covers every part of the machine for two years. "


def document(*texts: tuple[str, str], anchors: AnchorKind = "heading") -> Document:
    sections, whole = [], ""
    for anchor, text in texts:
        sections.append(Section(anchor, len(whole), len(whole) + len(text)))
        whole += text
    return Document(Path("x"), "text", "", whole, tuple(sections), anchors)


def test_a_passage_never_crosses_a_section() -> None:
    made = document(("A", "Short. "), ("B", "Also short. "), ("C", SENTENCE * 40))
    chunks = cut(made)
    assert [chunk.anchor for chunk in chunks[:2]] == ["A", "B"] and len(chunks) > 3
    for chunk in chunks:
        section = next(one for one in made.sections if one.anchor == chunk.anchor)
        assert section.start <= chunk.start < chunk.end <= section.end


def test_passages_end_with_sentences_and_are_filled() -> None:
    made = document(("A", SENTENCE * 60))
    found = [made.text[chunk.start : chunk.end] for chunk in cut(made)]
    assert all(text.endswith("years.") and text.startswith("The") for text in found)
    assert all(TARGET * 0.7 < tokens(text) <= TARGET for text in found[:-1])


@pytest.mark.parametrize("end", ["。", "！", "？", "።", "।", "! ", "? ", '." '])
def test_sentences_end_in_other_scripts_too(end: str) -> None:
    sentence = "字" * 60 + end
    found = cut(made := document(("A", sentence * 23)))
    assert len(found) > 2
    assert all(made.text[chunk.start : chunk.end].endswith(end.strip()) for chunk in found)


def test_lines_are_counted_for_each_passage() -> None:
    made = document(
        ("lines 1-80", "".join(f"Line {at} says something that is long enough to count.\n\n" for at in range(1, 41))),
        anchors="lines",
    )
    chunks = cut(made)
    lines = made.text.split("\n")
    for chunk in chunks:
        first, last = (int(word) for word in chunk.anchor.removeprefix("lines ").split("-"))
        assert "\n".join(lines[first - 1 : last]) == made.text[chunk.start : chunk.end]
    assert len(chunks) > 1


def test_a_heading_alone_is_no_passage() -> None:
    made = document(("A", "# A\n\n"), ("A > B", "## B\ntext\n"), ("C", "# C\n"))
    assert [chunk.anchor for chunk in cut(made)] == ["A > B", "C"]


@pytest.mark.parametrize("piece", [".", "?!", "\n", "\n ", '. "', "1", "a", "字", " ", "\n1.", '."', "\n-"])
def test_hostile_repetition_costs_no_square(piece: str) -> None:
    """A square would be minutes."""
    begun = time.monotonic()
    cut(document(("lines 1-1", piece * 100_000), anchors="lines"))
    assert time.monotonic() - begun < 20


@hypothesis.given(strategies.lists(strategies.text(max_size=2000), min_size=1, max_size=4), strategies.integers(1, 60))
@hypothesis.settings(deadline=None, max_examples=60)
def test_nothing_is_lost_repeated_or_too_long(texts: list[str], times: int) -> None:
    made = document(*((f"s{at}", text * times) for at, text in enumerate(texts)))
    at, kept = 0, ""
    for chunk in cut(made):
        assert at <= chunk.start < chunk.end
        text = made.text[chunk.start : chunk.end]
        assert text.strip() == text and tokens(text) <= MOST
        assert not made.text[at : chunk.start].strip()
        kept, at = kept + text, chunk.end
    assert not made.text[at:].strip()
