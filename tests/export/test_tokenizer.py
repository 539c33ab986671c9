"""Tokenizer files of a bundle from every shape that checkpoints have them in, and from damaged ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto

from appliance.bundle.manifest import Manifest, Provenance, SchemeSummary
from appliance.bundle.store import BundleWriter, open_bundle
from appliance.errors import ApplianceError, BundleError, CheckpointError
from appliance.runtime.chat_template import load_chat_template
from appliance.runtime.tokenizer import load_tokenizer
from export.gguf_vocabulary import CUTS, build_sentencepiece, build_tokenizer_json, read_vocabulary
from export.tokenizer import TokenizerFiles, write_tokenizer
from tests.runtime.tokenizer_samples import FakeCheckpoint, gpt2_metadata, llama_metadata


def tokenizer_json(**changes: Any) -> bytes:
    config = gpt2_metadata()
    settings = json.loads(build_tokenizer_json(config, read_vocabulary(config, "test"), "test"))
    return json.dumps({**settings, **changes}).encode()


def sentencepiece_model(**normalizer: bool) -> bytes:
    config = llama_metadata()
    model = proto.ModelProto.FromString(build_sentencepiece(config, read_vocabulary(config, "test"), "test"))
    for name, value in {"add_dummy_prefix": True, **normalizer}.items():
        setattr(model.normalizer_spec, name, value)
    return model.SerializeToString()


def write(tmp_path: Path, config: dict[str, Any], form: str = "safetensors", **sidecars: Any) -> tuple[TokenizerFiles, Path]:
    """Write from a checkpoint with these sidecars ("tokenizer_json" is "tokenizer.json"); the files and their folder."""
    names = {"chat_template_jinja": "chat_template.jinja", "tokenizer_model": "tokenizer.model"}
    data = {
        names.get(key, f"{key.removesuffix('_json')}.json"): value if isinstance(value, bytes) else json.dumps(value).encode()
        for key, value in sidecars.items()
    }
    source = tmp_path / "source"
    source.mkdir()
    writer = BundleWriter(tmp_path / "bundle")
    return write_tokenizer(FakeCheckpoint(source, config, form, data), writer), writer.folder


def test_a_bundle_reads_back(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    files, _ = write(tmp_path, {**gpt2_metadata(), "tokenizer.chat_template": template}, "gguf")
    writer = BundleWriter(tmp_path / "bundle")
    bundle = writer.finish(manifest(files))
    bundle = open_bundle(bundle.path)
    tokenizer = load_tokenizer(bundle)
    rendered = load_chat_template(bundle, tokenizer)
    assert rendered is not None
    assert rendered.render([{"role": "user", "content": "he"}]) == "<|endoftext|>he<|endoftext|>"
    assert tokenizer.encode("he<|im_end|>") == [3 + 256, 1]
    (bundle.path / files.info.file).write_text("{}")
    with pytest.raises(BundleError):
        load_tokenizer(bundle)


def manifest(files: TokenizerFiles) -> Manifest:
    return Manifest(
        format=1,
        name="tiny",
        architecture="llama",
        parameters=1,
        context_length=8,
        vocab_size=1000,
        hidden_size=1,
        scheme=SchemeSummary(name="none", roles={}),
        tokenizer=files.info,
        chat_template=files.chat_template,
        generation=files.generation,
        variants={},
        files={},
        provenance=Provenance(source="test", command="test", versions={}, created="2026-01-01T00:00:00Z"),
    )


def test_stop_tokens_come_from_every_file_that_names_some(tmp_path: Path) -> None:
    files, folder = write(
        tmp_path,
        {"eos_token_id": 7, "bos_token_id": 9},
        tokenizer_json=tokenizer_json(),
        tokenizer_config={"eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}},
        generation_config={"eos_token_id": [5, 7], "temperature": 0.6, "top_k": 40, "top_p": 0.9, "do_sample": True},
    )
    assert files.info.eos == (0, 5, 7, 1), "the tokenizer's own first, then files, then the end of a turn"
    assert files.info.bos == 9
    written = json.loads((folder / "generation.json").read_text())
    assert written == {
        "temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": None, "repetition_penalty": None, "stop_token_ids": [0, 5, 7, 1],
    }  # fmt: skip


def test_a_model_that_asks_to_be_greedy_is(tmp_path: Path) -> None:
    _, folder = write(tmp_path, {}, tokenizer_json=tokenizer_json(), generation_config={"do_sample": False, "temperature": 0.1})
    assert json.loads((folder / "generation.json").read_text())["temperature"] == 0


POST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


@pytest.mark.parametrize(
    ("post", "config", "wanted"),
    [
        (None, {}, False),
        (POST, {}, True),
        (POST, {"add_bos_token": False}, False),
        (None, {"add_bos_token": True, "bos_token": "<|endoftext|>"}, True),
        (None, {"add_bos_token": True}, False),
    ],
)
def test_whether_bos_is_added(tmp_path: Path, post: Any, config: dict[str, Any], wanted: bool) -> None:
    data = tokenizer_json(post_processor=post)
    files, _ = write(tmp_path, {}, tokenizer_json=data, tokenizer_config=config)
    assert files.info.add_bos is wanted
    assert files.info.bos == (0 if wanted else None)


def test_tokens_added_beside_tokenizer_json_are_put_in(tmp_path: Path) -> None:
    size = 3 + 256 + 3
    added = {str(size): {"content": "<|eot_id|>", "special": True}, "1": {"content": "<|im_end|>", "special": True}}
    files, folder = write(tmp_path, {}, tokenizer_json=tokenizer_json(), tokenizer_config={"added_tokens_decoder": added})
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert inner.encode("he<|eot_id|>").ids == [3 + 256, size]
    assert files.info.eos == (1, size, 0)


def test_an_added_token_whose_id_is_taken_is_refused(tmp_path: Path) -> None:
    added = {"4": {"content": "<|eot_id|>", "special": True}}
    with pytest.raises(CheckpointError, match="cannot take the id 4"):
        write(tmp_path, {}, tokenizer_json=tokenizer_json(), tokenizer_config={"added_tokens_decoder": added})


@pytest.mark.parametrize(
    ("dummy", "config", "wanted"),
    [
        (True, {}, "always"),
        (True, {"legacy": True}, "always"),
        (True, {"legacy": False}, "first"),
        (True, {"add_prefix_space": False}, "never"),
        (False, {}, "never"),
    ],
)
def test_sentencepiece_space_before_text(tmp_path: Path, dummy: bool, config: dict[str, Any], wanted: str) -> None:
    files, folder = write(tmp_path, {}, tokenizer_model=sentencepiece_model(add_dummy_prefix=dummy), tokenizer_config=config)
    assert files.info.space_prefix == wanted
    assert not proto.ModelProto.FromString((folder / "tokenizer.model").read_bytes()).normalizer_spec.add_dummy_prefix
    assert files.info.eos == () and files.info.bos is None and not files.info.add_bos


def test_sentencepiece_with_added_tokens(tmp_path: Path) -> None:
    added = {"300": {"content": "<|im_end|>", "special": True}, "1": {"content": "<s>", "special": True}}
    files, _ = write(
        tmp_path,
        {"bos_token_id": 1, "eos_token_id": 2},
        tokenizer_model=sentencepiece_model(),
        tokenizer_config={"added_tokens_decoder": added, "eos_token": "</s>"},
        added_tokens={"<extra>": 301},
    )
    assert files.info.added == {300: "<|im_end|>", 301: "<extra>"}
    assert files.info.eos == (2, 300) and files.info.bos == 1 and files.info.add_bos


def test_a_gguf_of_the_llama_kind(tmp_path: Path) -> None:
    files, folder = write(tmp_path, llama_metadata(), "gguf")
    assert (files.info.kind, files.info.file, files.info.space_prefix) == ("sentencepiece", "tokenizer.model", "always")
    assert (files.info.bos, files.info.eos, files.info.add_bos) == (1, (2,), True)
    model = proto.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    assert [piece.type for piece in model.pieces[:4]] == [2, 3, 3, 6]
    assert model.pieces[259].piece == "▁▁▁" and model.trainer_spec.byte_fallback


TOOL = [{"name": "default", "template": "  plain\n"}, {"name": "tool_use", "template": "\n with {{ tools | length }}\n"}]


@pytest.mark.parametrize(
    ("sidecars", "with_tools", "without"),
    [
        ({"tokenizer_config": {"chat_template": "text"}}, "text", "text"),
        ({"tokenizer_config": {"chat_template": TOOL[:1]}}, "  plain", "  plain"),
        ({"tokenizer_config": {"chat_template": TOOL}}, "\n with 1", "  plain"),
        ({"tokenizer_config": {"chat_template": "old"}, "chat_template_jinja": b"own file"}, "own file", "own file"),
        ({"chat_template": {"chat_template": "own json"}}, "own json", "own json"),
    ],
)
def test_where_a_chat_template_may_stand(tmp_path: Path, sidecars: dict[str, Any], with_tools: str, without: str) -> None:
    _, folder = write(tmp_path, {}, tokenizer_json=tokenizer_json(), **sidecars)
    from appliance.runtime.chat_template import ChatTemplate

    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, {})
    message = [{"role": "user", "content": "x"}]
    assert template.render(message) == without
    if "tools" in source:
        assert template.render(message, [{"type": "function"}]) == with_tools


def test_no_template_is_no_file(tmp_path: Path) -> None:
    files, folder = write(tmp_path, {}, tokenizer_json=tokenizer_json())
    assert files.chat_template is None and not (folder / "chat_template.jinja").exists()


def cut(pre: str, text: str) -> list[str]:
    config = gpt2_metadata(pre)
    inner = tokenizers.Tokenizer.from_str(build_tokenizer_json(config, read_vocabulary(config, "test"), "test"))
    return [text[start:end] for _, (start, end) in inner.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", " ", " he", "!?", "\n", "\n", "IT", "'", "S"]),
        ("gpt-2", ["it", "'s", " 1234", " ", " he", "!?", "\n", "\n", "IT", "'", "S"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", " ", " he", "!?\n\n", "IT", "'S"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", " ", " he", "!?\n\n", "IT", "'S"]),
        ("default", ["it", "'", "s", " ", "123", "4", " ", " he", "!?", "\n", "\n", "IT", "'", "S"]),
    ],
)
def test_how_text_is_cut(pre: str, wanted: list[str]) -> None:
    assert cut(pre, "it's 1234  he!?\n\nIT'S") == wanted


def test_every_known_cut_builds() -> None:
    for pre in CUTS:
        assert "".join(cut(pre, "a b1 é世👩‍👧\r\n\t x")) == "a b1 é世👩‍👧\r\n\t x", pre


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


GPT2, LLAMA = gpt2_metadata(), llama_metadata()
TOKENS = GPT2["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "kind None"),
        (changed(GPT2, model="bert"), 'kinds that are read: "gpt2", "llama"'),
        (changed(GPT2, pre="nonesuch"), "known: default, gpt-2, llama-bpe, llama-v3, llama3, qwen2, smollm"),
        (changed(GPT2, pre=["smollm"]), "is not known"),
        (changed(GPT2, tokens=[*TOKENS[:-1], TOKENS[7]]), "tokens 7 and 261 are both"),
        (changed(GPT2, tokens=[*TOKENS[:-1], ""]), "token 261 is empty"),
        (changed(GPT2, tokens=[*TOKENS[:-1], 7]), "no list of str"),
        (changed(GPT2, tokens="text"), "no list of str"),
        (changed(GPT2, tokens=[]), "has 0 tokens"),
        (changed(GPT2, token_type=[1, 1]), "262 tokens and 2 types"),
        (changed(GPT2, token_type=["a"] * 262), "no list of int"),
        (changed(GPT2, eos_token_id=262), "eos_token_id = 262 is outside"),
        (changed(GPT2, bos_token_id=-1), "bos_token_id = -1 is outside"),
        (changed(GPT2, bos_token_id="x"), "bos_token_id = 'x' is outside"),
        (changed(GPT2, merges=["h e", "he"]), "merge 'he'"),
        (changed(GPT2, merges=["h nowhere"]), "merge 'h nowhere'"),
        (changed(GPT2, merges=["l l"]), "merge 'l l'"),
        (changed(LLAMA, scores=[0.0]), "270 tokens and 1 scores"),
        (changed(LLAMA, unknown_token_id=999), "unknown_token_id = 999 is outside"),
        (changed(GPT2) | {"tokenizer.chat_template": "{% for x in y"}, "does not compile"),
        (changed(GPT2) | {"tokenizer.chat_template": 7}, "neither text nor a list"),
        (changed(GPT2) | {"general.sampling.temp": -1.0}, "temperature"),
    ],
)
def test_a_damaged_gguf_vocabulary_is_one_clear_error(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    if says.startswith("270"):
        says = f"{len(LLAMA['tokenizer.ggml.tokens'])} tokens and 1 scores"
    refused(says, tmp_path, config, "gguf")


def refused(says: str, tmp_path: Path, config: dict[str, Any], form: str, **sidecars: Any) -> None:
    with pytest.raises(ApplianceError) as failure:
        write(tmp_path, config, form, **sidecars)
    assert isinstance(failure.value, CheckpointError)
    assert says in str(failure.value) and "\n" not in str(failure.value) and str(tmp_path) in str(failure.value)


@pytest.mark.parametrize(
    ("sidecars", "says"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer_json": b"{"}, "not a tokenizer.json"),
        ({"tokenizer_json": b"\xff\xfe"}, "not a tokenizer.json"),
        ({"tokenizer_model": b"# tiktoken"}, "not a SentencePiece model"),
        ({"tokenizer_model": sentencepiece_model(remove_extra_whitespaces=True)}, "drops repeated spaces"),
        ({"tokenizer_json": tokenizer_json(), "tokenizer_config": b"[]"}, "not a JSON object"),
        (
            {"tokenizer_json": tokenizer_json(), "tokenizer_config": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "no token id",
        ),
        ({"tokenizer_json": tokenizer_json(), "tokenizer_config": {"added_tokens_decoder": {"1": {}}}}, "has no content"),
        ({"tokenizer_json": tokenizer_json(), "tokenizer_config": {"chat_template": TOOL[1:]}}, 'is named "default"'),
        ({"tokenizer_json": tokenizer_json(), "chat_template_jinja": b"\xff"}, "not UTF-8"),
        ({"tokenizer_json": tokenizer_json(), "generation_config": {"eos_token_id": "x"}}, "eos_token_id = 'x'"),
        ({"tokenizer_json": tokenizer_json(), "generation_config": {"eos_token_id": 262}}, "end token 262 is outside"),
        ({"tokenizer_json": tokenizer_json(), "generation_config": {"top_p": 7}}, "top_p"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_clear_error(tmp_path: Path, sidecars: dict[str, Any], says: str) -> None:
    refused(says, tmp_path, {}, "safetensors", **sidecars)


def test_a_huge_tokenizer_json_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    with open(tmp_path / "tokenizer.json", "r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="more than any tokenizer"):
        write_tokenizer(FakeCheckpoint(tmp_path, {}, "safetensors"), BundleWriter(tmp_path / "bundle"))
