"""Plain text, tables of comma-separated values, source code: every file that is text. Anchors are line ranges.

Knows: nothing of any language. Does not know: chunks, which get narrower line ranges.
"""

from appliance.knowledge.document import Extract, Section, lines_anchor
from appliance.knowledge.encoding import decode

SUFFIXES = (".txt", ".text", ".log", ".csv", ".tsv", ".rst", ".tex", ".org")
VERSION = 1


def read(data: bytes) -> Extract:
    """The text as it stands, one section."""
    text = decode(data)
    sections = (Section(lines_anchor(1, text.rstrip("\n").count("\n") + 1), 0, len(text)),) if text.strip() else ()
    return Extract(text, sections, "lines")
