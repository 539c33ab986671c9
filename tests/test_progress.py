"""Progress where there is no terminal: what has begun, how far it is, how long it took; nothing on standard output."""

import re
import time

import pytest

from appliance import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_long_work_says_how_far_it_is(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar("quantize", 200) as advance:
        for _ in range(50):
            clock[0] += 0.5
            advance(4)
    assert capsys.readouterr() == (
        "",
        "quantize ...\nquantize: 40 % after 10 s, about 15 s left\nquantize: 80 % after 20 s, about 5 s left\n"
        "quantize: done in 25 s\n",
    )


@pytest.mark.parametrize(("seconds", "end"), [(1.9, ""), (2.0, "fetch: done in 2 s\n")])
def test_short_work_and_work_of_unknown_length(
    clock: list[float], capsys: pytest.CaptureFixture[str], seconds: float, end: str
) -> None:
    with progress.bar("fetch", None) as advance:
        clock[0] += seconds
        advance(1)
    assert capsys.readouterr() == ("", f"fetch ...\n{end}")


def test_work_that_fails_does_not_say_it_is_done(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), progress.bar("fetch", 3):
        clock[0] += 60
        raise ValueError
    assert capsys.readouterr().err == "fetch ...\n"


def test_stages_begin_anew_when_what_is_counted_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage first counts 4 layers, then 84 windows: no share of it may ever be over 100%."""
    monkeypatch.setattr(progress, "SAY_SECONDS", 0)
    with progress.stages() as told:
        for done in range(5):
            told("measure", done, 4)
        for done in range(5, 85):
            told("measure", done, 84)
        told("write", 1, 2)
    err = capsys.readouterr().err
    shares = [int(share) for share in re.findall(r"(\d+) %", err)]
    assert shares and max(shares) == 100, err
    assert [line for line in err.splitlines() if line.endswith("...")] == ["measure ...", "measure ...", "write ..."]
