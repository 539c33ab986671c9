"""onnxruntime-genai's side of bench/decode.py; runs in an environment of its own. Argument: its model folder.

Knows: the peer's API. Does not know: this project.
"""

import json
import resource
import sys
import time

import numpy as np
import onnxruntime_genai as genai


def answer(model: genai.Model, vocab_size: int, context: int, steps: int) -> dict[str, float]:
    """Tokens/s of prefill (first token included) and decode, peak RSS in MiB."""
    ids = np.random.default_rng(context).integers(0, vocab_size, context).astype(np.int32)
    began = time.perf_counter()
    parameters = genai.GeneratorParams(model)
    # An end token must not cut the run short, and greedy search needs no sampling.
    length = context + steps + 1
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    generator.generate_next_token()
    prefilled = time.perf_counter()
    for _ in range(steps):
        generator.generate_next_token()
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"prefill": context / (prefilled - began), "decode": steps / (ended - prefilled), "peak_rss_mib": peak}


def main() -> None:
    with open(f"{sys.argv[1]}/genai_config.json") as file:
        vocab_size = json.load(file)["model"]["vocab_size"]
    model = genai.Model(sys.argv[1])
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, vocab_size, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
