"""Token ids to text, one token at a time, never half a character.

Knows: that tokens are bytes of UTF-8. Does not know: which tokenizer made them, or stop strings.

    id -> bytes -> [strip one leading space] -> incremental UTF-8 -> text
                    first bytes only             keeps 0..3 bytes back
"""

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether encoding put a space before the text that decoding takes away."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""


class Detokenizer:
    """Text of a growing list of tokens; constant work for each token.

    The texts of all pushes and of `flush`, joined, equal `tokenizer.decode` of all ids. Bytes that can never become a
    character give U+FFFD exactly where `bytes.decode("utf-8", "replace")` over the whole would put it.

    Args:
        tokenizer: gives the bytes of each token.
        skip_special: leave special tokens out; otherwise their names are shown.
        continues: the tokens go on from earlier text, so that a leading space is part of the text.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool = True, continues: bool = False):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._strip = tokenizer.strips_leading_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is still open."""
        if token in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for a character that was left open, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
