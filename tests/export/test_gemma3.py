"""Gemma 3's graph: each of its features is needed for transformers' logits, every key it cannot honour is refused by name."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle import vocabulary
from appliance.errors import CheckpointError
from appliance.targets import load
from export import arch, parity
from export.arch import gemma3, gemma3_text
from export.arch.gemma3_text import Config
from export.blocks import RopeScaling
from export.checkpoint import open_checkpoint
from export.graph import nodes_of
from export.lower import lower
from tests.export.test_goldens import FOLDER, TARGETS, Golden, altered, attention, bypass, read
from tests.golden import recipe
from tests.static_pair import fresh_seed, open_pair, take_all

TEXT = gemma3_text.TINY
PUBLISHED_4B = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
    "mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
"""The keys of Gemma 3 4B: nearly all is left to the defaults."""


def changed(**fields: Any) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(config, **fields)


def windows(change: Callable[[int], int]) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(config, windows=tuple(change(one) for one in config.windows))


FEATURES: dict[str, tuple[str, Callable[[Config], Config]]] = {
    "norm epsilon": ("period", changed(norm_epsilon=1e-5)),
    "global theta": ("period", changed(rope_theta=20.0)),
    "local theta": ("period", changed(local_theta=500.0)),
    "linear scaling": ("linear-rope", changed(rope_scaling=RopeScaling())),
    "linear factor": ("all", changed(rope_scaling=RopeScaling("linear", factor=2.0))),
    "scale of queries": ("period", changed(scale=1 / 4)),
    "windows": ("period", windows(lambda window: 0)),
    "full layers": ("period", windows(lambda window: 8)),
    "order of layers": ("all", lambda config: dataclasses.replace(config, windows=(8, 0, 0))),
    "sixth layer": ("usual-period", changed(windows=(8,) * 6)),
    "window one too small": ("period", windows(lambda window: 7 if window else 0)),
    "window one too large": ("period", windows(lambda window: 9 if window else 0)),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_the_golden_fails(feature: str, target: str) -> None:
    name, change = FEATURES[feature]
    golden = read(f"gemma3_text/{name}")
    opened = golden.opened()
    delta = golden.delta(dataclasses.replace(opened, config=change(opened.config)), TARGETS[target]())
    assert delta > 3 * parity.LIMIT, f"{name} without {feature} differs by no more than {delta}"


LOST = {
    "first norm": "input_layernorm.weight", "second norm": "post_attention_layernorm.weight",
    "third norm": "pre_feedforward_layernorm.weight", "fourth norm": "post_feedforward_layernorm.weight",
    "norm of q": "q_norm.weight", "norm of k": "k_norm.weight", "last norm": "model.norm.weight", "q bias": "q_proj.bias",
    "o bias": "o_proj.bias",
}  # fmt: skip


@pytest.mark.parametrize("part", LOST)
def test_without_a_weight_the_golden_fails(part: str) -> None:
    golden = read("gemma3_text/all")
    weights = {name: np.zeros_like(array) if name.endswith(LOST[part]) else array for name, array in golden.weights().items()}
    delta = golden.delta(arch.open_model(recipe.Memory(golden.config, weights)), load("cpu"))
    assert delta > 3 * parity.LIMIT, f"without {part} it differs by no more than {delta}"


def exact_gelu(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Gelu":
            node.attributes["approximate"] = ir.AttrString("approximate", "none")


GRAPH: dict[str, Callable[[ir.Model], None]] = {
    "size of embeddings": bypass("Mul", "embed_tokens/Mul", 0),
    "softcap off": attention("softcap", 0.75),
    "gate": bypass("Mul", "mlp/Mul", 1),
    "gelu": bypass("Gelu", "act/Gelu", 0),
    "norm of q": bypass("RMSNorm", "q_norm/RMSNorm", 0),
    "norm of k": bypass("RMSNorm", "k_norm/RMSNorm", 0),
    "norm behind attention": bypass("RMSNorm", "post_attention_layernorm/RMSNorm", 0),
    "norm behind the mlp": bypass("RMSNorm", "post_feedforward_layernorm/RMSNorm", 0),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("part", GRAPH)
def test_without_a_part_of_the_graph_the_golden_fails(part: str, target: str) -> None:
    """And both lowerings agree on what the altered graph means."""
    golden = read("gemma3_text/period")
    build = altered(golden.opened(), GRAPH[part])
    found, plain = (
        parity.logits(parity.open_lowered(lower(build, one, 0, 1), threads=1), golden.ids, (11,))
        for one in (TARGETS[target](), parity.reference_target())
    )
    assert np.abs(found - golden.logits).max() > 3 * parity.LIMIT, f"without {part} it is no different"
    assert np.abs(found - plain).max() < parity.LIMIT, f"{target} reads {part} in another way"


def test_the_gelu_of_tanh_and_the_exact_one_differ_by_more_than_rounding() -> None:
    golden = read("gemma3_text/all")
    one = lower(altered(golden.opened(), exact_gelu), load("cpu"), 0, 1)
    right, other = golden.delta(golden.opened(), load("cpu")), parity.logits(parity.open_lowered(one, threads=1), golden.ids)
    assert np.abs(other - golden.logits).max() > 20 * right


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["usual-period", "full"])
def test_a_gguf_of_the_same_weights_gives_the_same_logits(name: str, target: str) -> None:
    golden = read(f"gemma3_text/{name}")
    kept = recipe.as_gguf(golden.config, golden.weights())
    if name == "full":
        kept = dataclasses.replace(kept, config={key: value for key, value in kept.config.items() if "sliding" not in key})
    opened = arch.open_model(kept)
    assert opened.model_type == "gemma3_text"
    assert golden.delta(opened, TARGETS[target]()) < parity.LIMIT


@pytest.mark.parametrize("wrong", ["one more", "one less"])
def test_a_norm_off_by_one_fails(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative of (1 + w): folded into a GGUF, where it is folded already, or not folded where it is not."""
    golden = read("gemma3_text/usual-period")
    if wrong == "one less":
        monkeypatch.setattr(gemma3_text, "add_one", lambda array: array)
        opened = golden.opened()
    else:
        kept = recipe.as_gguf(golden.config, golden.weights())
        weights = {name: array + 1 if "norm" in name else array for name, array in kept.weights.items()}
        opened = arch.open_model(dataclasses.replace(kept, weights=weights))
    assert golden.delta(opened, load("cpu")) > 3 * parity.LIMIT


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [True, False])
def test_the_text_of_a_checkpoint_with_images_is_that_text(prefix: str, tied: bool) -> None:
    """Both namings of published files; what sees images is left out."""
    golden = read("gemma3_text/period" if tied else "gemma3_text/all")
    head = {"language_model.model.": "language_model.lm_head.weight", "model.language_model.": "lm_head.weight"}[prefix]
    weights = {name.replace("model.", prefix, 1): array for name, array in golden.weights().items() if "lm_head" not in name}
    seeing = prefix.removesuffix("language_model.") if prefix.startswith("model.") else ""
    weights[f"{seeing}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = np.ones((3, 3), np.float32)
    weights[f"{seeing}multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(3, np.float32)
    if not tied:
        weights[head] = golden.weights()["lm_head.weight"]
    opened = arch.open_model(recipe.Memory({"model_type": "gemma3", "text_config": golden.config}, weights))
    assert golden.delta(opened, load("cpu")) < parity.LIMIT


@pytest.mark.parametrize("name", ["period", "all"])
def test_the_static_pair_gives_the_golden_logits(name: str, tmp_path: Path) -> None:
    golden: Golden = read(f"gemma3_text/{name}")
    decoder = open_pair(golden.opened().build, tmp_path)
    seed = fresh_seed()
    cuts = np.random.default_rng(seed).permutation([1, 1, 5, 8, 8, 8, 2, 7]).tolist()
    found = take_all(decoder, np.array(golden.ids), cuts)
    delta = np.abs(found - golden.logits[np.cumsum(cuts) - 1]).max()
    assert delta < parity.LIMIT, (seed, delta)


def test_every_weight_says_its_role_stream_and_layer() -> None:
    graph = read("gemma3_text/all").opened().build().graph
    tags = {name: value.metadata_props for name, value in graph.initializers.items()}
    at = "model.layers.1"
    assert tags[f"{at}.self_attn.q_norm.weight"] == {"role": "norm", "layer": "1"}
    assert tags[f"{at}.self_attn.q_proj.weight"] == {"role": "attn.q", "stream": "layers.1.attn_in", "layer": "1"}
    assert tags[f"{at}.post_feedforward_layernorm.weight"] == {"role": "norm", "layer": "1"}
    assert {tags[name]["role"] for name in tags if name.startswith("rope")} == {"rope"}
    windows_of = [node.attributes["window"].as_int() for node in nodes_of(graph, vocabulary.ATTENTION)]
    assert windows_of == [0, 8, 0]


def config_of(config: dict[str, Any], format: str = "safetensors") -> Config:
    found: Config = arch.open_model(recipe.Memory(config, {}, format)).config
    return found


def test_a_config_as_it_is_published_is_read() -> None:
    config = config_of(PUBLISHED_4B)
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.rope_theta, config.local_theta, config.scale, config.tied) == (1e6, 1e4, 1 / 16, True)
    assert config.rope_scaling == RopeScaling("linear", 8.0) and config.context_length == 131072
    assert config.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4


def test_both_spellings_of_rope_settings_mean_the_same() -> None:
    old = {**TEXT["linear-rope"], "layer_types": TEXT["all"]["layer_types"]}
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    assert config_of(old) == config_of({**new, "rope_parameters": TEXT["all"]["rope_parameters"]})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cap on scores": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "cap on logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "another activation": ({"hidden_activation": "relu"}, "relu"),
    "both directions": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "another rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    "flat rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "rope_theta"),
    "scaled local rope": ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "linear"),
    "a third kind of layer": ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    "too few kinds": ({"layer_types": ["full_attention"]}, "names 1 layers of 3"),
    "a word for kinds": ({"layer_types": "full_attention"}, "must be a list"),
    "uneven heads": ({"num_key_value_heads": 3}, "cannot share 3"),
    "odd head": ({"head_dim": 15}, "15 is odd"),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.parametrize("deep", [False, True])
def test_what_is_not_supported_is_refused_by_name(fault: str, deep: bool) -> None:
    change, words = REFUSED[fault]
    config = {**TEXT["period"], **change}
    with pytest.raises(CheckpointError) as caught:
        config_of({"model_type": "gemma3", "text_config": config} if deep else config)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_with_images_needs_its_text() -> None:
    with pytest.raises(CheckpointError, match="text_config"):
        config_of({"model_type": "gemma3"})
    with pytest.raises(CheckpointError, match="quantization_config"):
        config_of({**PUBLISHED_4B, "quantization_config": {"quant_method": "awq"}})
    with pytest.raises(CheckpointError, match=r"language_model\.model\.embed_tokens"):
        arch.open_model(recipe.Memory(gemma3.TINY["text"], {})).build()


def gguf(change: dict[str, Any]) -> Config:
    config = TEXT["usual-period"]
    kept = recipe.as_gguf(config, recipe.tensors(config, 1))
    found: Config = arch.open_model(dataclasses.replace(kept, config={**kept.config, **change})).config
    return found


def test_what_a_gguf_leaves_out_is_what_llama_cpp_takes() -> None:
    plain = gguf({"gemma3.rope.freq_base_swa": None, "gemma3.attention.scale": None})
    assert (plain.local_theta, plain.scale) == (1e4, 1 / 4)
    wide = {"gemma3.attention.scale": None, "gemma3.attention.head_count": 2}
    assert gguf(wide).scale == 1 / 4 and gguf({**wide, "gemma3.block_count": 62}).scale == 1 / math.sqrt(32)
    assert gguf({"gemma3.attention.sliding_window_pattern": 3}).windows == (8, 8, 0, 8, 8, 0)
    assert gguf({"gemma3.attention.sliding_window_pattern": [False, True] * 3}).windows == (0, 8) * 3
    linear = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    assert gguf(linear).rope_scaling == RopeScaling("linear", 8.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gemma3.final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping"),
        ({"gemma3.attn_logit_softcapping": 30.0}, "gemma3.attn_logit_softcapping"),
        ({"gemma3.rope.scaling.type": "yarn"}, "yarn"),
        ({"gemma3.attention.value_length": 8}, "gemma3.attention.value_length"),
        ({"gemma3.attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ({"gemma3.block_count": None}, "gemma3.block_count"),
    ],
)
def test_what_a_gguf_asks_for_and_is_not_supported_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        gguf(change)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("target", TARGETS)
def test_gemma_continues_as_transformers_does(target: str, gemma_gguf: Path) -> None:
    """64 greedy tokens and, at every position, the logits that the golden file keeps."""
    with np.load(FOLDER / "gemma3.npz") as file:
        ids, prompt, kept, wanted = file["ids"].tolist(), int(file["prompt"]), file["kept"], file["logits"]
    model = parity.open_float(arch.open_model(open_checkpoint(gemma_gguf)), TARGETS[target](), context=256, threads=2)
    found = parity.logits(model, ids, (prompt, 1))
    assert len(ids) == prompt + 64
    assert found[prompt - 1 : -1].argmax(axis=1).tolist() == ids[prompt:]
    delta = np.abs(np.take_along_axis(found, kept.astype(np.int64), axis=1) - wanted).max()
    assert delta < parity.LIMIT, delta
