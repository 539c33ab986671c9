"""Texts that losses are measured on, one file each, found by looking. Frozen: a figure names its text, and the text's hash.

Knows: the folder. Does not know: tokens, models, or calibration, which never sees these.

* `prose-jargon.txt`: 260,000 characters of human prose from the Jargon File 4.4.7 (public domain).
* `handbook.txt`: 41,000 characters of technical English with tables and commands: this project's own pages as they stood on
  the last day of November 2026 (Apache-2.0).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BadInput

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Text:
    """One text: its name, what it says, and the sha256 of its bytes."""

    name: str
    content: str
    sha256: str


def known() -> tuple[str, ...]:
    """Names of the texts that come with the program: prose first, it is the one that claims are made on."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.txt")), key=lambda name: (not name.startswith("prose"), name)))


def load(name: str) -> Text:
    """One of the program's own texts."""
    return read(FOLDER / f"{name}.txt")


def read(path: Path) -> Text:
    """A text of UTF-8 in a file, called after it.

    Raises:
        BadInput: there is no such file, or it is no text.
    """
    try:
        data = path.read_bytes()
        content = data.decode("utf-8")
    except OSError as failure:
        raise BadInput(f"cannot read {path}: {failure.strerror}", "name a text file: --text FILE") from None
    except UnicodeDecodeError as failure:
        raise BadInput(f"{path} is no text: byte {failure.start} is no UTF-8", "name a text file: --text FILE") from None
    if not content.strip():
        raise BadInput(f"{path} is empty", "name a text with some words in it: --text FILE")
    return Text(path.stem, content, hashlib.sha256(data).hexdigest())
