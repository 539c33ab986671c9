"""Weights: what is refused, with which words, and that nothing is read before it is asked for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle import vocabulary
from appliance.errors import CheckpointError
from export import arch
from export.weights import Tag, Weights, check_tags
from tests.golden import recipe

CONFIG = arch.find("llama").TINY["all"]


class Counting:
    """A checkpoint that counts what is read, and may refuse to be read at all."""

    def __init__(self, inner: recipe.Memory):
        self.inner = inner
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.inner.read(name)


def memory(change: Callable[[dict[str, np.ndarray]], None] = lambda weights: None, **config: Any) -> recipe.Memory:
    said = {**CONFIG, **config}
    weights = recipe.tensors(said, 1)
    change(weights)
    return recipe.Memory(said, weights)


def refusal(checkpoint: recipe.Memory) -> str:
    with pytest.raises(CheckpointError) as caught:
        arch.open_model(checkpoint).build()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_tensor_is_named_with_its_shape() -> None:
    said = refusal(memory(lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")))
    assert "model.layers.1.mlp.up_proj.weight" in said and "[128, 64]" in said and "missing" in said


def test_a_missing_tensor_of_a_gguf_is_named_as_the_file_would() -> None:
    kept = recipe.as_gguf(CONFIG, memory().weights)
    weights = {name: array for name, array in kept.weights.items() if name != "blk.1.ffn_up.weight"}
    said = refusal(dataclasses.replace(kept, weights=weights))
    assert "blk.1.ffn_up.weight" in said and "model.layers.1.mlp.up_proj.weight" in said


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    def cut(weights: dict[str, np.ndarray]) -> None:
        weights["model.layers.0.self_attn.k_proj.weight"] = weights["model.layers.0.self_attn.k_proj.weight"][:-1]

    said = refusal(memory(cut))
    assert "model.layers.0.self_attn.k_proj.weight" in said and "[31, 64]" in said and "[32, 64]" in said


def test_tensors_left_over_are_named() -> None:
    said = refusal(memory(lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": np.ones(32, np.float32)})))
    assert "model.layers.0.self_attn.q_norm.weight" in said and "1 tensors" in said


def test_a_bias_that_the_config_denies_is_left_over() -> None:
    checkpoint = memory()
    said = refusal(dataclasses.replace(checkpoint, config={**checkpoint.config, "mlp_bias": False}))
    assert "model.layers.0.mlp.down_proj.bias" in said and "and 1 more" in said


def test_rotary_buffers_and_the_copy_of_a_tied_head_are_ignored() -> None:
    def add(weights: dict[str, np.ndarray]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    model = arch.open_model(memory(add, tie_word_embeddings=True)).build()
    assert "lm_head.weight" not in model.graph.initializers


def test_building_reads_nothing_and_keeps_nothing() -> None:
    checkpoint = Counting(memory())
    graph = arch.open_model(checkpoint).build().graph
    assert checkpoint.reads == []
    tensor = graph.initializers["model.norm.weight"].const_value
    assert tensor is not None
    first, second = tensor.numpy(), tensor.numpy()
    assert checkpoint.reads == ["model.norm.weight"] * 2 and first is not second
    assert np.array_equal(first, checkpoint.inner.weights["model.norm.weight"])


def test_every_weight_says_its_role_stream_and_layer() -> None:
    graph = arch.open_model(memory()).build().graph
    tags = {name: value.metadata_props for name, value in graph.initializers.items()}
    assert all(tag.get(vocabulary.ROLE) in vocabulary.ROLES for tag in tags.values()), tags
    at = "model.layers.1.self_attn"
    assert tags[f"{at}.q_proj.weight"] == {"role": "attn.q", "stream": "layers.1.attn_in", "layer": "1"}
    assert {tags[f"{at}.{part}_proj.weight"]["stream"] for part in "qkv"} == {"layers.1.attn_in"}
    assert tags[f"{at}.o_proj.weight"]["role"] == "attn.o"
    assert tags["model.layers.0.mlp.gate_proj.weight"]["stream"] == tags["model.layers.0.mlp.up_proj.weight"]["stream"]
    assert tags["model.layers.0.mlp.down_proj.weight"]["role"] == "mlp.down"
    assert tags["model.embed_tokens.weight"]["role"] == "embed" and tags["lm_head.weight"]["role"] == "head"
    assert tags["rope.cos"] == {"role": "rope"} and tags[f"{at}.q_proj.bias"]["role"] == "bias"


@pytest.mark.parametrize("role", [None, "attn.x"])
def test_a_weight_without_a_role_is_an_error(role: str | None) -> None:
    graph = arch.open_model(memory()).build().graph
    tags = graph.initializers["model.layers.0.self_attn.o_proj.weight"].metadata_props
    tags.pop(vocabulary.ROLE)
    if role:
        tags[vocabulary.ROLE] = role
    with pytest.raises(AssertionError, match=r"o_proj\.weight has the role"):
        check_tags(graph)


def test_a_tag_of_an_unknown_role_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no role"):
        Tag("attn.x").props()


def test_one_tensor_taken_twice_is_one_initializer() -> None:
    graph = ir.Graph([], [], nodes=[])
    weights = Weights(memory())
    first = weights.take(graph, "model.norm.weight", (64,), Tag("norm"))
    assert weights.take(graph, "model.norm.weight", (64,), Tag("norm")) is first
    assert weights.has("lm_head.weight") and not weights.has("nothing")
