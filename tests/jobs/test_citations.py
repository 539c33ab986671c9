"""Citations: tied to what supports them, checked against what is there."""

import pytest

from appliance.errors import NotFound
from appliance.jobs.citations import bind, bind_all, check, leading, normalize, split_sentences, support
from appliance.jobs.draft import Claim, Passage

SHIFT = "The night shift starts at 0:30 instead of 1:00 from 30 November until 24 December."
MANUAL = (
    "Cleaning\nClean the oven every week. Never open the door of a hot oven.\n\nThe filter costs 1,800 euros, and lasts a year."
)
PASSAGES = [
    Passage(path="/a/shift.md", anchor="Meeting > Decisions", text=f"Decisions\n\n{SHIFT} The van goes on Friday."),
    Passage(path="/a/manual.pdf", anchor="page 3", text=MANUAL),
]


def claim(sentence: str, quote: str, path: str = "/a/manual.pdf", anchor: str = "page 3") -> Claim:
    return Claim(sentence=sentence, path=path, anchor=anchor, quote=quote)


def locate(path: str, anchor: str) -> str:
    for passage in PASSAGES:
        if (passage.path, passage.anchor) == (path, anchor):
            return passage.text
    raise NotFound(f"{path} has no place {anchor}")


@pytest.mark.parametrize(
    ("sentence", "path", "quote"),
    [
        (SHIFT, "/a/shift.md", SHIFT),
        ("From 30 November until 24 December the night shift starts at 0:30.", "/a/shift.md", SHIFT),
        ("The oven must be cleaned every week.", "/a/manual.pdf", "Clean the oven every week."),
        ("A filter lasts a year and costs 1800 euros.", "/a/manual.pdf", "The filter costs 1,800 euros, and lasts a year."),
        ("You should never open the hot oven's door.", "/a/manual.pdf", "Never open the door of a hot oven."),
    ],
)
def test_a_sentence_gets_the_passage_that_supports_it(sentence: str, path: str, quote: str) -> None:
    found = bind(sentence, PASSAGES)
    assert found is not None and (found.path, found.quote) == (path, quote)
    assert check(found, locate) is None


@pytest.mark.parametrize(
    "sentence",
    [
        "The day shift starts at 0:30 from 30 November until 24 December.",  # another word
        "The night shift starts at 1:00 instead of 1:00 from 30 November until 24 December.",  # a number too often
        "The night shift starts at 0:45.",  # a number that is not there
        "Open the door of a hot oven.",  # the denial is lost
        "Never clean the oven every week.",  # one is made up
        "The moon is made of green cheese.",
        "1,800.",
        "",
    ],
)
def test_what_nothing_supports_gets_none(sentence: str) -> None:
    assert bind(sentence, PASSAGES) is None


def test_fragments_and_repetitions_are_no_claims() -> None:
    passages = [Passage(path="/a", anchor="page 1", text="It is meant for trained bakery staff.")]
    claims, dropped = bind_all("It is meant for trained\nbakery staff.", passages)
    assert claims == () and dropped == 1
    claims, dropped = bind_all(f"{SHIFT}\n- {SHIFT.removesuffix('.')}", PASSAGES)
    assert [claim.sentence for claim in claims] == [SHIFT] and dropped == 0


def test_far_apart_sentences_do_not_support_one_together() -> None:
    text = "The front tyres have 3.1 mm and the rear tyres 4.4 mm. Replace them before winter. The left low beam is set too high."
    passages = [Passage(path="/a", anchor="page 1", text=text)]
    assert bind("The left low beam is set to 3.1 mm and the rear tyres are 4.4 mm.", passages) is None
    assert bind("The left low beam is set too high before winter.", passages) is not None


def test_scripts_without_spaces_are_compared_by_pairs() -> None:
    passage = Passage(path="/a", anchor="p", text="夜班从零点三十分开始。烤箱每周清洁一次。")
    found = bind("烤箱每周清洁。", [passage])
    assert found is not None and found.quote == "烤箱每周清洁一次。"
    assert bind("烤箱每月更换。", [passage]) is None


def test_a_summary_becomes_claims_each_once() -> None:
    text = f"# Summary\n\n1. {SHIFT}\n- {SHIFT.lower()}\n* **Clean the oven every week.** The moon is cheese.\n"
    claims, dropped = bind_all(text, PASSAGES)
    assert [one.sentence for one in claims] == [SHIFT, "Clean the oven every week."] and dropped == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (claim("Clean the oven every week.", "Clean the oven every week."), None),
        (claim("Clean the oven every week.", "Clean  the oven\nevery week."), None),  # white space does not count
        (claim("Clean the oven every month.", "Clean the oven every month."), "the quote is not in the source"),
        (claim("Clean it.", " "), "the quote is not in the source"),
        (claim("Clean the oven.", "Clean the oven every week.", anchor="page 9"), "/a/manual.pdf has no place page 9"),
        (claim("Clean the oven.", "Clean the oven every week.", path="/gone"), "/gone has no place page 3"),
        (claim("Clean the oven 7 times every week.", "Clean the oven every week."), "7 is not in the quote"),
        (claim("Paint the walls every week.", "Clean the oven every week."), "the quote does not support the sentence"),
    ],
)
def test_the_check_says_why_a_claim_does_not_hold(given: Claim, reason: str | None) -> None:
    assert check(given, locate) == reason


def test_a_source_that_cannot_be_read_is_a_reason() -> None:
    def broken(path: str, anchor: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    assert check(claim("Clean it.", "Clean it."), broken) == "the source cannot be read: Permission denied"


def test_headings_are_neither_sentences_nor_quotes() -> None:
    assert split_sentences("Quantities and prices\nShort\nIt takes five sacks of flour every day") == [
        "It takes five sacks of flour every day"
    ]
    (first,) = leading(
        [Passage(path="/a", anchor="page 1", text="Deck oven\nOverview\nThis manual covers the oven and its steam.")]
    )
    assert first.quote == first.sentence == "This manual covers the oven and its steam."
    assert leading([Passage(path="/a", anchor="x", text="Only a heading")]) == ()
    several = [Passage(path="/a", anchor=f"page {at}", text=f"Page {at} covers the oven. It goes on.") for at in (1, 1, 2, 3, 4)]
    assert [claim.sentence for claim in leading(several)] == [f"Page {at} covers the oven." for at in (1, 2, 3)]
    two = [
        Passage(path="/a", anchor=anchor, text=f"{anchor} heats the oven well. {anchor} heats the steam well.") for anchor in "AB"
    ]
    assert [claim.quote for claim in leading(two)] == [
        "A heats the oven well.",
        "A heats the steam well.",
        "B heats the oven well.",
    ]


def test_line_ends_inside_a_sentence_do_not_end_it() -> None:
    text = "This manual covers the deck oven with two decks and its steam\nGenerator, as it was delivered in the year 2020."
    (first,) = leading([Passage(path="/a", anchor="page 1", text=text)])
    assert first.sentence == normalize(text) and first.quote == text


def test_support_is_a_share() -> None:
    words = "alpha bravo charlie delta echoes foxtrot golf hotels"
    assert support(words, words) == 1 and support(words, words.replace("golf", "")) == pytest.approx(7 / 8)
