"""Small tokenizers made on the spot: byte-level BPE, SentencePiece from a GGUF-like vocabulary, and golden files."""

import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tokenizer"


def golden(name: str) -> Any:
    """A committed golden file, decoded."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def byte_characters() -> list[str]:
    """GPT-2's character of each byte, from its definition."""
    spelled, shifted = [], 0
    for code in range(256):
        char = chr(code)
        if char.isprintable() and char != " " and code != 0xAD:
            spelled.append(char)
        else:
            spelled.append(chr(0x100 + shifted))
            shifted += 1
    return spelled


def gpt2_metadata(pre: str = "smollm") -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary: two control tokens, one user-defined, the 256 bytes, three merges."""
    tokens = ["<|endoftext|>", "<|im_end|>", "<think>", *byte_characters(), "he", "Ġhe", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "Ġ he", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def llama_metadata(space_prefix: bool = True) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary with byte fallback and a user-defined run of spaces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{code:02X}>" for code in range(256)), "   "]
    types = [2, 3, 3] + [6] * 256 + [4]
    scores = [0.0] * len(tokens)
    pieces = ["▁he", "he", "llo", "ll", "▁", *"helo wrdé".replace(" ", ""), "世"]
    tokens += pieces
    types += [1] * len(pieces)
    scores += [-float(at) for at in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


class FakeCheckpoint:
    """A checkpoint of nothing but metadata and sidecars."""

    license = "unknown"

    def __init__(self, path: Path, config: dict[str, Any], form: str = "gguf", sidecars: dict[str, bytes] | None = None):
        self.path = path
        self.format = form
        self.config = config
        for name, data in (sidecars or {}).items():
            (path / name).write_bytes(data)

    def sidecar(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.is_file() else None

    def names(self) -> list[str]:
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def stored_type(self, name: str) -> str:
        raise KeyError(name)

    def stored_grid(self, name: str) -> None:
        return None

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)

    def files(self) -> list[Path]:
        return []
