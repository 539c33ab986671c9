"""Solvers that need no calibration, zero points, the spill's keys, and forms by weight."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import TargetError
from quant import solvers, spill
from quant.affine import dequantize_affine, fit_affine
from quant.arrays import dequantize, pack_zeros, round_to_nearest
from quant.decide import decide
from quant.emit import emit
from quant.moments import Gatherer, Moments
from quant.plan import plans
from quant.proxy import proxy_loss
from quant.record import record, summary
from quant.scheme import Form, Options, WeightRule
from quant.schemes import find
from tests.quant.canonical import Weight, emulate, inputs, linear_model, session, target, tied_model


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def test_solvers_are_found_by_looking() -> None:
    assert {"fit", "nearest"} <= set(solvers.known())
    with pytest.raises(TargetError, match='unknown solver "fiit"; did you mean "fit"'):
        solvers.find("fiit")


@pytest.mark.parametrize(("bits", "group", "symmetric"), itertools.product((4, 8), (32, 0), (True, False)))
def test_fit_loses_less_than_nearest_and_says_how_much(bits: int, group: int, symmetric: bool) -> None:
    seed, rng = fresh()
    weight = rng.standard_normal((40, 100)).astype(np.float32)
    form = Form(bits, group, "block-dynamic", symmetric)
    x = rng.standard_normal((300, 100)).astype(np.float32) * rng.uniform(0.1, 3, 100).astype(np.float32)
    noise = {}
    for name in ("nearest", "fit"):
        solved = solvers.find(name).solve(weight, form, _moments(x), 1)
        assert (solved.zero_points is None) == symmetric
        values = dequantize_affine(solved.q, solved.scales, solved.zero_points, bits, group)
        true = float(((weight - values).astype(np.float64) ** 2).sum())
        assert solved.error.noise == pytest.approx(true, rel=1e-4), f"seed {seed}"
        lost = float((((weight - values) @ x.T) ** 2).mean() / ((weight @ x.T) ** 2).mean())
        assert solved.proxy == pytest.approx(lost, rel=1e-3), f"seed {seed}"
        noise[name] = true
    assert noise["fit"] < noise["nearest"], f"seed {seed}"


def _moments(x: np.ndarray) -> Moments:
    gatherer = Gatherer(x.shape[1])
    gatherer.add(x)
    return gatherer.moments()


def test_moments_are_means_over_all_tokens() -> None:
    seed, rng = fresh()
    x = rng.standard_normal((3, 1500, 24)).astype(np.float32)
    gatherer = Gatherer(24)
    for part in x:
        gatherer.add(part)
    found = gatherer.moments()
    flat = x.reshape(-1, 24).astype(np.float64)
    assert found.tokens == 4500 and found.h.shape == (24, 24)
    assert np.allclose(found.h, flat.T @ flat / 4500, atol=1e-5), f"seed {seed}"


def test_float32_sums_of_moments_are_exact_enough() -> None:
    """The figure in the docstring of `quant.moments`."""
    seed, rng = fresh()
    x = rng.standard_normal((64, 512, 32)).astype(np.float32) * rng.uniform(0.01, 10, 32).astype(np.float32)
    gatherer = Gatherer(32)
    for part in x:
        gatherer.add(part)
    flat = x.reshape(-1, 32).astype(np.float64)
    wanted = flat.T @ flat / len(flat)
    assert np.linalg.norm(gatherer.moments().h - wanted) < 2e-6 * np.linalg.norm(wanted), f"seed {seed}"


def test_the_proxy_of_nothing_lost_is_nothing() -> None:
    weight = np.ones((4, 8), np.float32)
    assert proxy_loss(weight, weight, np.eye(8, dtype=np.float32)) == 0
    assert proxy_loss(weight, weight * 0, np.zeros((8, 8), np.float32)) == 0
    assert proxy_loss(weight, weight * 0, np.eye(8, dtype=np.float32)) == 1


def test_one_sided_groups_gain_from_zero_points() -> None:
    seed, rng = fresh()
    weight = rng.uniform(1, 2, (20, 70)).astype(np.float32)
    q, scales, zeros, error = fit_affine(weight, 4, 32)
    lost = ((weight - dequantize_affine(q, scales, zeros, 4, 32)) ** 2).sum()
    assert error.noise == pytest.approx(float(lost), rel=1e-4), f"seed {seed}"
    plain, plain_scales = round_to_nearest(weight, 4, 32)
    assert lost < 0.3 * ((weight - dequantize(plain, plain_scales, 32)) ** 2).sum(), f"seed {seed}"


@pytest.mark.parametrize("form", ["cpu", "cpu-static"])
@pytest.mark.parametrize(("columns", "bias"), [(256, False), (96, True), (100, True), (20, False)])
def test_a_matmul_with_zero_points_is_what_numpy_says(form: str, columns: int, bias: bool, tmp_path: Path) -> None:
    seed, rng = fresh()
    weight = (rng.standard_normal((24, columns)) + rng.uniform(-2, 2, (24, 1))).astype(np.float32)
    extra = rng.standard_normal(24).astype(np.float32) if bias else None
    model = linear_model(Weight("proj.weight", "attn.q", weight), extra)
    decision = decide(model, find("w4a8", Options(group=32, symmetric=False)), target(form), tmp_path / "work")
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    q, scales = (node.inputs[index].const_value.numpy().copy() for index in (1, 2))  # type: ignore[union-attr]
    zeros = node.inputs[4].const_value.numpy().copy()  # type: ignore[union-attr]
    assert len(np.unique(zeros)) > 1, "these weights want zero points away from the middle"
    emit(model, target(form))
    dtype = target(form).weights.scale_dtype
    real = sum(
        int(value.const_value.nbytes)  # type: ignore[union-attr]
        for value in model.graph.initializers.values()
        if value.metadata_props.get("role") == "attn.q"
    )
    told = record(decision, dtype)["bytes_by_role"]["attn.q"]
    assert told == real or (form == "cpu-static" and told == real + 12), "an odd nibble a row is only in the packed form"
    assert not summary(decision).roles["attn.q"].symmetric
    wide = q.astype(np.int16) - (np.repeat(zeros, 32, axis=1)[:, :columns].astype(np.int16) - 8)
    run = session(model, tmp_path)
    for rows in (1, 7):
        x = inputs(rng, rows, columns, 32)
        y = run.run(None, {"x": x[None]})[0][0]
        wanted = emulate(x, wide, scales, 32) + (0 if extra is None else extra)
        assert np.abs(y - wanted).max() <= 2e-5 * np.abs(wanted).max(), f"seed {seed}, {rows} rows"


def test_zero_points_pack_low_nibble_first_and_pad_with_the_middle() -> None:
    assert pack_zeros(np.array([[1, 2, 3]], np.uint8), 4).tolist() == [[0x21, 0x83]]


def test_a_target_without_zero_points_says_so(tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", "attn.q", np.ones((8, 64), np.float32)))
    with pytest.raises(TargetError, match="with zero points; target cpu takes none"):
        decide(model, find("w4a8", Options(symmetric=False)), target("cpu", symmetric_only=True), tmp_path)


def test_the_key_changes_with_all_that_changes_the_numbers() -> None:
    form = Form(4, 32, "block-dynamic")
    base: tuple[object, ...] = ("w", (8, 64), form, "fit 1", "")
    changes = [
        ("v", (8, 64), form, "fit 1", ""),
        ("w", (8, 65), form, "fit 1", ""),
        ("w", (8, 64), Form(8, 32, "block-dynamic"), "fit 1", ""),
        ("w", (8, 64), Form(4, 64, "block-dynamic"), "fit 1", ""),
        ("w", (8, 64), Form(4, 32, "block-dynamic", False), "fit 1", ""),
        ("w", (8, 64), form, "fit 2", ""),
        ("w", (8, 64), form, "fit 1", "text"),
    ]
    keys = {spill.key_of(*each) for each in [base, *changes]}  # type: ignore[arg-type]
    assert len(keys) == len(changes) + 1
    assert spill.key_of("w", (8, 64), Form(4, 32, "float"), "fit 1", "") == spill.key_of(*base)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_zero_points_are_written_again(damage: str, tmp_path: Path) -> None:
    weight = np.random.default_rng().standard_normal((24, 64)).astype(np.float32)
    scheme = find("w4a8", Options(group=32, symmetric=False))
    decide(linear_model(Weight("proj.weight", "attn.q", weight)), scheme, target("cpu"), tmp_path)
    path = next(tmp_path.glob("*.z.npy"))
    whole = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(whole[:50])
    decide(linear_model(Weight("proj.weight", "attn.q", weight)), scheme, target("cpu"), tmp_path)
    assert path.read_bytes() == whole


def test_an_exception_for_one_weight_goes_to_the_record_with_its_reason(tmp_path: Path) -> None:
    model = tied_model(np.random.default_rng().standard_normal((50, 64)).astype(np.float32))
    options = Options(group=32, weights={"up.weight": WeightRule("the worst one", bits=8)})
    told = record(decide(model, find("w4a8", options), target("cpu"), tmp_path))
    found = {one["name"]: (one["bits"], one["reason"], one["solver"]) for one in told["matrices"]}
    assert found["up.weight"] == (8, "the worst one; asked for: --group 32", "fit")
    assert found["gate.weight"] == (4, "asked for: --group 32", "fit")
    assert told["options"]["weights"] == {"up.weight": {"reason": "the worst one", "bits": 8, "group": None, "symmetric": None}}


def test_an_exception_for_no_weight_is_an_error() -> None:
    model = tied_model(np.ones((50, 64), np.float32))
    options = Options(weights={"upp.weight": WeightRule("a slip", bits=8)})
    with pytest.raises(TargetError, match=r'unknown weight "upp\.weight"; did you mean "up\.weight"'):
        plans(model, find("w4a8", options), target("cpu"))


def test_the_baseline_rounds_plainly(tmp_path: Path) -> None:
    weight = np.random.default_rng().standard_normal((24, 64)).astype(np.float32)
    model = linear_model(Weight("proj.weight", "attn.q", weight))
    decision = decide(model, find("w4a8-rtn"), target("cpu"), tmp_path)
    node = next(node for node in model.graph if node.op_type == "QuantLinear")
    q, scales = round_to_nearest(weight, 4, 32)
    assert np.array_equal(node.inputs[1].const_value.numpy(), q)  # type: ignore[union-attr]
    assert np.array_equal(node.inputs[2].const_value.numpy(), scales)  # type: ignore[union-attr]
    assert decision.matrices[0].solver == "nearest"
