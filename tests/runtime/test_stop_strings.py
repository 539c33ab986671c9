"""Stop strings: the same outcome for every way of splitting the text, nothing sent that a stop string swallows."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import RequestError
from appliance.runtime.stop_strings import StopStrings

LETTERS = st.text("ab😀", max_size=30)
STOPS = st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=4)


def cut_by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the answer ends when a stop string is complete, and is cut where that began."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@settings(deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_any_split_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    watch, sent, stopped = StopStrings(stops), "", False
    wanted, ends = cut_by_definition(text, stops)
    for start, end in itertools.pairwise(edges):
        piece, stopped = watch.push(text[start:end])
        sent += piece
        assert wanted.startswith(sent), "something was sent that a stop string swallows"
        if not stopped:
            held = text[len(sent) : end]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops), f"{held!r} is held for nothing"
    assert stopped == ends
    assert sent + watch.flush() == wanted


def test_nothing_comes_after_a_stop() -> None:
    watch = StopStrings(["\n\n"])
    assert watch.push("one\n") == ("one", False)
    assert watch.push("\ntwo") == ("", True)
    assert watch.push("three") == ("", True)
    assert watch.flush() == ""


def test_flush_lets_go_of_what_was_held() -> None:
    watch = StopStrings(["</end>"])
    assert watch.push("text </en") == ("text ", False)
    assert watch.flush() == "</en"
    assert watch.flush() == ""


def test_of_stops_complete_at_once_the_longer_one_cuts() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", True)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def test_long_stops_stay_cheap() -> None:
    """Every push could be the stop's beginning; trying each length anew would make this take seconds."""
    watch = StopStrings(["a" * 1000 + "b"])
    sent = "".join(watch.push("a")[0] for _ in range(20_000)) + watch.flush()
    assert sent == "a" * 20_000
