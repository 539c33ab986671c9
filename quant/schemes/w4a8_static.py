"""w4a8-static: int4 linears with one scale a row, activations in uint8 with calibrated ranges, Q/DQ around every linear.

Knows: this scheme's numbers. Does not know: how they are found or written.
Linears alone: the attention's products, norms, activation functions and additions stay float.
The head has 16-bit activations: its output would have 256 steps for all logits. So have the streams whose 8 bits cost most,
up to a share of the products; a matrix unit runs those at half the speed.
"""

from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=0, activation="static-u16")

SCHEME = Scheme(
    name="w4a8-static",
    summary="4-bit weights with one scale a row, 8-bit activations with calibrated ranges; the next width where those cost most",
    default=Form(bits=4, group=0, activation="static-u8"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="gptq",
    reshape=True,
    budget=4.5,
    budget_grows=True,
    wide=0.25,
)
