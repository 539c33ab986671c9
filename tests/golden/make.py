"""Makes the golden files again: reference logits by torch and transformers, from the same weights.

    pip install '.[reference]'
    python -m tests.golden.make                      # tiny random models
    python -m tests.golden.make --starter FILE.gguf  # and the starter model's greedy answer
    python -m tests.golden.make --gemma FILE.gguf    # and Gemma's greedy continuation

Knows: transformers. Does not know: our graphs; only the TINY configs are taken from the architectures.
"""

import argparse
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from export import arch
from tests.golden import recipe

FOLDER = Path(__file__).parent
LENGTH = 40
SEED = 1
QUESTION = "What is the capital of France?"
BEGINNING = "The three largest moons of the planet Jupiter are"
"""What Gemma continues: it is a base model without a chat template."""
GREEDY = 64
SAMPLED = 96
"""Vocabulary entries whose logits are kept of each of a real model's positions, besides the eight best."""


def main() -> None:
    """Write every golden file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starter", type=Path, help="the starter model's GGUF")
    parser.add_argument("--gemma", type=Path, help="Gemma's GGUF")
    arguments = parser.parse_args()
    for name in arch.known():
        if arch.task_of(name) == "generate":  # `make_bert` does the others
            for variant, config in arch.find(name).TINY.items():
                make_tiny(name, variant, config)
    if arguments.starter:
        make_greedy(arguments.starter, "starter", QUESTION)
    if arguments.gemma:
        make_greedy(arguments.gemma, "gemma3", BEGINNING)


def make_tiny(name: str, variant: str, config: Mapping[str, Any]) -> None:
    """`<architecture>/<variant>.npz`: config, seed, ids [S], logits [S,V] float32."""
    import torch
    import transformers

    settings = copy.deepcopy(dict(config.get("text_config", config)))  # transformers writes into it
    kind = settings.pop("model_type")
    ids = np.random.RandomState(SEED).randint(0, settings["vocab_size"], LENGTH)
    made = transformers.AutoConfig.for_model(kind, **settings, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    arrays = recipe.tensors(config, SEED)
    if "text_config" in config:
        arrays = {key.removeprefix("language_model."): array for key, array in arrays.items() if "language_model" in key}
    weights = {key: torch.from_numpy(array) for key, array in arrays.items()}
    if made.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    path = FOLDER / name / f"{variant}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, config=json.dumps(config), seed=SEED, ids=ids.astype(np.int64), logits=logits)
    print(path.name, logits.shape, f"logits {logits.std():.2f}")


def make_greedy(path: Path, name: str, words: str) -> None:
    """`<name>.npz`: a prompt's ids, the greedy answer's, and for each position some logits of the whole run.

    transformers reads the GGUF by itself: it dequantizes, and puts rows back in order, in its own way.
    """
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    text, turns = f"{tokenizer.bos_token}{words}", [{"role": "user", "content": words}]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = len(ids)
    with torch.no_grad():
        for _ in range(GREEDY):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    best = np.argsort(-logits, axis=1)[:, :8]
    fixed = np.random.RandomState(SEED).choice(logits.shape[1], SAMPLED, replace=False)
    kept = np.concatenate([best, np.broadcast_to(fixed, (len(ids), SAMPLED))], axis=1)
    np.savez_compressed(
        FOLDER / f"{name}.npz", text=text, ids=np.array(ids, np.int64), prompt=prompt, kept=kept.astype(np.int32),
        logits=np.take_along_axis(logits, kept, axis=1),
    )  # fmt: skip
    print(f"{name}.npz", prompt, "+", GREEDY, repr(tokenizer.decode(ids[prompt:])))


if __name__ == "__main__":
    main()
