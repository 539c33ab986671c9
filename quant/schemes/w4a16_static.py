"""w4a16-static: int4 linears with one scale a row, activations in uint16 with calibrated ranges, Q/DQ around every linear.

Knows: this scheme's numbers. Does not know: how they are found or written.
Linears alone: the attention's products, norms, activation functions and additions stay float.
"""

from quant.scheme import Form, Scheme

_TABLE = Form(bits=8, group=0, activation="static-u16")

SCHEME = Scheme(
    name="w4a16-static",
    summary="4-bit weights with one scale a row, 8 bits where those cost most, 16-bit activations with calibrated ranges",
    default=Form(bits=4, group=0, activation="static-u16"),
    roles={"embed": _TABLE, "head": _TABLE},
    solver="gptq",
    reshape=True,
    budget=4.5,
    budget_grows=True,
)
