"""Word documents. Anchors are headings.

Knows: how large a package may unpack. Does not know: WordprocessingML (mammoth turns it into HTML, `html` takes it from there).
"""

import io
import zipfile

from appliance.knowledge.document import DocumentError, Extract
from appliance.knowledge.readers import html

SUFFIXES = (".docx", ".docm", ".dotx")
VERSION = 1

MOST_UNPACKED = 256 * 2**20
"""Bytes a package may unpack to. The zip directory states them, and no more than stated is ever unpacked."""


def read(data: bytes) -> Extract:
    """One section from every heading to the next."""
    import mammoth

    _check_package(data)
    try:
        result = mammoth.convert_to_html(io.BytesIO(data), convert_image=mammoth.images.img_element(lambda image: {}))
    except MemoryError:
        raise
    except Exception as failure:  # mammoth has no error type of its own: whatever fails inside it is the file's fault
        reason = " ".join(str(failure).split())[:200]
        raise DocumentError("unreadable", f"it is no sound Word document ({type(failure).__name__}: {reason})") from None
    return html.extract(result.value)


def _check_package(data: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            entries = package.infolist()
    except zipfile.BadZipFile:
        raise DocumentError("unreadable", "it is no Word document: not a zip package") from None
    if any(entry.flag_bits & 1 for entry in entries):
        raise DocumentError("unreadable", "it is locked with a password")
    size = sum(entry.file_size for entry in entries)
    if size > MOST_UNPACKED:
        raise DocumentError("unreadable", f"it unpacks to {size / 2**20:.0f} MiB, the limit is {MOST_UNPACKED // 2**20} MiB")
