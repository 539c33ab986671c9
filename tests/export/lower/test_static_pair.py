"""The static pair in float: valid graphs of fixed shapes, equal to the graph of growing state, whatever the padding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from appliance.bundle.vocabulary import ATTENTION, STATIC_MASK, window_mask_name, window_of_mask
from appliance.runtime import static_decoder
from export import arch, lower
from export.arch import llama, mistral
from export.graph import nodes_of
from tests.static_pair import CHUNK, CONTEXT, STATIC, fresh_seed, open_pair, random_checkpoint, reference_logits, take_all

CONFIGS: dict[str, dict[str, Any]] = llama.TINY | {f"mistral-{name}": config for name, config in mistral.TINY.items()}
TOLERANCE = 1e-3


def builder(name: str, seed: int) -> Callable[[], ir.Model]:
    return arch.open_model(random_checkpoint(CONFIGS[name], seed)).build


def changed(build: Callable[[], ir.Model], **changes: list[float]) -> Callable[[], ir.Model]:
    """Attention attributes set anew, one value a layer: features that no TINY config switches on."""

    def again() -> ir.Model:
        model = build()
        for layer, node in enumerate(nodes_of(model.graph, ATTENTION)):
            for name, values in changes.items():
                kind = ir.AttrInt64 if name == "window" else ir.AttrFloat32
                node.attributes[name] = kind(name, values[layer])
        return model

    return again


def tokens(name: str, count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, CONFIGS[name]["vocab_size"], count)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_graphs_are_valid_and_of_fixed_shape(name: str, tmp_path: Path) -> None:
    lowered = lower.lower(builder(name, fresh_seed()), STATIC, CONTEXT, CHUNK)
    assert set(lowered.graphs) == {"prefill", "decode"}
    for kind, model in lowered.graphs.items():
        ir.save(model, tmp_path / f"{kind}.onnx")
        proto = onnx.load(tmp_path / f"{kind}.onnx")
        onnx.checker.check_model(proto, full_check=True)
        assert {node.domain for node in proto.graph.node} == {""}
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True).graph
        known = {value.name: value for value in [*inferred.input, *inferred.value_info, *inferred.output]}
        for node in inferred.node:
            for output in node.output:
                dims = known[output].type.tensor_type.shape.dim
                assert all(dim.HasField("dim_value") for dim in dims), f"{kind}: {output} has a free dimension"
                assert len(dims) <= 4, f"{kind}: {output} has {len(dims)} dimensions, more than many NPUs take"


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_the_graph_of_growing_state(name: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    build = builder(name, seed)
    ids = tokens(name, 29, seed)
    wanted = reference_logits(build, ids, tmp_path)
    decoder = open_pair(build, tmp_path)
    # Full chunks, a padded one, single tokens, a padded one in the middle.
    pieces = [8, 8, 3, 1, 1, 5, 1, 2]
    found = take_all(decoder, ids, pieces)
    delta = np.abs(found - wanted[np.cumsum(pieces) - 1]).max()
    assert delta < TOLERANCE, f"seed {seed}: {delta}"
    assert wanted.std() > 1, "logits too flat to tell anything apart"


@pytest.mark.parametrize(
    "changes",
    [
        {"window": [5, 0]},
        {"window": [1, 20]},
        {"softcap": [3.0, 1.0]},
        {"scale": [0.05, 1.0]},
        {"window": [3, 11], "softcap": [2.0, 0.0], "scale": [0.5, 0.1]},
    ],
    ids=str,
)
def test_attention_features_by_layer(changes: dict[str, list[float]], tmp_path: Path) -> None:
    seed = fresh_seed()
    plain = builder("head-dim", seed)
    build = changed(plain, **changes)
    ids = tokens("head-dim", 29, seed)
    wanted = reference_logits(build, ids, tmp_path)
    pieces = [8, 7, 1, 1, 8, 4]
    delta = np.abs(take_all(open_pair(build, tmp_path), ids, pieces) - wanted[np.cumsum(pieces) - 1]).max()
    assert delta < TOLERANCE, f"seed {seed}: {delta}"
    without = np.abs(take_all(open_pair(plain, tmp_path), ids, pieces) - wanted[np.cumsum(pieces) - 1]).max()
    assert without > 10 * TOLERANCE, f"seed {seed}: the feature makes no difference here, so this test says nothing"


def test_layers_of_one_window_share_one_mask(tmp_path: Path) -> None:
    for windows, names in (
        ([0, 0], [STATIC_MASK]),
        ([5, 5], ["mask.window.5"]),
        ([9, 5], ["mask.window.5", "mask.window.9"]),
        ([0, 5], [STATIC_MASK, "mask.window.5"]),
    ):
        graphs = lower.lower(changed(builder("tied", 1), window=windows), STATIC, CONTEXT, CHUNK).graphs
        masks = [value.name for value in graphs["decode"].graph.inputs if window_of_mask(str(value.name)) is not None]
        assert masks == names


def test_mask_names_read_back() -> None:
    assert [window_of_mask(window_mask_name(window)) for window in (0, 1, 512)] == [0, 1, 512]
    assert [window_of_mask(name) for name in ("input_ids", "mask.window.x", "mask.window.", "mask.5", "masks")] == [None] * 5


def shifted(by: dict[str, int]) -> Callable[..., None]:
    """`fill_mask` with one of its arguments off by a little."""
    right = static_decoder.fill_mask

    def wrong(mask: NDArray[np.float32], past: int, new: int, window: int) -> None:
        given = {"past": past, "new": new, "window": window}
        moved = {name: max(value + by.get(name, 0), 0 if name == "past" else 1) for name, value in given.items()}
        right(mask, **(moved | ({} if window else {"window": 0})))

    return wrong


@pytest.mark.parametrize("by", [{"past": 1}, {"past": -1}, {"new": -1}, {"window": 1}, {"window": -1}], ids=str)
def test_a_mask_off_by_one_is_noticed(by: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = fresh_seed()
    build = builder("mistral-window", seed)
    ids = tokens("mistral-window", 27, seed)
    wanted = reference_logits(build, ids, tmp_path)
    pieces = [8, 8, 3, 1, 1, 6]
    decoder = open_pair(build, tmp_path)
    assert np.abs(take_all(decoder, ids, pieces) - wanted[np.cumsum(pieces) - 1]).max() < TOLERANCE, f"seed {seed}"
    monkeypatch.setattr(static_decoder, "fill_mask", shifted(by))
    assert np.abs(take_all(decoder, ids, pieces) - wanted[np.cumsum(pieces) - 1]).max() > TOLERANCE, f"seed {seed}"
