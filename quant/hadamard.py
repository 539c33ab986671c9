"""Orthogonal matrices that are cheap to apply: randomized Hadamard where the size has one, random orthogonal otherwise.

Knows: arrays. Does not know: weights, graphs, or where a rotation may stand.

A Hadamard matrix has entries of +1 and -1 and orthogonal rows, so each coordinate of a rotated vector is a sum of all
coordinates with equal weight: what stuck out is spread evenly. Orders: 1, 2 and multiples of 4. Here they are Kronecker
products of small ones: powers of two (Sylvester 1867), q+1 for a prime q = 3 mod 4 and 2(q+1) for a prime q = 1 mod 4
(Paley 1933). So 576 = 12 x 12 x 4, 640 = 20 x 32, 896 = 28 x 32.
"""

from dataclasses import dataclass

import numpy as np

from quant.arrays import Floats

_SYLVESTER = 64
"""Largest power of two that is kept as one matrix: a vector of 4096 takes two products with 64 numbers a coordinate."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix R = diag(signs) (F1 x F2 x ...), x the Kronecker product.

    Attributes:
        kind: "hadamard", or "orthogonal" where the size has no Hadamard matrix that is known here.
        signs: [n] of +1 and -1: the randomness of a Hadamard rotation.
        factors: square matrices, scaled to be orthogonal; their sizes multiply to n.
    """

    kind: str
    signs: Floats
    factors: tuple[Floats, ...]

    @property
    def size(self) -> int:
        """n."""
        return len(self.signs)

    @property
    def name(self) -> str:
        """What it is, for a record: "hadamard 12x12x4"."""
        return f"{self.kind} {'x'.join(str(len(factor)) for factor in self.factors)}"

    def turn(self, rows: np.ndarray) -> Floats:
        """rows [..., n] -> rows R, float32."""
        shape = rows.shape
        turned: Floats = (rows.astype(np.float32, copy=False) * self.signs).reshape(-1, *(len(one) for one in self.factors))
        for axis, factor in enumerate(self.factors, start=1):
            turned = np.moveaxis(np.moveaxis(turned, axis, -1) @ factor, -1, axis)
        return np.ascontiguousarray(turned.reshape(shape))

    def turn_rows(self, matrix: np.ndarray) -> Floats:
        """matrix [n, ...] -> R^T matrix: the rows of a weight whose output is to come out rotated."""
        return (
            np.ascontiguousarray(self.turn(np.moveaxis(matrix, 0, -1)).swapaxes(0, -1)) if matrix.ndim == 2 else self.turn(matrix)
        )

    def matrix(self) -> Floats:
        """R itself, [n,n]."""
        return self.turn(np.eye(self.size, dtype=np.float32))


def rotation(size: int, seed: int, *path: int) -> Rotation:
    """The rotation of a size for a seed; equal arguments give equal numbers.

    Args:
        size: n.
        seed: chooses the signs (and the orthogonal factor where there is one).
        path: numbers that tell rotations of one seed apart, e.g. layer and head.
    """
    rng = np.random.default_rng([seed, *path])
    signs = rng.choice(np.array([-1, 1], np.float32), size)
    orders = _orders(size)
    if orders is not None:
        return Rotation("hadamard", signs, tuple(_scaled(_hadamard(order)) for order in orders))
    even = size & -size
    odd = size // even
    random = np.linalg.qr(rng.standard_normal((odd, odd)))[0].astype(np.float32)
    return Rotation("orthogonal", signs, (random, *(_scaled(_sylvester(order)) for order in _powers(even) if order > 1)))


def _scaled(matrix: np.ndarray) -> Floats:
    scaled: Floats = (matrix / np.sqrt(len(matrix))).astype(np.float32)
    return scaled


def _orders(size: int) -> list[int] | None:
    """Orders of known Hadamard matrices whose product is `size`, or None."""
    if size & (size - 1) == 0:
        return _powers(size)
    for order in range(12, size + 1, 4):
        if order & (order - 1) and size % order == 0 and _paley_prime(order):
            rest = _orders(size // order)
            if rest is not None:
                return [order, *(one for one in rest if one > 1)]
    return None


def _powers(size: int) -> list[int]:
    """A power of two as factors up to `_SYLVESTER`."""
    found = []
    while size > 1:
        found.append(min(size, _SYLVESTER))
        size //= found[-1]
    return found or [1]


def _hadamard(order: int) -> np.ndarray:
    return _sylvester(order) if order & (order - 1) == 0 else _paley(order, _paley_prime(order))


def _sylvester(order: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _paley_prime(order: int) -> int:
    """The prime of Paley's construction of this order, 0 where there is none."""
    if _prime(order - 1) and (order - 1) % 4 == 3:
        return order - 1
    half = order // 2 - 1
    return half if order % 4 == 0 and _prime(half) and half % 4 == 1 else 0


def _paley(order: int, prime: int) -> np.ndarray:
    """Paley's construction from the quadratic residues modulo `prime`: I for order prime+1, II for 2(prime+1)."""
    squares = {number * number % prime for number in range(1, prime)}
    character = np.array([0 if not number else 1 if number in squares else -1 for number in range(prime)])
    residues = character[(np.arange(prime)[:, None] - np.arange(prime)[None]) % prime]
    first = order == prime + 1
    core = np.zeros((prime + 1, prime + 1))
    core[0, 1:], core[1:, 0], core[1:, 1:] = 1, -1 if first else 1, residues
    if first:
        return core + np.eye(prime + 1)
    return np.kron(core, [[1, 1], [1, -1]]) + np.kron(np.eye(prime + 1), [[1, -1], [-1, -1]])


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
