"""Microscaling arithmetic against ml_dtypes' own types, the bytes against gguf and onnx."""

import gguf
import ml_dtypes
import numpy as np
import onnx
import pytest

from quant import mx

E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
"""Halfway between neighbours of E2M1: a tie goes to the one whose mantissa bit is 0."""


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def near(rng: np.random.Generator, element: type, largest: float) -> np.ndarray:
    """Every number of a format, every middle of two, their float32 neighbours, and random ones; finite, within range."""
    bits = {E2M1: 16, E4M3: 256}[element]
    numbers = np.arange(bits, dtype=np.uint8).view(element).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = np.concatenate([numbers, middles])
    around = np.concatenate([np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    random = rng.uniform(-largest, largest, 5000) * 2.0 ** rng.integers(-12, 1, 5000)
    found = np.concatenate([exact, around, random]).astype(np.float32)
    return found[np.abs(found) <= largest]


@pytest.mark.parametrize(("element", "kind"), [(mx.E2M1, E2M1), (mx.E4M3, E4M3)])
def test_rounding_is_that_of_the_independent_types(element: mx.Element, kind: type) -> None:
    seed, rng = fresh()
    values = near(rng, kind, element.largest)
    assert np.array_equal(mx.round_to(values, element), values.astype(kind).astype(np.float32)), f"seed {seed}"


def test_ties_go_to_even() -> None:
    assert mx.round_to(MIDDLES, mx.E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert mx.round_to(-MIDDLES, mx.E2M1).tolist() == [0, -1, -1, -2, -2, -4, -4]


@pytest.mark.parametrize(("element", "largest"), [(mx.E2M1, 6), (mx.E4M3, 448)])
def test_beyond_the_largest_is_the_largest(element: mx.Element, largest: float) -> None:
    beyond = np.array([largest * 1.001, 1e30, -1e30, np.inf], np.float32)
    assert mx.round_to(beyond, element).tolist() == [largest, largest, -largest, largest]
    assert np.isnan(mx.round_to(np.array([np.nan], np.float32), element)).all()


def test_subnormal_elements_are_kept() -> None:
    assert mx.round_to(np.array([0.5, 0.26, 0.24], np.float32), mx.E2M1).tolist() == [0.5, 0.5, 0]
    steps = np.array([1, 2, 7, 0.5, 0.51, 1.5], np.float32) * np.float32(2.0**-9)
    assert (mx.round_to(steps, mx.E4M3) / np.float32(2.0**-9)).tolist() == [1, 2, 7, 0, 1, 2]


@pytest.mark.parametrize(
    ("most", "exponent"),
    [
        (1.0, -2),
        (1.99, -2),
        (2.0, -1),
        (6.0, 0),
        (7.99, 0),
        (8.0, 1),
        (0.0, -127),
        (1e-45, -127),
        (3.4e38, 125),
        (2.0**-124, -126),
    ],
)
def test_the_shared_exponent_is_the_specifications(most: float, exponent: int) -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, 7] = -most
    assert mx.shared_exponents(block, mx.E2M1).tolist() == [exponent]
    assert mx.shared_exponents(block, mx.E4M3).tolist() == [max(exponent - 6, -127)]


@pytest.mark.parametrize("columns", [32, 96, 50, 7])
def test_weights_are_a_plain_conversion_block_by_block(columns: int) -> None:
    seed, rng = fresh()
    weight = (rng.standard_normal((9, columns)) * 2.0 ** rng.integers(-30, 30, (9, 1))).astype(np.float32)
    q, scales, _ = mx.quantize_weights(weight, search=False)
    for row in range(9):
        for block, start in enumerate(range(0, columns, 32)):
            part = weight[row, start : start + 32]
            x = np.float32(2.0 ** (np.floor(np.log2(np.abs(part).max().astype(np.float64))) - 2))
            wanted = np.clip(part / x, -6, 6).astype(E2M1).astype(np.float32) * x
            assert np.array_equal(q[row, start : start + 32] * scales[row, block], wanted), f"seed {seed}, row {row}"


def test_the_search_loses_less_and_clamps_less() -> None:
    seed, rng = fresh()
    weight = rng.standard_normal((64, 320)).astype(np.float32)
    lost = []
    for search in (False, True):
        q, scales, clamped = mx.quantize_weights(weight, search=search)
        lost.append((((weight - q * np.repeat(scales, 32, axis=1)) ** 2).sum(), clamped))
    assert lost[1][0] < 0.98 * lost[0][0] and lost[1][1] < lost[0][1], f"seed {seed}: {lost}"


def test_quantizing_again_changes_nothing() -> None:
    seed, rng = fresh()
    for search in (False, True):
        q, scales, _ = mx.quantize_weights(rng.standard_normal((64, 100)).astype(np.float32), search=search)
        value = q * np.repeat(scales, 32, axis=1)[:, :100]
        q2, scales2, clamped = mx.quantize_weights(value, search=search)
        assert np.array_equal(q2 * np.repeat(scales2, 32, axis=1)[:, :100], value) and not clamped, f"seed {seed}"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_refused(bad: float) -> None:
    weight = np.ones((2, 40), np.float32)
    weight[1, 39] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        mx.quantize_weights(weight)


def test_activations_are_a_plain_conversion_block_by_block() -> None:
    seed, rng = fresh()
    x = (rng.standard_normal((3, 5, 100)) * 2.0 ** rng.integers(-20, 20, (3, 5, 1))).astype(np.float32)
    x[0, 0, 32:64] = 0
    x[1, 1, 70] = np.nan
    found = mx.quantize_activations(x)
    for start in range(0, 100, 32):
        part = x[..., start : start + 32]
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = 2.0 ** (np.floor(np.log2(np.abs(part).max(-1, keepdims=True).astype(np.float64))) - 8)
            scale = np.where(scale == 0, 2.0**-127, scale)
        wanted = (np.clip(part / scale, -448, 448).astype(E4M3).astype(np.float64) * scale).astype(np.float32)
        assert np.array_equal(found[..., start : start + 32], wanted, equal_nan=True), f"seed {seed}"
    assert np.isnan(found[1, 1, 64:96]).all() and np.isfinite(found[1, 1, :64]).all()


def test_a_whole_linear_is_the_sum_over_blocks() -> None:
    seed, rng = fresh()
    weight, x = rng.standard_normal((24, 70)).astype(np.float32), rng.standard_normal((2, 3, 70)).astype(np.float32)
    q, scales, _ = mx.quantize_weights(weight)
    dense = (q * np.repeat(scales, 32, axis=1)[:, :70]).astype(np.float64)
    wanted = mx.quantize_activations(x).astype(np.float64) @ dense.T
    assert np.allclose(mx.linear(x, q, scales), wanted, rtol=1e-6, atol=1e-6), f"seed {seed}"
    assert not np.allclose(mx.linear(x, q, scales), x @ dense.T, rtol=1e-3)


def test_scales_are_e8m0() -> None:
    exponents = np.arange(255, dtype=np.uint8)
    wanted = exponents.view(E8M0).astype(np.float64)
    assert np.array_equal(mx.scales_of(exponents).astype(np.float64) * 2, wanted)
    assert np.array_equal(mx.exponents_of(mx.scales_of(exponents)), exponents)
    assert np.isnan(mx.scales_of(np.array([255], np.uint8))).all()


def test_codes_are_e2m1() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert np.array_equal(mx.values_of(codes), codes.view(E2M1).astype(np.float32) * 2)
    assert mx.codes_of(mx.values_of(codes)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("columns", [64, 50, 1])
def test_pairs_are_what_onnx_unpacks(columns: int) -> None:
    seed, rng = fresh()
    q, _, _ = mx.quantize_weights(rng.standard_normal((5, columns)).astype(np.float32))
    packed, width = mx.pack_pairs(q), -(-columns // 32) * 32
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT4E2M1, (5, width), packed.tobytes(), raw=True)
    values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
    assert np.array_equal(values[:, :columns] * 2, q) and not values[:, columns:].any(), f"seed {seed}"
    assert np.array_equal(mx.unpack_pairs(packed, columns), q)
    swapped = (packed >> 4) | (packed << 4)
    assert columns == 1 or not np.array_equal(mx.unpack_pairs(swapped, columns), q)


@pytest.mark.parametrize("columns", [64, 256])
def test_gguf_dequantizes_what_was_packed_for_it(columns: int) -> None:
    seed, rng = fresh()
    weight = (rng.standard_normal((5, columns)) * 2.0 ** rng.integers(-20, 20, (5, 1))).astype(np.float32)
    q, scales, _ = mx.quantize_weights(weight)
    packed = mx.pack_gguf(q, scales)
    assert packed.shape == (5, columns // 32 * 17)
    values = gguf.dequantize(packed, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(values, q * np.repeat(scales, 32, axis=1)), f"seed {seed}"
    again = mx.unpack_gguf(packed, columns)
    assert np.array_equal(again[0], q) and np.array_equal(again[1], scales)
    pairs = np.concatenate([packed.reshape(5, -1, 17)[..., :1], mx.pack_pairs(q).reshape(5, -1, 16)], axis=-1)
    other = gguf.dequantize(np.ascontiguousarray(pairs.reshape(5, -1)), gguf.GGMLQuantizationType.MXFP4)
    assert not np.array_equal(other, values), "the two layouts are not the same"
