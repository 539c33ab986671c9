"""What errors of an attention's queries, keys and values meet on their way out: pure functions on arrays.

Knows: the arithmetic of `vocabulary.ATTENTION` for one window without a past. Does not know: graphs, weights, moments.

With P[t,s] how much token t looks at token s, the attention gives out v'[t] = sum_s P[t,s] v[s]. So, to first order:

    value   an error e of the weight costs e . x'[t], x'[t] = sum_s P[t,s] x[s]: vectors as attention mixes them. A token that
            all others look at (the first one, in most models) counts as often as it is looked at, and what differs from token
            to token is averaged away.
    key     an error d of k[s] moves v'[t] by P[t,s] (q[t] . d) (v[s] - v'[t]): a token counts as much as looking at it
            changes what comes out.
    query   an error d of q[t] moves v'[t] by sum_s P[t,s] (d . (k[s] - k'[t])) (v[s] - v'[t]).

Sums over s and directions of q are taken as independent there: one number a token, not a matrix. A softcap flattens the scores:
what moves one by d moves it by d (1 - (score / cap)^2) behind it. A norm of a head of q or k (Gemma 3) shrinks errors as it
shrinks the head.
T = tokens of the window, R = query heads that share a key head, d = head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quant.arrays import Floats

_LEAST = np.float32(1e-20)


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


@dataclass(frozen=True)
class Entering:
    """What enters the attention at the T tokens of a window, not rotated yet.

    Attributes:
        q, k, v: [T,heads*d] and twice [T,kv_heads*d].
        before: q and k in front of the norm of each head; None = there is none.
    """

    q: Floats
    k: Floats
    v: Floats
    before: tuple[Floats, Floats] | None = None


def attended(
    x: Floats, entering: Entering, shape: Shape, tables: tuple[Floats, Floats] | None, costs: Floats
) -> Iterator[Attended]:
    """Each key head in turn.

    Args:
        x: [T,K], what enters the products that make q, k and v.
        tables: cosines and sines of the first T positions, [T,r/2] each; None = no rotary positions.
        costs: [T], cost of a unit of squared error in what the attention gives out at each token.
    """
    q, k, v = (_heads(one, shape) for one in (entering.q, entering.k, entering.v))
    shrunk = [1 / (np.square(_heads(one, shape)).mean(-1) + _LEAST) for one in entering.before or ()]
    if tables is not None:
        q, k = rotated(q, *tables), rotated(k, *tables)
    count = shape.heads // shape.kv_heads
    costs = np.tile(costs, count)
    for head in range(shape.kv_heads):
        own = np.ascontiguousarray(q[head * count : (head + 1) * count])
        scores = capped_scores(own, k[head], shape)
        looks = probabilities(scores, shape.window).reshape(-1, len(x))
        vectors = looks @ x
        vectors *= np.sqrt(costs)[:, None]
        moved = _squared_distances(looks, v[head])
        moved *= looks
        moved *= looks
        moved *= costs[:, None]
        if shape.softcap:
            moved *= np.square(1 - np.square(scores / np.float32(shape.softcap))).reshape(-1, len(x))
        keys = np.square(own).sum(-1).reshape(-1) @ moved
        queries = (moved * _squared_distances(looks, k[head])).sum(-1).reshape(count, -1)
        if shrunk:
            keys, queries = keys * shrunk[1][head], queries * shrunk[0][head * count : (head + 1) * count]
        yield Attended(vectors, np.maximum(keys, 0), np.maximum(queries.sum(0), 0))


def rotated(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """[H,T,d] at positions 0..T-1; what is beyond the tables' width stays."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def capped_scores(q: Floats, k: Floats, shape: Shape) -> Floats:
    """[R,T,T] of rotated q [R,T,d] and k [T,d]."""
    scores: Floats = (q.reshape(-1, shape.head_dim) @ k.T).reshape(len(q), len(k), len(k)) * np.float32(shape.scale)
    if not shape.softcap:
        return scores
    return np.asarray(np.tanh(scores / np.float32(shape.softcap)) * np.float32(shape.softcap), np.float32)


def probabilities(scores: Floats, window: int) -> Floats:
    """How much each token looks at each, [R,T,T]; `window` 0 = at all before it."""
    places = np.arange(scores.shape[-1])
    seen = places <= places[:, None]
    if window:
        seen &= places > places[:, None] - window
    looks: Floats = np.where(seen, scores, np.float32(-np.inf))
    looks -= looks.max(-1, keepdims=True)
    np.exp(looks, out=looks)
    looks /= looks.sum(-1, keepdims=True)
    return looks


def _heads(x: Floats, shape: Shape) -> Floats:
    """[T,heads*d] -> [heads,T,d]."""
    return x.reshape(len(x), -1, shape.head_dim).transpose(1, 0, 2)


def _squared_distances(looks: Floats, vectors: Floats) -> Floats:
    """[R*T,T]: from what each row's token gets of the vectors [T,d] to each of them."""
    mixed = looks @ vectors
    found: Floats = np.multiply(mixed, -2, dtype=np.float32) @ vectors.T
    found += np.square(vectors).sum(-1)
    found += np.square(mixed).sum(-1)[:, None]
    return found
