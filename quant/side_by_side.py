"""The float model and the quantized one side by side, layer after layer: what each hands on, and how far the two are apart.

Knows: chains of hidden states, which go through the parts of a model together and lie on disk between two layers.
Does not know: how a part is opened (`quant.layers.Opener`), what becomes of the last hidden states.

    chain      its layers                         its text
    float      float                              everything
    quantized  decided                            a few windows: accumulated loss of each layer
    weights    the integers' values, float math   a few windows (`quant.ablations`)
    ...
Beside them each decided layer runs on the float chain's input: its own, local loss. One layer's weights are in memory at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.bundle.record import LayerRecord
from appliance.runtime.session import give_back_memory
from quant.ablations import model_of
from quant.evaluate import Likeness
from quant.layers import TAIL, Opener, Outputs, Part, Running, cut
from quant.windows import Ids

FLOAT, QUANTIZED = "float", "quantized"

Progress = Callable[[int, int], None]
"""(parts done, parts in all)."""


@dataclass(frozen=True)
class Models:
    """Canonical graphs.

    Attributes:
        plain: the float model as the bundle's scheme prepared it (rotated, perhaps).
        decided: the same with its integers.
    """

    plain: tuple[Part, ...]
    decided: tuple[Part, ...]

    @classmethod
    def of(cls, plain: ir.Model, decided: ir.Model) -> "Models":
        """Cut both; `BadInput` when one cannot be cut."""
        return cls(cut(plain), cut(decided))


@dataclass(frozen=True)
class Walk:
    """What goes through the model.

    Attributes:
        inputs: token ids [B,S], each by itself.
        probes: numbers of the inputs that the quantized chain runs on.
        chains: names of ablations -> numbers of the inputs that they run on.
        folder: for hidden states; the caller removes it.
        visit: is shown each decided part with what enters its linears, by stream tag, when the float model feeds it the first
            probe.
        compare: is shown each float part, the decided one and what enters the float part's linears, by stream tag, for the first
            probe.
    """

    inputs: Sequence[Ids]
    folder: Path
    probes: Sequence[int] = ()
    chains: Mapping[str, Sequence[int]] = field(default_factory=dict)
    visit: Callable[[Part, Mapping[str, np.ndarray]], None] | None = None
    compare: Callable[[Part, Part, Mapping[str, np.ndarray]], None] | None = None

    def last(self, chain: str, number: int) -> np.ndarray:
        """[B,S,D]: what the head takes, once the walk is over."""
        found: np.ndarray = np.load(self.folder / f"{chain}.{number}.npy")
        return found

    def entering(self, chain: str, number: int, part: Part) -> np.ndarray:
        """What enters the part: token ids, or what the part before handed on."""
        return self.inputs[number] if part.entering is None else self.last(chain, number)

    def keep(self, chain: str, number: int, hidden: np.ndarray) -> None:
        """Hand on to the next part."""
        np.save(self.folder / f"{chain}.{number}.npy", hidden)


def walk(models: Models, going: Walk, opener: Opener, progress: Progress) -> tuple[LayerRecord, ...]:
    """Take every chain through all parts but the head's product; `going.last` then has what the head takes.

    Returns:
        The embedding and each layer: by what it adds to the residual stream when the float model feeds it (local), and by the
        stream after it (accumulated), over the probes. Empty without probes.
    """
    going.folder.mkdir(parents=True, exist_ok=True)
    found: list[LayerRecord] = []
    for number, (plain, decided) in enumerate(zip(models.plain, models.decided, strict=True)):
        progress(number, len(models.plain))
        locals_ = _quantized_part(decided, going, opener)
        for chain, inputs in going.chains.items():
            if inputs:
                _run(Running(model_of(chain, plain, decided), opener), going, chain, inputs, plain)
        record = _float_part(plain, decided, going, opener, locals_)
        if going.probes and plain is not models.plain[-1]:
            found.append(record)
        give_back_memory()
    progress(len(models.plain), len(models.plain))
    return tuple(found)


def _run(running: Running, going: Walk, chain: str, inputs: Sequence[int], part: Part) -> None:
    for at in inputs:
        going.keep(chain, at, running.run(going.entering(chain, at, part)).hidden)


def _quantized_part(decided: Part, going: Walk, opener: Opener) -> dict[int, np.ndarray]:
    """Take the quantized chain through the part; by probe, what the part makes of the float chain's input."""
    if not going.probes:
        return {}
    running = Running(decided.build(streams=going.visit is not None, head=False), opener)
    own = {}
    for at in going.probes:
        out = running.run(going.entering(FLOAT, at, decided))
        own[at] = out.hidden
        if going.visit is not None and at == going.probes[0]:
            going.visit(decided, _streams(decided, out))
    _run(running, going, QUANTIZED, going.probes, decided)
    return own


def _streams(part: Part, out: Outputs) -> dict[str, np.ndarray]:
    """What enters a part's linears; a tail that runs without its head gives out what enters that."""
    return {**out.streams, **({"head_in": out.hidden} if part.name == TAIL else {})}


def _float_part(plain: Part, decided: Part, going: Walk, opener: Opener, own: Mapping[int, np.ndarray]) -> LayerRecord:
    """Take the float chain through the part, and compare the others with it."""
    compare = going.compare if going.probes else None
    running = Running(plain.build(streams=compare is not None, head=False), opener)
    local, along = Likeness(), Likeness()
    for at in range(len(going.inputs)):
        entering = going.entering(FLOAT, at, plain)
        out = running.run(entering)
        leaving = out.hidden
        going.keep(FLOAT, at, leaving)
        if compare is not None and at == going.probes[0]:
            compare(plain, decided, _streams(plain, out))
        if at in own:
            before = entering if plain.layer is not None else np.float32(0)
            local.add(leaving - before, own[at] - before)
            along.add(leaving, going.last(QUANTIZED, at))
    return layer_record(plain.name, local, along)


def layer_record(name: str, local: Likeness, along: Likeness) -> LayerRecord:
    """Six digits that count."""
    snr, cosine, after, after_cosine = (
        None if value is None else float(f"{value:.6g}") for value in (local.snr_db, local.cosine, along.snr_db, along.cosine)
    )
    return LayerRecord(name=name, local_snr_db=snr, local_cosine=cosine, snr_db=after, cosine=after_cosine)
