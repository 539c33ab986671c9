"""From bytes to text, for files that do not say how they are encoded.

Knows: byte order marks, UTF-8, a guess as the last resort. Does not know: formats.
"""

import codecs

from appliance.knowledge.document import DocumentError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 256 * 1024


def decode(data: bytes, stated: str = "") -> str:
    """The text of `data`, with "\\n" for every line end.

    Args:
        stated: the encoding that the file itself names, if it does; an unknown name is passed over.

    Raises:
        DocumentError: it is no text.
    """
    return _decode(data, stated).replace("\r\n", "\n").replace("\r", "\n")


def _decode(data: bytes, stated: str) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    for encoding in ("utf-8", stated):
        try:
            text = data.decode(encoding) if encoding else None
        except (UnicodeDecodeError, LookupError):
            continue
        if text is not None and "\0" not in text:
            return text
    return _guess(data)


def _guess(data: bytes) -> str:
    from charset_normalizer import from_bytes  # a third of a second to import, and rarely needed

    best = None if b"\0" in data else from_bytes(data[:_SAMPLE]).best()
    if best is None:
        raise DocumentError("unsupported", "it is neither a known kind of document nor text")
    return data.decode(best.encoding, "replace")
