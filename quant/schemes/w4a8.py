"""w4a8: int4 linears, an 8-bit head and embedding, int8 activations with one scale per row and weight group.

Knows: this scheme's numbers. Does not know: how they are found or written.
Group 64 is the default: at one row it decodes 20% faster than group 32 and loses 1.4 dB of weight SNR to it
(SmolLM2: 22.3, 21.0 and 20.1 dB at 32, 64 and 128; plain rounding has 19.9, 19.0 and 18.2).
"""

from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=64, activation="block-dynamic")

SCHEME = Scheme(
    name="w4a8",
    summary="4-bit weights, 8-bit head and embedding, 8-bit activations per block",
    default=Form(bits=4, group=64, activation="block-dynamic"),
    roles={"embed": _TABLE, "head": _TABLE},
)
