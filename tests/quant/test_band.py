"""What is outside a band, and which part is named for it."""

import pytest

from appliance.bundle.record import EmulationRecord, EvaluationRecord, LayerRecord, TokenizerRecord
from quant.band import Band, complaint, worst_part
from tests.report.records import embedding, evaluation, record, text

MATRICES = record().matrices
WIDE = Band()


def test_a_bundle_inside_its_band_has_nothing_to_complain_of() -> None:
    assert complaint(WIDE, MATRICES, evaluation()) == ""
    assert complaint(WIDE, (), evaluation(texts=(), layers=(), embeddings=(embedding(),))) == ""


OPERATOR = "the operator of model.layers.3.mlp.down_proj.weight"
CASES: dict[str, tuple[Band, EvaluationRecord, str]] = {
    "kl": (
        Band(kl=0.1),
        evaluation(),
        "on prose-jargon the mean KL to the float model is 0.190, over the scheme's 0.1; look at layers.3",
    ),
    "delta": (Band(delta=0.2), evaluation(), "on prose-jargon ln PPL rises by 0.215, over the scheme's 0.2; look at layers.3"),
    "second text": (
        Band(kl=0.3, delta=0.2),
        evaluation(texts=(text("one", 0.1), text("two", 0.25))),
        "on two ln PPL rises by 0.250",
    ),
    "no numbers": (
        WIDE,
        evaluation(texts=(text(delta=None),)),
        "on prose-jargon 198 of 198 positions have logits that are no numbers",
    ),
    "operator": (
        Band(emulation=1e-8),
        evaluation(),
        f"an operator does not compute what its integers stand for; look at {OPERATOR}",
    ),
    "operator without a number": (
        WIDE,
        evaluation(emulation=EmulationRecord(matrices=1, rows=8, worst=None, worst_matrix="m.weight")),
        "look at the operator of m.weight",
    ),
    "operator and loss": (Band(kl=0.1, emulation=1e-8), evaluation(), f"look at {OPERATOR}"),
    "clipped": (
        Band(saturation=0.005),
        evaluation(),
        "1% of the weights of model.layers.0.mlp.gate_proj.weight were clipped; look at it",
    ),
    "cosine": (
        Band(cosine=0.9995),
        evaluation(texts=(), layers=(), embeddings=(embedding(),)),
        "on handbook vectors have a mean cosine of 0.999, under the scheme's 0.9995; look at the record",
    ),
    "vectors": (
        WIDE,
        evaluation(embeddings=(embedding().model_copy(update={"broken": 3}),)),
        "on handbook 3 of 50 vectors are no numbers",
    ),
    "tokenizer": (
        WIDE,
        evaluation(tokenizer=TokenizerRecord(against="x", texts=1, tokens=1, equal=False, first_difference="token 3 is 1 here")),
        "the tokenizer cuts a text otherwise: token 3 is 1 here",
    ),
    "a layer of noise": (
        WIDE,
        evaluation(layers=(LayerRecord(name="layers.7", local_snr_db=-0.4, local_cosine=0.6, snr_db=9.0, cosine=0.9),)),
        "layers.7 by itself has an SNR of -0.4 dB, under the scheme's 0; look at layers.7",
    ),
    "a layer without numbers": (
        WIDE,
        evaluation(layers=(LayerRecord(name="layers.0", local_snr_db=None, local_cosine=None, snr_db=None, cosine=None),)),
        "a layer gives no numbers; look at layers.0, which gives no numbers",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_leaves_the_band_is_told_with_where_to_look(case: str) -> None:
    band, found, says = CASES[case]
    told = complaint(band, MATRICES, found)
    assert says in told and "\n" not in told


def test_the_part_to_look_at() -> None:
    layers = list(evaluation().layers)
    worst = worst_part(layers)
    assert worst is not None and worst.name == "layers.3"
    layers[1] = LayerRecord(name="layers.1", local_snr_db=None, local_cosine=None, snr_db=None, cosine=None)
    worst = worst_part(layers)
    assert worst is not None and worst.name == "layers.1"
    exact = LayerRecord(name="layers.0", local_snr_db=None, local_cosine=1.0, snr_db=None, cosine=1.0)
    assert worst_part([exact]) is None and worst_part([]) is None
