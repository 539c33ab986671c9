"""Which graph a lowering makes.

Knows: the kinds of graphs. Does not know: passes or targets.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["dynamic", "prefill", "decode"]


@dataclass(frozen=True)
class Step:
    """One graph of a variant.

    Attributes:
        kind: dynamic, or one half of the static pair.
        tokens: new tokens of one run: chunk in prefill, 1 in decode, 0 = any number in the dynamic form.
        context: tokens of context the graph can hold.
    """

    kind: Kind
    tokens: int
    context: int
