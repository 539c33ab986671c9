"""The account of a decision against the files it comes to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appliance.bundle.record import Record
from appliance.bundle.vocabulary import QUANT_LINEAR
from quant.budget import Choice, Unit, bytes_of, choose
from quant.decide import decide
from quant.emit import emit
from quant.graph import canonical
from quant.record import record, said, summary, with_ranges
from quant.scheme import Form, Measured, Options, WeightRule
from quant.schemes import find
from quant.static import Range, Ranges, by_weight
from tests.quant.canonical import target, tied_model
from tests.static_pair import fresh_seed


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_the_initializers(form: str, tied: bool, tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 100)).astype(np.float32), tied=tied)
    decision = decide(model, find("w4a8", Options(group=32)), target(form), tmp_path)
    emit(model, target(form))
    dtype = target(form).weights.scale_dtype
    told = record(decision, dtype)
    assert json.loads(json.dumps(told, allow_nan=False)) == told, "plain JSON"
    real: dict[str, int] = {}
    for value in model.graph.initializers.values():
        if role := value.metadata_props.get("role"):
            real[role] = real.get(role, 0) + int(value.const_value.nbytes)  # type: ignore[union-attr]
    if tied:
        real["embed+head"] = real.pop("embed")
    assert told["bytes_by_role"] == real
    parameters = 50 * 100 * (1 if tied else 2) + 2 * 100 * 100 + 100
    assert told["parameters"] == parameters
    assert told["bits_per_weight"] == pytest.approx(8 * sum(real.values()) / parameters, abs=1e-4)
    body = real["mlp.gate"] + real["mlp.up"] + real["norm"]
    assert told["bits_per_body_weight"] == pytest.approx(8 * body / (2 * 100 * 100 + 100), abs=1e-4)


def test_evidence_by_matrix_and_role(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 128)).astype(np.float32))
    options = Options(group=32, roles={"mlp.up": {"bits": 8}})
    told = record(decide(model, find("w4a8", options), target("cpu"), tmp_path))
    assert told["options"] == {"group": 32, "roles": {"mlp.up": {"bits": 8}}, "symmetric": True, "kv": "float32", "weights": {}}
    assert 20 < told["snr_db_by_role"]["mlp.gate"] < 24 and 44 < told["snr_db_by_role"]["mlp.up"] < 49
    gate = next(one for one in told["matrices"] if one["name"] == "gate.weight")
    assert gate["shape"] == [128, 128] and gate["bits"] == 4 and gate["group"] == 32 and 0 < gate["saturation"] < 0.05
    assert told["activations"]["head"] == "block-dynamic" and told["activations"]["norm"] == "float"
    assert told["float"] == [
        {"name": "norm.weight", "role": "norm", "shape": [128], "bytes": 512, "reason": "norm always stays float"}
    ]


def test_each_matrix_has_the_activations_of_its_ranges(tmp_path: Path) -> None:
    """Of two linears, one has a stream that got 16 bits; and the tied head's scheme gives 16 anyway."""
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    decision = decide(model, replace(find("w4a8-static"), solver="fit"), target("cpu-static"), tmp_path)
    nodes = {str(node.inputs[1].name): str(node.name) for node in canonical(model.graph, QUANT_LINEAR)}  # type: ignore[union-attr]
    ranges = {name: Ranges(Range.over(-1, 1, 8), Range.over(-1, 1, 8)) for name in nodes.values()}
    wide = Range.over(-1, 1, 16)
    ranges[nodes["up.weight.q"]] = Ranges(wide, wide, "8 bits here move the hidden state by 9%")
    ranges[nodes["embed.weight.q"]] = Ranges(wide, wide)
    told = record(with_ranges(decision, by_weight(model, ranges)))
    found = {one["name"]: (one["activation"], one["activation_reason"]) for one in told["matrices"]}
    assert found == {
        "embed.weight": ("static-u16", ""),
        "gate.weight": ("static-u8", ""),
        "up.weight": ("static-u16", "8 bits here move the hidden state by 9%"),
    }
    assert (told["activations"]["mlp.gate"], told["activations"]["mlp.up"]) == ("static-u8", "static-u16")


def test_a_role_whose_matrices_differ_says_how_many_have_which(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    decision = decide(model, find("w4a8"), target("cpu"), tmp_path)
    first = next(one for one in decision.matrices if one.name == "gate.weight")
    other = replace(first, name="other.weight", form=replace(first.form, activation="float"))
    more = (*decision.matrices, other, replace(first, name="third.weight"))
    assert record(replace(decision, matrices=more))["activations"]["mlp.gate"] == "2 block-dynamic, 1 float"


def test_the_manifest_counts_a_tied_table_once(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    decision = decide(model, find("w4a8"), target("cpu"), tmp_path)
    told = summary(decision)
    assert told.name == "w4a8" and sorted(told.roles) == ["embed", "head", "mlp.gate", "mlp.up", "norm"]
    assert (told.roles["embed"].parameters, told.roles["head"].parameters) == (3200, 0)
    assert told.roles["head"].bits == 8 and told.roles["norm"].bits == 32 and told.roles["mlp.up"].bytes == 64 * (32 + 2)
    assert sum(form.parameters for form in told.roles.values()) == decision.parameters


def test_an_embedding_that_is_only_looked_up_has_no_activations(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32), tied=False)
    told = summary(decide(model, find("w4a8"), target("cpu"), tmp_path))
    assert (told.roles["embed"].activation, told.roles["head"].activation) == ("float", "block-dynamic")


def test_a_choice_can_be_made_again_from_the_record_alone(tmp_path: Path) -> None:
    """The forms that a budget could buy, what it expected of each, and its bytes: `choose` takes the same again."""
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    model = tied_model(rng.standard_normal((50, 128)).astype(np.float32))
    forms = [Form(bits, group, "block-dynamic", zeros) for bits, group, zeros in
             ((4, 32, True), (4, 32, False), (4, 128, True), (8, 32, True))]  # fmt: skip
    names = ["gate.weight", "up.weight"]
    units = tuple(
        Measured((name,), float(kl), {form: float(kl * rng.random()) for form in forms})
        for name, kl in zip(names, rng.random(2), strict=True)
    )

    def had(unit: Measured) -> tuple[Choice, ...]:
        return tuple(Choice(form, bytes_of(128, 128, form), loss) for form, loss in unit.expected.items())

    budget = int(1.5 * bytes_of(128, 128, forms[0]) + rng.integers(0, 5000))
    chosen = choose([Unit(unit.weights[0], had(unit)) for unit in units], budget)
    rules = {
        name: WeightRule("measured", one.form.bits, one.form.group, one.form.symmetric)
        for name, one in zip(names, chosen, strict=True)
    }
    scheme = replace(find("w4a8"), options=Options(weights=rules), budget=5.6, measured=units)
    told = record(decide(model, scheme, target("cpu"), tmp_path))
    assert (told["budget"], told["wide"]) == (5.6, 0.0)
    by_name = {one["name"]: one for one in told["matrices"]}
    again = []
    for unit in units:
        found = by_name[unit.weights[0]]
        assert found["cost_kl"] == pytest.approx(unit.kl, rel=1e-5) and found["cost_with"] == [], f"seed {seed}"
        shown = dict(zip(map(said, forms), forms, strict=True))
        assert list(found["cost_by_form"]) == ["4/32", "4/32 zero points", "4/128", "8/32"]
        choices = tuple(
            Choice(shown[key], bytes_of(*found["shape"], shown[key]), kl) for key, kl in found["cost_by_form"].items()
        )
        again.append(Unit(found["name"], choices))
    forms_again = [one.form for one in choose(again, budget)]
    assert forms_again == [one.form for one in chosen], f"seed {seed}"
    for name, form in zip(names, forms_again, strict=True):
        assert (by_name[name]["bits"], by_name[name]["group"], by_name[name]["symmetric"]) == (
            form.bits,
            form.group,
            form.symmetric,
        )
    assert (by_name["embed.weight"]["cost_kl"], by_name["embed.weight"]["cost_by_form"]) == (None, {}), "no budget is about it"


def test_weights_of_one_unit_name_each_other(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    decision = decide(model, find("w4a8"), target("cpu"), tmp_path)
    unit = Measured(("gate.weight", "up.weight"), 0.25, {Form(4, 64, "block-dynamic"): 0.3})
    told = record(replace(decision, scheme=replace(decision.scheme, measured=(unit,))))
    found = {one["name"]: (one["cost_kl"], one["cost_with"]) for one in told["matrices"]}
    assert found == {"embed.weight": (None, []), "gate.weight": (0.25, ["up.weight"]), "up.weight": (0.25, ["gate.weight"])}


def test_every_key_is_one_that_a_record_has(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    told = record(decide(model, find("w4a8"), target("cpu"), tmp_path))
    assert Record.model_validate(told).model_dump(include=set(told), mode="json")["matrices"][0]["cost_kl"] is None
    with pytest.raises(ValueError, match="wise"):
        Record.model_validate({**told, "wise": 0.25})
