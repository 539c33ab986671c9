"""A bundle's own graphs at work: logits of every position of a window, and the text they write by themselves.

Knows: the decoder that serves requests, in steps that keep memory small. Does not know: what the logits are compared with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from appliance.bundle.store import Bundle
from appliance.errors import LossError
from appliance.runtime.decoder import Decoder, open_decoder
from appliance.runtime.session import give_back_memory
from quant.evaluate import Floats
from quant.windows import Ids

ELEMENTS = 1 << 22
"""Logits of one step, 16 MiB of float32: fewer rows would cost more than they save, the kernels unpack weights for every step."""


@dataclass(frozen=True)
class Shipped:
    """One opened variant of a bundle.

    Attributes:
        vocabulary: width of a row of logits.
    """

    decoder: Decoder
    vocabulary: int

    @property
    def provider(self) -> str:
        """Who runs it, read back from the session."""
        return self.decoder.placement.provider

    def logits(self, ids: Ids) -> Iterator[Floats]:
        """Logits [rows,V] of all positions of a window, a few rows at a time, in order; copy what must last."""
        state = self.decoder.new_state(len(ids))
        step = max(1, min(self.decoder.chunk, ELEMENTS // self.vocabulary))
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            yield self._run(state, part, len(part))

    def write(self, prompt: Sequence[int], count: int, words: int) -> list[int]:
        """`count` tokens after `prompt`, the likeliest of the first `words` each time; an end token does not end it."""
        state = self.decoder.new_state(len(prompt) + count)
        ids = np.asarray(prompt, np.int64)
        for start in range(0, len(ids), self.decoder.chunk):
            logits = self._run(state, ids[start : start + self.decoder.chunk], 1)
        found: list[int] = []
        while True:
            found.append(int(logits[-1, :words].argmax()))
            if len(found) == count:
                return found
            logits = self._run(state, found[-1:], 1)

    def _run(self, state: Any, ids: Any, keep: int) -> Floats:
        """A step. Some operators look at what they are given only now, and a bundle that nobody can run is no bundle."""
        try:
            return self.decoder.run(state, ids, keep)
        except RuntimeError as failure:
            said = " ".join(str(failure).split())[:300]
            raise LossError(f"the graphs were written, and do not run: {said}", "build it for another target") from failure

    def close(self) -> None:
        """Free the sessions, and give their memory back to the system."""
        self.decoder.close()
        give_back_memory()


def open_shipped(bundle: Bundle, target: str, threads: int = 0, targets: Path | None = None) -> Shipped:
    """Open the graphs of one target; errors as `appliance.runtime.decoder.open_decoder` has them."""
    return Shipped(open_decoder(bundle, target, threads, targets=targets), bundle.manifest.vocab_size)
