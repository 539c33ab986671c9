"""The account of a decision against the files it comes to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appliance.bundle.vocabulary import QUANT_LINEAR
from quant.decide import decide
from quant.emit import emit
from quant.graph import canonical
from quant.record import record, summary, with_ranges
from quant.scheme import Options
from quant.schemes import find
from quant.static import Range, Ranges, by_weight
from tests.quant.canonical import target, tied_model


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
