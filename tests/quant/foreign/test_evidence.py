"""What a file of another exporter is checked for before it gets its name, and the evidence in its record."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance import cli
from appliance.errors import BundleError, LossError
from appliance.targets import load
from appliance.targets.capabilities import Target
from quant import decide, emit, schemes
from quant.foreign.loss import SEED, TOKENS, Facts, Unmeasured, feed
from quant.foreign.quantize import Request, quantize
from quant.plan import Plan
from quant.solvers import Solved
from tests.quant.foreign.graphs import FOREIGN, VOCAB, logits, write_foreign
from tests.static_pair import fresh_seed


def request_for(source: Path, scheme: str = "w4a8") -> Request:
    return Request(source, schemes.find(scheme), load("cpu"), source.parent / "out" / "model.onnx")


def made(source: Path, scheme: str = "w4a8") -> dict[str, Any]:
    request = request_for(source, scheme)
    request.output.parent.mkdir(exist_ok=True)
    quantize(request, lambda *_: None)
    found: dict[str, Any] = json.loads(request.record.read_text(encoding="utf-8"))
    return found


def refused(source: Path, error: type[Exception], message: str) -> None:
    """It ends with that error and leaves nothing."""
    with pytest.raises(error, match=message) as caught:
        made(source)
    assert "\n" not in str(caught.value)
    assert list((source.parent / "out").iterdir()) == []


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[ir.Graph], None]) -> None:
    """What is emitted is altered before it is written."""
    whole = emit.emit

    def emitted(model: ir.Model, target: Target) -> None:
        whole(model, target)
        spoil(model.graph)

    monkeypatch.setattr(emit, "emit", emitted)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_loss_is_what_the_two_files_say(name: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    source = write_foreign(name, tmp_path, seed)
    loss = made(source)["loss"]
    assert loss["why_not"] == "" and loss["tokens"] >= 32, loss
    ids = np.random.default_rng(SEED).integers(0, VOCAB, (1, loss["tokens"]))
    before, after = (logits(path, ids)[0].astype(np.float64) for path in (source, tmp_path / "out" / "model.onnx"))
    p, q = (np.exp(one) / np.exp(one).sum(1, keepdims=True) for one in (before, after))
    assert loss["kl_mean"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=0.02), seed
    assert loss["relative_difference"] == pytest.approx(np.sqrt(((after - before) ** 2).sum() / (before**2).sum()), rel=0.02), (
        seed
    )
    assert loss["same_top"] == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=0.05), seed
    assert 0.01 < loss["relative_difference"] < 0.5, seed


def test_what_is_not_rounded_loses_nothing(tmp_path: Path) -> None:
    loss = made(write_foreign("torch-llama-eager", tmp_path, fresh_seed()), "float")["loss"]
    assert (loss["relative_difference"], loss["kl_mean"], loss["same_top"]) == (0, 0, 1)


def test_the_record_says_what_it_was_made_from_and_with_and_how_large_it_is(tmp_path: Path) -> None:
    source = write_foreign("genai-llama", tmp_path, fresh_seed())
    found = made(source)
    told = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("model.onnx", "model.onnx.data")}
    assert found["source"] == {
        "file": "model.onnx", "sha256": told["model.onnx"], "weights": {"model.onnx.data": told["model.onnx.data"]},
    }  # fmt: skip
    assert found["versions"].keys() == {"python", "appliance", "onnx", "onnx-ir", "onnxruntime", "numpy"}
    size = found["sizes"]["cpu"]
    assert found["bits_per_weight"] == size["bits_per_weight"] and size["bytes_by_type"]["int4 weights"] > 0
    on_disk = sum(one["bytes"] for one in found["files"].values())
    assert size["bytes"] <= on_disk
    assert str(tmp_path) not in json.dumps(found)


def test_swapped_halves_of_bytes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(graph: ir.Graph) -> None:
        value = next(value for name, value in graph.initializers.items() if name.endswith(".q4"))
        assert value.const_value is not None
        packed = value.const_value.numpy()
        value.const_value = ir.tensor((packed >> 4) | (packed << 4), name=value.name)

    spoilt(monkeypatch, swap)
    refused(write_foreign("genai-llama", tmp_path, fresh_seed()), BundleError, "integers are not those that were decided")


def test_one_wrong_integer_of_a_table_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alter(graph: ir.Graph) -> None:
        value = next(value for name, value in graph.initializers.items() if name.endswith(".q8"))
        assert value.const_value is not None
        packed = value.const_value.numpy().copy()
        packed.reshape(-1)[17] ^= 1
        value.const_value = ir.tensor(packed, name=value.name)

    spoilt(monkeypatch, alter)
    refused(write_foreign("torch-qwen3-eager", tmp_path, fresh_seed()), BundleError, "1 integers are not those that were decided")


def test_a_file_that_does_not_run_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(graph: ir.Graph) -> None:
        next(node for node in graph if node.op_type == "Add").op_type = "NoSuchOperator"

    spoilt(monkeypatch, unknown)
    refused(write_foreign("torch-llama-eager", tmp_path, fresh_seed()), LossError, "was written, and does not run: ")


def test_logits_that_are_no_numbers_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decide.solved

    def infinite(plan: Plan, weight: np.ndarray, moments: Any, threads: int) -> Solved:
        found = whole(plan, weight, moments, threads)
        return replace(found, scales=np.full_like(found.scales, np.inf)) if "head" in plan.roles else found

    monkeypatch.setattr(decide, "solved", infinite)
    refused(write_foreign("torch-llama-eager", tmp_path, fresh_seed()), LossError, "gives logits that are no numbers")


def test_a_weight_may_be_called_as_emission_calls_its_parts(tmp_path: Path) -> None:
    def rename(model: ir.Model) -> None:
        for name in ("model.layers.0.attn.o_proj.MatMul.weight", "model.layers.1.attn.o_proj.MatMul.weight"):
            model.graph.initializers[name].name = f"{name}.q"

    found = made(write_foreign("genai-llama", tmp_path, fresh_seed(), rename))
    assert sum(one["name"].endswith(".q") for one in found["matrices"]) == 2


@pytest.mark.usefixtures("home")
def test_a_graph_with_an_input_of_an_unknown_kind_says_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def strange(model: ir.Model) -> None:
        model.graph.inputs.append(ir.Value(name="flag", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.BOOL)))

    source = write_foreign("torch-llama-eager", tmp_path, fresh_seed(), strange)
    assert made(source)["loss"] == {"why_not": "its input flag [1] is of a kind that is not known"}
    assert cli.main(["quantize", str(source)]) == 0
    assert "what it lost was not measured: its input flag [1]" in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_the_command_tells_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_foreign("torch-llama-eager", tmp_path, fresh_seed())
    assert cli.main(["quantize", str(source)]) == 0
    assert f"on {TOKENS} random tokens: logits off by 0." in capsys.readouterr().out


KNOWN = Facts("input_ids", VOCAB, None, {"key": 32, "value": 48})


def inputs(*shapes: tuple[str, str, list[Any]]) -> list[Any]:
    return [SimpleNamespace(name=name, type=f"tensor({kind})", shape=shape) for name, kind, shape in shapes]


def test_inputs_of_other_exporters_are_fed() -> None:
    fed = feed(
        inputs(
            ("input_ids", "int32", ["b", 40]),
            ("attention_mask", "int64", ["b", "t"]),
            ("position_ids", "int64", ["b", "s"]),
            ("cache_position", "int64", ["s"]),
            ("past_key_values.0.key", "float", ["b", 2, "p", "d"]),
            ("past_key_values.0.value", "float16", ["b", 2, "p", "d"]),
        ),
        KNOWN,
    )
    assert {name: (array.shape, array.dtype.name) for name, array in fed.items()} == {
        "input_ids": ((1, 40), "int32"),
        "attention_mask": ((1, 40), "int64"),
        "position_ids": ((1, 40), "int64"),
        "cache_position": ((40,), "int64"),
        "past_key_values.0.key": ((1, 2, 0, 16), "float32"),
        "past_key_values.0.value": ((1, 2, 0, 24), "float16"),
    }
    assert fed["attention_mask"].all() and fed["position_ids"][0].tolist() == list(range(40)) and fed["input_ids"].max() < VOCAB
    few = feed(inputs(("input_ids", "int64", ["b", "s"])), replace(KNOWN, places=24))
    assert few["input_ids"].shape == (1, 24), "no more than there are positions"


@pytest.mark.parametrize(
    "shape",
    [
        ("attention_mask", "int64", ["b", 1, "s", "t"]),
        ("past.0.key", "float", ["b", 2, 512, 16]),
        ("inputs_embeds", "float", ["b", "s", 64]),
        ("pixel_values", "float", ["b", 3, 224, 224]),
        ("past_key_values.0.key", "double", ["b", 2, "p", 16]),
    ],
)
def test_what_cannot_be_fed_is_named(shape: tuple[str, str, list[Any]]) -> None:
    with pytest.raises(Unmeasured, match=f"its input {shape[0]} "):
        feed(inputs(("input_ids", "int64", ["b", "s"]), shape), KNOWN)
    with pytest.raises(Unmeasured, match="which input takes token ids"):
        feed(inputs(shape), KNOWN)
