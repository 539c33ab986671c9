"""Cutting a document into passages: whole sentences, within one section, of a size that an embedder takes in.

Knows: sentence ends of many scripts, a guess of token counts. Does not know: any tokenizer, the index.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.knowledge.document import Document, Section, lines_anchor

TARGET = 240
"""Tokens at which a passage is closed. MiniLM was trained on 128 to 256 and takes 512 at most."""
MOST = 360
"""Tokens that one passage has at most, by the guess."""

# A blank line, or the end of a sentence with what closes it and the white space after it, or a line before a list item.
# Scripts that write no spaces end their sentences with marks of their own. A run of marks is looked at once, from its
# beginning: a page of dots must not cost the square of its length.
_SENTENCE_END = re.compile(
    r"""\n[ \t]*+\n\s*+|(?<![.!?…])[.!?…]++["'”’»)\]]*+\s++|[。！？｡।॥።]+["”’」』）]*\s*|\n(?=\s*+(?:[-*+•|]|\d++[.)])\s)"""
)
_WORDS = re.compile(r"[a-zA-Z]+|\d|[^\W\d_]+|[^\w\s]|_")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Chunk:
    """A passage: characters `start` to `end` of the document's text, under the section's anchor or narrower lines."""

    anchor: str
    start: int
    end: int


def tokens(text: str) -> int:
    """About how many tokens a WordPiece tokenizer of English makes of it, rather too many than too few."""
    count = 0
    for word in _WORDS.findall(text):
        count += (len(word) + 5) // 6 if word.isascii() else (len(word) + 1) // 2 if word < "\u0530" else len(word)
    return count


def cut(document: Document) -> list[Chunk]:
    """Every passage of the document, in order.

    Together they cover all of its text but white space, and headings with nothing between them and the first one below:
    those stand in the anchors of what is below.
    """
    found = []
    line, counted = 1, 0  # the number of the line that character `counted` stands in
    for section, following in zip(document.sections, [*document.sections[1:], None], strict=True):
        if following and _bare(document, section, following):
            continue
        for start, end in _packed(document.text, section):
            anchor = section.anchor
            if document.anchors == "lines":
                line, counted = line + document.text.count("\n", counted, start), start
                anchor = lines_anchor(line, line + document.text.count("\n", start, end))
            found.append(Chunk(anchor, start, end))
    return found


def _bare(document: Document, section: Section, following: Section) -> bool:
    """Whether the section is a heading alone, above another one."""
    text = document.text[section.start : section.end].strip()
    return document.anchors == "heading" and "\n" not in text and following.anchor.startswith(f"{section.anchor} > ")


def _packed(text: str, section: Section) -> Iterator[tuple[int, int]]:
    """Neighbouring sentences joined until the target is reached; no white space at either end."""
    start = end = section.start
    size = 0
    for first, last in _sentences(text, section):
        count = tokens(text[first:last])
        if size and size + count > (MOST if size < TARGET // 2 else TARGET):
            yield start, end
            size = 0
        start = start if size else first
        end, size = last, size + count
    if size:
        yield start, end


def _sentences(text: str, section: Section) -> Iterator[tuple[int, int]]:
    """Sentences without the white space around them; one that is too long is cut at white space, or anywhere."""
    at = section.start
    for stop in [*(match.end() for match in _SENTENCE_END.finditer(text, section.start, section.end)), section.end]:
        yield from _pieces(text, *_trimmed(text, at, stop))
        at = stop


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def _pieces(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    if start >= end:
        return
    if end - start <= TARGET or tokens(text[start:end]) <= MOST:
        yield start, end
        return
    middle = (start + end) // 2
    space = _SPACE.search(text, middle, end)
    cut_at = space.end() if space and space.end() < end else middle
    yield from _pieces(text, *_trimmed(text, start, cut_at))
    yield from _pieces(text, *_trimmed(text, cut_at, end))
