"""Chains through the layers by hand: what each part makes of what enters it, one part at a time, kept in memory."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appliance.targets import load
from export import arch
from export.checkpoint import open_checkpoint
from export.slices import opener
from quant import decide, emit
from quant.ablations import ACTIVATIONS, WEIGHTS, model_of
from quant.layers import Part, Running
from quant.schemes import find
from quant.side_by_side import FLOAT, QUANTIZED, Models, Walk, walk
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(3, 64, 2, 1, 96, vocab=300, context=64)


def snr(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean over rows, by Python's floats."""
    rows = zip(reference.reshape(-1, reference.shape[-1]).tolist(), other.reshape(-1, other.shape[-1]).tolist(), strict=True)
    shares = [math.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / math.fsum(a * a for a in x) for x, y in rows]
    return -10 * math.log10(max(sum(shares) / len(shares), 1e-30))  # 300 dB: equal


def test_every_chain_is_what_its_parts_make_by_hand(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    seed = int(rng.integers(1 << 30))
    source = write_safetensors(tmp_path / "source", replace(MODEL, seed=seed), "float32")
    opened = arch.open_model(open_checkpoint(source))
    plain, decided = opened.build(), opened.build()
    decide.decide(decided, find("w4a8"), load("cpu"), tmp_path / "work")
    models = Models.of(plain, decided)
    inputs = [rng.integers(0, 300, (1, size)) for size in (20, 13, 9)]
    opens = opener(64, tmp_path / "parts", emit.emit)
    going = Walk(inputs, tmp_path / "hidden", probes=(0, 1), chains={WEIGHTS: (0,), ACTIVATIONS: (1,)})
    told: list[int] = []
    found = walk(models, going, opens, lambda done, total: told.append(done))
    assert told == list(range(6)) and [one.name for one in found] == ["embed", "layers.0", "layers.1", "layers.2"], seed

    def run(part: Part, entering: np.ndarray, other: Part | None = None, chain: str = "") -> np.ndarray:
        model = part.build(streams=False, head=False) if other is None else model_of(chain, part, other)
        return Running(model, opens).run(entering).hidden

    chains = {FLOAT: list(inputs), QUANTIZED: list(inputs[:2]), WEIGHTS: [inputs[0]], ACTIVATIONS: [inputs[1]]}
    for number, (one, two) in enumerate(zip(models.plain, models.decided, strict=True)):
        own = [run(two, entering) for entering in chains[FLOAT][:2]]
        before = chains[FLOAT] if one.layer is not None else [np.float32(0)] * 3
        chains[QUANTIZED] = [run(two, entering) for entering in chains[QUANTIZED]]
        chains[FLOAT] = [run(one, entering) for entering in chains[FLOAT]]
        for name in (WEIGHTS, ACTIVATIONS):
            chains[name] = [run(one, entering, two, name) for entering in chains[name]]
        if number == len(models.plain) - 1:
            break
        added = np.concatenate([(after - entering)[0] for after, entering in zip(chains[FLOAT][:2], before[:2], strict=True)])
        theirs = np.concatenate([(after - entering)[0] for after, entering in zip(own, before[:2], strict=True)])
        whole = np.concatenate([after[0] for after in chains[FLOAT][:2]])
        along = np.concatenate([after[0] for after in chains[QUANTIZED]])
        assert found[number].local_snr_db == pytest.approx(snr(added, theirs), abs=0.02), (seed, found[number].name)
        assert found[number].snr_db == pytest.approx(snr(whole, along), abs=0.02), (seed, found[number].name)
    for at, hidden in enumerate(chains[FLOAT]):
        assert going.last(FLOAT, at) == pytest.approx(hidden, abs=1e-4), seed
    for at, hidden in enumerate(chains[QUANTIZED]):
        assert snr(going.last(QUANTIZED, at), hidden) > 60, seed
    assert going.last(WEIGHTS, 0) == pytest.approx(chains[WEIGHTS][0], abs=1e-4), seed
    assert snr(going.last(ACTIVATIONS, 1), chains[ACTIVATIONS][0]) > 60, seed
