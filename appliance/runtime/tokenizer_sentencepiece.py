"""SentencePiece models through the `sentencepiece` library, with tokens added beside the model.

Knows: piece types, byte fallback, the space that some models put before a text. Does not know: templates.
Source: sentencepiece_model.proto; Kudo and Richardson 2018.

    text -> split at special and added tokens -> each piece of text: [leading space] + sentencepiece -> ids
"""

import re
from collections.abc import Iterable
from pathlib import Path

from appliance.bundle.manifest import TokenizerInfo
from appliance.bundle.tokenizer_file import parse_sentencepiece, read_bytes
from appliance.errors import BundleError
from appliance.runtime.tokenizer import checked_id, checked_text, decode_all, finished

FIX = "build the bundle again"


class SentencePieceTokenizer:
    """A tokenizer that `sentencepiece` runs; see `appliance.runtime.tokenizer.Tokenizer`."""

    def __init__(self, path: Path, info: TokenizerInfo, model_size: int):
        self.info = info
        self._inner = parse_sentencepiece(read_bytes(path, BundleError, FIX), path, BundleError, FIX)
        size = self._inner.get_piece_size()
        self.vocab_size = min(max([size, *(token + 1 for token in info.added)]), model_size)
        control = {token for token in range(size) if self._inner.is_control(token) or self._inner.is_unknown(token)}
        self.special_ids = frozenset(control | set(info.added) | set(info.eos))
        self.strips_leading_space = info.space_prefix != "never"
        self._names = {token: self._inner.id_to_piece(token) for token in sorted(control)} | info.added
        self._ids = {name: token for token, name in self._names.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """See the protocol."""
        checked_text(text)
        ids: list[int] = []
        parts = self._split.split(text) if special and self._split else [text]
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self._ids[part])
            elif part:
                prefixed = self.info.space_prefix == "always" or (self.info.space_prefix == "first" and at == 0)
                ids += self._inner.encode(" " + part if prefixed else part)
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
        if text in self._ids:
            return self._ids[text]
        found: int = self._inner.piece_to_id(text)
        return None if found == self._inner.unk_id() else found

    def _spell(self, token: int) -> bytes:
        if token in self._names:
            return self._names[token].encode()
        if token >= self._inner.get_piece_size():  # a hole between the model and its added tokens
            return b""
        piece: str = self._inner.id_to_piece(token)
        if self._inner.is_byte(token):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace("\u2581", " ").encode()
