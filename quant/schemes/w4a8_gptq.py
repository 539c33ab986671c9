"""w4a8-gptq: int4 linears whose integers keep their outputs on calibration text, 8-bit head and embedding.

Knows: this scheme's numbers. Does not know: how they are found or written.
"""

from quant.band import Band
from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=32, activation="block-dynamic")

SCHEME = Scheme(
    name="w4a8-gptq",
    summary="4-bit weights solved on calibration text; 8-bit head and embedding, 8-bit activations per block",
    default=Form(bits=4, group=32, activation="block-dynamic"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="gptq",
    band=Band(kl=0.7, delta=0.7),
)
