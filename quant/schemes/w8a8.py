"""w8a8: 8-bit weights everywhere. What it still loses is what int8 activations lose: the ceiling for every 4-bit scheme.

Knows: this scheme's numbers. Does not know: how they are found or written.
"""

from quant.band import Band
from quant.scheme import Form, Scheme

SCHEME = Scheme(
    name="w8a8",
    summary="8-bit weights, 8-bit activations per block",
    default=Form(bits=8, group=64, activation="block-dynamic"),
    band=Band(kl=0.05, delta=0.05, cosine=0.97),
)
