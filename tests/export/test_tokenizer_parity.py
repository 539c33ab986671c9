"""Our tokenizers against other readers of the same vocabulary; differences that must be seen, and what cannot be."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from export.checkpoint import open_checkpoint
from export.gguf_vocabulary import build_tokenizer_json, read_vocabulary
from export.tokenizer_parity import SAME_LIBRARY, WHERE_IT_IS_CUT, Encode, compare
from tests.checkpoints import Llama, byte_tokens, write_gguf, write_safetensors
from tests.runtime.tokenizer_samples import FakeCheckpoint

TEXTS = ["Plain words, 1234.", "äöü 漢字 \U0001f600\n\ttabs", ""]
MODEL = Llama(vocab=300)
ROOT = Path(__file__).resolve().parents[2]


def by_bytes(text: str) -> list[int]:
    """The tests' vocabulary has a token for each byte, in order."""
    return list(text.encode())


def test_a_tokenizer_file_is_run_by_its_library(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "model", MODEL, tokenizer=True))
    found = compare(checkpoint, by_bytes, TEXTS)
    assert found.equal and found.against.startswith("the checkpoint's tokenizer.json, run by tokenizers")
    assert found.blind_to == SAME_LIBRARY
    assert (found.texts, found.tokens) == (3, sum(len(text.encode()) for text in TEXTS))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: [*ids[:4], 65, *ids[5:]], "token 4 is 65 here and 110 there"),
        (lambda ids: [*ids, 65], " tokens here, "),
        (lambda ids: ids[:-1], " tokens here, "),
    ],
)
def test_other_ids_are_seen(change: object, says: str, tmp_path: Path) -> None:
    assert callable(change)
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "model", MODEL, tokenizer=True))
    found = compare(checkpoint, lambda text: change(by_bytes(text)) if text else [], TEXTS)
    assert not found.equal and says in found.first_difference


def test_a_gguf_is_spelt_out_by_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", MODEL))
    assert len(byte_tokens(300)) == 300
    found = compare(checkpoint, by_bytes, TEXTS)
    assert found.equal and found.against.startswith("the token table of the GGUF"), found.first_difference
    wrong = compare(checkpoint, lambda text: [min(byte + (byte == 0xC3), 255) for byte in text.encode()], TEXTS)
    assert not wrong.equal and wrong.first_difference == "the tokens spell another text from byte 0 on"


MERGED = ["ab", "bc", "abc"]
"""Tokens of more than a byte. By the right merges "abc" is ab + c, then the whole; by the wrong ones a + bc."""
RIGHT, WRONG = ["a b", "b c", "ab c"], ["b c", "a b", "ab c"]


def merging_gguf(path: Path) -> Path:
    """The vocabulary of a GGUF whose tokens come of `RIGHT`, and no weights."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
        (writer.add_rope_dimension_count, 64), (writer.add_vocab_size, 258 + len(MERGED)),
    ):  # fmt: skip
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_tokens(258), *MERGED])
    writer.add_token_types([1] * 256 + [3] * 2 + [1] * len(MERGED))
    writer.add_token_merges(RIGHT)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merging_config() -> dict[str, Any]:
    """What `merging_gguf` says of its tokens."""
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": RIGHT,
        "tokenizer.ggml.tokens": [*byte_tokens(258), *MERGED],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 2 + [1] * len(MERGED),
        "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257,
    }  # fmt: skip


def bundled(merges: list[str]) -> tuple[str, Encode]:
    """The tokenizer.json that we make of that vocabulary, with these merges, and what it encodes."""
    config = {**merging_config(), "tokenizer.ggml.merges": merges}
    data = build_tokenizer_json(config, read_vocabulary(config, "test"), "test")
    whole = tokenizers.Tokenizer.from_str(data)
    return data, lambda text: list(whole.encode(text, add_special_tokens=False).ids)


MERGING_TEXTS = ["abc", "ab abc bc"]


def test_the_right_and_the_wrong_merges_spell_the_same_text_with_other_tokens() -> None:
    (_, right), (_, wrong) = bundled(RIGHT), bundled(WRONG)
    assert right("abc") == [260] and wrong("abc") == [97, 259]


def test_wrong_merges_are_seen_against_the_checkpoints_own_file(tmp_path: Path) -> None:
    data, right = bundled(RIGHT)
    checkpoint = FakeCheckpoint(tmp_path, {}, "safetensors", {"tokenizer.json": data.encode()})
    assert compare(checkpoint, right, MERGING_TEXTS).equal
    found = compare(checkpoint, bundled(WRONG)[1], MERGING_TEXTS)
    assert not found.equal and found.first_difference == "token 0 is 97 here and 260 there"


def test_a_table_of_tokens_does_not_see_wrong_merges_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    checkpoint = FakeCheckpoint(tmp_path, merging_config(), "gguf", {})
    found = compare(checkpoint, bundled(WRONG)[1], MERGING_TEXTS)
    assert found.equal and found.blind_to == WHERE_IT_IS_CUT


@pytest.mark.slow
def test_wrong_merges_of_a_gguf_are_seen_by_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment that `make deps-full` compiles llama-cpp-python in; its packages come after this one's own."""
    places = list((ROOT / ".appliance" / "bench" / "llama-env").glob("lib/python*/site-packages"))
    assert importlib.util.find_spec("llama_cpp") or places, "llama-cpp-python is missing: make deps-full"
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, places)])
    path = merging_gguf(tmp_path / "model.gguf")
    checkpoint = FakeCheckpoint(tmp_path, merging_config(), "gguf", {})
    monkeypatch.setattr(checkpoint, "files", lambda: [path])
    found = compare(checkpoint, bundled(RIGHT)[1], MERGING_TEXTS)
    assert found.equal and found.blind_to == "" and "llama.cpp" in found.against, found.first_difference
    wrong = compare(checkpoint, bundled(WRONG)[1], MERGING_TEXTS)
    assert not wrong.equal and wrong.first_difference == "token 0 is 97 here and 260 there"
