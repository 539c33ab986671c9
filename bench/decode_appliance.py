"""This project's side of bench/decode.py: one JSON question a line, one JSON answer a line.

Knows: the decoder. Does not know: the peer. Arguments: bundle, threads.
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

from appliance.bundle.store import open_bundle
from appliance.runtime.decoder import Decoder, open_decoder


def answer(decoder: Decoder, context: int, steps: int) -> dict[str, float]:
    """Tokens/s of prefill (first token included) and decode, peak RSS in MiB."""
    ids = np.random.default_rng(context).integers(0, decoder.vocab_size, context)
    began = time.perf_counter()
    state = decoder.new_state(context + steps)
    for first in range(0, context, decoder.chunk):
        logits = decoder.run(state, ids[first : first + decoder.chunk], 1)
    token = int(logits[-1].argmax())
    prefilled = time.perf_counter()
    for _ in range(steps):
        token = int(decoder.run(state, (token,))[-1].argmax())
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"prefill": context / (prefilled - began), "decode": steps / (ended - prefilled), "peak_rss_mib": peak}


def main() -> None:
    decoder = open_decoder(open_bundle(Path(sys.argv[1])), "cpu", int(sys.argv[2]))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(decoder, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
