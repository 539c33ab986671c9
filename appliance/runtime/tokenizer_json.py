"""`tokenizer.json` through the `tokenizers` library.

Knows: how pieces are written by byte-level, byte-fallback and WordPiece vocabularies. Does not know: BOS rules beyond
`TokenizerInfo`, templates.
Source: the byte-to-character table is GPT-2's (Radford et al. 2019): printable Latin-1 characters stand for themselves,
the other 68 bytes for U+0100 and up.
"""

import json
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from appliance.bundle.manifest import TokenizerInfo
from appliance.bundle.tokenizer_file import parse_json, read_bytes
from appliance.errors import BundleError
from appliance.runtime.tokenizer import checked_id, checked_text, decode_all, finished

FIX = "build the bundle again"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    """A tokenizer that `tokenizers` runs; see `appliance.runtime.tokenizer.Tokenizer`."""

    def __init__(self, path: Path, info: TokenizerInfo, model_size: int):
        self.info = info
        data = read_bytes(path, BundleError, FIX)
        self._inner = parse_json(data, path, BundleError, FIX)
        decoder = _decoder(self._inner)
        added = self._inner.get_added_tokens_decoder()
        self.vocab_size = min(_vocab_size(self._inner, added, path), model_size)
        self._added = {token: entry.content for token, entry in added.items()}
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special) | frozenset(info.eos)
        self._style = _style(decoder, path)
        self.strips_leading_space = _strips(decoder)
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """See the protocol."""
        with self._lock:  # the switch belongs to the shared object
            self._inner.encode_special_tokens = not special
            ids = self._inner.encode(checked_text(text), add_special_tokens=False).ids
        return finished(ids, self.info, self.info.add_bos and special if bos is None else bos, self.vocab_size)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """See the protocol."""
        return decode_all(self, ids, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """See the protocol."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._spell(checked_id(token, self.vocab_size))
        return data

    def token_id(self, text: str) -> int | None:
        """See the protocol."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._inner.id_to_token(token)
        if piece is None:  # a hole in the numbering
            return b""
        if self._style == "bytes":
            return piece_bytes(piece)
        if self._style == "words":
            return piece[2:].encode() if piece.startswith("##") else b" " + piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()


def piece_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; a piece with a character outside the table is taken as it is written."""
    try:
        return bytes(_byte_of(ord(char)) for char in piece)
    except ValueError:
        return piece.encode()


def _byte_of(code: int) -> int:
    if code < 0x100:
        return code if _stands_for_itself(code) else -1  # bytes() refuses -1
    return _SHIFTED[code - 0x100] if code - 0x100 < len(_SHIFTED) else -1


def _stands_for_itself(code: int) -> bool:
    return 0x21 <= code <= 0x7E or 0xA1 <= code <= 0xAC or 0xAE <= code <= 0xFF


_SHIFTED = tuple(code for code in range(0x100) if not _stands_for_itself(code))


def _vocab_size(inner: tokenizers.Tokenizer, added: dict[int, Any], path: Path) -> int:
    """One more than the largest id; holes are allowed, as published vocabularies have them."""
    ids = [*inner.get_vocab(with_added_tokens=False).values(), *added]
    if not ids:
        raise BundleError(f"{path}: the vocabulary is empty", FIX)
    return max(ids) + 1


def _decoder(inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """The decoder as tokenizer.json has it; reading the whole file once more would double the time of loading."""
    found: dict[str, Any] = {} if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    return found


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder as the list of its parts."""
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return parts


def _style(decoder: dict[str, Any], path: Path) -> str:
    kinds = {part.get("type") for part in _parts(decoder)}
    if "ByteLevel" in kinds:
        return "bytes"
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return "spaces"
    if "WordPiece" in kinds:
        return "words"
    names = ", ".join(sorted(str(kind) for kind in kinds))
    raise BundleError(f"{path}: its decoder ({names}) is not one of ByteLevel, ByteFallback, Metaspace, WordPiece")


def _strips(decoder: dict[str, Any]) -> bool:
    """Whether decoding takes away one leading space."""
    for part in _parts(decoder):
        kind = part.get("type")
        if kind == "WordPiece" or (kind == "Metaspace" and part.get("prepend_scheme", "always") != "never"):
            return True
        if kind == "Strip" and part.get("content") == " " and part.get("start", 0) > 0:
            return True
    return False
