"""The vocabulary of a checkpoint as the one file a bundle carries.

Knows: tokenizer.json, SentencePiece models, tokens added beside them, and that a GGUF may be all there is.
Does not know: begin and end tokens, templates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from appliance.bundle.tokenizer_file import parse_json, parse_sentencepiece, read_bytes
from appliance.errors import CheckpointError
from export.checkpoint.sidecars import read_object
from export.checkpoint.source import Checkpoint
from export.gguf_vocabulary import build_sentencepiece, build_tokenizer_json, read_vocabulary

FIX = "fetch the checkpoint again"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
SpacePrefix = Literal["never", "first", "always"]


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary ready to be written.

    Attributes:
        kind, file, data: as the manifest names it, and the bytes.
        ids: ids of the tokens that are found in text before it is cut, by how they are written.
        controls: those of them that are no text.
        size: one more than the largest id.
        adds_bos: whether BOS goes first, or the id the file itself puts first; None when it does not say.
        added: SentencePiece only, tokens that the model lacks.
        space_prefix: SentencePiece only, see `TokenizerInfo`.
    """

    kind: Literal["tokenizers", "sentencepiece"]
    file: str
    data: bytes
    ids: Mapping[str, int]
    controls: frozenset[str]
    size: int
    adds_bos: int | bool | None = None
    added: Mapping[int, str] = field(default_factory=dict)
    space_prefix: SpacePrefix = "never"


def read_vocabulary_files(checkpoint: Checkpoint) -> Vocabulary:
    """The first there is of tokenizer.json, tokenizer.model and a GGUF's own vocabulary.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if path := checkpoint.sidecar(TOKENIZER_JSON):
        return _from_json(read_bytes(path, CheckpointError, FIX), path, added_tokens(checkpoint))
    if path := checkpoint.sidecar(TOKENIZER_MODEL):
        return _from_sentencepiece(checkpoint, path)
    if checkpoint.format == "gguf":
        return _from_gguf(checkpoint)
    raise CheckpointError(
        f"{checkpoint.path} has no tokenizer: neither {TOKENIZER_JSON} nor {TOKENIZER_MODEL}",
        "add the one that was published with the model",
    )


def tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The decoded tokenizer_config.json, empty when there is none."""
    path = checkpoint.sidecar("tokenizer_config.json")
    return read_object(path) if path else {}


def added_tokens(checkpoint: Checkpoint) -> dict[int, dict[str, Any]]:
    """Tokens that tokenizer_config.json or added_tokens.json add to the vocabulary file, by id."""
    found: dict[int, dict[str, Any]] = {}
    if path := checkpoint.sidecar("added_tokens.json"):
        for text, token in read_object(path).items():
            found[_token_id(token, path)] = {"content": text, "special": True}
    if path := checkpoint.sidecar("tokenizer_config.json"):
        for token, entry in (read_object(path).get("added_tokens_decoder") or {}).items():
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
                raise CheckpointError(f"{path}: added token {token!r} has no content", FIX)
            found[_token_id(token, path)] = entry
    return found


def _token_id(token: object, path: Path) -> int:
    if isinstance(token, str) and token.isascii() and token.isdigit():
        token = int(token)
    if not isinstance(token, int) or not 0 <= token < 1 << 31:
        raise CheckpointError(f"{path}: {token!r} is no token id", FIX)
    return token


def _from_json(data: bytes, path: Path, added: Mapping[int, Mapping[str, Any]]) -> Vocabulary:
    inner = parse_json(data, path, CheckpointError, FIX)
    missing = {token: entry for token, entry in sorted(added.items()) if inner.token_to_id(entry["content"]) is None}
    if missing:
        data = _with_added(data, path, missing)
        inner = parse_json(data, path, CheckpointError, FIX)
    known = inner.get_added_tokens_decoder()
    for token, entry in missing.items():
        if token not in known or known[token].content != entry["content"]:
            raise CheckpointError(f"{path}: added token {entry['content']!r} cannot take the id {token}", FIX)
    plain, full = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
    return Vocabulary(
        kind="tokenizers",
        file=TOKENIZER_JSON,
        data=data,
        ids={entry.content: token for token, entry in known.items()},
        controls=frozenset(entry.content for entry in known.values() if entry.special),
        size=max([*inner.get_vocab().values(), -1]) + 1,
        adds_bos=full[0] if full and full[:1] != plain[:1] else False,
    )


def _with_added(data: bytes, path: Path, missing: Mapping[int, Mapping[str, Any]]) -> bytes:
    """The file with more entries in its list of added tokens."""
    settings = json.loads(data)
    entries = settings.get("added_tokens") or []
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token, entry in missing.items():
        entries.append({"id": token, "content": entry["content"], **{flag: bool(entry.get(flag, False)) for flag in flags}})
    settings["added_tokens"] = sorted(entries, key=lambda entry: entry["id"])
    return json.dumps(settings, ensure_ascii=False).encode()


def _from_sentencepiece(checkpoint: Checkpoint, path: Path) -> Vocabulary:
    """A SentencePiece model, told to leave the space before a text to the runtime."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as proto

    data = read_bytes(path, CheckpointError, FIX)
    parse_sentencepiece(data, path, CheckpointError, FIX)
    model = proto.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as failure:
        raise CheckpointError(f"{path}: not a SentencePiece model: {failure}", FIX) from None
    normalizer = model.normalizer_spec
    if normalizer.remove_extra_whitespaces:
        raise CheckpointError(f"{path}: it drops repeated spaces, which no chat model does", "use the model's tokenizer.json")
    config = tokenizer_config(checkpoint)
    prefix: SpacePrefix = "never"
    if normalizer.add_dummy_prefix and config.get("add_prefix_space") is not False:
        prefix = "always" if config.get("legacy", True) else "first"
    normalizer.add_dummy_prefix = False
    pieces = {piece.piece: token for token, piece in enumerate(model.pieces)}
    added = {token: entry["content"] for token, entry in added_tokens(checkpoint).items()}
    added = {token: text for token, text in added.items() if pieces.get(text) != token}
    kinds = proto.ModelProto.SentencePiece
    controls = {piece.piece: token for token, piece in enumerate(model.pieces) if piece.type in (kinds.CONTROL, kinds.UNKNOWN)}
    ids = controls | {text: token for token, text in added.items()}
    return Vocabulary(
        kind="sentencepiece",
        file=TOKENIZER_MODEL,
        data=model.SerializeToString(deterministic=True),
        ids=ids,
        controls=frozenset(ids),
        size=max([len(model.pieces), *(token + 1 for token in added)]),
        adds_bos=None,
        added=added,
        space_prefix=prefix,
    )


def _from_gguf(checkpoint: Checkpoint) -> Vocabulary:
    where = str(checkpoint.path)
    vocabulary = read_vocabulary(checkpoint.config, where)
    controls = vocabulary.controls()
    if vocabulary.model == "gpt2":
        data = build_tokenizer_json(checkpoint.config, vocabulary, where).encode()
        parse_json(data, checkpoint.path, CheckpointError, FIX)
        return Vocabulary(
            "tokenizers", TOKENIZER_JSON, data, controls, frozenset(controls), len(vocabulary.tokens), vocabulary.add_bos
        )
    data = build_sentencepiece(checkpoint.config, vocabulary, where)
    parse_sentencepiece(data, checkpoint.path, CheckpointError, FIX)
    return Vocabulary(
        kind="sentencepiece",
        file=TOKENIZER_MODEL,
        data=data,
        ids=controls,
        controls=frozenset(controls),
        size=len(vocabulary.tokens),
        adds_bos=vocabulary.add_bos,
        space_prefix="always" if vocabulary.space_prefix else "never",
    )
