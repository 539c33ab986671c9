"""Integers and scales of the GGUF types whose blocks are a plain grid: Q4_0, Q4_1, Q8_0.

Knows: the bytes of these three blocks. Does not know: files, what a tensor is for, or who can hold such a grid.
Source: ggml's block_q4_0, block_q4_1 and block_q8_0 (github.com/ggml-org/ggml). A block is 32 neighbours of a row:

    Q4_0   d f16 |         16 bytes: values 0..15 in the low nibbles, 16..31 in the high ones    (q - 8) * d
    Q4_1   d f16 | m f16 | 16 bytes, likewise                                                     q * d + m
    Q8_0   d f16 |         32 x int8                                                              q * d
"""

import numpy as np

from export.checkpoint.source import Grid
from export.checkpoint.tensors import GridCodec

BLOCK = 32


def q4_0(raw: np.ndarray) -> Grid:
    """uint8 of blocks of 18 bytes -> q [blocks,32] in -8..7, scales [blocks,1]."""
    blocks = raw.reshape(-1, 2 + BLOCK // 2)
    return Grid(_signed(blocks[:, 2:]), _halves(blocks, 0), None)


def q4_1(raw: np.ndarray) -> Grid:
    """uint8 of blocks of 20 bytes -> q [blocks,32] in -8..7 (8 less than stored), scales and offsets [blocks,1]."""
    blocks = raw.reshape(-1, 4 + BLOCK // 2)
    return Grid(_signed(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def q8_0(raw: np.ndarray) -> Grid:
    """uint8 of blocks of 34 bytes -> q [blocks,32] in -128..127, scales [blocks,1]."""
    blocks = raw.reshape(-1, 2 + BLOCK)
    return Grid(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _halves(blocks, 0), None)


GRIDS = {"Q4_0": GridCodec(4, False, q4_0), "Q4_1": GridCodec(4, True, q4_1), "Q8_0": GridCodec(8, False, q8_0)}


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float16, copy=False)


def _signed(nibbles: np.ndarray) -> np.ndarray:
    """The first half of a block lies in the low nibbles, the second in the high ones; stored values are 8 too large."""
    stored = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=1)
    return (stored.view(np.int8) - np.int8(8)).astype(np.int8, copy=False)
