"""Weights of mixture-of-experts layers as QMoE takes them, and in numpy what the operator computes.

Knows: the operator's layout and arithmetic. Does not know: graphs, architectures, how integers are found.
No command reaches this: no architecture here has experts, and `quant.emit` writes no QMoE. It is the layout that an architecture
with experts must emit, put down and checked before there is one: with gate and up in a wrong order a graph still runs, and is
another function. The layout, gate and up in turn, is checked in `tests/quant/test_experts.py` against onnxruntime's own kernel,
which two wrong orders fail. `quant.structure` reads no QMoE back: whoever emits one adds that.
Source: com.microsoft QMoE with activation_type "swiglu", swiglu_fusion 1, quant_type "int"; onnxruntime 1.32's CPU kernel takes
no other fusion. FC1 holds gate and up in turn, row by row, so that neighbours of its product belong to one hidden unit:

    FC1 [E,2I,K]: rows g0 u0 g1 u1 ...      h_i = silu(g_i . x) * (u_i . x)
    FC2 [E,K,I]                             y = sum over chosen experts of p_e * FC2_e h
"""

from typing import Any, Final

import numpy as np

from quant.arrays import Bytes, Floats, pack_rows

ATTRIBUTES: Final[dict[str, Any]] = {
    "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0,
}  # fmt: skip
"""SiLU(gate) * up; the operator's own defaults are another function (1.702 and + 1)."""


def interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows of gate and up [...,I,K] (weights, integers or scales) in turn: [...,2I,K], FC1's order."""
    both = np.stack([gate, up], axis=-2)
    return both.reshape(*gate.shape[:-2], 2 * gate.shape[-2], gate.shape[-1])


def separate(joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `interleave`."""
    return joined[..., 0::2, :], joined[..., 1::2, :]


def pack(q: np.ndarray, bits: int) -> Bytes:
    """Integers [E,N,K] int8 as the operator stores them: [E,N,K*bits/8], as MatMulNBits' B without its axis of blocks."""
    experts, rows, columns = q.shape
    return pack_rows(q.reshape(experts * rows, columns), bits, columns).reshape(experts, rows, -1)


def mixture(x: Floats, router: Floats, joined: Floats, down: Floats, count: int) -> Floats:
    """What QMoE computes in float64: x [T,K], router logits [T,E], FC1 [E,2I,K], FC2 [E,K,I] -> [T,K].

    The `count` experts with the largest logits take part, weighted with the softmax over those alone
    (normalize_routing_weights 1).
    """
    y = np.zeros(x.shape)
    gate, up = separate(joined.astype(np.float64))
    for token, chosen in enumerate(np.argsort(-router, axis=-1, kind="stable")[:, :count]):
        weights = np.exp(router[token, chosen].astype(np.float64) - router[token].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            g, u = gate[expert] @ x[token], up[expert] @ x[token]
            y[token] += weight * (down[expert].astype(np.float64) @ (g / (1 + np.exp(-g)) * u))
    return y.astype(np.float32)
