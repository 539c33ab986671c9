"""Rotations: orthogonal, spread evenly, the same for the same seed."""

import numpy as np
import pytest

from quant.hadamard import Rotation, rotation

HADAMARD = (1, 2, 4, 12, 20, 28, 36, 48, 64, 96, 128, 576, 640, 896, 960, 1152)
ORTHOGONAL = (3, 7, 30, 92, 100)  # 92 = 4 x 23 has a Hadamard matrix, of a construction that is not here


def fresh() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


@pytest.mark.parametrize("size", [*HADAMARD, *ORTHOGONAL])
def test_a_rotation_is_orthogonal_and_its_fast_form_is_its_matrix(size: int) -> None:
    seed = fresh()
    turn = rotation(size, seed)
    matrix = turn.matrix().astype(np.float64)
    assert turn.size == size and np.abs(matrix @ matrix.T - np.eye(size)).max() < 1e-5, f"seed {seed}"
    rows = np.random.default_rng(seed).standard_normal((3, 5, size)).astype(np.float32)
    assert np.abs(turn.turn(rows) - rows @ matrix).max() < 1e-5 * size**0.5, f"seed {seed}"
    tall = rows[0].T.copy()
    assert np.abs(turn.turn_rows(tall) - matrix.T @ tall).max() < 1e-5 * size**0.5, f"seed {seed}"
    assert np.abs(turn.turn_rows(rows[0, 0]) - rows[0, 0] @ matrix).max() < 1e-5 * size**0.5, f"seed {seed}"


@pytest.mark.parametrize("size", HADAMARD)
def test_a_hadamard_rotation_spreads_one_coordinate_over_all(size: int) -> None:
    turn = rotation(size, fresh())
    assert turn.kind == "hadamard"
    assert np.allclose(np.abs(turn.matrix()), size**-0.5, rtol=1e-4)


@pytest.mark.parametrize("size", ORTHOGONAL)
def test_a_size_without_a_known_hadamard_matrix_says_so(size: int) -> None:
    assert rotation(size, fresh()).name.startswith("orthogonal")


def test_names_tell_the_factors() -> None:
    assert [rotation(size, 0).name for size in (576, 640, 64, 4096)] == [
        "hadamard 12x12x4", "hadamard 20x32", "hadamard 64", "hadamard 64x64",
    ]  # fmt: skip


def test_seed_and_path_choose_the_numbers() -> None:
    seed = fresh()

    def signs(turn: Rotation) -> bytes:
        return turn.signs.tobytes() + turn.factors[0].tobytes()

    for size in (576, 100):
        assert signs(rotation(size, seed, 2, 3)) == signs(rotation(size, seed, 2, 3))
        others = [rotation(size, seed + 1, 2, 3), rotation(size, seed, 2, 4), rotation(size, seed, 2)]
        assert signs(rotation(size, seed, 2, 3)) not in [signs(one) for one in others]
