"""PDF. Anchors are pages, counted from 1 as viewers do.

Knows: PDFium's text of a page. Does not know: how to read pictures of text; such a file `needs OCR`.
"""

import re

from appliance.knowledge.document import DocumentError, Extract, Section

SUFFIXES = (".pdf",)
VERSION = 1

_HYPHEN = re.compile(r"\ufffe|\x02")  # how PDFium marks a hyphen at a line's end that joins the parts of a word
_ZERO = re.compile(r"\0")


def read(data: bytes) -> Extract:
    """One section a page that has text."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as failure:
        if "password" in str(failure).lower():
            raise DocumentError("unreadable", "it is locked with a password") from None
        raise DocumentError("unreadable", f"it is no sound PDF ({failure})") from None
    pieces: list[str] = []
    sections: list[Section] = []
    length, pictures = 0, 0
    for number in range(len(document)):
        try:
            page = document[number]
            text = _clean(page.get_textpage().get_text_range())
        except pypdfium2.PdfiumError:
            continue  # one broken page does not hide the others
        if not text.strip():
            pictures += 1
            continue
        text = text.rstrip() + "\n\n"
        sections.append(Section(f"page {number + 1}", length, length + len(text)))
        pieces.append(text)
        length += len(text)
    if not sections and pictures:
        raise DocumentError("needs OCR", f"none of its {len(document)} pages has text, only pictures or nothing")
    if not sections:
        raise DocumentError("unreadable", "none of its pages can be opened")
    return Extract("".join(pieces), tuple(sections), "page")


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _ZERO.sub("", _HYPHEN.sub("-", text))
