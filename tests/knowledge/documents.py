"""Documents for the tests, written byte by byte: the libraries that read them must not be the ones that wrote them.

Knows: the least of PDF and of WordprocessingML. Does not know: the readers.
Sources: ISO 32000-1 (PDF 1.7), 7.5 File structure and 9.4 Text; ECMA-376, part 1.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

_TYPES = (
    '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Default Extension="xml" ContentType="application/xml"/><Override PartName="/word/document.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
_RELATIONS = (
    '<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship '
    'Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)
_WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def pdf(pages: Sequence[str | None]) -> bytes:
    """A PDF with a line of text on each page; None = a page with a black rectangle and no text, as a scan is."""
    bodies: list[bytes] = []
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(pages)))
    bodies.append(b"<< /Type /Catalog /Pages 2 0 R >>")
    bodies.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    bodies.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>")
    for at, text in enumerate(pages):
        resources = "/Resources << /Font << /F 3 0 R >> >> /MediaBox [0 0 612 792]"
        bodies.append(f"<< /Type /Page /Parent 2 0 R {resources} /Contents {5 + 2 * at} 0 R >>".encode())
        drawn = b"100 100 300 400 re f"
        if text is not None:
            lines = text.encode("cp1252").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)").split(b"\n")
            drawn = b"BT /F 12 Tf 14 TL 72 700 Td " + b" ".join(b"(" + line + b") Tj T*" for line in lines) + b" ET"
        bodies.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
    out, places = b"%PDF-1.7\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(bodies) + 1
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        size, table, size, len(out),
    )  # fmt: skip


def docx(path: Path, paragraphs: Sequence[tuple[int, str]]) -> Path:
    """A Word document of (heading level, text); level 0 = body text."""
    body = "".join(
        f"<w:p>{f'<w:pPr><w:pStyle w:val=%sHeading{level}%s/></w:pPr>' % (chr(34), chr(34)) if level else ''}"
        f'<w:r><w:t xml:space="preserve">{escape(text)}</w:t></w:r></w:p>'
        for level, text in paragraphs
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr("[Content_Types].xml", _TYPES)
        package.writestr("_rels/.rels", _RELATIONS)
        package.writestr("word/document.xml", f'<?xml version="1.0"?><w:document {_WORD}><w:body>{body}</w:body></w:document>')
    return path
