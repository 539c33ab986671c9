"""w4a8-channel: int4 linears with one scale a row, solved on calibration text after rotation and equalization; int8
activations with one scale a token.

Knows: this scheme's numbers. Does not know: how they are found or written.
What NPUs take whose matrix units know no groups: weights symmetric, per output channel; head and embedding 8 bits, likewise.
int4 with one scale a row is half a bit smaller than groups of 32 and loses twice as much. The budget gives that half back where
it saves most, as 8-bit weights, which such units take too (docs/LOG.md).
"""

from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=0, activation="token-dynamic")

SCHEME = Scheme(
    name="w4a8-channel",
    summary="4-bit weights with one scale a row, 8 bits where those cost most, rotated; 8-bit activations per token",
    default=Form(bits=4, group=0, activation="token-dynamic"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="gptq",
    reshape=True,
    budget=4.5,
    budget_grows=True,
)
