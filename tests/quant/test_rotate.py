"""Rotations and folded norms leave a float model what it is: on every architecture's small configs, and on the starter model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import ATTENTION, DOMAIN, RMS_NORM, ROLE
from export import arch, parity
from export.checkpoint import open_checkpoint
from export.graph import Nodes, add_initializer, nodes_of
from export.lower import lower
from quant import residual, rotate
from quant.rotate import Rotated, fold_norms
from tests.golden import recipe

TINY = [(name, variant) for name in arch.known() if arch.task_of(name) == "generate" for variant in sorted(arch.find(name).TINY)]
LIMIT = 1e-3
Change = Callable[[ir.Model], Any]


def fresh() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def tiny(name: str, variant: str, seed: int) -> arch.Opened:
    config = arch.find(name).TINY[variant]
    return arch.open_model(recipe.Memory(config, recipe.tensors(config, seed)))


def logits(opened: arch.Opened, ids: list[int], *changes: Change, context: int = 0) -> np.ndarray:
    """Logits of the float graph after `changes` to the canonical one."""

    def build() -> ir.Model:
        model = opened.build()
        for change in changes:
            change(model)
        return model

    target = parity.reference_target()
    return parity.logits(parity.open_lowered(lower(build, target, context, target.chunk), threads=1), ids)


def delta(opened: arch.Opened, seed: int, *changes: Change, before: Change | None = None) -> float:
    """Largest difference of a logit that `changes` make, relative to the largest logit."""
    ids = np.random.default_rng(seed).integers(0, opened.config.vocab_size, 40).tolist()
    first = [before] if before else []
    plain, changed = logits(opened, ids, *first), logits(opened, ids, *first, *changes)
    return float(np.abs(plain - changed).max() / np.abs(plain).max())


@pytest.mark.parametrize(("name", "variant"), TINY)
def test_a_rotated_model_is_the_same_model(name: str, variant: str) -> None:
    seed = fresh()
    done: list[Rotated] = []
    assert delta(tiny(name, variant, seed % 1000), seed, lambda model: done.append(rotate.rotate(model, seed))) < LIMIT, (
        f"seed {seed}"
    )
    assert done[0].heads.startswith("hadamard") and done[0].layers == len(
        nodes_of(tiny(name, variant, 0).build().graph, ATTENTION)
    )
    assert bool(done[0].residual) != bool(done[0].obstacle)


@pytest.mark.parametrize(("name", "variant"), TINY)
def test_a_model_with_folded_norms_is_the_same_model(name: str, variant: str) -> None:
    seed = fresh()
    assert delta(tiny(name, variant, seed % 1000), seed, fold_norms) < LIMIT, f"seed {seed}"


def turned_only(part: str) -> Change:
    """A rotation whose part of one kind was forgotten."""

    def change(model: ir.Model) -> None:
        kept = {key: value.const_value for key, value in model.graph.initializers.items() if part in key}
        assert kept
        rotate.rotate(model, 3)
        for key, tensor in kept.items():
            model.graph.initializers[key].const_value = tensor

    return change


@pytest.mark.parametrize(
    "part", ["embed_tokens", "q_proj.w", "v_proj.w", "v_proj.b", "o_proj.w", "o_proj.b", "up_proj.w", "down_proj.w",
             "down_proj.b", "input_layernorm", "model.norm", "lm_head"],
)  # fmt: skip
def test_without_one_of_its_parts_a_rotation_is_seen(part: str) -> None:
    assert delta(tiny("llama", "all", 5), fresh(), turned_only(part)) > 10 * LIMIT


@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_weights_really_turn_and_gains_are_gone(variant: str) -> None:
    model = tiny("llama", variant, 1).build()
    before = {key: value.const_value.numpy().copy() for key, value in model.graph.initializers.items()}  # type: ignore[union-attr]
    rotate.rotate(model, 0)
    for key, value in model.graph.initializers.items():
        now, role = value.const_value.numpy(), value.metadata_props.get(ROLE)  # type: ignore[union-attr]
        if role == "norm":
            assert np.ptp(now) == 0, key
        elif role != "rope" and key in before:
            assert np.abs(now - before[key]).max() > 0.1 * np.abs(now).max(), key


def test_a_tied_head_stays_tied() -> None:
    model = tiny("llama", "tied", 1).build()
    done = rotate.rotate(model, 0)
    assert done.tied
    table = model.graph.initializers["model.embed_tokens.weight"]
    assert sorted(use.node.op_type for use in table.uses()) == ["Embedding", "Linear"]
    square = model.graph.initializers["model.norm.weight.turned"]
    assert tuple(square.shape) == (64, 64) and square.metadata_props[ROLE] == "head"  # type: ignore[arg-type]


def test_a_final_norm_of_one_gain_needs_no_square() -> None:
    def flat(model: ir.Model) -> None:
        model.graph.initializers["model.norm.weight"].const_value = ir.tensor(np.full(64, 1.7, np.float32))

    seed, opened = fresh(), tiny("llama", "tied", 1)
    done: list[Rotated] = []
    assert delta(opened, seed, lambda model: done.append(rotate.rotate(model, seed)), before=flat) < LIMIT, f"seed {seed}"
    assert not done[0].tied


def post_norm(model: ir.Model) -> None:
    """A norm with a gain between the first feed-forward block and the addition."""
    node = next(node for node in model.graph if str(node.name).endswith("layers.0/mlp/down_proj/Linear"))
    add = next(iter(node.outputs[0].uses())).node
    gain = add_initializer(model.graph, "post.weight", ir.tensor(np.linspace(0.5, 2, 64, dtype=np.float32)), {ROLE: "norm"})
    at = Nodes(model.graph, "/model/layers.0/post", add)
    value = at.value(RMS_NORM, [node.outputs[0], gain], {"epsilon": 1e-6}, domain=DOMAIN)
    add.replace_input_with(1, value)


def test_a_norm_before_the_addition_blocks_the_stream_and_not_the_heads() -> None:
    seed = fresh()
    done: list[Rotated] = []
    opened = tiny("llama", "untied", seed % 1000)
    assert delta(opened, seed, lambda model: done.append(rotate.rotate(model, seed)), before=post_norm) < LIMIT, f"seed {seed}"
    assert "a norm with a gain stands before the addition" in done[0].obstacle and "layers.0/post" in done[0].obstacle
    assert not done[0].residual and done[0].heads == "hadamard 16"
    assert delta(opened, seed, fold_norms, before=post_norm) < LIMIT, f"seed {seed}"


def test_a_stream_that_is_given_out_is_not_turned() -> None:
    model = tiny("llama", "untied", 1).build()
    node = next(node for node in model.graph if node.op_type == "Add")
    model.graph.outputs.append(node.outputs[0])
    assert "gives out" in residual.find(model.graph).obstacle


def test_a_writer_that_something_else_reads_too_blocks_the_stream() -> None:
    model = tiny("llama", "untied", 1).build()
    node = next(node for node in model.graph if str(node.name).endswith("layers.0/mlp/down_proj/Linear"))
    twice = ir.node("Sigmoid", [node.outputs[0]], name="/other")
    model.graph.append(twice)
    model.graph.outputs.append(twice.outputs[0])
    assert "to something else" in residual.find(model.graph).obstacle


def test_weights_are_read_one_at_a_time_and_only_when_asked_for() -> None:
    opened = tiny("llama", "untied", 1)
    reads: list[str] = []
    checkpoint = opened.checkpoint

    class Counting(recipe.Memory):
        def read(self, name: str) -> np.ndarray:
            reads.append(name)
            return super().read(name)

    model = arch.open_model(Counting(checkpoint.config, checkpoint.weights)).build()  # type: ignore[attr-defined]
    rotate.rotate(model, 0)
    assert not reads
    model.graph.initializers["model.layers.1.self_attn.v_proj.weight"].const_value.numpy()  # type: ignore[union-attr]
    assert sorted(reads) == ["model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.v_proj.weight"]


def test_the_same_seed_gives_the_same_weights() -> None:
    seed = fresh()

    def weights(seed: int) -> dict[str, bytes]:
        model = tiny("llama", "tied", 1).build()
        rotate.rotate(model, seed)
        return {key: value.const_value.tobytes() for key, value in model.graph.initializers.items()}  # type: ignore[union-attr]

    assert weights(seed) == weights(seed) != weights(seed + 1)
    v = "model.layers.0.self_attn.v_proj.weight"
    heads = []
    for one in (seed, seed + 1):
        model = tiny("llama", "tied", 1).build()
        rotate.rotate(model, one, stream=False)
        heads.append(model.graph.initializers[v].const_value.tobytes())  # type: ignore[union-attr]
    assert heads[0] != heads[1]


def test_norms_count_what_was_folded() -> None:
    model = tiny("llama", "untied", 1).build()
    assert fold_norms(model) == len(nodes_of(model.graph, RMS_NORM)) == 5
    assert fold_norms(tiny("llama", "tied", 1).build()) == 4  # the last one's reader is the embedding


@pytest.mark.model
@pytest.mark.slow
def test_the_starter_model_rotated_is_the_starter_model(starter_gguf: Path) -> None:
    seed = fresh()
    opened = arch.open_model(open_checkpoint(starter_gguf))
    done: list[Rotated] = []
    assert delta(opened, seed, lambda model: done.append(rotate.rotate(model, seed))) < LIMIT, f"seed {seed}"
    assert (done[0].residual, done[0].heads, done[0].layers) == ("hadamard 12x12x4", "hadamard 64", 30)
