"""The proxy loss of a quantized matrix: what its outputs lose on the calibration text, from second moments alone.

The moments say which vectors, and how much each counts: losses of two matrices are no more comparable than those are.

Knows: arrays. Does not know: how integers were found.
"""

import numpy as np

from quant.arrays import Floats

_ROWS = 512


def proxy_loss(weight: np.ndarray, quantized: np.ndarray, h: Floats) -> float:
    """mean |x (W - W')^T|^2 / mean |x W^T|^2 = tr(E H E^T) / tr(W H W^T), for W, W' [N,K] and H = mean x x^T.

    0 when the weight gives nothing and neither does the error; summed over rows in float64.
    """
    lost = kept = 0.0
    for start in range(0, len(weight), _ROWS):
        part = np.asarray(weight[start : start + _ROWS], np.float32)
        rest = part - np.asarray(quantized[start : start + _ROWS], np.float32)
        lost += float(np.einsum("nk,nk->", rest @ h, rest, dtype=np.float64))
        kept += float(np.einsum("nk,nk->", part @ h, part, dtype=np.float64))
    return max(lost, 0.0) / kept if kept > 0 else 0.0
