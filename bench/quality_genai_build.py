"""onnxruntime-genai's model builder with one repair; runs in the peer's environment, takes the builder's own arguments.

Version 0.18 reads Gemma 3's two ropes as transformers 4 wrote them and stops at transformers 5's: {"full_attention": {...},
"sliding_attention": {...}}. Here they are laid flat before it looks. That the result is right is checked: its float model must be
the float graph.

Knows: the peer's builder, transformers' configs. Does not know: this project.
"""

import runpy
from typing import Any

import transformers

read = transformers.AutoConfig.from_pretrained


def flat(*arguments: Any, **options: Any) -> Any:
    """The config with one rope where the builder looks for one, and the sliding layers' base beside it."""
    config = read(*arguments, **options)
    ropes = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in ropes:
        full, sliding = ropes["full_attention"], ropes["sliding_attention"]
        config.rope_parameters = dict(full)
        config.rope_theta, config.rope_local_base_freq = full["rope_theta"], sliding["rope_theta"]
    return config


if __name__ == "__main__":
    transformers.AutoConfig.from_pretrained = flat
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
