"""A text's tokens as windows of one length: what a loss is measured over.

Knows: how windows are cut and chosen. Does not know: models, logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appliance.errors import BadInput

LENGTH = 1024
"""Tokens of a window, begin token included: long enough for attention to matter, short enough for any model's context."""
SHORTEST = 32
"""A last window with fewer tokens than this is left out: it would predict from nothing."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """One window: `ids` [n], of which ids[:-1] predict ids[1:]; `bos` = the first one is the begin token."""

    text: str
    number: int
    ids: Ids
    bos: bool = False


def cut(text: str, ids: Sequence[int], *, length: int = LENGTH, count: int = 0, bos: int | None = None) -> list[Window]:
    """Cut the tokens of a text, without a begin token, into windows.

    Args:
        text: its name.
        length: tokens of a window.
        count: how many windows, evenly spread over the text; 0 = all.
        bos: the model's begin token, put before every window when the model was trained to see one there.

    Raises:
        BadInput: the text is too short for one window of `SHORTEST` tokens.
    """
    front = [] if bos is None else [bos]
    step = length - len(front)
    starts = [start for start in range(0, len(ids), step) if len(ids) - start + len(front) >= min(SHORTEST, length)]
    if not starts:
        raise BadInput(f"the text {text} has only {len(ids)} tokens", f"give one of at least {SHORTEST}")
    if count and count < len(starts):
        starts = [starts[number * len(starts) // count] for number in range(count)]
    return [Window(text, number, np.array([*front, *ids[start : start + step]], np.int64)) for number, start in enumerate(starts)]
