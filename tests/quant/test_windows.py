"""Windows of a text's tokens, and the texts that come with the program."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import BadInput
from quant import texts
from quant.windows import cut


def test_windows_hold_every_token_once() -> None:
    found = cut("t", range(1000, 1300), length=100)
    assert [len(one.ids) for one in found] == [100, 100, 100]
    assert np.concatenate([one.ids for one in found]).tolist() == list(range(1000, 1300))
    assert [(one.text, one.number) for one in found] == [("t", 0), ("t", 1), ("t", 2)]


def test_every_window_begins_as_the_model_expects() -> None:
    found = cut("t", range(1000, 1250), length=100, bos=2)
    assert [one.ids[0] for one in found] == [2, 2, 2] and [len(one.ids) for one in found] == [100, 100, 53]
    assert found[1].ids[1] == 1099


def test_chosen_windows_are_spread_over_the_text() -> None:
    found = cut("t", range(1000), length=100, count=4)
    assert [one.ids[0] for one in found] == [0, 200, 500, 700]
    assert len(cut("t", range(1000), length=100, count=99)) == 10


def test_a_rest_that_predicts_from_nothing_is_left_out() -> None:
    assert [len(one.ids) for one in cut("t", range(131), length=100)] == [100]
    assert [len(one.ids) for one in cut("t", range(132), length=100)] == [100, 32]
    with pytest.raises(BadInput, match="has only 31 tokens"):
        cut("t", range(31), length=100)
    assert len(cut("t", range(20), length=16)) == 1, "a model whose context is smaller than that"


def test_the_texts_are_frozen() -> None:
    """Every published figure rests on these bytes."""
    assert texts.known() == ("prose-jargon", "handbook")
    hashes = {name: texts.load(name).sha256[:16] for name in texts.known()}
    assert hashes == {"prose-jargon": "a15a99c03fdfeb7b", "handbook": "6d3f9edd199099f7"}
    one = texts.load("handbook")
    assert one.sha256 == hashlib.sha256((texts.FOLDER / "handbook.txt").read_bytes()).hexdigest()
    assert 30_000 < len(one.content) < 60_000 and len(texts.load("prose-jargon").content) > 250_000


@pytest.mark.parametrize(
    ("data", "says"), [(None, "cannot read"), (b"", "is empty"), (b" \n", "is empty"), (b"a\xff", "byte 1 is no UTF-8")]
)
def test_what_is_no_text_is_refused(data: bytes | None, says: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / "mine.txt").write_bytes(data)
    with pytest.raises(BadInput, match=says):
        texts.read(tmp_path / "mine.txt")
