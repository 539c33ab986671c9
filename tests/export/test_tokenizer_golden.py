"""Token ids of real vocabularies, rebuilt from their GGUF, against transformers' (see golden/make_tokenizer.py)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import tokenizers

from appliance.bundle.store import BundleWriter
from appliance.runtime.tokenizer import Tokenizer
from appliance.runtime.tokenizer_json import JsonTokenizer
from appliance.runtime.tokenizer_sentencepiece import SentencePieceTokenizer
from export.checkpoint import open_checkpoint
from export.tokenizer import TokenizerFiles, write_tokenizer
from tests.runtime.tokenizer_samples import golden

T = TypeVar("T")


def written(gguf: Path, folder: Path) -> TokenizerFiles:
    """The tokenizer files of a GGUF, written below `folder`."""
    writer = BundleWriter(folder / "bundle")
    return write_tokenizer(open_checkpoint(gguf), writer)


def opened(gguf: Path, folder: Path) -> Tokenizer:
    info = written(gguf, folder).info
    path = folder / ".bundle.partial" / info.file
    return JsonTokenizer(path, info, 1 << 20) if info.kind == "tokenizers" else SentencePieceTokenizer(path, info, 1 << 20)


def assert_equal(tokenizer: Tokenizer, name: str) -> None:
    strings, ids = golden("strings.json"), golden(name)
    assert len(strings) == len(ids) == 500
    different = [text for text, wanted in zip(strings, ids, strict=True) if tokenizer.encode(text, bos=False) != wanted]
    assert not different, f"{len(different)} of 500 differ, the first: {different[0]!r}"
    assert tokenizer.info.kind == "sentencepiece" or all(
        tokenizer.decode(wanted, skip_special=False) == text for text, wanted in zip(strings, ids, strict=True)
    )


@pytest.mark.model
def test_smollm2_ids_equal_the_reference(starter_gguf: Path, tmp_path: Path) -> None:
    assert_equal(opened(starter_gguf, tmp_path), "smollm2.json")


@pytest.mark.model
def test_smollm2_special_tokens(starter_gguf: Path, tmp_path: Path) -> None:
    info = written(starter_gguf, tmp_path).info
    assert (info.bos, info.eos, info.add_bos) == (1, (2, 0), False)
    assert '"<|im_start|>"' in (tmp_path / ".bundle.partial" / "special_tokens_map.json").read_text(encoding="utf-8")


@pytest.mark.model
def test_smollm2_costs_little_more_than_the_bare_library(starter_gguf: Path, tmp_path: Path) -> None:
    """As a ratio, each the best of five in turn: what a machine does in a millisecond is another thing every time."""
    info = written(starter_gguf, tmp_path).info
    path = tmp_path / ".bundle.partial" / info.file
    text = "".join(text + "\n" for text in golden("strings.json"))
    seconds: dict[str, list[float]] = {name: [] for name in ("load", "bare load", "encode", "bare encode")}

    def timed(name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        seconds[name].append(time.perf_counter() - start)
        return result

    for _ in range(5):
        ours = timed("load", lambda: JsonTokenizer(path, info, 1 << 20))
        bare = timed("bare load", lambda: tokenizers.Tokenizer.from_file(str(path)))
        ids = timed("encode", lambda: ours.encode(text))  # noqa: B023 (called at once)
        assert ids == timed("bare encode", lambda: bare.encode(text, add_special_tokens=False).ids)  # noqa: B023
    best = {name: min(values) for name, values in seconds.items()}
    assert best["load"] < 4 * best["bare load"], best
    assert best["encode"] < 3 * best["bare encode"], best


@pytest.mark.slow
@pytest.mark.model
def test_gemma3_ids_equal_the_reference(gemma_gguf: Path, tmp_path: Path) -> None:
    assert_equal(opened(gemma_gguf, tmp_path), "gemma3.json")
