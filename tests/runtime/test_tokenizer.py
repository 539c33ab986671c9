"""Both kinds of tokenizer on small vocabularies whose ids can be worked out by hand, and on damaged files."""

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bundle.manifest import TokenizerInfo
from appliance.errors import BundleError, RequestError
from appliance.runtime.detokenizer import Detokenizer
from appliance.runtime.tokenizer import Tokenizer
from appliance.runtime.tokenizer_json import JsonTokenizer, piece_bytes
from appliance.runtime.tokenizer_sentencepiece import SentencePieceTokenizer
from export.gguf_vocabulary import build_sentencepiece, build_tokenizer_json, read_vocabulary
from tests.runtime.tokenizer_samples import byte_characters, gpt2_metadata, llama_metadata

IM_END, THINK, FIRST_BYTE = 1, 2, 3
HE, SPACE_HE, TWELVE = 3 + 256, 3 + 257, 3 + 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> JsonTokenizer:
    config = gpt2_metadata()
    path = folder / "tokenizer.json"
    path.write_text(build_tokenizer_json(config, read_vocabulary(config, "test"), "test"), encoding="utf-8")
    return JsonTokenizer(path, TokenizerInfo(kind="tokenizers", file=path.name, bos=0, eos=(1,), add_bos=True), 1000)


def sentencepiece(folder: Path, prefix: str, added: dict[int, str] | None = None) -> SentencePieceTokenizer:
    config = llama_metadata()
    path = folder / f"{prefix}.model"
    path.write_bytes(build_sentencepiece(config, read_vocabulary(config, "test"), "test"))
    info = TokenizerInfo(
        kind="sentencepiece", file=path.name, bos=1, eos=(2,), add_bos=True, space_prefix=prefix, added=added or {}
    )
    return SentencePieceTokenizer(path, info, 1000)


@pytest.fixture(scope="module", params=["bytes", "never", "first", "always"])
def tokenizer(request: pytest.FixtureRequest, folder: Path, byte_level: JsonTokenizer) -> Tokenizer:
    return byte_level if request.param == "bytes" else sentencepiece(folder, request.param)


def byte(code: int) -> int:
    return FIRST_BYTE + code


def test_byte_level_ids_by_hand(byte_level: JsonTokenizer) -> None:
    assert byte_level.encode("he he", bos=False) == [HE, SPACE_HE]
    assert byte_level.encode("é", bos=False) == [byte(0xC3), byte(0xA9)]
    assert byte_level.encode("12", bos=False) == [byte(0x31), byte(0x32)], "digits are cut one by one before merging"
    assert byte_level.encode("") == [0]


def test_pieces_spell_bytes() -> None:
    characters = byte_characters()
    assert [piece_bytes(char) for char in characters] == [bytes([code]) for code in range(256)]
    assert piece_bytes("Ġ世") == "Ġ世".encode(), "a piece outside the table is taken as it is written"


def test_special_tokens_in_text_are_read_or_not(byte_level: JsonTokenizer) -> None:
    assert byte_level.encode("he<|im_end|>he") == [0, HE, IM_END, HE]
    assert IM_END not in byte_level.encode("he<|im_end|>", special=False)
    assert byte_level.decode(byte_level.encode("he<|im_end|>", special=False)) == "he<|im_end|>"
    assert byte_level.encode("<think>", special=False) == [THINK], "a user-defined token is text"
    assert byte_level.decode([HE, IM_END, THINK]) == "he<think>"
    assert byte_level.decode([HE, IM_END], skip_special=False) == "he<|im_end|>"


def test_bos_is_added_once(byte_level: JsonTokenizer) -> None:
    assert byte_level.encode("he") == [0, HE]
    assert byte_level.encode("<|endoftext|>he") == [0, HE]
    assert byte_level.encode("he", bos=False) == [HE]
    assert byte_level.encode("he", special=False) == [HE]
    assert byte_level.encode("he", special=False, bos=True) == [0, HE]


def test_sentencepiece_space_prefix(folder: Path) -> None:
    never, first, always = (sentencepiece(folder, prefix) for prefix in ("never", "first", "always"))
    piece = {text: never.token_id(text) for text in ("▁he", "he", "llo", "▁")}
    assert never.encode("hello", bos=False) == [piece["he"], piece["llo"]]
    assert first.encode("hello", bos=False) == [piece["▁he"], piece["llo"]]
    assert first.encode("he</s>he", bos=False) == [piece["▁he"], 2, piece["he"]]
    assert always.encode("he</s>he", bos=False) == [piece["▁he"], 2, piece["▁he"]]
    assert always.encode(" he", bos=False) == [piece["▁"], piece["▁he"]]
    assert always.encode("") == [1]


def test_sentencepiece_byte_fallback_and_runs(folder: Path) -> None:
    tokenizer = sentencepiece(folder, "never")
    assert tokenizer.encode("☃", bos=False) == [3 + code for code in "☃".encode()]
    run = tokenizer.token_id("▁▁▁")
    assert run == 259
    assert tokenizer.encode("   ", bos=False) == [run]
    assert tokenizer.token_bytes(run) == b"   "


def test_sentencepiece_added_tokens(folder: Path) -> None:
    tokenizer = sentencepiece(folder, "never", {500: "<|im_start|>", 501: "<|im_start|>x"})
    assert tokenizer.vocab_size == 502
    assert tokenizer.encode("<|im_start|>x<|im_start|>", bos=False) == [501, 500]
    assert tokenizer.decode([501, tokenizer.token_id("he") or 0]) == "he"
    assert tokenizer.token_bytes(499) == b"", "a hole between the model and its added tokens"


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30))
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text
    streamed = Detokenizer(tokenizer)
    assert "".join([*map(streamed.push, ids), streamed.flush()]) == text


@settings(deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_their_bytes_do(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    whole = b"".join(tokenizer.token_bytes(token) for token in ids if token not in tokenizer.special_ids)
    whole = whole.removeprefix(b" ") if tokenizer.strips_leading_space else whole
    assert tokenizer.decode(ids) == whole.decode("utf-8", "replace")


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_an_id_outside_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        tokenizer.token_bytes(token)


def test_half_a_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_a_token_the_model_lacks_is_refused(byte_level: JsonTokenizer, folder: Path) -> None:
    info = TokenizerInfo(kind="tokenizers", file="tokenizer.json", eos=())
    small = JsonTokenizer(folder / "tokenizer.json", info, TWELVE)
    assert small.encode("he") == [HE]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        small.decode([TWELVE])
    with pytest.raises(RequestError, match=f"knows only {HE}"):
        JsonTokenizer(folder / "tokenizer.json", info, HE).encode("he")


class Slow:
    """The inner tokenizer with a pause after its switch is set, so that another thread comes between."""

    def __init__(self, inner: tokenizers.Tokenizer):
        object.__setattr__(self, "_real", inner)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real, name, value)
        time.sleep(0.001)


def test_threads_do_not_mix_up_special_tokens(byte_level: JsonTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level, "_inner", Slow(byte_level._inner))
    wrong: list[list[int]] = []

    def work(special: bool) -> None:
        for _ in range(30):
            ids = byte_level.encode("<|im_end|>", special=special, bos=False)
            if (ids == [IM_END]) != special:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(special,)) for special in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"BPE"', '"Nonsense"'),
        lambda text: text.replace('["h", "e"]', '["h", "nowhere"]'),
        lambda text: text.replace('"decoder": {"type": "ByteLevel"', '"decoder": {"type": "CTC"'),
        lambda text: json.dumps({**json.loads(text), "decoder": None}),
        lambda text: text.replace(": 3,", ": -3,"),
        lambda text: text.replace(": 3,", ": 99999999999999,"),
    ],
)
def test_a_damaged_tokenizer_json_is_one_clear_error(byte_level: JsonTokenizer, folder: Path, tmp_path: Path, change) -> None:
    before = (folder / "tokenizer.json").read_text(encoding="utf-8")
    after = change(before)
    assert after != before
    path = tmp_path / "tokenizer.json"
    path.write_text(after, encoding="utf-8")
    with pytest.raises(BundleError) as failure:
        JsonTokenizer(path, TokenizerInfo(kind="tokenizers", file=path.name), 1000)
    assert str(path) in str(failure.value) and "\n" not in str(failure.value)


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_damaged_sentencepiece_model_is_one_clear_error(folder: Path, tmp_path: Path, cut: int) -> None:
    sentencepiece(folder, "never")
    path = tmp_path / "tokenizer.model"
    path.write_bytes((folder / "never.model").read_bytes()[:cut])
    with pytest.raises(BundleError, match="not a SentencePiece model") as failure:
        SentencePieceTokenizer(path, TokenizerInfo(kind="sentencepiece", file=path.name), 1000)
    assert "\n" not in str(failure.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BundleError, match="more than any tokenizer"):
        JsonTokenizer(path, TokenizerInfo(kind="tokenizers", file=path.name), 1000)
