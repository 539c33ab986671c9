"""Calibration: hidden states of all windows go through the model layer by layer, and each layer is solved on the way.

Knows: the order of things, what a layer hands on, how a stopped run goes on. Does not know: how a part is opened
(`quant.layers.Opener`), how integers are found (`quant.solvers`), where the text comes from (`quant.selfwritten`).

    hidden states of all windows (a file) - layer k as it stands -+- second moments for its weights - solve them - spill
                                                                  |
    hidden states of the next layer (a file) - layer k with its quantized weights ----------------------------------------+

In memory at once: one layer's float weights, the moments of its streams, a few windows' activations. What a layer costs is
spent twice, once as it stands and once quantized, because the next layer must see what it will be given.

Activations stay float here: rounding them to int8 per block moves moments by 1e-4 of their size, far below the 3e-2 that
solvers add to the diagonal.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from quant import solvers, spill
from quant.affine import dequantize_affine
from quant.arrays import Floats
from quant.decide import key_of, solve
from quant.graph import lazy
from quant.keep import dequantize_stored
from quant.layer_moments import LayerMoments
from quant.layers import Opener, Outputs, Part, Running, cut, pass_through, width_of
from quant.moments import Moments
from quant.parallel import each
from quant.plan import Plan
from quant.scheme import Form
from quant.spill import Spilled
from quant.turns import Turns, digest

VERSION = 3
"""Raised whenever the same text would give other moments."""

_TOKENS = 512
"""Tokens that go through a part at once: 2048 took 0.24 s of processor time for what took 0.18 in windows of 512."""

Ids = npt.NDArray[np.int64]
Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, name of the layer)."""


@dataclass(frozen=True)
class Setup:
    """What a calibration works with.

    Attributes:
        ids: [W,S], windows of the calibration text.
        opener: opens parts.
        work: folder for results and hidden states.
        source: fingerprint of the float model, its numbers beside the weights included; "" = the weights themselves are read.
        threads: so many weights are solved at once.
    """

    ids: Ids
    opener: Opener
    work: Path
    source: str
    threads: int = 2


@dataclass(frozen=True)
class Layer:
    """One layer during a walk.

    Attributes:
        part: the layer.
        moments: by weight, of what its errors meet.
    """

    part: Part
    moments: Mapping[str, Moments]


Visit = Callable[[Layer], Mapping[str, ir.TensorProtocol]]
"""Looks at a layer's moments and gives the tensors that take the place of its weights, by name, before hidden states go on."""


def fingerprint(ids: Ids, plans: Sequence[Plan], source: str) -> str:
    """What the results of a calibration depend on: the text, the float model, and what becomes of every weight before.

    Args:
        source: fingerprint of the float model; without it the weights' own numbers are read.
    """
    said = [[*identity(plan, source), plan.solver, solvers.find(plan.solver).VERSION] for plan in plans if plan.in_body]
    text = json.dumps([VERSION, source, list(ids.shape), said])
    return digest(ids, text)


def calibrate(model: ir.Model, plans: Sequence[Plan], setup: Setup, progress: Progress | None = None) -> str:
    """Solve every weight of the body whose solver needs moments, into `setup.work`; `quant.decide` then finds them there.

    A run that was stopped, by whatever means, goes on with the layer it was in. A second run finds all done and reads nothing.

    Args:
        model: canonical float model, not changed.
        plans: `quant.plan.plans` of that very model.

    Returns:
        The calibration's fingerprint, for `decide`.

    Raises:
        BadInput: the model cannot be cut into layers.
        CheckpointError: a weight is damaged; it is named.
    """
    print_ = fingerprint(setup.ids, plans, setup.source)
    chosen = {plan.name: plan for plan in plans if plan.form.bits and plan.in_body}
    wanted = [plan for plan in chosen.values() if solvers.find(plan.solver).NEEDS_MOMENTS]

    def missing() -> bool:
        return not all(_found(plan, setup, print_) for plan in wanted)

    if not missing():
        return print_

    def visit(layer: Layer) -> dict[str, ir.TensorProtocol]:
        names = [name for name in layer.moments if name in chosen]

        def solved(name: str) -> ir.TensorProtocol:
            return _quantized(chosen[name], layer.moments[name], setup, print_)

        return dict(zip(names, each(solved, names, setup.threads, lambda name: chosen[name].parameters), strict=True))

    for _ in range(2):  # the second time when files of layers that were finished before a stop are damaged or gone
        walk(model, setup, visit, name=print_[:32], progress=progress)
        if not missing():
            break
    return print_


def walk(
    model: ir.Model,
    setup: Setup,
    visit: Visit,
    *,
    name: str,
    progress: Progress | None = None,
) -> None:
    """Take hidden states of all windows through the layers; `visit` sees each layer's moments and says how it goes on.

    A `visit` that gives nothing back walks through the float model (and spares the second run of each layer). It is asked
    again for a layer in which an earlier run was stopped, never for one that was finished.

    Args:
        name: of this walk's files in `setup.work`; equal names must mean equal visits.
    """
    parts = cut(model)
    layers = [part for part in parts if part.layer is not None]
    files = Turns(setup.work, f"walk.{name}", {"": (*setup.ids.shape, width_of(parts[0]))})
    total = 4 * len(layers) * len(setup.ids)
    for index in range(_begun(parts[0], len(layers), files, setup), len(layers)):
        part = layers[index]

        def told(share: float, index: int = index, part: Part = part) -> None:
            if progress:
                progress(int((index + share) * total / len(layers)), total, part.name)

        told(0)
        _Step(setup, part, files, index, told).run(visit)
        files.finish(index + 1)
    files.end(note=True)
    if progress:
        progress(total, total, "")


def _begun(embed: Part, layers: int, files: Turns, setup: Setup) -> int:
    """Which layer comes first; in front of the first one, what the embedding gives is written."""
    stopped = files.resume()
    if stopped is not None and stopped[0] < layers:
        return stopped[0]
    files.begin()
    running = Running(embed.build(), setup.opener)
    for _ in pass_through(running, setup.ids, files.entering(0), max(1, _TOKENS // setup.ids.shape[1])):
        pass
    files.finish(0)
    return 0


class _Step:
    """One layer of a walk."""

    def __init__(self, setup: Setup, part: Part, files: Turns, index: int, told: Callable[[float], None]):
        self._setup, self._part, self._told = setup, part, told
        self._files, self._index = files, index
        self._batch = max(1, _TOKENS // setup.ids.shape[1])

    def run(self, visit: Visit) -> None:
        replaced = visit(self._gather())
        if not replaced:
            return  # the hidden states of the layer as it stands are those that were written
        model = self._part.build(streams=False)
        for name, tensor in replaced.items():
            model.graph.initializers[name].const_value = tensor
        for windows, _ in self._passed(Running(model, self._setup.opener)):
            self._told(0.75 + 0.25 * windows.stop / len(self._setup.ids))

    def _gather(self) -> Layer:
        gathering = LayerMoments(self._part, self._setup.ids.size)
        for windows, out in self._passed(Running(gathering.build(), self._setup.opener)):
            gathering.add(out, windows.start)
            self._told(0.5 * windows.stop / len(self._setup.ids))
        return Layer(self._part, gathering.moments())

    def _passed(self, running: Running) -> Iterator[tuple[slice, Outputs]]:
        return pass_through(running, self._files.entering(self._index), self._files.leaving(self._index), self._batch)


def _key(plan: Plan, setup: Setup, print_: str) -> str:
    weight = None
    if not setup.source:
        assert plan.weight.const_value is not None
        weight = plan.weight.const_value.numpy()
    return key_of(plan, setup.source, print_, weight)


def _found(plan: Plan, setup: Setup, print_: str) -> Spilled | None:
    return spill.find(setup.work, _key(plan, setup, print_), plan.shape, plan.form)


def _quantized(plan: Plan, moments: Moments, setup: Setup, print_: str) -> ir.TensorProtocol:
    """The weight as the quantized model will have it; solved now unless an earlier run has done that."""
    spilled = _found(plan, setup, print_)
    if spilled is None:
        assert plan.weight.const_value is not None
        given = moments if solvers.find(plan.solver).NEEDS_MOMENTS else None
        weight = plan.weight.const_value.numpy()
        spilled = solve(plan, weight, given, setup.work, _key(plan, setup, print_), 1)
    return lazy(plan.name, ir.DataType.FLOAT, plan.shape, lambda: values_of(spilled, plan.form))


def values_of(spilled: Spilled, form: Form) -> Floats:
    """The quantized weight as float32 [N,K]."""
    q, scales = spilled.q(), spilled.scales()
    if form.offsets:
        return dequantize_stored(q, scales, spilled.offsets(), form.bits, form.group)
    return dequantize_affine(q, scales, None if form.symmetric else spilled.zero_points(), form.bits, form.group)


def identity(plan: Plan, source: str) -> list[object]:
    """A weight and its form; its numbers too where no fingerprint of the model says them.

    Activations are float here, whatever the form makes of them: schemes that differ in those alone share what was found.
    """
    assert plan.weight.const_value is not None
    numbers = "" if source else spill.content_of(plan.weight.const_value.numpy())
    return [plan.name, *astuple(replace(plan.form, activation="")), numbers]
