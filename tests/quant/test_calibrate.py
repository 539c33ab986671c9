"""Layer by layer: each weight is solved on what the layers before it really give, and a stopped run goes on."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.targets import load
from export import arch, parity
from export.slices import opener
from quant import calibrate, solvers
from quant.calibrate import Layer, Setup, values_of, walk
from quant.decide import decide
from quant.graph import lazy
from quant.layer_moments import LayerMoments
from quant.layers import Running, cut
from quant.moments import Moments
from quant.plan import Plan, plans
from quant.scheme import Form, Options, Scheme
from quant.solvers import Solved, fit
from tests.golden import recipe

SEEN: list[tuple[np.ndarray, Moments]] = []


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A solver that rounds as fit does and remembers its moments."""

    def solve(weight: np.ndarray, form: Form, moments: Moments | None, threads: int) -> Solved:
        assert moments is not None
        SEEN.append((weight, moments))
        return fit.solve(weight, form, moments, threads)

    SEEN.clear()
    module = SimpleNamespace(VERSION=1, NEEDS_MOMENTS=True, solve=solve)
    find = solvers.find
    monkeypatch.setattr(solvers, "find", lambda name: module if name == "watching" else find(name))
    return module


SCHEME = Scheme("watched", "for tests", Form(4, 32, "block-dynamic"), solver="watching", options=Options(group=32))


def tiny(name: str = "llama", kind: str = "all") -> arch.Opened:
    config: dict[str, Any] = arch.find(name).TINY[kind]
    return arch.open_model(recipe.Memory(config, recipe.tensors(config, 3)))


def ready(
    opened: arch.Opened, work: Path, seed: int, solver: str = "watching", **changes: Any
) -> tuple[ir.Model, tuple[Plan, ...], Setup]:
    ids = np.random.default_rng(seed).integers(0, opened.config.vocab_size, (6, 24))
    model = opened.build()
    setup = Setup(ids, opener(24, work / "parts"), work, "checkpoint", **changes)
    return model, plans(model, dataclasses.replace(SCHEME, solver=solver), load("cpu")), setup


def fresh() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def entering(model: ir.Model, plans: tuple[Plan, ...], setup: Setup, upto: int, print_: str) -> np.ndarray:
    """Hidden states [W,S,D] in front of layer `upto`, every weight before it quantized: worked out in one go, with no files."""
    x = setup.ids
    for part in cut(model)[: upto + 1]:
        built = part.build(streams=False)
        for plan in plans:
            if plan.name in built.graph.initializers and plan.in_body:
                spilled = calibrate._found(plan, setup, print_)
                assert spilled is not None
                values = values_of(spilled, plan.form)
                built.graph.initializers[plan.name].const_value = lazy(
                    plan.name, ir.DataType.FLOAT, values.shape, lambda values=values: values
                )
        x = Running(built, setup.opener).run(x).hidden
    return x


@pytest.mark.parametrize(("name", "kind"), [("llama", "all"), ("gemma3_text", "period"), ("mistral", "window")])
def test_a_layer_is_solved_on_what_the_quantized_layers_before_it_give(
    name: str, kind: str, watching: SimpleNamespace, tmp_path: Path
) -> None:
    seed = fresh()
    model, planned, setup = ready(tiny(name, kind), tmp_path, seed)
    print_ = calibrate.calibrate(model, planned, setup)
    body = [plan for plan in planned if plan.in_body]
    assert len(SEEN) == len(body), f"seed {seed}: every weight of the body once"
    layers = cut(model)[1:-1]
    hidden = entering(model, planned, setup, len(layers) - 1, print_)
    gathering = LayerMoments(layers[-1], setup.ids.size)
    gathering.add(Running(gathering.build(), setup.opener).run(hidden), 0)
    for weight, wanted in gathering.moments().items():
        array = model.graph.initializers[weight].const_value.numpy()  # type: ignore[union-attr]
        found = next(m for w, m in SEEN if np.array_equal(w, array))
        assert found.tokens == wanted.tokens >= setup.ids.size
        assert np.abs(found.h - wanted.h).max() < 1e-4 * np.abs(wanted.h).max(), f"seed {seed} {weight}"


def test_decide_finds_what_was_solved_and_a_second_run_reads_nothing(watching: SimpleNamespace, tmp_path: Path) -> None:
    model, planned, setup = ready(tiny(), tmp_path, 1)
    print_ = calibrate.calibrate(model, planned, setup)
    count = len(SEEN)
    assert calibrate.calibrate(model, planned, dataclasses.replace(setup, opener=None), None) == print_  # type: ignore[arg-type]
    decision = decide(tiny().build(), SCHEME, load("cpu"), tmp_path, source="checkpoint", calibration=print_)
    assert len(SEEN) == count
    assert all(matrix.proxy is not None and 0 < matrix.proxy < 0.1 for matrix in decision.matrices if matrix.roles[0] != "embed"
               and "head" not in matrix.roles)  # fmt: skip
    assert not list(tmp_path.glob("walk.*.npy")), "hidden states are gone"
    with pytest.raises(AssertionError, match="needs calibration first"):
        decide(tiny().build(), SCHEME, load("cpu"), tmp_path, source="checkpoint", calibration="another text")


def test_the_fingerprint_changes_with_text_and_with_what_comes_before(watching: SimpleNamespace) -> None:
    model = tiny().build()
    ids = np.arange(48).reshape(2, 24)
    base = plans(model, SCHEME, load("cpu"))
    other = plans(model, dataclasses.replace(SCHEME, options=Options(group=64)), load("cpu"))
    found = {
        calibrate.fingerprint(ids, base, "s"),
        calibrate.fingerprint(ids + 1, base, "s"),
        calibrate.fingerprint(ids.reshape(4, 12), base, "s"),
        calibrate.fingerprint(ids, other, "s"),
        calibrate.fingerprint(ids, base, "t"),
    }
    assert len(found) == 5 and calibrate.fingerprint(ids.copy(), base, "s") in found


def test_a_walk_that_changes_nothing_is_the_float_model(watching: SimpleNamespace, tmp_path: Path) -> None:
    opened = tiny("gemma3_text", "all")
    model, _, setup = ready(opened, tmp_path, 7)
    seen: list[str] = []

    def look(layer: Layer) -> dict[str, ir.TensorProtocol]:
        seen.append(layer.part.name)
        assert set(layer.moments) == {name for names in layer.part.streams.values() for name in names}
        assert all(np.isfinite(one.h).all() and one.h.any() for one in layer.moments.values())
        return {}

    told: list[tuple[int, int, str]] = []
    walk(model, setup, look, name="look", progress=lambda *now: told.append(now))
    assert seen == [f"layers.{index}" for index in range(len(seen))] and len(seen) == len(cut(model)) - 2
    done = [now[0] for now in told]
    assert done == sorted(done) and done[0] == 0 and told[-1] == (told[-1][1], told[-1][1], "")


@pytest.mark.parametrize("stop_at", [0, 1])
@pytest.mark.parametrize("damage", ["", "hidden", "note", "result"])
def test_a_stopped_run_goes_on_with_its_layer_and_gives_the_same(
    stop_at: int, damage: str, watching: SimpleNamespace, tmp_path: Path
) -> None:
    seed = fresh()
    model, planned, setup = ready(tiny(), tmp_path / "whole", seed)
    print_ = calibrate.calibrate(model, planned, setup)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.?.npy") if not path.name.startswith("walk")}
    per_layer = len(SEEN) // 2
    SEEN.clear()
    model, planned, setup = ready(tiny(), tmp_path / "stopped", seed)

    def stop(done: int, total: int, name: str) -> None:
        if name == f"layers.{stop_at}" and len(SEEN) > per_layer * stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(model, planned, setup, stop)
    solved = len(SEEN)
    assert 0 < solved < 2 * per_layer or stop_at == 1
    if damage == "hidden":
        next((tmp_path / "stopped").glob("walk.*.npy")).write_bytes(b"short")
    elif damage == "note":
        next((tmp_path / "stopped").glob("walk.*.json")).write_text("{")
    elif damage == "result":
        oldest = min((tmp_path / "stopped").glob("*.q.npy"), key=lambda path: path.stat().st_mtime_ns)
        oldest.write_bytes(b"short")  # of the first layer, which the note says is done when the second was stopped
    SEEN.clear()
    assert calibrate.calibrate(model, planned, setup) == print_
    assert len(SEEN) == 2 * per_layer - solved + (damage == "result"), f"seed {seed}: what was solved is not solved again"
    found = {path.name: path.read_bytes() for path in (tmp_path / "stopped").glob("*.?.npy") if not path.name.startswith("walk")}
    assert found == wanted, f"seed {seed}"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.quant import test_calibrate as here
from quant import calibrate
from quant.solvers import fit, gptq

def tell(done, total, name):
    if name == "layers.1":
        os.kill(os.getpid(), signal.SIGKILL)

model, plans, setup = here.gptq_ready(Path(sys.argv[1]))
calibrate.calibrate(model, plans, setup, tell if sys.argv[2] == "kill" else None)
"""


def gptq_ready(work: Path) -> tuple[ir.Model, tuple[Plan, ...], Setup]:
    return ready(tiny(), work, 11, solver="gptq")


def test_a_killed_run_goes_on_and_gives_identical_bytes(tmp_path: Path) -> None:
    def run(work: Path, how: str) -> int:
        return subprocess.run([sys.executable, "-c", KILLED, str(work), how], env={**os.environ, "PYTHONPATH": "."}).returncode

    assert run(tmp_path / "whole", "go") == 0
    assert run(tmp_path / "killed", "kill") == -signal.SIGKILL
    assert run(tmp_path / "killed", "go") == 0
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).glob("*.npy")} for name in ("whole", "killed")]
    assert files[0] == files[1] and len(files[0]) == 2 * 2 * 7


def test_calibrated_rounding_loses_less_of_the_outputs_than_the_fit(tmp_path: Path) -> None:
    model, planned, setup = gptq_ready(tmp_path)
    print_ = calibrate.calibrate(model, planned, setup)
    decision = decide(
        model, dataclasses.replace(SCHEME, solver="gptq"), load("cpu"), tmp_path, source="checkpoint", calibration=print_
    )
    body = [matrix for matrix in decision.matrices if matrix.solver == "gptq"]
    assert len(body) == 14 and all(not matrix.fell_back for matrix in body)


def test_what_lies_on_disk_loses_what_the_solver_says(tmp_path: Path) -> None:
    """The proxy worked out anew from the files: it sees integers that were written in another order than they are read in."""
    model, planned, setup = gptq_ready(tmp_path)
    print_ = calibrate.calibrate(model, planned, setup)
    first = cut(model)[1]
    gathering = LayerMoments(first, setup.ids.size)
    gathering.add(Running(gathering.build(), setup.opener).run(entering(model, planned, setup, 0, print_)), 0)
    moments = gathering.moments()
    for plan in planned:
        if plan.name not in moments:
            continue
        spilled = calibrate._found(plan, setup, print_)
        assert spilled is not None and plan.weight.const_value is not None
        weight, h = plan.weight.const_value.numpy().astype(np.float64), moments[plan.name].h.astype(np.float64)
        rest = weight - values_of(spilled, plan.form)
        lost = ((rest @ h) * rest).sum() / ((weight @ h) * weight).sum()
        assert spilled.proxy == pytest.approx(lost, rel=1e-3), plan.name


@pytest.mark.parametrize("tokens", [1, 7])
def test_few_windows_at_once_or_many_give_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, planned, setup = gptq_ready(tmp_path / "many")
    calibrate.calibrate(model, planned, setup)
    monkeypatch.setattr(calibrate, "_TOKENS", 24 * tokens)
    model, planned, setup = gptq_ready(tmp_path / "few")
    calibrate.calibrate(model, planned, setup)
    q = [sorted((tmp_path / name).glob("*.q.npy")) for name in ("many", "few")]
    share = [np.mean(np.load(one) == np.load(other)) for one, other in zip(*q, strict=True)]
    assert min(share) > 0.8 and np.median(share) > 0.97, "sums in another order tip a few integers over"


def test_the_reference_of_these_tests_runs(watching: SimpleNamespace, tmp_path: Path) -> None:
    """`entering` with nothing quantized is the float model's own hidden state."""
    opened = tiny()
    model, _, setup = ready(opened, tmp_path, 1)
    last = Running(cut(model)[-1].build(), setup.opener).run(entering(model, (), setup, 2, "")).hidden
    wanted = parity.logits(parity.open_float(opened, parity.reference_target()), setup.ids[0].tolist())
    assert np.abs(last[0] - wanted).max() < 1e-4 * np.abs(wanted).max()
