"""mxfp4a8: Microscaling FP4 weights and FP8 activations, each in blocks of 32 with a power of two.

Knows: this scheme's numbers. Does not know: how they are found (`quant.mx`) or written.
Embedding and head stay float, as in the checkpoints that are published in this format: FP4 costs them most, and hardware that
takes the format has no other 8-bit weights for them.
SmolLM2, 1024 tokens: delta ln PPL +0.53, weights alone +0.48. A power of two a block leaves 18.9 dB of a weight (18.6 with the
specification's own choice of it, which clamps twice as many), a float16 scale on int4 22.2.
No built-in target has an operator for it (onnxruntime 1.32 has no FP4 DequantizeLinear); a vendor's target file says so with
`elements`.
"""

from quant.band import Band
from quant.scheme import FLOAT, Form, Scheme

SCHEME = Scheme(
    name="mxfp4a8",
    summary="MXFP4 weights, MXFP8 activations per block of 32 (OCP Microscaling), float head and embedding",
    default=Form(bits=4, group=32, activation="mxfp8", element="mxfp4"),
    roles={"embed": FLOAT, "head": FLOAT},
    solver="mxfp4",
    band=Band(kl=1.5, delta=1.5),
)
