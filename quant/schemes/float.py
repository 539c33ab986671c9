"""float: nothing is quantized. The reference that the others are compared with, and the way to rule quantization out.

Knows: this scheme's numbers. Does not know: how they are found or written.
"""

from quant.band import Band
from quant.scheme import FLOAT, Scheme

SCHEME = Scheme(
    name="float",
    summary="weights as the checkpoint has them, no quantization",
    default=FLOAT,
    band=Band(kl=0.005, delta=0.005, cosine=0.999),
)
