"""Equalization and all of reshaping: the same function, columns alike, and nothing left of outliers that a rescaling planted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance import targets
from appliance.bundle.vocabulary import ROLE
from export import arch
from export.checkpoint import open_checkpoint
from export.slices import opener, reference_for
from quant.decide import decide
from quant.emit import emit
from quant.equalize import Factors, equalize
from quant.reshape import Reshaping
from quant.scheme import Form, Scheme
from tests.golden import recipe
from tests.quant.planting import plant
from tests.quant.test_rotate import LIMIT, TINY, delta, fresh, tiny

TABLE = Form(8, 0, "token-dynamic")
CHANNEL = Scheme("channel", "", Form(4, 0, "token-dynamic"), {"embed": TABLE, "head": TABLE})


def columns_of(model: ir.Model, name: str) -> np.ndarray:
    """Root mean square of each column."""
    weight = model.graph.initializers[name].const_value.numpy()  # type: ignore[union-attr]
    found: np.ndarray = np.sqrt((weight.astype(np.float64) ** 2).mean(0))
    return found


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("name", "variant"), TINY)
def test_an_equalized_model_is_the_same_model(name: str, variant: str, norms: bool) -> None:
    seed = fresh()
    opened = tiny(name, variant, seed % 1000)
    assert delta(opened, seed, lambda model: equalize(model, Factors(), norms=norms)) < LIMIT, f"seed {seed}"


@pytest.mark.parametrize(("name", "variant"), TINY)
def test_a_reshaped_model_is_the_same_model_planted_outliers_or_not(name: str, variant: str) -> None:
    seed = fresh()
    opened = tiny(name, variant, seed % 1000)
    assert delta(opened, seed, Reshaping().apply) < LIMIT, f"seed {seed}"
    rng = np.random.default_rng(seed)
    assert delta(opened, seed, lambda model: plant(model, rng)) < LIMIT, f"seed {seed}: planting is no exact rescaling"
    rng = np.random.default_rng(seed)
    assert delta(opened, seed, lambda model: plant(model, rng), Reshaping().apply) < LIMIT, f"seed {seed}"


@pytest.mark.parametrize(("name", "variant"), TINY)
def test_nothing_is_left_of_planted_outliers(name: str, variant: str) -> None:
    """Weight by weight: what is quantized is the same matrix, whatever was planted before."""
    seed = fresh()
    opened = tiny(name, variant, seed % 1000)
    plain, planted = opened.build(), opened.build()
    plant(planted, np.random.default_rng(seed))
    for model in (plain, planted):
        Reshaping().apply(model)
    for key, value in plain.graph.initializers.items():
        if value.metadata_props.get(ROLE, "rope") in ("rope", "embed"):
            continue
        one, other = (model.graph.initializers[key].const_value.numpy() for model in (plain, planted))  # type: ignore[union-attr]
        # Channels that shrank may bring the mean below a power of two: then the whole weight is twice or half as large.
        other = other * 2.0 ** np.round(np.log2(np.abs(one).max() / np.abs(other).max()))
        assert np.abs(one - other).max() <= 1e-4 * np.abs(one).max(), f"seed {seed}: {key}"


def test_columns_come_out_alike_and_shared_ones_together() -> None:
    model = tiny("llama", "head-dim", 3).build()
    done = equalize(model, Factors(), norms=True)
    assert (done.norms, done.values, done.gated) == (4, 2, 2)
    down = columns_of(model, "model.layers.0.mlp.down_proj.weight")
    assert np.ptp(down) < 1e-4 * down.mean() and 0.7 < down.mean() * 2 ** np.round(-np.log2(down.mean())) < 1.5
    o = columns_of(model, "model.layers.0.self_attn.o_proj.weight").reshape(4, 32) ** 2  # one key-value head for 4
    assert np.ptp(o.mean(0)) < 1e-4 * o.mean() and np.ptp(o) > 0.01 * o.mean()
    model = tiny("llama", "untied", 3).build()
    equalize(model, Factors(), norms=True, values=False, gated=False)
    both = [columns_of(model, f"model.layers.1.mlp.{part}_proj.weight") for part in ("gate", "up")]
    spread = [np.std(one) / np.mean(one) for one in (*both, both[0] + both[1])]
    assert spread[2] < 0.5 * min(spread[:2]), spread


def test_norms_are_left_alone_where_a_rotation_has_been() -> None:
    opened = tiny("llama", "untied", 1)
    model = opened.build()
    told = Reshaping().apply(model)
    assert told.rotated.residual and told.equalized.norms == 0
    gains = [value for value in model.graph.initializers.values() if value.metadata_props.get(ROLE) == "norm"]
    assert gains and all(np.ptp(value.const_value.numpy()) == 0 for value in gains)  # type: ignore[union-attr]


def test_a_stream_that_cannot_be_turned_gets_its_norms_equalized() -> None:
    name = next((name for name, _ in TINY if name.startswith("gemma3")), None)
    assert name is not None
    model = tiny(name, next(variant for one, variant in TINY if one == name), 1).build()
    told = Reshaping().apply(model)
    assert "before the addition" in told.rotated.obstacle and told.equalized.norms > 0 and told.rotated.layers > 0


def test_factors_are_found_once_a_build_and_weights_stay_lazy() -> None:
    opened = tiny("llama", "untied", 1)
    reads: list[str] = []

    class Counting(recipe.Memory):
        def read(self, name: str) -> np.ndarray:
            reads.append(name)
            return super().read(name)

    counting = arch.open_model(Counting(opened.checkpoint.config, opened.checkpoint.weights))  # type: ignore[attr-defined]
    reshaping = Reshaping()
    first, second = counting.build(), counting.build()
    for model in (first, second):
        reshaping.apply(model)
    assert not reads
    up = "model.layers.1.mlp.up_proj.weight"
    one = first.graph.initializers[up].const_value.numpy()  # type: ignore[union-attr]
    assert reads.count("model.layers.1.mlp.down_proj.weight") == 1
    other = second.graph.initializers[up].const_value.numpy()  # type: ignore[union-attr]
    assert reads.count("model.layers.1.mlp.down_proj.weight") == 1 and np.array_equal(one, other)


def test_a_channel_of_zeros_stays_finite() -> None:
    def dead(model: ir.Model) -> None:
        value = model.graph.initializers["model.layers.0.mlp.down_proj.weight"]
        array = value.const_value.numpy().copy()  # type: ignore[union-attr]
        array[:, 5] = 0
        value.const_value = ir.tensor(array, name=value.name)

    seed = fresh()
    assert delta(tiny("llama", "tied", 1), seed, Reshaping().apply, before=dead) < LIMIT, f"seed {seed}"


def quantized(
    opened: arch.Opened, folder: Path, scheme: Scheme, ids: np.ndarray, *changes: Callable[[ir.Model], Any]
) -> np.ndarray:
    """Logits [S,V] of the emitted model."""
    target = reference_for(targets.load("cpu-static"))
    model = opened.build()
    for change in changes:
        change(model)
    decide(model, scheme, targets.load("cpu-static"), folder / "work")
    feeds: dict[str, np.ndarray] = {
        "input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64), "logits_to_keep": np.array([len(ids)]),
    }  # fmt: skip
    for value in model.graph.inputs:
        if str(value.name).startswith("past"):
            feeds[str(value.name)] = np.zeros((1, int(value.shape[1]), 0, int(value.shape[3])), np.float32)  # type: ignore[index,arg-type]
    return opener(64, folder / "parts", emit, target=target, threads=1)(model)(feeds)["logits"][0]


def loss(plain: np.ndarray, other: np.ndarray) -> float:
    """Mean KL of the next token, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    a, b = log_softmax(plain), log_softmax(other)
    return float((np.exp(a) * (a - b)).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_planted_outliers_cost_the_quantized_model_nothing(name: str, tmp_path: Path) -> None:
    seed = fresh()
    opened = tiny(name, next(variant for one, variant in TINY if one == name), seed % 1000)
    ids = np.random.default_rng(seed).integers(0, opened.config.vocab_size, 48)
    float_scheme = Scheme("float", "", Form(0, 0, "float"))

    def planted(model: ir.Model) -> None:
        plant(model, np.random.default_rng(seed))

    exact = quantized(opened, tmp_path / "float", float_scheme, ids)
    clean = loss(exact, quantized(opened, tmp_path / "clean", CHANNEL, ids, Reshaping().apply))
    after = loss(exact, quantized(opened, tmp_path / "after", CHANNEL, ids, planted, Reshaping().apply))
    bare = loss(exact, quantized(opened, tmp_path / "bare", CHANNEL, ids, planted))
    assert abs(after - clean) < 0.02 and after < 1.2 * clean + 1e-4, f"seed {seed}: {clean} {after}"
    assert bare > 3 * clean, f"seed {seed}: without reshaping outliers must be seen: {clean} {bare}"


@pytest.mark.model
@pytest.mark.slow
def test_planted_outliers_leave_the_starter_models_weights_as_they_were(starter_gguf: Path) -> None:
    """All that is quantized of SmolLM2, after reshaping: the same numbers, and the same integers but for ties."""
    seed = fresh()
    opened = arch.open_model(open_checkpoint(starter_gguf))
    plain, planted = opened.build(), opened.build()
    plant(planted, np.random.default_rng(seed))
    for model in (plain, planted):
        Reshaping().apply(model)
    rng = np.random.default_rng(seed)
    names = [
        key for key, value in plain.graph.initializers.items() if value.metadata_props.get(ROLE, "").startswith(("attn", "mlp"))
    ]
    for key in rng.choice(names, 40, replace=False):
        one, other = (model.graph.initializers[key].const_value.numpy() for model in (plain, planted))  # type: ignore[union-attr]
        other = other * 2.0 ** np.round(np.log2(np.abs(one).max() / np.abs(other).max()))
        assert np.abs(one - other).max() <= 1e-4 * np.abs(one).max(), f"seed {seed}: {key}"
        scale = np.abs(one).max(1, keepdims=True) / 7
        moved = np.rint(one / scale) != np.rint(other / scale)
        assert moved.mean() < 1e-4, f"seed {seed}: {key}"
