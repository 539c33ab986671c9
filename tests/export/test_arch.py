"""Finding architectures and reading configs: every refusal names the key or the known names."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from appliance.errors import CheckpointError
from export import arch
from export.arch import llama
from export.blocks import RopeScaling, rope_frequencies
from tests.golden import recipe

PLAIN = llama.TINY["tied"]
LLAMA3 = llama.TINY["llama3-rope"]["rope_scaling"]


def config_of(config: dict[str, Any]) -> Any:
    return arch.open_model(recipe.Memory(config, {})).config


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        config_of(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_architecture_names_the_known_ones() -> None:
    said = refusal({**PLAIN, "model_type": "gpt_bigcode"})
    assert "gpt_bigcode" in said and "llama" in said and "mistral" in said


@pytest.mark.parametrize("name", ["..llama", "llama.x", "__init__", ""])
def test_a_name_that_is_no_file_is_unknown(name: str) -> None:
    assert "unknown architecture" in refusal({**PLAIN, "model_type": name})


def test_a_config_without_model_type_is_refused() -> None:
    assert '"model_type"' in refusal({key: value for key, value in PLAIN.items() if key != "model_type"})


def test_an_unknown_gguf_architecture_is_refused() -> None:
    with pytest.raises(CheckpointError, match='unknown architecture "mamba"; known'):
        arch.open_model(recipe.Memory({"general.architecture": "mamba"}, {}, format="gguf"))


REFUSED = {
    "quantization_config": {"quant_method": "gptq"},
    "hidden_act": "gelu",
    "sliding_window": 4096,
    "rope_interleaved": True,
    "partial_rotary_factor": 0.5,
    "num_local_experts": 8,
    "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_named(key: str) -> None:
    assert f'"{key}"' in refusal({**PLAIN, key: REFUSED[key]})


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("spelling", [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")])
def test_an_unknown_rope_scaling_is_named(kind: str, spelling: tuple[str, str]) -> None:
    said = refusal({**PLAIN, spelling[0]: {spelling[1]: kind, "factor": 2.0}})
    assert kind in said and "llama3" in said and "linear" in said


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"hidden_size": None}, "hidden_size"),
    "text for a number": ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    "true for a number": ({"vocab_size": True}, "vocab_size"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads"),
    "negative": ({"intermediate_size": -1}, "intermediate_size"),
    "infinite": ({"rope_theta": float("inf")}, "rope_theta"),
    "number for a flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    "list for an object": ({"rope_scaling": [1]}, "rope_scaling"),
    "uneven heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    "odd head": ({"head_dim": 15}, "15 is odd"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "llama3 factors upside down": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}, "high_freq_factor"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_damaged_config_is_named(fault: str) -> None:
    change, words = BROKEN[fault]
    assert words in refusal({**PLAIN, **change})


def test_both_spellings_of_rope_settings_mean_the_same() -> None:
    old = config_of({**PLAIN, "rope_theta": 500.0, "rope_scaling": LLAMA3})
    without = {key: value for key, value in PLAIN.items() if key != "rope_theta"}
    new = config_of({**without, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_mistral_reads_its_window() -> None:
    tiny = arch.find("mistral").TINY
    assert config_of(tiny["window"]).window == 8 and config_of(tiny["full"]).window == 0
    assert '"hidden_act"' in refusal({**tiny["window"], "hidden_act": "gelu"})


@pytest.mark.parametrize("key", ["sliding_window", "num_key_value_heads"])
def test_a_mistral_config_must_name_what_its_reference_has_odd_defaults_for(key: str) -> None:
    config = arch.find("mistral").TINY["window"]
    assert f'lacks "{key}"' in refusal({name: value for name, value in config.items() if name != key})


PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "keys of SmolLM2": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
            "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
            "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
        },
        (64, 3, 0),
    ),
    "keys of Llama 3.2": (
        {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
            "vocab_size": 128256,
        },
        (64, 8, 0),
    ),
    "keys of Mistral 7B": (
        {
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "use_cache": True, "vocab_size": 32000,
        },
        (128, 8, 4096),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published_are_read(name: str) -> None:
    said, (head_dim, kv_heads, window) = PUBLISHED[name]
    config = config_of(said)
    assert (config.head_dim, config.kv_heads, config.window) == (head_dim, kv_heads, window)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.block_count": None}, "llama.block_count"),
    ],
)
def test_what_a_gguf_asks_for_and_is_not_supported_is_named(change: dict[str, Any], words: str) -> None:
    kept = recipe.as_gguf(PLAIN, recipe.tensors(PLAIN, 1))
    with pytest.raises(CheckpointError, match=words):
        arch.open_model(dataclasses.replace(kept, config={**kept.config, **change}))


def test_a_gguf_with_rotary_factors_of_another_length_is_refused() -> None:
    config = llama.TINY["llama3-rope"]
    kept = recipe.as_gguf(config, recipe.tensors(config, 1))
    weights = {**kept.weights, "rope_freqs.weight": np.ones(5, np.float32)}
    with pytest.raises(CheckpointError, match="5 rotary factors for 8"):
        arch.open_model(dataclasses.replace(kept, weights=weights))


def test_llama3_frequencies_are_those_of_llama_cpps_factors() -> None:
    """Against the other statement of the rule, by wave lengths, with the numbers of Llama 3.2."""
    said = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    ours = rope_frequencies(64, 500000.0, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192))
    plain = 1 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(ours, plain / recipe._llama3_factors(64, 500000.0, said), rtol=2e-6)
    assert not np.allclose(ours, plain)
