"""Our tokenizers against independent readers of the same vocabulary; and differences that must be seen."""

from pathlib import Path

import pytest

from export.checkpoint import open_checkpoint
from export.tokenizer_parity import compare
from tests.checkpoints import Llama, byte_tokens, write_gguf, write_safetensors

TEXTS = ["Plain words, 1234.", "äöü 漢字 \U0001f600\n\ttabs", ""]
MODEL = Llama(vocab=300)


def by_bytes(text: str) -> list[int]:
    """The tests' vocabulary has a token for each byte, in order."""
    return list(text.encode())


def test_a_tokenizer_file_is_run_by_its_library(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "model", MODEL, tokenizer=True))
    found = compare(checkpoint, by_bytes, TEXTS)
    assert found.equal and found.against.startswith("the checkpoint's tokenizer.json, run by tokenizers")
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
