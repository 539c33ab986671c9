"""w4a8-channel: int4 linears with one scale a row, solved on calibration text after rotation and equalization; int8
activations with one scale a token.

Knows: this scheme's numbers. Does not know: how they are found or written.
What NPUs take whose matrix units know no groups: weights symmetric, per output channel; head and embedding 8 bits, likewise.
"""

from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=0, activation="token-dynamic")

SCHEME = Scheme(
    name="w4a8-channel",
    summary="4-bit weights with one scale a row, rotated and solved on calibration text; 8-bit activations per token",
    default=Form(bits=4, group=0, activation="token-dynamic"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="gptq",
    reshape=True,
)
