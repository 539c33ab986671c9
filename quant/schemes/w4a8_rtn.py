"""w4a8-rtn: plain round to nearest in groups of 32, head and embedding in 8 bits: the baseline of every gain.

Knows: this scheme's numbers. Does not know: how they are found or written.
"""

from quant.band import Band
from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=32, activation="block-dynamic")

SCHEME = Scheme(
    name="w4a8-rtn",
    summary="4-bit weights by plain rounding, the baseline; 8-bit head and embedding, 8-bit activations per block",
    default=Form(bits=4, group=32, activation="block-dynamic"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="nearest",
    band=Band(kl=1.5, delta=1.5),
)
