"""The bundle's tokenizer against another reading of the checkpoint's own vocabulary.

Knows: which other readers there are for a kind of vocabulary, and what each cannot see. Does not know: how the bundle's files
were made.

    tokenizer.json    the file of the checkpoint, run by `tokenizers`          the bundle's is run by the same libraries: seen is
    tokenizer.model   the file of the checkpoint, run by `sentencepiece`       what we changed of the file, or ask of them wrongly
    GGUF              llama.cpp, where it is installed (extra "gguf"): written apart from ours
                      else the file's own table of tokens, whose bytes, one token after the other, must be the text again: seen
                      are lost and changed bytes; any cut of the text into tokens that exist will do, so wrong merges are not
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Sequence

from appliance.bundle.record import TokenizerRecord
from export.checkpoint.source import Checkpoint

Encode = Callable[[str], Sequence[int]]
"""A text as token ids, nothing put before it, special tokens read as the text they are."""

SAME_LIBRARY = "faults of the library, which runs the bundle's tokenizer too"
WHERE_IT_IS_CUT = "where a text is cut; only that no byte is lost (the extra gguf compares cuts)"

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def compare(checkpoint: Checkpoint, ours: Encode, texts: Sequence[str]) -> TokenizerRecord:
    """Encode the texts both ways. What differs first is told, never raised."""
    against, theirs, blind = _reader(checkpoint)
    tokens, difference = 0, ""
    for text in texts:
        ids = list(ours(text))
        tokens += len(ids)
        difference = difference or (_by_table(checkpoint, ids, text) if theirs is None else _by_ids(ids, theirs(text)))
    return TokenizerRecord(
        against=against, blind_to=blind, texts=len(texts), tokens=tokens, equal=not difference, first_difference=difference
    )


def _reader(checkpoint: Checkpoint) -> tuple[str, Encode | None, str]:
    """Its name; what encodes, None = only the table of tokens can be asked; what it cannot see."""
    if path := checkpoint.sidecar("tokenizer.json"):
        import tokenizers

        whole = tokenizers.Tokenizer.from_file(str(path))
        whole.no_truncation()
        whole.no_padding()
        whole.encode_special_tokens = True
        said = f"the checkpoint's tokenizer.json, run by tokenizers {tokenizers.__version__}"
        return said, (lambda text: list(whole.encode(text, add_special_tokens=False).ids)), SAME_LIBRARY
    if path := checkpoint.sidecar("tokenizer.model"):
        import sentencepiece

        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
        said = f"the checkpoint's tokenizer.model, run by sentencepiece {sentencepiece.__version__}"
        return said, (lambda text: list(pieces.encode(text))), SAME_LIBRARY
    if importlib.util.find_spec("llama_cpp") is not None:
        return _llama_cpp(checkpoint)
    return "the token table of the GGUF: the tokens' bytes are the text again", None, WHERE_IT_IS_CUT


def _llama_cpp(checkpoint: Checkpoint) -> tuple[str, Encode, str]:
    # By name: it is installed only with the extra "gguf", and nothing else here needs it.
    path = checkpoint.files()[0]
    model = importlib.import_module("llama_cpp").Llama(str(path), vocab_only=True, verbose=False)
    version = importlib.metadata.version("llama-cpp-python")
    said = f"the GGUF, read by llama.cpp (llama-cpp-python {version})"
    return said, (lambda text: list(model.tokenize(text.encode(), add_bos=False, special=False))), ""


def _by_ids(ours: Sequence[int], theirs: Sequence[int]) -> str:
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"token {at} is {one} here and {other} there"
    return "" if len(ours) == len(theirs) else f"{len(ours)} tokens here, {len(theirs)} there"


def _by_table(checkpoint: Checkpoint, ids: Sequence[int], text: str) -> str:
    """Spell the ids with the tokens as the GGUF writes them."""
    tokens = checkpoint.config.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence):
        return "the file has no table of tokens"
    byte_level = checkpoint.config.get("tokenizer.ggml.model") == "gpt2"
    spell = _byte_level if byte_level else _sentencepiece
    data = b"".join(spell(str(tokens[token])) for token in ids)
    wanted = text.encode()
    if data == wanted or (not byte_level and data == b" " + wanted):
        return ""
    at = next(
        (at for at, (one, other) in enumerate(zip(data, wanted, strict=False)) if one != other), min(len(data), len(wanted))
    )
    return f"the tokens spell another text from byte {at} on"


def _alphabet() -> dict[str, int]:
    """GPT-2's: bytes that are printable in Latin-1 stand for themselves, the others for U+0100 and up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _alphabet()


def _byte_level(token: str) -> bytes:
    if all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    return token.encode()  # an added token is written as it is


def _sentencepiece(token: str) -> bytes:
    found = _BYTE.match(token)
    return bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()
