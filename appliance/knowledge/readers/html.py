"""HTML as a browser shows it: no scripts, styles or hidden parts. Anchors are headings.

Knows: which elements are blocks, which are never shown. Does not know: style sheets or scripts, which it never runs.
"""

import re

from selectolax.lexbor import LexborHTMLParser, LexborNode

from appliance.knowledge.document import Extract, Headings, Section
from appliance.knowledge.encoding import decode

SUFFIXES = (".html", ".htm", ".xhtml")
VERSION = 1

_UNSEEN = ("script", "style", "noscript", "template", "head", "svg", "math", "iframe", "object", "canvas", "audio", "video",
           "select", "textarea", "button", "input")  # fmt: skip
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        """address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer form
           h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section summary table tbody tfoot thead tr ul""",
    )
)
_CELLS = ("td", "th")
_HEADING = re.compile(r"h[1-6]")


def read(data: bytes) -> Extract:
    """One section from every heading to the next."""
    return extract(decode(data))


def extract(source: str) -> Extract:
    """The same of decoded HTML."""
    tree = LexborHTMLParser(source)
    body = tree.body
    if body is None:
        return Extract("", (), "heading")
    body.strip_tags([*_UNSEEN, "[hidden]"])
    page = _Page()
    _walk(body, page)
    return page.finish()


class _Page:
    """Text under construction."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._headings = Headings()
        self._cuts = [(0, "")]

    def write(self, text: str) -> None:
        """Text of one line; white space counts once, as in a browser."""
        ends_blank = not self._pieces or self._pieces[-1][-1:].isspace()
        words = re.sub(r"[ \t\n\r\f]+", " ", text)
        self.add(words.lstrip(" ") if ends_blank else words)

    def add(self, text: str) -> None:
        """Text as it stands."""
        if text:
            self._pieces.append(text)
            self._length += len(text)

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self._pieces and not self._pieces[-1].endswith("\n"):
            self.add("\n")

    def heading(self, level: int, title: str) -> None:
        """A section begins."""
        self.end_line()
        self._cuts.append((self._length, self._headings.enter(level, title)))

    def finish(self) -> Extract:
        """Everything written so far."""
        text = "".join(self._pieces)
        ends = [start for start, _ in self._cuts[1:]] + [len(text)]
        cuts = zip(self._cuts, ends, strict=True)
        return Extract(text, tuple(Section(name, at, end) for (at, name), end in cuts if text[at:end].strip()), "heading")


def _walk(top: LexborNode, page: _Page) -> None:
    """Depth first without recursion: a hostile file may nest a million deep.

    A stack of (node, whether its end is meant).
    """
    stack: list[tuple[LexborNode, bool]] = [(top, False)]
    preformatted = 0
    while stack:
        node, leaving = stack.pop()
        tag = node.tag or ""
        if tag == "-text":
            text = node.text_content or ""
            page.add(text) if preformatted else page.write(text)
            continue
        if tag in _BLOCKS:
            page.end_line()
        if tag == "pre":
            preformatted += -1 if leaving else 1
        if leaving:
            if tag in _CELLS:
                page.write(" ")
            continue
        if _HEADING.fullmatch(tag):
            page.heading(int(tag[1]), node.text(deep=True))
        stack.append((node, True))
        child = node.last_child
        while child is not None:
            stack.append((child, False))
            child = child.prev
