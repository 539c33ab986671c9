"""What errors of an attention's queries, keys and values meet on their way out: pure functions on arrays.

Knows: the arithmetic of `vocabulary.ATTENTION` for one window without a past. Does not know: graphs, weights, moments.

With P[t,s] how much token t looks at token s, the attention gives out v'[t] = sum_s P[t,s] v[s]. So, to first order:

    value   an error e of the weight costs e . x'[t], x'[t] = sum_s P[t,s] x[s]: vectors as attention mixes them. A token that
            all others look at (the first one, in most models) counts as often as it is looked at, and what differs from token
            to token is averaged away.
    key     an error d of k[s] moves v'[t] by P[t,s] (q[t] . d) (v[s] - v'[t]): a token counts as much as looking at it
            changes what comes out.
    query   an error d of q[t] moves v'[t] by sum_s P[t,s] (d . (k[s] - k'[t])) (v[s] - v'[t]).

Sums over s and directions of q are taken as independent there: one number a token, not a matrix.
T = tokens of the window, R = query heads that share a key head, d = head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quant.arrays import Floats


@dataclass(frozen=True)
class Shape:
    """Attributes of the operator, as `vocabulary.ATTENTION` names them."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int


@dataclass(frozen=True)
class Attended:
    """One key head of one window.

    Attributes:
        vectors: [R*T,K], x' of each query head and token, times the square root of what an error there costs.
        keys: [T], cost of an error of each key, relative to one another.
        queries: [T], of each query, summed over the R heads.
    """

    vectors: Floats
    keys: Floats
    queries: Floats


def attended(x: Floats, qkv: tuple[Floats, Floats, Floats], shape: Shape, tables: tuple[Floats, Floats] | None,
             costs: Floats) -> Iterator[Attended]:  # fmt: skip
    """Each key head in turn.

    Args:
        x: [T,K], what enters the products that make q, k and v.
        qkv: what enters the attention, [T,heads*d] and twice [T,kv_heads*d], not rotated yet.
        tables: cosines and sines of the first T positions, [T,r/2] each; None = no rotary positions.
        costs: [T], cost of a unit of squared error in what the attention gives out at each token.
    """
    q, k, v = (one.reshape(len(x), -1, shape.head_dim).transpose(1, 0, 2) for one in qkv)
    if tables is not None:
        q, k = rotated(q, *tables), rotated(k, *tables)
    count = shape.heads // shape.kv_heads
    costs = np.tile(costs, count)
    for head in range(shape.kv_heads):
        own = np.ascontiguousarray(q[head * count : (head + 1) * count])
        looks = probabilities(own, k[head], shape).reshape(-1, len(x))
        vectors = looks @ x
        vectors *= np.sqrt(costs)[:, None]
        moved = _squared_distances(looks, v[head])
        moved *= looks
        moved *= looks
        moved *= costs[:, None]
        keys = np.square(own).sum(-1).reshape(-1) @ moved
        queries = (moved * _squared_distances(looks, k[head])).sum(-1).reshape(count, -1).sum(0)
        yield Attended(vectors, np.maximum(keys, 0), np.maximum(queries, 0))


def rotated(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """[H,T,d] at positions 0..T-1; what is beyond the tables' width stays."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def probabilities(q: Floats, k: Floats, shape: Shape) -> Floats:
    """How much each token looks at each: [R,T,T] of rotated q [R,T,d] and k [T,d]."""
    scores = (q.reshape(-1, shape.head_dim) @ k.T).reshape(len(q), len(k), len(k)) * np.float32(shape.scale)
    if shape.softcap:
        scores = np.asarray(np.tanh(scores / np.float32(shape.softcap)) * np.float32(shape.softcap), np.float32)
    places = np.arange(len(k))
    seen = places <= places[:, None]
    if shape.window:
        seen &= places > places[:, None] - shape.window
    scores[:, ~seen] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores


def _squared_distances(looks: Floats, vectors: Floats) -> Floats:
    """[R*T,T]: from what each row's token gets of the vectors [T,d] to each of them."""
    mixed = looks @ vectors
    found: Floats = np.multiply(mixed, -2, dtype=np.float32) @ vectors.T
    found += np.square(vectors).sum(-1)
    found += np.square(mixed).sum(-1)[:, None]
    return found
