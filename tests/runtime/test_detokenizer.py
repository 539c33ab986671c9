"""Incremental detokenization against Python's own decoder over the whole."""

import codecs
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.runtime.detokenizer import Detokenizer

SPECIAL = 3


class Pieces:
    """A vocabulary of given byte strings; token 3 is special."""

    def __init__(self, pieces: list[bytes], strips: bool = False):
        self._pieces = pieces
        self.special_ids = frozenset({SPECIAL})
        self.strips_leading_space = strips

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]


def push_all(tokenizer: Pieces, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


ANY_BYTES = st.one_of(
    st.binary(max_size=5),
    st.text(max_size=3).map(str.encode),
    st.sampled_from([b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xff", b" "]),
)
PIECES = st.lists(ANY_BYTES, min_size=5, max_size=5)


@settings(deadline=None)
@given(pieces=PIECES, ids=st.lists(st.integers(0, 4), max_size=30))
def test_joined_pushes_equal_decoding_the_whole(pieces: list[bytes], ids: list[int]) -> None:
    whole = b"".join(pieces[token] for token in ids if token != SPECIAL).decode("utf-8", "replace")
    assert "".join(push_all(Pieces(pieces), ids)) == whole


@settings(deadline=None)
@given(pieces=PIECES, ids=st.lists(st.integers(0, 4), max_size=30))
def test_one_leading_space_is_taken_away(pieces: list[bytes], ids: list[int]) -> None:
    whole = b"".join(pieces[token] for token in ids if token != SPECIAL).removeprefix(b" ").decode("utf-8", "replace")
    assert "".join(push_all(Pieces(pieces, strips=True), ids)) == whole
    kept = b"".join(pieces[token] for token in ids if token != SPECIAL).decode("utf-8", "replace")
    assert "".join(push_all(Pieces(pieces, strips=True), ids, continues=True)) == kept


@settings(deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 60), max_size=10))
def test_half_a_character_is_never_sent(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "surrogatepass") if text.isascii() else text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in itertools.pairwise(edges)]
    tokenizer = Pieces([*parts[:3], b"<special>", *parts[3:]])
    ids = [at if at < 3 else at + 1 for at in range(len(parts))]
    sent = push_all(tokenizer, ids) if len(parts) >= 3 else [codecs.decode(data, "utf-8")]
    assert "".join(sent) == text
    so_far = ""
    for piece in sent:
        so_far += piece
        assert text.startswith(so_far)


def test_special_tokens_are_shown_on_request_and_do_not_tear_characters() -> None:
    tokenizer = Pieces([b"\xf0\x9f", b"\x98\x80", b"a", b"<|end|>"])
    assert push_all(tokenizer, [0, SPECIAL, 1]) == ["", "", "😀", ""]
    assert "".join(push_all(tokenizer, [2, SPECIAL], skip_special=False)) == "a<|end|>"


def test_the_leading_space_is_one_and_may_come_late() -> None:
    tokenizer = Pieces([b"", b"  a", b" b", b"<|end|>"], strips=True)
    assert push_all(tokenizer, [0, SPECIAL, 1, 2]) == ["", "", " a", " b", ""]


def test_an_open_character_becomes_one_mark_at_the_end() -> None:
    assert push_all(Pieces([b"ok \xf0\x9f\x98"]), [0]) == ["ok ", "�"]
