"""Sentence encoders against embeddings that transformers computed from the same weights (see `tests/golden/make_bert.py`).

And the reverse: with any one feature of the builder switched off, the comparison must fail.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle import vocabulary
from appliance.errors import CheckpointError
from appliance.targets import load
from appliance.targets.capabilities import Target
from export import arch, parity
from export.arch import bert
from export.arch.bert import Config
from export.lower import lower
from tests.golden import recipe_bert

FOLDER = Path(__file__).parents[1] / "golden" / "bert"
TARGETS: dict[str, Callable[[], Target]] = {"reference": parity.reference_target, "contrib": lambda: load("cpu")}
CLOSE = 1e-4
"""Of one number of a unit vector of 64; two vectors of the golden file are 0.1 and more apart."""


@dataclasses.dataclass(frozen=True)
class Golden:
    """One golden file, and a folder for the small files beside the weights."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    ids: np.ndarray
    mask: np.ndarray
    embeddings: np.ndarray
    folder: Path

    def opened(self) -> arch.Opened:
        return arch.open_model(recipe_bert.Sentence(self.config, self.weights, folder=self.folder))

    def delta(self, build: Callable[[], ir.Model], target: Target) -> float:
        """Largest difference of a number."""
        model = parity.open_lowered(lower(build, target, self.config["max_position_embeddings"], 1), threads=1)
        return float(np.abs(parity.embeddings(model, self.ids, self.mask) - self.embeddings).max())


def read(variant: str, folder: Path) -> Golden:
    recipe_bert.write_modules(folder, variant)
    with np.load(FOLDER / f"{variant}.npz") as file:
        config = json.loads(str(file["config"]))
        weights = recipe_bert.tensors(config, int(file["seed"]))
        return Golden(config, weights, file["ids"], file["mask"], file["embeddings"], folder)


def test_every_tiny_config_has_its_golden(tmp_path: Path) -> None:
    for variant, config in bert.TINY.items():
        assert read(variant, tmp_path).config == config, f"{variant}: run tests/golden/make_bert.py again"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", bert.TINY)
def test_embeddings_are_those_of_transformers(variant: str, target: str, tmp_path: Path) -> None:
    golden = read(variant, tmp_path)
    assert golden.delta(golden.opened().build, TARGETS[target]()) < CLOSE


@pytest.mark.parametrize("target", TARGETS)
def test_padding_changes_nothing(target: str, tmp_path: Path) -> None:
    """Each text alone and unpadded, and the batch with more padding of other ids."""
    golden = read("mean", tmp_path)
    opened = golden.opened()
    model = parity.open_lowered(lower(opened.build, TARGETS[target](), opened.config.context_length, 1), threads=1)
    for row, length in enumerate(recipe_bert.LENGTHS):
        alone = parity.embeddings(model, golden.ids[row : row + 1, :length], golden.mask[row : row + 1, :length])
        assert np.abs(alone - golden.embeddings[row]).max() < CLOSE
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    other = np.where(golden.mask, golden.ids, np.random.default_rng(seed).integers(0, 320, golden.ids.shape))
    wide, mask = (np.pad(one, ((0, 0), (0, 7))) for one in (other, golden.mask))
    assert np.abs(parity.embeddings(model, wide, mask) - golden.embeddings).max() < CLOSE, seed


def test_embeddings_have_unit_length_without_a_normalize_module_too(tmp_path: Path) -> None:
    golden = read("mean", tmp_path)
    recipe_bert.write_modules(tmp_path, "mean", normalize=False)
    assert golden.delta(golden.opened().build, load("cpu")) < CLOSE


def changed(**fields: Any) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(config, **fields)


FEATURES: dict[str, tuple[str, Callable[[Config], Config]]] = {
    "norm epsilon": ("mean", changed(norm_epsilon=1e-12)),
    "heads": ("mean", changed(heads=8)),
    "mean pooling": ("mean", changed(pooling="cls")),
    "cls pooling": ("cls", changed(pooling="mean")),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_the_golden_fails(feature: str, target: str, tmp_path: Path) -> None:
    variant, change = FEATURES[feature]
    golden = read(variant, tmp_path)
    opened = golden.opened()
    opened = dataclasses.replace(opened, config=change(opened.config))
    assert golden.delta(opened.build, TARGETS[target]()) > 10 * CLOSE


PARTS = sorted({name for name in recipe_bert.shapes(bert.TINY["mean"]) if ".layer.1." not in name and "pooler" not in name})


@pytest.mark.parametrize("part", PARTS)
def test_without_a_weight_the_golden_fails(part: str, tmp_path: Path) -> None:
    """Every weight matters, but for the keys' bias: it adds the same to all scores of a row, which softmax takes away."""
    golden = read("mean", tmp_path)
    golden.weights[part] = np.full_like(golden.weights[part], 1 if part.endswith("LayerNorm.weight") else 0)
    delta = golden.delta(golden.opened().build, load("cpu"))
    assert delta < CLOSE if part.endswith("key.bias") else delta > 10 * CLOSE, delta


def bypass(op: str, at: str, kept: int) -> Callable[[ir.Model], None]:
    """Let input `kept` of every node of `op` whose name ends with `at` stand for its output."""

    def change(model: ir.Model) -> None:
        found = [node for node in model.graph if node.op_type == op and (node.name or "").endswith(at)]
        assert found
        for node in found:
            value = node.inputs[kept]
            assert value is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            model.graph.remove(node, safe=True)

    return change


def rescale(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == vocabulary.SELF_ATTENTION:
            node.attributes["scale"] = ir.AttrFloat32("scale", 0.5)


def tanh_gelu(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Gelu":
            node.attributes["approximate"] = ir.AttrString("approximate", "tanh")


GRAPH: dict[str, Callable[[ir.Model], None]] = {
    "positions": bypass("Add", "embeddings/Add", 0),
    "residual around attention": bypass("Add", "attn/Add", 0),
    "residual around mlp": bypass("Add", "mlp/Add", 0),
    "gelu": bypass("Gelu", "mlp/Gelu", 0),
    "norm after attention": bypass("LayerNormalization", "attn_norm/LayerNormalization", 0),
    "norm after mlp": bypass("LayerNormalization", "mlp_norm/LayerNormalization", 0),
    "first norm": bypass("LayerNormalization", "embeddings/LayerNormalization", 0),
    "mask in pooling": bypass("Mul", "pool/Mul", 0),
    "unit length": bypass("Max", "pool/Max", 1),
    "attention scale": rescale,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("part", GRAPH)
def test_without_a_part_of_the_graph_the_golden_fails(part: str, target: str, tmp_path: Path) -> None:
    golden = read("mean", tmp_path)

    def build() -> ir.Model:
        model = golden.opened().build()
        GRAPH[part](model)
        return model

    assert golden.delta(build, TARGETS[target]()) > 10 * CLOSE


def test_the_exact_gelu_is_told_from_its_approximation(tmp_path: Path) -> None:
    golden = read("mean", tmp_path)

    def build() -> ir.Model:
        model = golden.opened().build()
        tanh_gelu(model)
        return model

    exact = golden.delta(golden.opened().build, parity.reference_target())
    assert golden.delta(build, parity.reference_target()) > 20 * exact


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "relative positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    "another activation": ({"hidden_act": "gelu_new"}, "hidden_act"),
    "a decoder": ({"is_decoder": True}, "is_decoder"),
    "heads that do not divide": ({"num_attention_heads": 5}, "5 heads"),
    "no sizes": ({"hidden_size": None}, "hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_of_other_models_are_refused(case: str, tmp_path: Path) -> None:
    changes, word = REFUSED[case]
    with pytest.raises(CheckpointError, match=word):
        arch.open_model(recipe_bert.Sentence({**bert.TINY["mean"], **changes}, {}, folder=tmp_path))


MODULES: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "cannot be read"),
    "no list": ("{}", "not a list"),
    "another module": ('[{"type": "x.Dense", "path": ""}]', "Dense"),
    "no pooling": ('[{"type": "x.Transformer", "path": ""}]', "no pooling"),
    "pooling elsewhere": ('[{"type": "x.Pooling", "path": "../../secret"}]', "leaves the folder"),
    "pooling without its config": ('[{"type": "x.Pooling", "path": "2_Pooling"}]', "is missing"),
}


@pytest.mark.parametrize("case", MODULES)
def test_damaged_modules_are_refused(case: str, tmp_path: Path) -> None:
    text, word = MODULES[case]
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=word):
        arch.open_model(recipe_bert.Sentence(bert.TINY["mean"], {}, folder=tmp_path))


def test_a_pooling_that_is_not_supported_is_named(tmp_path: Path) -> None:
    recipe_bert.write_modules(tmp_path, "max")
    with pytest.raises(CheckpointError, match="max_tokens is not supported"):
        arch.open_model(recipe_bert.Sentence(bert.TINY["mean"], {}, folder=tmp_path))
