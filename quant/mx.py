"""OCP Microscaling formats in numpy: MXFP4 weights (E2M1), MXFP8 activations (E4M3), one power of two (E8M0) a block of 32.

Knows: the specification's arithmetic and three byte layouts. Does not know: graphs, targets, how a solver is chosen.
Source: OCP Microscaling Formats (MX) Specification v1.0, 2023: element formats (5.3), conversion (6.3), dot product (6.2).

    block of 32:  X = 2^(floor(log2 max|v|) - emax), kept as E8M0;  P_i = round(v_i / X) in the element format;  v_i ~ X * P_i

    E2M1   emax 2   0 0.5 1 1.5 2 3 4 6            subnormal 0.5
    E4M3   emax 8   up to 448, steps of 2^-9 below 2^-6
    E8M0   byte e is 2^(e-127), 255 is NaN; there is no zero: a block of zeros gets 2^-127

Rounding is to nearest, ties to even; what lies beyond the largest element is clamped to it. Here an E2M1 matrix is kept as
twice its elements, whole numbers in -12..12, with X/2 as their scale: value = q * scale, as for integers, exactly. A negative
zero becomes a plain one, the same number.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quant.arrays import Bytes, Floats, Int8s

BLOCK: Final = 32
NAN_SCALE: Final = 255
BIAS: Final = 127

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
"""Twice the magnitudes of E2M1, by the low three bits of its code; the fourth is the sign."""


@dataclass(frozen=True)
class Element:
    """An element format: explicit bits of the mantissa, exponent of the smallest normal number, largest number, its exponent."""

    mantissa: int
    least: int
    largest: float
    emax: int


E2M1 = Element(mantissa=1, least=0, largest=6.0, emax=2)
E4M3 = Element(mantissa=3, least=-6, largest=448.0, emax=8)


def round_to(values: Floats, element: Element) -> Floats:
    """The nearest numbers of an element format, ties to even, clamped to the largest; NaN stays NaN."""
    _, exponents = np.frexp(values)  # |v| = m * 2^e with m in 0.5..1, so floor(log2 |v|) is e - 1; 0 has e = 0
    steps = np.maximum(exponents - 1, element.least) - element.mantissa
    rounded = np.ldexp(np.rint(np.ldexp(values, -steps)), steps)
    found: Floats = np.clip(rounded, -element.largest, element.largest).astype(np.float32)
    return found


def shared_exponents(blocks: Floats, element: Element) -> npt.NDArray[np.int16]:
    """Exponents of X for blocks [...,32]: [...], in -127..127. Blocks must be finite."""
    most = np.abs(blocks).max(-1)
    _, exponents = np.frexp(most)
    found: npt.NDArray[np.int16] = np.where(most > 0, exponents - 1 - element.emax, -BIAS).clip(-BIAS, BIAS).astype(np.int16)
    return found


def quantize_weights(weight: np.ndarray, *, search: bool = True) -> tuple[Int8s, Floats, int]:
    """MXFP4 of a matrix [N,K]: q int8 [N,K] (twice the elements), scales float32 [N,ceil(K/32)] (X/2), clamped weights.

    Args:
        search: also try twice the specification's X, which clamps nothing between 6X and 8X, and take what loses less. Every
            X is valid in the format; the specification says which one a plain conversion takes.

    Raises:
        ValueError: NaN or infinity among the weights.
    """
    blocks = _blocks(weight)
    if not np.isfinite(blocks).all():
        raise ValueError("NaN or infinity among the weights")
    plain = shared_exponents(blocks, E2M1)
    best, exponents = _rounded(blocks, plain), plain
    if search:
        wider = np.minimum(plain + 1, BIAS).astype(np.int16)
        other = _rounded(blocks, wider)
        better = _squares(blocks, other, wider) < _squares(blocks, best, plain)
        best = np.where(better[..., None], other, best)
        exponents = np.where(better, wider, plain)
    clamped = int((np.abs(blocks) > np.ldexp(np.float32(E2M1.largest), exponents)[..., None]).sum())
    q = (best.reshape(len(best), -1)[:, : weight.shape[1]] * 2).astype(np.int8)
    return q, np.ldexp(np.float32(1), exponents - 1), clamped


def quantize_activations(x: np.ndarray) -> Floats:
    """x [...,K] as MXFP8 holds it, every block of 32 along K: float32 [...,K]. A block with NaN or infinity is all NaN."""
    shape = x.shape
    blocks = _blocks(x.reshape(-1, shape[-1]))
    broken = np.logical_not(np.isfinite(blocks).all(axis=-1))
    blocks = np.where(broken[..., None], np.float32(0), blocks)
    exponents = shared_exponents(blocks, E4M3)
    values = np.ldexp(round_to(np.ldexp(blocks, -exponents[..., None]), E4M3), exponents[..., None])
    values[broken] = np.nan
    found: Floats = values.reshape(len(values), -1)[:, : shape[-1]].reshape(shape)
    return found


def linear(x: np.ndarray, q: np.ndarray, scales: np.ndarray) -> Floats:
    """x [...,K] @ W^T as the specification computes it: products within a block summed, then scaled, then blocks summed.

    In float64, so that it is what every order of sums in hardware comes near to: [...,N] float32.
    """
    shape = x.shape
    activations = quantize_activations(x).reshape(-1, shape[-1]).astype(np.float64)
    y = np.zeros((len(activations), len(q)))
    for block, start in enumerate(range(0, shape[-1], BLOCK)):
        part = slice(start, start + BLOCK)
        y += (activations[:, part] @ q[:, part].T.astype(np.float64)) * scales[:, block].astype(np.float64)
    return y.astype(np.float32).reshape(*shape[:-1], len(q))


def exponents_of(scales: Floats) -> Bytes:
    """E8M0 bytes [N,G] of scales (X/2) as `quantize_weights` gives them."""
    mantissas, exponents = np.frexp(scales)
    assert (mantissas == 0.5).all(), "an MX scale is a power of two"
    return (exponents + BIAS).astype(np.uint8)


def scales_of(exponents: Bytes) -> Floats:
    """The inverse of `exponents_of`; byte 255 gives NaN."""
    scales: Floats = np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS - 1)
    return np.where(exponents == NAN_SCALE, np.float32(np.nan), scales)


def codes_of(q: Int8s) -> Bytes:
    """The four bits of each element, sign first: uint8 of q's shape, 0..15."""
    found: Bytes = np.searchsorted(_DOUBLED, np.abs(q)).astype(np.uint8) | (np.uint8(8) * (q < 0).astype(np.uint8))
    return found


def values_of(codes: Bytes) -> Int8s:
    """Twice the element of each code, the inverse of `codes_of`."""
    magnitudes = _DOUBLED[codes & 7]
    found: Int8s = np.where(codes & 8, -magnitudes, magnitudes)
    return found


def pack_pairs(q: Int8s) -> Bytes:
    """Neighbours share a byte, the earlier one low: [N, whole blocks * 16].

    The layout of ONNX's FLOAT4E2M1, of safetensors' F4, and of gpt-oss's `*_blocks` (there as [...,G,16] beside `*_scales`
    [...,G] of E8M0 bytes). The specification itself leaves the layout open.
    """
    codes = codes_of(_whole(q))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def unpack_pairs(packed: Bytes, columns: int) -> Int8s:
    """The inverse of `pack_pairs`."""
    return values_of(np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)[:, :columns])


def pack_gguf(q: Int8s, scales: Floats) -> Bytes:
    """GGUF's MXFP4 (ggml's block_mxfp4): [N, G*17], a block being its E8M0 byte and 16 bytes: elements 0..15 low, 16..31 high."""
    codes = codes_of(_whole(q)).reshape(len(q), -1, 2, BLOCK // 2)
    blocks = np.concatenate([exponents_of(scales)[..., None], codes[:, :, 0] | (codes[:, :, 1] << np.uint8(4))], axis=-1)
    return blocks.reshape(len(q), -1)


def unpack_gguf(packed: Bytes, columns: int) -> tuple[Int8s, Floats]:
    """The inverse of `pack_gguf`."""
    blocks = packed.reshape(len(packed), -1, 1 + BLOCK // 2)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    return values_of(codes.reshape(len(packed), -1)[:, :columns]), scales_of(blocks[..., 0])


def _rounded(blocks: Floats, exponents: npt.NDArray[np.int16]) -> Floats:
    """Elements [N,G,32]; adding 0 turns -0.0 to 0.0."""
    return round_to(np.ldexp(blocks, -exponents[..., None]), E2M1) + np.float32(0)


def _squares(blocks: Floats, elements: Floats, exponents: npt.NDArray[np.int16]) -> Floats:
    rest = blocks - np.ldexp(elements, exponents[..., None])
    sums: Floats = np.einsum("ngk,ngk->ng", rest, rest)
    return sums


def _blocks(matrix: np.ndarray) -> Floats:
    """[N,K] -> [N,G,32] float32, zeros after the end of a row."""
    return _whole(matrix).astype(np.float32, copy=False).reshape(len(matrix), -1, BLOCK)


def _whole(matrix: np.ndarray) -> np.ndarray:
    rows, columns = matrix.shape
    padded = -(-columns // BLOCK) * BLOCK
    if padded == columns:
        return matrix
    whole = np.zeros((rows, padded), matrix.dtype)
    whole[:, :columns] = matrix
    return whole
