"""Tokenizer files: opened with every kind of damage turned into one clear error.

Knows: which libraries read them and how those fail. Does not know: what is done with an opened tokenizer.
"""

from pathlib import Path

import sentencepiece
import tokenizers

from appliance.errors import ApplianceError

LARGEST_FILE = 256 << 20
"""Bytes; the largest published tokenizer.json (262144 tokens, pretty printed) has 33 MB."""


def read_bytes(path: Path, error: type[ApplianceError], fix: str) -> bytes:
    """The file's bytes; `error` when it is larger than any tokenizer."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise error(f"{path} has {size} bytes, more than any tokenizer (the limit is {LARGEST_FILE})", fix)
    return path.read_bytes()


def parse_json(data: bytes, path: Path, error: type[ApplianceError], fix: str) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json`, with truncation and padding switched off: nothing is cut in silence."""
    try:
        inner = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as failure:  # the library raises plain Exception, and its panics are no Exception at all
        raise error(f"{path}: not a tokenizer.json: {_reason(failure)}", fix) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def parse_sentencepiece(data: bytes, path: Path, error: type[ApplianceError], fix: str) -> sentencepiece.SentencePieceProcessor:
    """The tokenizer of a SentencePiece model."""
    inner = sentencepiece.SentencePieceProcessor()
    try:
        inner.load_from_serialized_proto(data)
    except (RuntimeError, ValueError, OSError, TypeError) as failure:
        raise error(f"{path}: not a SentencePiece model: {_reason(failure)}", fix) from None
    return inner


def _reason(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return lines[0][:200] if lines else type(failure).__name__
