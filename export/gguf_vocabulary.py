"""A tokenizer rebuilt from the vocabulary inside a GGUF, where that is all there is.

Knows: `tokenizer.ggml.*` metadata, and which way of cutting text each `tokenizer.ggml.pre` name stands for.
Does not know: where files go (`export.tokenizer`), or how tokenizers run.

    model "gpt2"  -> tokenizer.json    byte-level BPE: tokens + merges + the cuts of its `pre` name
    model "llama" -> tokenizer.model   SentencePiece BPE: pieces + scores + types, bytes for what is unknown

Source: the GGUF specification (token types 1 normal .. 6 byte); sentencepiece_model.proto, whose piece types have the same
numbers. The cuts are those the model families published in their own tokenizer.json; "default" is what llama.cpp
does for a vocabulary that names none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LARGEST_VOCABULARY = 4_000_000
AGAIN = "fetch the file again, or add the model's tokenizer.json beside it"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cuts:
    """How text is cut before merging.

    Attributes:
        patterns: regular expressions, one after the other; what none of them matches is a piece of its own.
        normalizer: Unicode form the text is brought to first, or None.
        whole_pieces: a piece that is in the vocabulary is taken whole, even if merging would not reach it.
        bos: BOS goes first where the file does not say.
    """

    patterns: tuple[str, ...]
    normalizer: str | None = None
    whole_pieces: bool = False
    bos: bool = False


_LLAMA3_CUTS = Cuts((_LLAMA3,), whole_pieces=True, bos=True)
CUTS: Mapping[str, Cuts] = {
    "default": Cuts((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Cuts((_GPT2 + r"|\s+",)),
    "llama-bpe": _LLAMA3_CUTS,
    "llama-v3": _LLAMA3_CUTS,
    "llama3": _LLAMA3_CUTS,
    "qwen2": Cuts((_QWEN2,), normalizer="NFC"),
    "smollm": Cuts((r"\p{N}", _GPT2 + r"|\s+")),
}


@dataclass(frozen=True)
class Vocabulary:
    """A GGUF's vocabulary, checked.

    Attributes:
        model: "gpt2" or "llama".
        tokens: text of each id, as the file spells it.
        types: GGUF token type of each id.
        bos, eos, unknown, padding: ids, or None.
        add_bos: BOS goes before a text.
        space_prefix: a space goes before a text.
    """

    model: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    add_bos: bool
    space_prefix: bool

    def controls(self) -> dict[str, int]:
        """Control tokens by name."""
        return {self.tokens[token]: token for token, kind in enumerate(self.types) if kind == CONTROL}


def read_vocabulary(config: Mapping[str, Any], where: str) -> Vocabulary:
    """Read and check the vocabulary of GGUF metadata.

    Raises:
        CheckpointError: there is none, its model or `pre` name is not known, lists of different lengths, a token twice,
            an id outside of it.
    """
    model = config.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f'{where}: its tokenizer is of the kind {model!r}; kinds that are read: "gpt2", "llama"',
            "add the model's tokenizer.json beside it",
        )
    tokens = _listed(config, "tokenizer.ggml.tokens", where, str)
    if not 1 <= len(tokens) <= LARGEST_VOCABULARY:
        raise CheckpointError(f"{where}: its vocabulary has {len(tokens)} tokens", AGAIN)
    types = tuple(int(kind) for kind in _listed(config, "tokenizer.ggml.token_type", where, int) or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{where}: its vocabulary has {len(tokens)} tokens and {len(types)} types", AGAIN)
    _refuse_twice(tokens, where)
    cuts = _cuts(config, where) if model == "gpt2" else None
    return Vocabulary(
        model=model,
        tokens=tuple(tokens),
        types=types,
        bos=_token(config, "bos", len(tokens), where),
        eos=_token(config, "eos", len(tokens), where),
        unknown=_token(config, "unknown", len(tokens), where),
        padding=_token(config, "padding", len(tokens), where),
        add_bos=bool(config.get("tokenizer.ggml.add_bos_token", cuts.bos if cuts else True)),
        space_prefix=bool(config.get("tokenizer.ggml.add_space_prefix", cuts is None)),
    )


def build_tokenizer_json(config: Mapping[str, Any], vocabulary: Vocabulary, where: str) -> str:
    """The text of a tokenizer.json for a byte-level BPE vocabulary.

    Raises:
        CheckpointError: a merge that is no pair of tokens, or whose result is no token.
    """
    cuts = _cuts(config, where)
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in cuts.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(token, vocabulary) for token in _added_ids(vocabulary)],
            "normalizer": {"type": cuts.normalizer} if cuts.normalizer else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
            "post_processor": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": cuts.whole_pieces,
                "vocab": {text: token for token, text in enumerate(vocabulary.tokens)},
                "merges": _merges(config, vocabulary, where),
            },
        },
        ensure_ascii=False,
    )


def build_sentencepiece(config: Mapping[str, Any], vocabulary: Vocabulary, where: str) -> bytes:
    """A serialized SentencePiece model for a vocabulary with scores.

    The space before a text is left to the runtime (`TokenizerInfo.space_prefix`), so the model itself adds none.

    Raises:
        CheckpointError: no score for each token, or no token for what is unknown.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    tokens, size = vocabulary.tokens, len(vocabulary.tokens)
    scores = _listed(config, "tokenizer.ggml.scores", where, float)
    if len(scores) != size:
        raise CheckpointError(f"{where}: its vocabulary has {size} tokens and {len(scores)} scores", AGAIN)
    unknown: int = vocabulary.unknown if vocabulary.unknown is not None else _unknown(vocabulary, where)
    model = proto.ModelProto()
    for token, (text, kind, score) in enumerate(zip(tokens, vocabulary.types, scores, strict=True)):
        kind = UNKNOWN if token == unknown else CONTROL if kind == UNKNOWN else kind
        spelled = text if kind in (CONTROL, UNKNOWN) else text.replace(" ", "\u2581")
        model.pieces.add(piece=spelled, score=float(score), type=kind)
    trainer = model.trainer_spec
    trainer.model_type = proto.TrainerSpec.BPE
    trainer.vocab_size = size
    trainer.byte_fallback = BYTE in vocabulary.types
    trainer.unk_id, trainer.unk_piece = unknown, tokens[unknown]
    for name, special in (("bos", vocabulary.bos), ("eos", vocabulary.eos), ("pad", vocabulary.padding)):
        setattr(trainer, f"{name}_id", -1 if special is None else special)
        if special is not None:
            setattr(trainer, f"{name}_piece", tokens[special])
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    data: bytes = model.SerializeToString()
    return data


def _cuts(config: Mapping[str, Any], where: str) -> Cuts:
    name = config.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in CUTS:
        raise CheckpointError(
            f"{where}: its way of cutting text, tokenizer.ggml.pre = {name!r}, is not known; known: {', '.join(sorted(CUTS))}",
            "add the model's tokenizer.json beside it",
        )
    return CUTS[name]


def _added_ids(vocabulary: Vocabulary) -> list[int]:
    """Tokens that are found in the text before it is cut."""
    return [token for token, kind in enumerate(vocabulary.types) if kind in (CONTROL, USER_DEFINED)]


def _added(token: int, vocabulary: Vocabulary) -> dict[str, Any]:
    special = vocabulary.types[token] == CONTROL
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": vocabulary.tokens[token], **flags, "special": special}


def _merges(config: Mapping[str, Any], vocabulary: Vocabulary, where: str) -> list[list[str]]:
    known = set(vocabulary.tokens)
    pairs = []
    for merge in _listed(config, "tokenizer.ggml.merges", where, str):
        pair = merge.split(" ")
        if len(pair) != 2 or not known.issuperset(pair) or "".join(pair) not in known:
            raise CheckpointError(f"{where}: merge {merge!r} does not join two tokens to a third", AGAIN)
        pairs.append(pair)
    return pairs


def _unknown(vocabulary: Vocabulary, where: str) -> int:
    named = [token for token, kind in enumerate(vocabulary.types) if kind == UNKNOWN]
    if "<unk>" in vocabulary.tokens:
        named.append(vocabulary.tokens.index("<unk>"))
    if not named:
        raise CheckpointError(f"{where}: its vocabulary names no token for what is unknown", AGAIN)
    return named[0]


def _listed(config: Mapping[str, Any], key: str, where: str, kind: type) -> Sequence[Any]:
    """The array under `key`; empty when it is not there."""
    found = config.get(key)
    if found is None:
        return []
    items = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(items, list | tuple) or any(not isinstance(item, int | float if kind is float else kind) for item in items):
        raise CheckpointError(f"{where}: {key} is no list of {kind.__name__}", AGAIN)
    return items


def _refuse_twice(tokens: Sequence[str], where: str) -> None:
    first: dict[str, int] = {}
    for token, text in enumerate(tokens):
        if not text:
            raise CheckpointError(f"{where}: token {token} is empty", AGAIN)
        if first.setdefault(text, token) != token:
            raise CheckpointError(f"{where}: tokens {first[text]} and {token} are both {text!r}", AGAIN)


def _token(config: Mapping[str, Any], name: str, size: int, where: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token = config.get(key)
    if token is None:
        return None
    if not isinstance(token, int) or not 0 <= token < size:
        raise CheckpointError(f"{where}: {key} = {token!r} is outside the vocabulary of {size}", AGAIN)
    return token
