"""`python -m tests.systemd.hanging_daemon ARGUMENTS...`: `appliance ARGUMENTS` over the real worker and a decoder that can hang.

A prompt with "hang" in it never comes out of its first step; one with "long" takes a second a chunk. Loading takes a moment.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance import cli
from appliance.bundle.generation import GenerationDefaults
from appliance.engine import pool
from appliance.engine.onnx import OnnxEngine, OpenModel
from appliance.runtime.decoder import Logits
from tests.fakes import ByteTokenizer, FakeDecoder, FakeState, PlainTemplate

CHUNK_SECONDS, LOAD_SECONDS = 1.0, 0.7


class HangingDecoder(FakeDecoder):
    """Hangs as a broken driver does: inside `run`, for good."""

    def run(self, state: FakeState, ids: Sequence[int] | NDArray[np.int64], keep: int = 1) -> Logits:
        prompt = bytes(token for token in [*state.history, *map(int, ids)] if token < 256)
        while b"hang" in prompt:
            time.sleep(60)
        if b"long" in prompt and not keep:
            time.sleep(CHUNK_SECONDS)
        return super().run(state, ids, keep)


def main() -> int:
    """Put an engine over that decoder where the real one would be opened, then run the real command line."""
    model = OpenModel("fake", HangingDecoder(script=b"Paris."), ByteTokenizer(), PlainTemplate(), GenerationDefaults())

    def open_model() -> OpenModel:
        time.sleep(LOAD_SECONDS)
        return model

    pool.open_onnx = lambda target, threads, targets: lambda bundle: OnnxEngine(None, target="fake", open_with=open_model)
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
