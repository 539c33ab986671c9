"""This project's side of bench/quality.py: a bundle as it is shipped, or the float graph that everything is measured against.

    python quality_appliance.py bundle FOLDER THREADS       logits, one JSON question a line (bench/quality_side.py)
    python quality_appliance.py float CHECKPOINT THREADS    the same of the float graph

Knows: the decoder, the float reference. Does not know: the peers.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from appliance.bundle.store import open_bundle
from appliance.runtime.decoder import open_decoder
from export import arch, parity
from export.checkpoint import open_checkpoint

CHUNK = 256

Write = Callable[[list[int], str], None]
"""Writes the logits of every position, [len(ids), words] float32, into a file."""


def of_bundle(folder: str, threads: int) -> Write:
    decoder = open_decoder(open_bundle(Path(folder)), "cpu", threads)
    size = min(CHUNK, decoder.chunk)

    def write(ids: list[int], path: str) -> None:
        state = decoder.new_state(len(ids))
        with Path(path).open("wb") as file:
            for first in range(0, len(ids), size):
                part = ids[first : first + size]
                decoder.run(state, part, len(part)).tofile(file)

    return write


def of_float(checkpoint: str, threads: int) -> Write:
    opened = arch.open_model(open_checkpoint(Path(checkpoint)))
    model = parity.open_float(opened, parity.reference_target(), threads=threads)

    def write(ids: list[int], path: str) -> None:
        parity.logits(model, ids, [CHUNK]).tofile(path)

    return write


def main() -> None:
    kind, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    write = (of_bundle if kind == "bundle" else of_float)(path, threads)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        write(asked["ids"], asked["out"])
        print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
