"""From bytes to text, for files that say at most somewhere inside how they are encoded.

Knows: byte order marks, UTF-8, a guess as the last resort. Does not know: formats; the guess believes a `charset=` that stands
in the first lines, as HTML has it.
"""

import codecs
import contextlib

from appliance.knowledge.document import DocumentError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 256 * 1024


def decode(data: bytes) -> str:
    """The text of `data`, with "\\n" for every line end; `DocumentError` when it is no text."""
    return _decode(data).replace("\r\n", "\n").replace("\r", "\n")


def _decode(data: bytes) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode("utf-8")
        if "\0" not in text:
            return text
    return _guess(data)


def _guess(data: bytes) -> str:
    from charset_normalizer import from_bytes  # a third of a second to import, and rarely needed

    best = None if b"\0" in data else from_bytes(data[:_SAMPLE]).best()
    if best is None:
        raise DocumentError("unsupported", "it is neither a known kind of document nor text")
    return data.decode(best.encoding, "replace")
