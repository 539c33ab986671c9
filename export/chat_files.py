"""What a checkpoint says of conversations: special tokens, the chat template, sampling defaults.

Knows: the keys of tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and of GGUF metadata.
Does not know: vocabularies inside (`export.vocabulary_files`), or how templates are rendered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.bundle.generation import GenerationDefaults
from appliance.bundle.store import BundleWriter
from appliance.bundle.template_dialect import check_syntax
from appliance.errors import CheckpointError
from appliance.strict import read
from export.checkpoint.sidecars import read_object
from export.checkpoint.source import Checkpoint
from export.vocabulary_files import FIX, Vocabulary, tokenizer_config

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation.json"
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>",
)  # fmt: skip
"""Tokens that end an answer wherever they are control tokens, even where generation_config.json forgets them."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "separator"}
GGUF_ENDS = ("eos", "eot", "eom")
DEFAULTS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
"""Sampling defaults by their name in generation_config.json, and after "general.sampling." in a GGUF."""


@dataclass(frozen=True)
class SpecialTokens:
    """Begin and end tokens.

    Attributes:
        names: how they are written, by the names templates know them under ("bos_token", ...).
        bos: id, or None.
        stops: ids that end an answer; the tokenizer's own end token first.
        add_bos: BOS goes before a text.
    """

    names: Mapping[str, str]
    bos: int | None
    stops: tuple[int, ...]
    add_bos: bool


def read_special_tokens(checkpoint: Checkpoint, vocabulary: Vocabulary) -> SpecialTokens:
    """Gather special tokens from every file that names some.

    Raises:
        CheckpointError: an id that is no id, or is outside the vocabulary.
    """
    config = tokenizer_config(checkpoint)
    names = _names(checkpoint, config)
    ids = vocabulary.ids
    bos = ids.get(names.get("bos_token", ""))
    if bos is None:
        bos = next(iter(_ids(checkpoint, "bos_token_id")), None)
    stops = [ids[name] for name in [names.get("eos_token", "")] if name in ids]
    stops += _ids(checkpoint, "eos_token_id")
    ends = [name for name in TURN_ENDS if name in vocabulary.controls]
    if "<|return|>" in vocabulary.controls:  # there "<|end|>" ends a message, and the answer goes on
        ends = [name for name in ends if name != "<|end|>"]
    stops += [ids[name] for name in ends]
    for token in [*stops, *([] if bos is None else [bos])]:
        if token >= vocabulary.size:
            raise CheckpointError(
                f"{checkpoint.path}: begin or end token {token} is outside its tokenizer's {vocabulary.size}", FIX
            )
    said = config.get("add_bos_token")
    adds = said if isinstance(said, bool) else vocabulary.adds_bos
    if adds is None:
        adds = True  # a SentencePiece model that says nothing: every family of that age puts BOS first
    if adds is not True and adds is not False:  # the file itself puts this id first
        bos = adds if bos is None else bos
        adds = adds == bos
    return SpecialTokens(names, bos, tuple(dict.fromkeys(stops)), bool(adds) and bos is not None)


def _names(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    path = checkpoint.sidecar("special_tokens_map.json")
    found: dict[str, str] = {}
    for source in (_gguf_names(checkpoint), read_object(path) if path else {}, config):
        for name in NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                found[name] = text
    return found


def _gguf_names(checkpoint: Checkpoint) -> dict[str, str]:
    tokens = checkpoint.config.get("tokenizer.ggml.tokens") if checkpoint.format == "gguf" else None
    found = {}
    for name, word in GGUF_NAMES.items():
        token = checkpoint.config.get(f"tokenizer.ggml.{word}_token_id") if tokens is not None else None
        if isinstance(token, int) and tokens is not None and 0 <= token < len(tokens):
            found[name] = str(tokens[token])
    return found


def _ids(checkpoint: Checkpoint, key: str) -> list[int]:
    """Ids under `key` of generation_config.json and config.json, or of GGUF metadata."""
    if checkpoint.format == "gguf":
        words = GGUF_ENDS if key == "eos_token_id" else ("bos",)
        sources: Iterable[tuple[str, Any]] = [
            (str(checkpoint.path), checkpoint.config.get(f"tokenizer.ggml.{word}_token_id")) for word in words
        ]
    else:
        path = checkpoint.sidecar("generation_config.json")
        generation = read_object(path) if path else {}
        inner = checkpoint.config.get("text_config")
        inner = inner if isinstance(inner, Mapping) else {}
        own = checkpoint.config.get(key, inner.get(key))
        sources = [(str(path), generation.get(key)), (f"{checkpoint.path}: config.json", own)]
    found: list[int] = []
    for where, value in sources:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise CheckpointError(f"{where}: {key} = {token!r} is no token id", FIX)
            found.append(token)
    return found


def write_chat_template(checkpoint: Checkpoint, writer: BundleWriter) -> str | None:
    """Write chat_template.jinja if the checkpoint has a template anywhere; returns its name in the bundle.

    Raises:
        CheckpointError: it is of no known shape, or does not compile.
    """
    where, source = _template(checkpoint)
    if source is None:
        return None
    check_syntax(source, where, CheckpointError, "mend the template or remove it")
    writer.path(CHAT_TEMPLATE).write_text(source, encoding="utf-8", newline="")
    return CHAT_TEMPLATE


def _template(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The template's source and where it stands: its own file, the tokenizer's config, a GGUF's metadata."""
    if path := checkpoint.sidecar(CHAT_TEMPLATE):
        return str(path), _text(path)
    if path := checkpoint.sidecar("chat_template.json"):
        return str(path), _one(read_object(path).get("chat_template"), str(path))
    config = tokenizer_config(checkpoint)
    if config.get("chat_template") is not None:
        where = str(checkpoint.sidecar("tokenizer_config.json"))
        return where, _one(config["chat_template"], where)
    if checkpoint.format != "gguf" or checkpoint.config.get("tokenizer.chat_template") is None:
        return "", None
    named = [{"name": "default", "template": checkpoint.config["tokenizer.chat_template"]}]
    tools = checkpoint.config.get("tokenizer.chat_template.tool_use")
    named += [] if tools is None else [{"name": "tool_use", "template": tools}]
    return str(checkpoint.path), _one(named, str(checkpoint.path))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8", FIX) from None


def _one(found: object, where: str) -> str | None:
    """One source of what may be a list of named templates: "tool_use" is for requests with tools, "default" for others."""
    if found is None or isinstance(found, str):
        return found
    named: dict[str, str] = {}
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise CheckpointError(f"{where}: chat_template is neither text nor a list of named templates", FIX)
        named[entry["name"]] = entry["template"]
    if "default" not in named:
        raise CheckpointError(f'{where}: none of its chat templates is named "default", only {sorted(named)}', FIX)
    if "tool_use" not in named:
        return named["default"]
    # An expression at either end keeps the blocks around it from swallowing the template's own line ends and indents.
    guarded = {name: "{{ '' }}" + source.removesuffix("\n") + "{{ '' }}" for name, source in named.items()}
    return "{% if tools %}" + guarded["tool_use"] + "{% else %}" + guarded["default"] + "{% endif %}"


def write_generation(checkpoint: Checkpoint, writer: BundleWriter, stops: tuple[int, ...]) -> str:
    """Write generation.json: stop tokens, and sampling defaults; temperature 0 for a model that asks to be greedy.

    Raises:
        CheckpointError: a default out of range.
    """
    path = checkpoint.sidecar("generation_config.json")
    found: dict[str, Any] = {}
    where = str(path or checkpoint.path)
    if path is not None:
        config = read_object(path)
        found = {name: config[name] for name in DEFAULTS if config.get(name) is not None}
        if config.get("do_sample") is False:
            found = {"temperature": 0.0}
    elif checkpoint.format == "gguf":
        keys = {name: f"general.sampling.{word}" for name, word in DEFAULTS.items()}
        found = {name: checkpoint.config[key] for name, key in keys.items() if checkpoint.config.get(key) is not None}
    defaults = read(GenerationDefaults, {**found, "stop_token_ids": stops}, where, CheckpointError)
    writer.path(GENERATION).write_text(defaults.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return GENERATION
