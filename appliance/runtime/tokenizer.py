"""Text to token ids and back: what a tokenizer is, and how a bundle's is opened.

Knows: the two kinds of tokenizer file a bundle may carry. Does not know: how they work inside
(`appliance.runtime.tokenizer_json`, `appliance.runtime.tokenizer_sentencepiece`), sessions or templates.
"""

from collections.abc import Iterable
from typing import Protocol

from appliance.bundle.manifest import TokenizerInfo
from appliance.bundle.store import Bundle
from appliance.errors import BundleError, RequestError
from appliance.runtime.detokenizer import Detokenizer


class Tokenizer(Protocol):
    """A model's tokenizer. Thread-safe.

    Attributes:
        info: what the manifest says of it.
        vocab_size: ids are 0..vocab_size-1.
        special_ids: tokens that are no text: begin, end, turns, padding.
        strips_leading_space: encoding puts a space before the text, decoding takes it away.
    """

    @property
    def info(self) -> TokenizerInfo: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_leading_space(self) -> bool: ...

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text; empty gives no ids but BOS.
            special: read special tokens written out in the text as those tokens, and add BOS if the model wants one and
                the text does not begin with it. False: the text is only text.
            bos: add BOS or not, whatever the model wants; a rendered chat template brings its own.

        Raises:
            RequestError: the text is no valid Unicode (a lone surrogate).
        """

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; U+FFFD where bytes are no UTF-8. `RequestError` for an id outside the vocabulary."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 that a token stands for; a special token's name. `RequestError` outside the vocabulary."""

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`, if there is one."""


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """Open the bundle's tokenizer.

    Raises:
        BundleError: the file is damaged, or its ids do not fit the model's vocabulary.
    """
    info = bundle.manifest.tokenizer
    path = bundle.file(info.file)
    tokenizer: Tokenizer
    if info.kind == "tokenizers":
        from appliance.runtime.tokenizer_json import JsonTokenizer

        tokenizer = JsonTokenizer(path, info, bundle.manifest.vocab_size)
    else:
        from appliance.runtime.tokenizer_sentencepiece import SentencePieceTokenizer

        tokenizer = SentencePieceTokenizer(path, info, bundle.manifest.vocab_size)
    for token in [*info.eos, *([] if info.bos is None else [info.bos])]:
        if not 0 <= token < tokenizer.vocab_size:
            raise BundleError(f"{path}: begin or end token {token} is outside the vocabulary", "build the bundle again")
    return tokenizer


def checked_text(text: str) -> str:
    """`text`, or a `RequestError` when it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise RequestError(
            f"the text has half a surrogate pair at character {failure.start}", "send valid Unicode", param="messages"
        ) from None
    return text


def finished(ids: list[int], info: TokenizerInfo, bos: bool, size: int) -> list[int]:
    """`ids` with BOS in front when it is wanted, exists and is not there; `RequestError` for one the model does not know.

    Published tokenizers have tokens that their text-only model lacks (Gemma 3's image token is one).
    """
    if ids and max(ids) >= size:
        raise RequestError(f"the text has the special token {max(ids)}, the model knows only {size}", "leave it out")
    if not bos or info.bos is None or ids[:1] == [info.bos]:
        return ids
    return [info.bos, *ids]


def decode_all(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special: bool) -> str:
    """Text of `ids` by the one rule that streaming uses too."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    pieces = [detokenizer.push(token) for token in ids]
    return "".join(pieces) + detokenizer.flush()


def checked_id(token: int, size: int) -> int:
    """`token`, or a `RequestError` when it is outside the vocabulary."""
    if not 0 <= token < size:
        raise RequestError(f"token id {token} is outside the vocabulary of {size}", "use this model's own token ids")
    return token
