"""A decoder run part by part is the decoder run whole."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import DOMAIN
from appliance.errors import BadInput
from appliance.targets import load
from export import arch, parity
from export.checkpoint import open_checkpoint
from export.slices import opener
from quant.decide import decide
from quant.emit import emit
from quant.layers import Hidden, Part, cut, open_part, pass_through
from quant.scheme import Options
from quant.schemes import find
from tests.golden import recipe

MODELS = [(name, kind) for name in ("llama", "mistral", "gemma3_text") for kind in arch.find(name).TINY]


def tiny(name: str, kind: str, seed: int = 1) -> arch.Opened:
    config: dict[str, Any] = arch.find(name).TINY[kind]
    return arch.open_model(recipe.Memory(config, recipe.tensors(config, seed)))


def by_parts(parts: tuple[Part, ...], ids: np.ndarray, folder: Path, **options: Any) -> np.ndarray:
    opened = opener(ids.shape[1], folder, emit, **options)
    x = ids
    for part in parts:
        x = open_part(part, opened, streams=False).run(x).hidden
    return x


@pytest.mark.parametrize(("name", "kind"), MODELS)
def test_parts_in_a_row_are_the_whole_float_model(name: str, kind: str, tmp_path: Path) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    opened = tiny(name, kind, seed % 1000)
    ids = np.random.default_rng(seed).integers(0, opened.config.vocab_size, (2, 30))
    found = by_parts(cut(opened.build()), ids, tmp_path)
    whole = parity.open_float(opened, parity.reference_target())
    for row in range(2):
        wanted = parity.logits(whole, ids[row].tolist())
        assert np.abs(found[row] - wanted).max() < 1e-5 * np.abs(wanted).max(), f"seed {seed}"
    assert not list(tmp_path.iterdir()), "weights on their way to a session are gone"


@pytest.mark.model
def test_parts_of_the_starter_model_are_the_whole(starter_gguf: Path, tmp_path: Path) -> None:
    opened = arch.open_model(open_checkpoint(starter_gguf))
    ids = np.random.default_rng().integers(0, opened.config.vocab_size, (1, 100))
    found = by_parts(cut(opened.build()), ids, tmp_path)
    wanted = parity.logits(parity.open_float(opened, parity.reference_target()), ids[0].tolist())
    assert np.abs(found[0] - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("operator", ["MatMulNBits", "DequantizeLinear"])
@pytest.mark.parametrize(("name", "kind", "symmetric"), [("llama", "all", True), ("gemma3_text", "period", False)])
def test_parts_of_a_decided_model_are_the_whole_emitted_one(
    operator: str, name: str, kind: str, symmetric: bool, tmp_path: Path
) -> None:
    opened, ids = tiny(name, kind), np.random.default_rng().integers(0, 300, (1, 30))
    reference = parity.reference_target()
    weights = reference.weights.model_copy(update={"operator": operator})
    target = reference.model_copy(update={"weights": weights})

    def decided() -> ir.Model:
        model = opened.build()
        decide(model, find("w4a8", Options(group=32, symmetric=symmetric)), load("cpu"), tmp_path / "work", source="x")
        return model

    found = by_parts(cut(decided()), ids, tmp_path / "parts", target=target)
    wanted = opener(30, tmp_path, emit, target=target)(decided())(
        {"input_ids": ids, "attention_mask": np.ones_like(ids), "logits_to_keep": np.array([30])} | _past(opened)
    )["logits"]
    float_logits = by_parts(cut(opened.build()), ids, tmp_path / "float")
    largest, lost = np.abs(wanted).max(), np.abs(found - float_logits).max()
    assert lost > 1e-3 * largest, "it is the quantized model that ran"
    # The last bit of a sum decides a tie of an activation's rounding now and then, which is worth a part of all that was lost.
    assert np.abs(found - wanted).max() < max(1e-4 * largest, 0.15 * lost)


def _past(opened: arch.Opened) -> dict[str, np.ndarray]:
    inputs = [value for value in opened.build().graph.inputs if value.metadata_props.get("state")]
    return {str(v.name): np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32) for v in inputs}  # type: ignore[index]


@pytest.mark.parametrize(("name", "kind"), [("llama", "biases"), ("gemma3_text", "all"), ("mistral", "window")])
def test_streams_are_what_enters_their_linears(name: str, kind: str, tmp_path: Path) -> None:
    opened = tiny(name, kind)
    parts = cut(opened.build())
    assert [part.name for part in parts] == ["embed", *(f"layers.{i}" for i in range(len(parts) - 2)), "tail"]
    ids = np.random.default_rng().integers(0, opened.config.vocab_size, (1, 20))
    run = opener(20, tmp_path)
    hidden = open_part(parts[0], run).run(ids).hidden
    out = open_part(parts[1], run, state=True).run(hidden)
    assert list(parts[1].streams) == [f"layers.0.{name}" for name in ("attn_in", "attn_out", "mlp_in", "mlp_mid")]
    assert set(out.streams) == set(parts[1].streams) and sorted(out.state) == ["present.0.key", "present.0.value"]
    weights = recipe.tensors(arch.find(name).TINY[kind], 1)
    norm = weights["model.layers.0.input_layernorm.weight"] + (name == "gemma3_text")
    epsilon = opened.config.norm_epsilon
    wanted = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + epsilon) * norm
    assert np.allclose(out.streams["layers.0.attn_in"], wanted, atol=1e-4)
    assert next(iter(parts[1].streams.values())) == tuple(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    last = open_part(parts[-1], run, head=False).run(hidden)
    assert np.array_equal(last.hidden, open_part(parts[-1], run).run(hidden).streams["head_in"])


def test_many_windows_pass_through_a_file(tmp_path: Path) -> None:
    opened = tiny("llama", "tied")
    embed, layer, *_ = cut(opened.build())
    ids = np.random.default_rng().integers(0, 300, (5, 12))
    run, states = opener(12, tmp_path), Hidden(tmp_path / "hidden.npy", (5, 12, 64))
    for _ in pass_through(open_part(embed, run), ids, states, 2):
        pass
    before = states.read(slice(None)).copy()
    running, seen = open_part(layer, run), []
    for windows, out in pass_through(running, states, states, 2):
        seen.append(windows)
        assert out.streams["layers.0.mlp_mid"].shape == (windows.stop - windows.start, 12, 128)
    assert seen == [slice(0, 2), slice(2, 4), slice(4, 5)]
    for row in range(5):
        assert np.allclose(states.read(slice(row, row + 1)), running.run(before[row : row + 1]).hidden, atol=1e-5)
    states.flush()
    assert Hidden.existing(states.path, (5, 12, 64)) is not None
    assert Hidden.existing(states.path, (5, 12, 65)) is None
    states.path.write_bytes(states.path.read_bytes()[:100])
    assert Hidden.existing(states.path, (5, 12, 64)) is None


def test_a_part_can_be_built_twice_and_leaves_the_whole_alone(tmp_path: Path) -> None:
    model = tiny("llama", "tied").build()
    before = [node.name for node in model.graph]
    part = cut(model)[1]
    one, two = part.build(), part.build(streams=False, state=True)
    assert one.graph is not two.graph and [node.name for node in model.graph] == before
    assert [value.name for value in two.graph.outputs] == ["hidden.next", "present.0.key", "present.0.value"]
    assert one.graph.initializers["model.layers.0.mlp.up_proj.weight"].const_value is not None


def _broken(kind: str) -> ir.Model:
    """A model that cannot be cut, and why."""
    model = tiny("llama", "tied").build()
    graph = model.graph
    if kind == "no layers":
        for value in (*graph.initializers.values(), *graph.inputs):
            value.metadata_props.pop("layer", None)
    elif kind == "out of order":
        for value in graph.initializers.values():
            if value.metadata_props.get("layer") == "0" and "self_attn" in str(value.name):
                value.metadata_props["layer"] = "1"
        for value in graph.inputs:
            if value.metadata_props.get("layer") == "0":
                value.metadata_props["layer"] = "1"
    elif kind == "two hidden states":
        adds = [node for node in graph if node.op_type == "Add"]
        adds[3].replace_input_with(0, adds[0].outputs[0])
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no layers", "no weight says its layer"),
        ("out of order", "comes after layer 1, or mixes two"),
        ("two hidden states", "layers.0 hands on 2 values"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_place(kind: str, message: str) -> None:
    with pytest.raises(BadInput, match=f"cannot be cut into layers: .*{message}"):
        cut(_broken(kind))


def test_a_stream_tag_stands_for_one_value() -> None:
    model = tiny("llama", "tied").build()
    model.graph.initializers["model.layers.0.mlp.down_proj.weight"].metadata_props["stream"] = "layers.0.attn_in"
    with pytest.raises(BadInput, match=r"two different values carry the stream tag layers\.0\.attn_in"):
        cut(model)[1].build()


def test_no_canonical_node_is_in_two_parts_or_none() -> None:
    model = tiny("gemma3_text", "all").build()
    parts = cut(model)
    assert sum(len(part.nodes) for part in parts) == len(list(model.graph))
    assert {node.domain for part in parts for node in part.linears} == {DOMAIN}
