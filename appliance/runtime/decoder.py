"""The decoder protocol: a loaded model as a function of token ids and a state, whatever form its graphs have.

Knows: what a decoder promises, how one is opened for a bundle and a target. Does not know: sampling, text, requests.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.store import Bundle
from appliance.errors import BundleError
from appliance.runtime.session import Placement
from appliance.targets import load

Logits = NDArray[np.float32]


class DecoderState(Protocol):
    """What one sequence carries from step to step: attention's keys and values, and whatever else the model names."""

    @property
    def length(self) -> int:
        """Tokens taken in so far."""


class Decoder(Protocol):
    """One loaded model. Not thread-safe: one thread drives it."""

    @property
    def chunk(self) -> int:
        """Most tokens that one `run` takes."""

    @property
    def context(self) -> int:
        """Most tokens that one state can hold."""

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""

    @property
    def placement(self) -> Placement:
        """Where the graphs run, read back from the sessions."""

    def new_state(self, capacity: int) -> DecoderState:
        """An empty state that can take `capacity` tokens; memory may be taken only as it fills.

        `ContextLengthError` when `capacity` is more than `context`.
        """

    def run(self, state: Any, ids: Sequence[int] | NDArray[np.int64], keep: int = 1) -> Logits:
        """Append `ids` to the state and return the logits after its last `keep` tokens.

        Args:
            state: made by this decoder's `new_state` (each has its own kind). It advances by len(ids); after an error it is
                of no more use.
            ids: 1..chunk token ids.
            keep: 0..len(ids); 0 means that no logits are wanted (a decoder may then skip the head).

        Returns:
            [keep, vocab_size] float32. The caller may write into it, the next `run` may overwrite it: copy what must last.
        """

    def close(self) -> None:
        """Free the sessions. States made before are of no more use."""


def open_decoder(bundle: Bundle, target_name: str, threads: int, *, targets: Path | None = None) -> Decoder:
    """Open the graphs of `bundle` for one target.

    Args:
        bundle: an opened bundle.
        target_name: a key of its variants and the name of a target file.
        threads: processor threads of one step, 0 = one for each physical core.
        targets: folder with more target files.

    Raises:
        TargetError: no such target.
        BundleError: the bundle has no graphs for it, or they are damaged.
        DeviceError: the provider refused them or would have fallen back in silence.
    """
    variant = bundle.variant(target_name)
    target = load(target_name, targets)
    if variant.form != target.flags.form:
        raise BundleError(
            f"{bundle.path}: variant {target_name!r} has the {variant.form} form, its target the {target.flags.form} one",
            "build the bundle again",
        )
    if variant.form == "dynamic":
        from appliance.runtime.dynamic_decoder import DynamicDecoder

        return DynamicDecoder.open(bundle, variant, target, threads)
    from appliance.runtime.static_decoder import StaticDecoder

    return StaticDecoder.open(bundle, variant, target, threads)
