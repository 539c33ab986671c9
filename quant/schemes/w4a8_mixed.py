"""w4a8-mixed: int4 linears solved on calibration text, 8 bits for those whose measured cost is worst, under a budget of bytes.

Knows: this scheme's numbers. Does not know: how costs are measured or integers found.
Groups of 32 are the start from which groups and bits are chosen: what a coarser group saves is spent where it gains more.
"""

from quant.band import Band
from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=32, activation="block-dynamic")

SCHEME = Scheme(
    name="w4a8-mixed",
    summary="4-bit weights solved on calibration text, 8 bits where 4 were measured to cost most; 8-bit activations per block",
    default=Form(bits=4, group=32, activation="block-dynamic"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="gptq",
    budget=5.6,
    band=Band(kl=0.5, delta=0.5),
)
