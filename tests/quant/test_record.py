"""The account of a decision against the files it comes to."""

import json
from pathlib import Path

import numpy as np
import pytest

from quant.decide import decide
from quant.emit import emit
from quant.record import record, summary
from quant.scheme import Options
from quant.schemes import find
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
