"""The page of a bundle: whole, well-formed, needing nothing else, and deaf to what a stranger's model calls things."""

import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from appliance.bundle.record import (
    GreedyRecord,
    LayerRecord,
    Record,
    ReshapedRecord,
    StreamRecord,
    TokenizerRecord,
    VerdictRecord,
)
from appliance.report import conditions, plots, words
from appliance.report.marks import Frame, element, escape, ticks
from appliance.report.page import page
from quant.band import Band, complaint
from tests.report import records
from tests.report.records import embedding, evaluation, manifest, record, text

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Reader(HTMLParser):
    """Elements, attributes and text, and whether every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def read(of: Record) -> Reader:
    reader = Reader()
    reader.feed(page(manifest(), of))
    assert reader.open == []
    return reader


def test_the_page_says_everything_and_needs_nothing() -> None:
    made = page(manifest(), record())
    found = read(record())
    for said in (
        "It lost noticeably: with 5.22 bits a weight it is 24.0% more perplexed by human text", "picks the same next word 73%",
        "+0.2154 ± 0.0113", "handbook", "7 tokens", "measured to be sensitive", "norm always stays float",
        "the same 1000 tokens for 2 texts (against another reader)", "3.1e-07 of the largest output", "appliance evaluate small",
        "appliance build checkpoint", "ef" * 32, "ab" * 32, "All 8 matrices", "int4 weights", "mean KL at most 1",
    ):  # fmt: skip
        assert said in found.text, said
    assert sum(tag == "svg" for tag, _ in found.seen) == 5
    outside = [value for _, attributes in found.seen for key, value in attributes.items() if key in ("src", "href", "srcset")]
    assert outside == [] and not any(tag in ("script", "link", "img", "iframe") for tag, _ in found.seen)
    assert not re.search(r"url\(|@import|https?://", made)


def test_the_page_says_how_it_was_quantized() -> None:
    found = read(record(**records.conditions()))
    for said in (*records.SAID, "layers.3.mlp_mid", "8 bits in layer 3 cost 7%", "static-u16", "output loss", "0.0123", "38.0 dB",
                 "32.5 dB"):  # fmt: skip
        assert said in found.text, said
    assert "layers.3.mlp_in" not in found.text, "it has what the scheme gives"
    nothing = record(options={"group": None, "symmetric": True, "kv": "float32", "roles": {}, "weights": {}})
    assert "How it was quantized" not in read(nothing).text


def test_what_stands_in_the_way_of_a_rotation_is_told() -> None:
    reshaped = records.conditions()["reshaped"]
    assert isinstance(reshaped, ReshapedRecord)
    bare: dict[str, object] = {"residual": "", "heads": "", "folded": 0, "tied": False, "norms": 5, "values": 0, "gated": 0}
    told = reshaped.model_copy(update={**bare, "obstacle": "layer 2 adds a bias"})
    assert conditions.reshaped(told) == "residual stream not rotated: layer 2 adds a bias; equalized: 5 norms"
    assert conditions.widths(()) == "16 bits for 0 of 0 streams"


def test_a_limit_of_the_band_is_a_most_or_a_least_as_the_band_means_it() -> None:
    """Every limit of a real band, set once under and once over what the record has: one of the two is complained of."""
    found = evaluation(layers=evaluation().layers, embeddings=(embedding(),))
    matrices = record().matrices
    assert complaint(Band(), matrices, found) == ""
    said = {name: words.limit(name, value) for name, value in Band().limits().items()}
    for name, low, high in (
        ("kl", 0.1, 0.3), ("delta", 0.2, 0.3), ("saturation", 0.005, 0.3), ("emulation", 1e-8, 1e-3), ("layer_snr_db", 0.0, 30.0),
        ("cosine", 0.85, 0.9995),
    ):  # fmt: skip
        least = bool(complaint(Band(**{name: high}), matrices, found))
        assert least != bool(complaint(Band(**{name: low}), matrices, found)), name
        assert ("at least" in said[name]) == least and ("at most" in said[name]) != least, said[name]
    shown = read(record(verdict=VerdictRecord(band=Band().limits(), complaint=""))).text
    assert all(one in shown for one in said.values()) and " up to " not in shown
    assert words.limit("of tomorrow", 2.5) == "of tomorrow 2.5"


def test_the_page_says_which_figures_come_from_the_files() -> None:
    files = "The losses on text and the bundle's answers come from running its graph files"
    assert files in read(record()).text and "run a layer at a time on the processor" in read(record()).text
    away = evaluation(ran="the graphs cannot run here (no such device)", greedy=())
    shown = read(record(evaluation=away)).text
    assert "None of the figures comes from running the bundle's graph files: the graphs cannot run here (no such device)" in shown
    assert files not in shown
    texts_alone = evaluation(layers=(), ablations=(), emulation=None)
    assert "a layer at a time" not in read(record(evaluation=texts_alone)).text
    vectors = evaluation(texts=(), layers=(), ablations=(), greedy=(), emulation=None, embeddings=(embedding(),))
    shown = read(record(evaluation=vectors)).text
    assert "The vectors come from running the bundle's graph file" in shown and "losses on text" not in shown
    assert "The bundle was not run" in read(record(evaluation=None)).text


def test_the_page_says_what_the_tokenizers_comparison_cannot_see() -> None:
    blind = TokenizerRecord(against="a table", blind_to="where a text is cut", texts=2, tokens=9, equal=True)
    assert "(against a table; not seen: where a text is cut)" in read(record(evaluation=evaluation(tokenizer=blind))).text
    assert "not seen" not in read(record()).text


def test_the_page_says_what_a_budget_was_spent_by() -> None:
    first, *rest = record().matrices
    measured = first.model_copy(update={"cost_kl": 0.000123, "cost_by_form": {"4/32": 0.0002, "8/32": 1e-6}})
    shown = read(record(budget=5.6, matrices=(measured, *rest))).text
    assert "5.6 bits a weight without the tables, scales included; chosen by the measured cost of 1 matrices" in shown
    assert "cost, nats" in shown and "0.00012" in shown
    assert "cost, nats" not in read(record()).text and "budget" not in conditions.lines(record())
    static = records.conditions() | {"wide": 0.25}
    assert "; the scheme lets 25% of the products have them" in read(record(**static)).text


HOSTILE = '</title></style><script>alert(1)</script><img src=x onerror="a()">\x1b[31m\u202e&amp;'


def test_what_a_model_says_stays_text() -> None:
    greedy = GreedyRecord(name=HOSTILE, prompt=HOSTILE, tokens=9, agreed=1, common=HOSTILE, next=HOSTILE, reference_next=HOSTILE)
    one = record()
    matrix = one.matrices[0].model_copy(update={"name": f"model.layers.0.{HOSTILE}", "roles": (HOSTILE,), "reason": HOSTILE})
    bad = one.model_copy(
        update={
            "matrices": (matrix,), "evaluation": evaluation(greedy=(greedy,), provider=HOSTILE, command=HOSTILE),
            "command": HOSTILE, "scheme": HOSTILE,
            "verdict": VerdictRecord(band={HOSTILE: 1.0}, complaint=HOSTILE), "calibration": {HOSTILE: HOSTILE},
            "files": {HOSTILE: HOSTILE}, "float": (one.float[0].model_copy(update={"role": HOSTILE, "reason": HOSTILE}),),
        }
    )  # fmt: skip
    reshaped = records.conditions()["reshaped"]
    assert isinstance(reshaped, ReshapedRecord)
    stream = StreamRecord(stream=HOSTILE, bits=16, reason=HOSTILE, cost_8_bits=0, low=0, high=1)
    bad = bad.model_copy(
        update={
            "reshaped": reshaped.model_copy(update={"obstacle": HOSTILE}), "ranges": {HOSTILE: (stream,)},
            "options": {HOSTILE: HOSTILE, "roles": {HOSTILE: {"bits": 4}}},
        }
    )  # fmt: skip
    reader = Reader()
    made = page(manifest().model_copy(update={"name": HOSTILE, "architecture": HOSTILE}), bad)
    reader.feed(made)
    assert reader.open == []
    assert {tag for tag, _ in reader.seen} == {tag for tag, _ in read(record()).seen} | {"strong"}
    assert "\x1b" not in made and "\u202e" not in made and "<script" not in made


@pytest.mark.parametrize("without", ["evaluation", "verdict", "sizes", "matrices", "float", "files", "everything"])
def test_a_record_without_a_part_still_makes_a_page(without: str) -> None:
    nothing = {"evaluation": None, "verdict": None, "sizes": {}, "matrices": (), "float": (), "files": {}}
    found = read(record(**(nothing if without == "everything" else {without: nothing[without]})))
    assert "small" in found.text
    if without in ("evaluation", "everything"):
        assert "Nobody has measured yet" in found.text


def test_a_broken_bundle_is_called_broken() -> None:
    broken = LayerRecord(name="layers.2", local_snr_db=None, local_cosine=None, snr_db=None, cosine=None)
    bad = evaluation(texts=(text(delta=None),), layers=(*evaluation().layers[:2], broken))
    complaint = VerdictRecord(band={"KL": 1.0}, complaint="look at layer 2", accepted=True)
    found = read(record(evaluation=bad, verdict=complaint))
    assert "Broken: 198 of 198 positions gave no numbers" in found.text and "broken" in found.text
    assert "Outside the scheme's band: look at layer 2. Installed all the same" in found.text
    assert any(attributes.get("class") == "lead bad" for _, attributes in found.seen)


def test_an_embedding_model_is_judged_by_its_vectors() -> None:
    found = read(record(evaluation=evaluation(texts=(), layers=(), ablations=(), greedy=(), embeddings=(embedding(),))))
    assert "to a cosine of 0.9978 or more, and the nearest other passage is the same for 96% of the passages" in found.text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 22.5), (0, 0.0004), (19.2, 21.1), (5, 5), (0, 0), (0, 12345)])
def test_ticks_are_few_round_and_hold_everything(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 9
    steps = [second - first for first, second in itertools.pairwise(marks)]
    assert max(steps) == pytest.approx(min(steps))
    digit = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(digit - nice) for nice in (1, 2, 2.5, 5, 10)) < 1e-6


def test_places_of_a_plot() -> None:
    frame = Frame(x=(0, 10), y=(0, 2), width=100, height=100, left=10, right=10, top=10, bottom=10)
    assert (frame.across(0), frame.across(5), frame.across(10)) == (10, 50, 90)
    assert (frame.down(0), frame.down(1), frame.down(2)) == (90, 50, 10)
    log = Frame(x=(8, 128), y=(0, 1), width=100, height=100, left=10, right=10, log=True)
    assert (log.across(8), log.across(32), log.across(128)) == (10, 50, 90)


def test_the_map_has_a_cell_for_every_matrix_and_says_other_bits() -> None:
    made = str(plots.heat(record().matrices))
    assert made.count("<rect") == 8 and made.count('class="mark middle">8<') == 2
    assert 'class="h0"' in made and 'class="h8"' in made
    assert plots.heat(()) is None
    assert [plots.shade(value, 10, 20) for value in (10, 14.9, 20, None)] == [0, 4, 8, 8]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.up", 12),
        ("encoder.layer.3.x", 3),
        ("model.embed_tokens.weight", None),
        ("layers.x.1", None),
        ("", None),
    ],
)
def test_the_layer_in_a_name(name: str, layer: int | None) -> None:
    assert plots.layer_of(name) == layer


def test_probabilities_that_moved_are_a_loss_even_where_the_text_is_not_more_surprising() -> None:
    moved = text(delta=-0.08).model_copy(update={"kl_mean": 0.92})
    said = words.lost(record(evaluation=evaluation(texts=(moved,))))
    assert said.startswith("It lost much: ") and "7.7% less perplexed" in said


def test_words_for_numbers() -> None:
    assert [words.number(value) for value in (0.19, 1.7, 12.34, 0.00031234, 123456.0, 0, None, 2e-9)] == [
        "0.190", "1.70", "12.3", "0.000312", "123456", "0", "-", "0.000000"]  # fmt: skip
    assert [words.grade(value) for value in (-0.1, 0.0, 0.01, 0.05, 0.2, 0.5, 2)] == [
        "practically nothing", "practically nothing", "very little", "a little", "noticeably", "much",
        "so much that it is of no use"]  # fmt: skip
    assert escape("<&\"'>") == "&lt;&amp;&quot;&#x27;&gt;" and escape(element("b", {}, "<")) == "<b>&lt;</b>"
