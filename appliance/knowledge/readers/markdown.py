"""Markdown. The text stays as written, marks included, so that a quote of it is found in the file; anchors are headings.

Knows: which lines are headings, as CommonMark says it (a `#` in a code block is none). Does not know: HTML blocks inside.
"""

import re

from markdown_it import MarkdownIt

from appliance.knowledge.document import Extract, Headings, Section
from appliance.knowledge.encoding import decode

SUFFIXES = (".md", ".markdown", ".mdown", ".mkd")
VERSION = 1

_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)


def read(data: bytes) -> Extract:
    """One section from every heading to the next."""
    text = decode(data)
    starts = _line_starts(text)
    skipped = _FRONT_MATTER.match(text)  # its closing line would make a heading of what stands above
    shift = text[: skipped.end()].count("\n") if skipped else 0
    headings = Headings()
    cuts = [(0, "")]
    for line, level, title in _headings(text[skipped.end() :] if skipped else text):
        cuts.append((starts[line + shift], headings.enter(level, title)))
    ends = [start for start, _ in cuts[1:]] + [len(text)]
    found = tuple(Section(anchor, start, end) for (start, anchor), end in zip(cuts, ends, strict=True) if text[start:end].strip())
    return Extract(text, found, "heading")


def _line_starts(text: str) -> list[int]:
    return [0] + [at + 1 for at, character in enumerate(text) if character == "\n"]


def _headings(text: str) -> list[tuple[int, int, str]]:
    """(line counted from 0, level, title without marks) of every heading that is not inside a list or a quotation."""
    tokens = MarkdownIt("commonmark").parse(text)
    found = []
    for at, token in enumerate(tokens):
        if token.type == "heading_open" and token.level == 0 and token.map:
            title = "".join(one.content for one in tokens[at + 1].children or [] if one.type in ("text", "code_inline"))
            found.append((token.map[0], int(token.tag[1:]), title))
    return found
