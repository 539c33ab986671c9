"""Calibration: hidden states of all windows go through the model layer by layer, and each layer is solved on the way.

Knows: the order of things, what a layer hands on, how a stopped run goes on. Does not know: how a part is opened
(`quant.layers.Opener`), how integers are found (`quant.solvers`), where the text comes from (`quant.selfwritten`).

    hidden states of all windows (a file) - layer k as it stands -+- second moments of its streams - solve its weights - spill
                                                                  |
    hidden states of the next layer (a file) - layer k with its quantized weights ----------------------------------------+

In memory at once: one layer's float weights, the moments of its streams, a few windows' activations. What a layer costs is
spent twice, once as it stands and once quantized, because the next layer must see what it will be given.

Activations stay float here: rounding them to int8 per block moves moments by 1e-4 of their size, far below the 1e-2 that
solvers add to the diagonal.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from quant.layers import Hidden, Opener, Outputs, Part, Running, cut, pass_through, width_of
from quant.moments import Gatherer, Moments
from quant.plan import Plan
from quant.scheme import Form
from quant.spill import Spilled

VERSION = 1
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
        source: fingerprint of the float weights.
        threads: for solvers.
        rounds: streams of a layer are gathered and solved in so many groups, in order, each seeing the weights before it
            quantized: 1 = all at once, 2 = attention before the feed-forward block.
    """

    ids: Ids
    opener: Opener
    work: Path
    source: str
    threads: int = 2
    rounds: int = 1


@dataclass(frozen=True)
class Layer:
    """One layer during a walk, or some streams of it.

    Attributes:
        part: the layer.
        moments: by stream tag.
    """

    part: Part
    moments: Mapping[str, Moments]

    @property
    def weights(self) -> dict[str, str]:
        """Name of a weight -> its stream, for the streams at hand."""
        return {name: stream for stream, names in self.part.streams.items() if stream in self.moments for name in names}

    def moments_of(self, weight: str) -> Moments:
        """What enters that weight."""
        return self.moments[self.weights[weight]]


Visit = Callable[[Layer], Mapping[str, ir.TensorProtocol]]
"""Looks at a layer's moments and gives the tensors that take the place of its weights, by name, before hidden states go on."""


def fingerprint(ids: Ids, plans: Sequence[Plan], rounds: int = 1) -> str:
    """What the results of a calibration depend on beside the weights: the text, and what becomes of every weight before."""
    said = [[plan.name, _form(plan.form), plan.solver, solvers.find(plan.solver).VERSION] for plan in plans if plan.in_body]
    text = json.dumps([VERSION, list(ids.shape), rounds, said])
    return hashlib.sha256(np.ascontiguousarray(ids, "<u4").tobytes() + text.encode()).hexdigest()


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
    print_ = fingerprint(setup.ids, plans, setup.rounds)
    chosen = {plan.name: plan for plan in plans if plan.form.bits and plan.in_body}
    wanted = [plan for plan in chosen.values() if solvers.find(plan.solver).NEEDS_MOMENTS]

    def missing() -> bool:
        return not all(_found(plan, setup, print_) for plan in wanted)

    if not missing():
        return print_

    def visit(layer: Layer) -> dict[str, ir.TensorProtocol]:
        return {name: _quantized(chosen[name], layer.moments_of(name), setup, print_) for name in layer.weights if name in chosen}

    cross = any(solvers.find(plan.solver).NEEDS_CROSS for plan in wanted)
    for _ in range(2):  # the second time when files of layers that were finished before a stop are damaged or gone
        walk(model, setup, visit, name=print_[:32], cross=cross, progress=progress)
        if not missing():
            break
    return print_


def walk(
    model: ir.Model,
    setup: Setup,
    visit: Visit,
    *,
    name: str,
    cross: bool = False,
    progress: Progress | None = None,
) -> None:
    """Take hidden states of all windows through the layers; `visit` sees each layer's moments and says how it goes on.

    A `visit` that gives nothing back walks through the float model (and spares the second run of each layer). It is asked
    again for a layer in which an earlier run was stopped, never for one that was finished.

    Args:
        name: of this walk's files in `setup.work`; equal names must mean equal visits.
        cross: gather cross moments with the float model, whose hidden states then go along.
    """
    parts = cut(model)
    layers = [part for part in parts if part.layer is not None]
    files = _Files(setup, name, cross, width_of(parts[0]))
    total = 4 * len(layers) * len(setup.ids)
    for index in range(files.begin(parts[0], len(layers)), len(layers)):
        part = layers[index]

        def told(share: float, index: int = index, part: Part = part) -> None:
            if progress:
                progress(int((index + share) * total / len(layers)), total, part.name)

        told(0)
        _Step(setup, part, files, index, told).run(visit)
        files.finish(index)
    files.end(len(layers))
    if progress:
        progress(total, total, "")


class _Step:
    """One layer of a walk."""

    def __init__(self, setup: Setup, part: Part, files: "_Files", index: int, told: Callable[[float], None]):
        self._setup, self._part, self._told = setup, part, told
        self._files, self._index = files, index
        self._batch = max(1, _TOKENS // setup.ids.shape[1])

    def run(self, visit: Visit) -> None:
        replaced: dict[str, ir.TensorProtocol] = {}
        groups = _groups(list(self._part.streams), self._setup.rounds)
        for number, streams in enumerate(groups):
            layer = self._gather(streams, replaced, number / len(groups), 1 / len(groups))
            made = visit(layer)
            if not made and len(groups) == 1:
                return  # the hidden states of the layer as it stands are those that were written
            replaced.update(made)
        running = self._open(replaced, streams=False)
        for windows, _ in pass_through(running, self._files.entering(self._index), self._files.leaving(self._index), self._batch):
            self._told(0.75 + 0.25 * windows.stop / len(self._setup.ids))

    def _open(self, replaced: Mapping[str, ir.TensorProtocol], *, streams: bool) -> Running:
        model = self._part.build(streams=streams)
        for name, tensor in replaced.items():
            model.graph.initializers[name].const_value = tensor
        return Running(model, self._setup.opener)

    def _gather(self, streams: Sequence[str], replaced: Mapping[str, ir.TensorProtocol], start: float, share: float) -> Layer:
        """Moments of these streams, the weights of the streams before them replaced."""
        running = self._open(replaced, streams=True)
        gatherers: dict[str, Gatherer] = {}
        for windows, out, reference in self._runs(running, replaced):
            for stream in streams:
                vectors = out.streams[stream]
                if stream not in gatherers:
                    gatherers[stream] = Gatherer(vectors.shape[-1], cross=self._files.cross)
                gatherers[stream].add(vectors, None if reference is None else reference.streams[stream])
            self._told(0.5 * (start + share * windows.stop / len(self._setup.ids)))
        return Layer(self._part, {stream: one.moments() for stream, one in gatherers.items()})

    def _runs(
        self, running: Running, replaced: Mapping[str, ir.TensorProtocol]
    ) -> Iterator[tuple[slice, Outputs, Outputs | None]]:
        """What comes out of each batch, and the float model's where cross moments are gathered."""
        entering, leaving = self._files.entering(self._index), self._files.leaving(self._index)
        if not self._files.cross:
            yield from ((windows, out, None) for windows, out in pass_through(running, entering, leaving, self._batch))
            return
        beside = self._open({}, streams=True) if replaced else running
        float_in, float_out = self._files.float_entering(self._index), self._files.float_leaving(self._index)
        for (windows, out), (_, reference) in zip(
            pass_through(running, entering, leaving, self._batch),
            pass_through(beside, float_in, float_out, self._batch),
            strict=True,
        ):
            yield windows, out, reference


class _Files:
    """Hidden states between layers, two files by turns, and a note of how far they are; written so that any stop leaves a pair
    that belongs together."""

    def __init__(self, setup: Setup, name: str, cross: bool, width: int):
        setup.work.mkdir(parents=True, exist_ok=True)
        self.cross = cross
        self._setup, self._shape = setup, (*setup.ids.shape, width)
        self._note = setup.work / f"walk.{name}.json"
        kinds = ("", ".float") if cross else ("",)
        self._paths = [[setup.work / f"walk.{name}{kind}.{turn}.npy" for turn in (0, 1)] for kind in kinds]
        self._files: list[list[Hidden]] = []

    def begin(self, embed: Part, layers: int) -> int:
        """Open the files; which layer comes first."""
        done = self._read_note()
        found = [[Hidden.existing(path, self._shape) for path in pair] for pair in self._paths]
        if done is not None and done < layers and all(one is not None for pair in found for one in pair):
            self._files = [[one for one in pair if one is not None] for pair in found]
            return done
        self._note.unlink(missing_ok=True)
        self._files = [[Hidden(path, self._shape) for path in pair] for pair in self._paths]
        running = Running(embed.build(), self._setup.opener)
        for windows, out in pass_through(running, self._setup.ids, None, max(1, _TOKENS // self._shape[1])):
            for pair in self._files:
                pair[0].write(windows, out.hidden)
        self.finish(-1)
        return 0

    def entering(self, index: int) -> Hidden:
        return self._files[0][index % 2]

    def leaving(self, index: int) -> Hidden:
        return self._files[0][(index + 1) % 2]

    def float_entering(self, index: int) -> Hidden:
        return self._files[1][index % 2]

    def float_leaving(self, index: int) -> Hidden:
        return self._files[1][(index + 1) % 2]

    def finish(self, index: int) -> None:
        """What the layer hands on is on disk, and so is the note that says it."""
        for pair in self._files:
            pair[(index + 1) % 2].flush()
        spill.replace_file(self._note, lambda path: spill.write_text(path, json.dumps({"layers": index + 1})))

    def end(self, layers: int) -> None:
        """All layers are done: the note alone stays."""
        self._files = []
        for path in (path for pair in self._paths for path in pair):
            path.unlink(missing_ok=True)

    def _read_note(self) -> int | None:
        try:
            return int(json.loads(self._note.read_text(encoding="utf-8"))["layers"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _groups(streams: list[str], rounds: int) -> list[list[str]]:
    """The streams in order, in so many groups of nearly equal length."""
    count = max(1, min(rounds, len(streams)))
    bounds = [index * len(streams) // count for index in range(count + 1)]
    return [streams[start:end] for start, end in itertools.pairwise(bounds)]


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
        spilled = solve(plan, weight, given, setup.work, _key(plan, setup, print_), setup.threads)
    return lazy(plan.name, ir.DataType.FLOAT, plan.shape, lambda: values_of(spilled, plan.form))


def values_of(spilled: Spilled, form: Form) -> Floats:
    """The quantized weight as float32 [N,K]."""
    q, scales = spilled.q(), spilled.scales()
    if form.offsets:
        return dequantize_stored(q, scales, spilled.offsets(), form.bits, form.group)
    return dequantize_affine(q, scales, None if form.symmetric else spilled.zero_points(), form.bits, form.group)


def _form(form: Form) -> list[object]:
    return [form.bits, form.group, form.symmetric, form.offsets]
