"""Float graphs against logits that transformers computed from the same weights (see `tests/golden/make.py`).

And the reverse: with any one feature of the builder switched off, the comparison must fail.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle import vocabulary
from appliance.targets import load
from appliance.targets.capabilities import Target
from export import arch, parity
from export.arch import llama
from export.arch.llama import Config
from export.blocks import RopeScaling
from export.checkpoint import open_checkpoint
from export.graph import nodes_of
from export.lower import lower
from tests.checkpoints import Llama, write_gguf, write_safetensors
from tests.golden import recipe

FOLDER = Path(__file__).parents[1] / "golden"
GENERATORS = [name for name in arch.known() if arch.task_of(name) == "generate"]
TINY = sorted(f"{name}/{path.stem}" for name in GENERATORS for path in (FOLDER / name).glob("*.npz"))
TARGETS: dict[str, Callable[[], Target]] = {"reference": parity.reference_target, "contrib": lambda: load("cpu")}


@dataclass(frozen=True)
class Golden:
    """One golden file."""

    config: dict[str, Any]
    seed: int
    ids: list[int]
    logits: np.ndarray

    def weights(self) -> dict[str, np.ndarray]:
        return recipe.tensors(self.config, self.seed)

    def opened(self) -> arch.Opened:
        return arch.open_model(recipe.Memory(self.config, self.weights()))

    def delta(self, opened: arch.Opened, target: Target, chunks: tuple[int, ...] = ()) -> float:
        """Largest difference of a logit."""
        model = parity.open_float(opened, target, threads=1)
        return float(np.abs(parity.logits(model, self.ids, chunks) - self.logits).max())


def read(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as file:
        return Golden(json.loads(str(file["config"])), int(file["seed"]), file["ids"].tolist(), file["logits"])


def test_every_tiny_config_has_its_golden() -> None:
    for name in GENERATORS:
        for variant, config in arch.find(name).TINY.items():
            assert read(f"{name}/{variant}").config == config, f"{name}/{variant}: run tests/golden/make.py again"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name: str, target: str) -> None:
    golden = read(name)
    model = parity.open_float(golden.opened(), TARGETS[target](), threads=1)
    cut = int(np.random.SeedSequence().generate_state(1)[0]) % 30 + 2
    for chunks in ((), (cut,), (cut, 1), (1,)):
        delta = np.abs(parity.logits(model, golden.ids, chunks) - golden.logits).max()
        assert delta < parity.LIMIT, f"{name} for {target} in chunks of {chunks}: {delta}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in TINY if name.startswith("llama/")])
def test_a_gguf_of_the_same_weights_gives_the_same_logits(name: str, target: str) -> None:
    golden = read(name)
    opened = arch.open_model(recipe.as_gguf(golden.config, golden.weights()))
    assert opened.model_type == "llama"
    assert golden.delta(opened, TARGETS[target]()) < parity.LIMIT


def changed(**fields: Any) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(config, **fields)


def scaled(**fields: Any) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, **fields))


FEATURES: dict[str, tuple[str, Callable[[Config], Config]]] = {
    "norm epsilon": ("llama/tied", changed(norm_epsilon=1e-5)),
    "rope theta": ("llama/llama3-rope", changed(rope_theta=10000.0)),
    "llama3 scaling": ("llama/llama3-rope", changed(rope_scaling=RopeScaling())),
    "llama3 factor": ("llama/llama3-rope", scaled(factor=4.0)),
    "llama3 low factor": ("llama/llama3-rope", scaled(low_freq_factor=2.0)),
    "llama3 high factor": ("llama/llama3-rope", scaled(high_freq_factor=8.0)),
    "llama3 first context": ("llama/llama3-rope", scaled(original_context=64)),
    "linear scaling": ("llama/linear-rope", changed(rope_scaling=RopeScaling())),
    "linear factor": ("llama/linear-rope", scaled(factor=2.0)),
    "window": ("mistral/window", changed(window=0)),
    "window one too small": ("mistral/window", changed(window=7)),
    "window one too large": ("mistral/window", changed(window=9)),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_the_golden_fails(feature: str, target: str) -> None:
    name, change = FEATURES[feature]
    golden = read(name)
    opened = golden.opened()
    delta = golden.delta(dataclasses.replace(opened, config=change(opened.config)), TARGETS[target]())
    assert delta > 3 * parity.LIMIT, f"{name} without {feature} differs by no more than {delta}"


LOST: dict[str, tuple[str, dict[str, Any]]] = {
    "q bias": ("llama/biases", {"self_attn.q_proj.bias": 0}),
    "k bias": ("llama/biases", {"self_attn.k_proj.bias": 0}),
    "v bias": ("llama/biases", {"self_attn.v_proj.bias": 0}),
    "o bias": ("llama/biases", {"self_attn.o_proj.bias": 0}),
    "gate bias": ("llama/biases", {"mlp.gate_proj.bias": 0}),
    "up bias": ("llama/biases", {"mlp.up_proj.bias": 0}),
    "down bias": ("llama/biases", {"mlp.down_proj.bias": 0}),
    "first norm's weight": ("llama/tied", {"input_layernorm.weight": 1}),
    "second norm's weight": ("llama/tied", {"post_attention_layernorm.weight": 1}),
    "last norm's weight": ("llama/tied", {"model.norm.weight": 1}),
}  # fmt: skip


@pytest.mark.parametrize("part", LOST)
def test_without_a_weight_the_golden_fails(part: str) -> None:
    name, fills = LOST[part]
    golden = read(name)
    weights = golden.weights()
    for key, fill in fills.items():
        for found in [one for one in weights if one.endswith(key)]:
            weights[found] = np.full_like(weights[found], fill)
    opened = arch.open_model(recipe.Memory(golden.config, weights))
    delta = golden.delta(opened, load("cpu"))
    assert delta > 3 * parity.LIMIT, f"{name} without {part} differs by no more than {delta}"


def test_a_tie_where_there_is_none_fails() -> None:
    golden = read("llama/untied")
    weights = golden.weights()
    config = {**golden.config, "tie_word_embeddings": True}
    assert golden.delta(arch.open_model(recipe.Memory(config, weights)), load("cpu")) > 3 * parity.LIMIT


@pytest.mark.parametrize("wrong", ["none", "kv heads for q", "q heads for k"])
def test_rows_in_llama_cpps_order_fail(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative of un-permuting: left out, or with the other projection's number of heads."""
    golden = read("llama/tied")
    opened = arch.open_model(recipe.as_gguf(golden.config, golden.weights()))
    right = llama.unpermute
    heads, kv_heads = opened.config.heads, opened.config.kv_heads

    def swapped(array: np.ndarray, count: int) -> np.ndarray:
        if wrong == "none":
            return array
        if wrong == "kv heads for q" and count == heads:
            return right(array, kv_heads)
        return right(array, heads) if wrong == "q heads for k" and count == kv_heads else right(array, count)

    monkeypatch.setattr(llama, "unpermute", swapped)
    assert golden.delta(opened, load("cpu")) > 3 * parity.LIMIT


def test_unpermuting_undoes_llama_cpps_order() -> None:
    """Row by row, from the statement of the order in `recipe`, for an odd number of heads."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    array = np.random.default_rng(seed).standard_normal((3 * 8, 5))
    assert np.array_equal(llama.unpermute(recipe._gguf_rows("x.q_proj.weight", array, 3, 1), 3), array), seed


def altered(opened: arch.Opened, change: Callable[[ir.Model], None]) -> Callable[[], ir.Model]:
    """A build whose canonical graph is changed before anything is lowered."""

    def build() -> ir.Model:
        model = opened.build()
        change(model)
        return model

    return build


def attention(name: str, value: float) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        for node in nodes_of(model.graph, vocabulary.ATTENTION):
            node.attributes[name] = ir.AttrFloat32(name, value)

    return change


def forget_rope(model: ir.Model) -> None:
    for node in nodes_of(model.graph, vocabulary.ATTENTION):
        node.resize_inputs(5)


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


GRAPH: dict[str, tuple[str, Callable[[ir.Model], None]]] = {
    "rotary embedding": ("llama/tied", forget_rope),
    "scale by head_dim": ("llama/head-dim", attention("scale", 1 / 4)),
    "softcap off": ("llama/tied", attention("softcap", 0.75)),
    "residual around attention": ("llama/tied", bypass("Add", "attn/Add", 1)),
    "residual around mlp": ("llama/tied", bypass("Add", "mlp/Add", 1)),
    "gate": ("llama/tied", bypass("Mul", "mlp/Mul", 1)),
    "sigmoid of the gate": ("llama/tied", bypass("Mul", "act/Mul", 0)),
    "second norm": ("llama/tied", bypass("RMSNorm", "post_attention_layernorm/RMSNorm", 0)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("part", GRAPH)
def test_without_a_part_of_the_graph_the_golden_fails(part: str, target: str) -> None:
    """And both lowerings agree on what the altered graph means."""
    name, change = GRAPH[part]
    golden = read(name)
    build = altered(golden.opened(), change)
    found, plain = (
        parity.logits(parity.open_lowered(lower(build, one, 0, 1), threads=1), golden.ids, (11,))
        for one in (TARGETS[target](), parity.reference_target())
    )
    assert np.abs(found - golden.logits).max() > 3 * parity.LIMIT, f"{name} without {part} is no different"
    assert np.abs(found - plain).max() < parity.LIMIT, f"{target} reads {part} in another way"


def test_both_kinds_of_files_hold_the_same_model(tmp_path: Path) -> None:
    """From disk through the readers: safetensors, and GGUF as the `gguf` package writes it."""
    seed = int(np.random.SeedSequence().generate_state(1)[0]) % 2**31
    model = Llama(heads=6, hidden=96, kv_heads=3, tied=False, attention_bias=True, mlp_bias=True, seed=seed)
    paths = write_safetensors(tmp_path / "st", model, shards=2), write_gguf(tmp_path / "model.gguf", model)
    ids = np.random.default_rng(seed).integers(0, model.vocab, 24).tolist()
    opened = [arch.open_model(open_checkpoint(path)) for path in paths]
    first, second = (parity.logits(parity.open_float(one, load("cpu"), threads=1), ids) for one in opened)
    assert np.abs(first - second).max() < 1e-4, seed


@pytest.mark.model
@pytest.mark.parametrize("target", TARGETS)
def test_the_starter_model_answers_as_transformers_does(target: str, starter_gguf: Path) -> None:
    """64 greedy tokens and, at every position, the logits that the golden file keeps."""
    with np.load(FOLDER / "starter.npz") as file:
        ids, prompt, kept, wanted = file["ids"].tolist(), int(file["prompt"]), file["kept"], file["logits"]
    model = parity.open_float(arch.open_model(open_checkpoint(starter_gguf)), TARGETS[target](), context=256, threads=2)
    found = parity.logits(model, ids, (prompt, 1))
    assert found[prompt - 1 : -1].argmax(axis=1).tolist() == ids[prompt:]
    delta = np.abs(np.take_along_axis(found, kept.astype(np.int64), axis=1) - wanted).max()
    assert delta < parity.LIMIT, delta
