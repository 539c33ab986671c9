"""What quantizing each weight costs in KL, measured: the float model with that one weight as its solver leaves it.

Knows: one walk through the float model, layer by layer. Does not know: how a part is opened (`quant.layers.Opener`), what is
made of the figures (`quant.budget`).

Only what comes after a weight must run with it, so all variants go along with the float model, and each layer is opened once:

    text      hidden states - layer k - second moments for its weights - solve its weights, each in its plan's form
    held out  float, variants of layers before k  - layer k -  the same, one layer on
              float - layer k with one unit's weights solved -  a new variant
    end       final norm of all variants; KL against the float model

The head would be most of the work (Gemma: 168 of 268 M weights), so KL is taken to second order and by sampling: m words are
drawn from the float model's prediction at every place, and KL = 1/2 Var(e_word . delta), delta the variant's change of what
enters the head and e_word a word's row of it. For single weights that agrees with the exact KL to a few percent.
q and k of a layer are one unit: what they lose meets in one product. v is a unit of its own: on the starter model it is a
fifth of the three and half of their loss, so it pays that it is not joined with them where its form differs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from appliance.errors import CheckpointError
from quant import calibrate, solvers, spill
from quant.affine import dequantize_affine
from quant.arrays import Floats, group_size, groups_of
from quant.calibrate import Setup, identity
from quant.calibration_text import spread
from quant.decide import solved
from quant.graph import lazy
from quant.head import Head
from quant.layer_moments import LayerMoments
from quant.layers import TAIL, Part, Running, cut, pass_through, width_of
from quant.moments import Moments
from quant.parallel import each
from quant.plan import Plan
from quant.scheme import Form
from quant.turns import Turns, digest, read_note

VERSION = 4
"""Raised whenever the same model and text would give other figures."""

HELD_OUT, _SHARE = 512, 256
"""Tokens that the cost is measured on, whose moments are not gathered; so many are the beginning of one window of the text."""
SEEN = 6144
"""Tokens, evenly spread over the rest, whose moments the weights are solved with: four times the widest stream of a small model.
The solution that ships sees all of the text; for the order of the weights this is enough."""

_SAMPLES = 16
"""Words drawn at each place."""
_ROWS = 128
"""About so many rows of a weight say how its forms compare."""
_BATCH = 2048
"""Tokens that go through a part at once."""
_JOINED = ("attn.q", "attn.k")

Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, name of the layer)."""


@dataclass(frozen=True)
class Cost:
    """What one unit costs.

    Attributes:
        weights: names; they share a form.
        kl: nats a token that the model loses when these alone are quantized, in the form of their plan.
        factors: by form, how large the squared error of its outputs is against that of weights alone in the plan's form, so that
            kl * factor is its cost. It counts what the form loses of the weights and, where activations are rounded in blocks
            of the form's group, what that loses: an outlier takes more of its neighbours with it in a larger block.
    """

    weights: tuple[str, ...]
    kl: float
    factors: Mapping[Form, float]


def measure(
    model: ir.Model, plans: Sequence[Plan], setup: Setup, forms: Sequence[Form], progress: Progress | None = None
) -> tuple[Cost, ...]:
    """The cost of every weight of the body that its plan quantizes, unit by unit in the order of the model.

    A run that was stopped goes on with the layer it was in; a second run finds the figures in `setup.work`.

    Args:
        model: canonical float model, not changed.
        plans: `quant.plan.plans` of that very model.
        setup: its text should be some ten thousand tokens; the last ones are held out.
        forms: that `Cost.factors` is wanted for.

    Raises:
        BadInput: the model cannot be cut into layers.
    """
    parts = cut(model)
    run = _Run(parts, {plan.name: plan for plan in plans if plan.form.bits and plan.in_body}, setup, forms)
    found = run.read()
    if found is None:
        found = run.measured(progress)
    return found


class _Run:
    """One measurement. Hidden states lie in two files by turns, the float model's in front of the variants'."""

    def __init__(self, parts: Sequence[Part], plans: Mapping[str, Plan], setup: Setup, forms: Sequence[Form]):
        self._plans, self._setup, self._forms = plans, setup, forms
        self._embed, self._tail = parts[0], parts[-1]
        assert self._tail.name == TAIL
        self._layers = [part for part in parts if part.layer is not None]
        self._units = [_units(part, plans) for part in self._layers]
        windows, length = setup.ids.shape
        share = min(_SHARE, length)
        held = spread(windows, -(-HELD_OUT // share))
        self._held = setup.ids[held, :share]
        rest = np.delete(setup.ids, held, 0) if len(held) < windows else setup.ids
        self._seen = rest[spread(len(rest), -(-SEEN // length))]
        self._batch, self._held_batch = max(1, _BATCH // length), max(1, _BATCH // share)
        self._name = f"sensitivity.{self._print()}"
        shapes = {
            "text": (*self._seen.shape, width_of(self._embed)),
            "held": (len(self._held) * (1 + sum(map(len, self._units))), self._held.shape[1], width_of(self._embed)),
        }
        self._files = Turns(setup.work, self._name, shapes)
        self._factors: list[dict[Form, float]] = []

    def read(self) -> tuple[Cost, ...] | None:
        """The figures of an earlier run."""
        told, count = read_note(self._path("json")), sum(map(len, self._units))
        factors = self._read_factors(told.get("factors"), count) if told else None
        if told is None or factors is None or not _numbers(told.get("kl"), count):
            return None
        return self._costs(told["kl"], factors)

    def _read_factors(self, rows: object, count: int) -> list[dict[Form, float]] | None:
        """What a file says of the first `count` units; None where it does not, whatever it holds."""
        if not isinstance(rows, list) or len(rows) != count or not all(_numbers(row, len(self._forms)) for row in rows):
            return None
        return [dict(zip(self._forms, row, strict=True)) for row in rows]

    def measured(self, progress: Progress | None) -> tuple[Cost, ...]:
        for index in range(self._begin(), len(self._layers)):
            part = self._layers[index]
            if progress:
                progress(index, len(self._layers) + 1, part.name)
            self._layer(index, part)
            self._finish(index + 1)
        if progress:
            progress(len(self._layers), len(self._layers) + 1, TAIL)
        kl = self._end()
        told = {"kl": kl, "factors": self._told()}
        spill.replace_file(self._path("json"), lambda path: spill.write_text(path, json.dumps(told)))
        self._files.end()
        if progress:
            progress(len(self._layers) + 1, len(self._layers) + 1, "")
        return self._costs(kl, self._factors)

    def _costs(self, kl: Sequence[float], factors: Sequence[Mapping[Form, float]]) -> tuple[Cost, ...]:
        units = [unit for layer in self._units for unit in layer]
        return tuple(Cost(*each) for each in zip(units, kl, factors, strict=True))

    def _layer(self, index: int, part: Part) -> None:
        gathering = LayerMoments(part, SEEN)
        running = Running(gathering.build(), self._setup.opener)
        text, held = (self._files.entering(index, kind) for kind in ("text", "held"))
        after, moved = (self._files.leaving(index, kind) for kind in ("text", "held"))
        for windows, out in pass_through(running, text, after, self._batch):
            gathering.add(out, windows.start)
        streams = running.run(held.read(slice(0, len(self._held)))).streams
        del running
        made = len(self._held) * (1 + sum(len(units) for units in self._units[:index]))
        plain = Running(part.build(streams=False), self._setup.opener)
        for start in range(0, made, self._held_batch):
            rows = slice(start, min(start + self._held_batch, made))
            moved.write(rows, plain.run(held.read(rows)).hidden)
        del plain
        moments = gathering.moments()
        vectors = {name: streams[stream].reshape(-1, streams[stream].shape[-1]) for stream, names in part.streams.items()
                   for name in names}  # fmt: skip

        def solve(unit: tuple[str, ...]) -> tuple[dict[str, ir.TensorProtocol], dict[Form, float]]:
            return self._solved(unit, moments, vectors[unit[0]])

        def size(unit: tuple[str, ...]) -> int:
            return sum(self._plans[name].parameters for name in unit)

        for tensors, factors in each(solve, self._units[index], self._setup.threads, size):
            self._factors.append(factors)
            changed = part.build(streams=False)
            for name, tensor in tensors.items():
                changed.graph.initializers[name].const_value = tensor
            variant = Running(changed, self._setup.opener)
            for start in range(0, len(self._held), self._held_batch):
                rows = slice(start, min(start + self._held_batch, len(self._held)))
                moved.write(slice(made + rows.start, made + rows.stop), variant.run(held.read(rows)).hidden)
            made += len(self._held)

    def _solved(
        self, unit: tuple[str, ...], moments: Mapping[str, Moments], vectors: Floats
    ) -> tuple[dict[str, ir.TensorProtocol], dict[Form, float]]:
        """The unit's weights as solved, and how other forms compare."""
        tensors: dict[str, ir.TensorProtocol] = {}
        lost, own = dict.fromkeys(self._forms, 0.0), 0.0
        fit = solvers.find("fit")
        for name in unit:
            plan = self._plans[name]
            assert plan.weight.const_value is not None
            weight = np.asarray(plan.weight.const_value.numpy(), np.float32)
            made = solved(plan, weight, moments[name], 1)
            values = dequantize_affine(made.q, made.scales, made.zero_points, plan.form.bits, plan.form.group)
            tensors[name] = lazy(name, ir.DataType.FLOAT, plan.shape, lambda values=values: values)  # type: ignore[misc]
            missed = float(np.square(vectors @ (weight - values).T).sum(dtype=np.float64))
            some = weight[:: max(1, len(weight) // _ROWS)]
            noise, own = fit.solve(some, plan.form, None, 1).error.noise, own + missed
            for form in self._forms:
                share = fit.solve(some, form, None, 1).error.noise / noise if noise else 0.0
                lost[form] += missed * share + rounding_loss(weight, vectors, form)
        return tensors, {form: total / own if own else 0.0 for form, total in lost.items()}

    def _end(self) -> list[float]:
        """KL of every variant, in order."""
        held = self._files.entering(len(self._layers), "held")
        running = Running(self._tail.build(head=False), self._setup.opener)
        count = len(self._held)
        plain = running.run(held.read(slice(0, count))).hidden
        rows = self._sampled_rows(plain.reshape(-1, plain.shape[-1]))
        found = []
        for variant in range(1, held.shape[0] // count):
            changed = running.run(held.read(slice(variant * count, (variant + 1) * count))).hidden
            found.append(sampled_kl(rows, (changed - plain).reshape(-1, plain.shape[-1])))
        for kl, unit in zip(found, (unit for layer in self._units for unit in layer), strict=True):
            if not np.isfinite(kl):
                raise CheckpointError(f"with {unit[0]} quantized the model's predictions are not finite", "fetch it again")
        return found

    def _sampled_rows(self, entering: Floats) -> Floats:
        """Rows of the head for words drawn from the float model's predictions: [T,m,K]."""
        node, rng = self._tail.linears[-1], np.random.default_rng(0)
        head = Head(node, self._path("head"))
        try:
            steps = range(0, len(entering), 64)
            words = np.concatenate([drawn(head.logits(entering[at : at + 64]), _SAMPLES, rng) for at in steps])
            different, place = np.unique(words, return_inverse=True)
            rows: Floats = head.rows(different)[place.reshape(words.shape)]
        finally:
            head.close()
        return rows

    def _begin(self) -> int:
        """Which layer comes first; in front of the first one, what the embedding gives is written."""
        stopped = self._files.resume()
        if stopped is not None:
            factors = self._read_factors(stopped[1], sum(map(len, self._units[: stopped[0]])))
            if stopped[0] <= len(self._layers) and factors is not None:
                self._factors = factors
                return stopped[0]
        self._files.begin()
        running = Running(self._embed.build(), self._setup.opener)
        for kind, ids in (("text", self._seen), ("held", self._held)):
            for rows, out in pass_through(running, ids, None, self._batch):
                self._files.entering(0, kind).write(rows, out.hidden)
        self._finish(0)
        return 0

    def _finish(self, layers: int) -> None:
        self._files.finish(layers, self._told())

    def _told(self) -> list[list[float]]:
        """By unit and form."""
        return [[factors[form] for form in self._forms] for factors in self._factors]

    def _path(self, kind: str) -> Path:
        return self._setup.work / f"{self._name}.{kind}"

    def _print(self) -> str:
        plans = [
            [*identity(plan, self._setup.source), plan.solver, solvers.find(plan.solver).VERSION] for plan in self._plans.values()
        ]
        forms, shape = [astuple(_counted(form)) for form in self._forms], list(self._setup.ids.shape)
        versions = [VERSION, calibrate.VERSION, solvers.find("fit").VERSION]
        text = json.dumps([versions, self._setup.source, plans, forms, shape])
        return digest(self._setup.ids, text)[:32]


def _counted(form: Form) -> Form:
    """The form as far as its cost goes: of activations only those that are rounded in blocks count (`rounding_loss`)."""
    return form if form.activation == "block-dynamic" else replace(form, activation="")


def rounding_loss(weight: Floats, vectors: Floats, form: Form) -> float:
    """Squared error of the outputs when `vectors` [T,K] are rounded to int8 in blocks of the form's group, summed.

    Errors of different columns are taken as independent: one sum a column instead of a product with the whole weight [N,K].
    """
    if form.activation != "block-dynamic":
        return 0.0
    size, columns = group_size(vectors.shape[1], form.group), vectors.shape[1]
    whole = np.zeros((len(vectors), groups_of(columns, form.group) * size), np.float32)
    whole[:, :columns] = vectors
    blocks = whole.reshape(len(vectors), -1, size)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    missed = blocks - np.rint(blocks / np.where(step > 0, step, 1)) * step
    noise = np.square(missed).sum(0, dtype=np.float64).reshape(-1)[:columns]
    return float(noise @ np.square(weight).sum(0, dtype=np.float64))


def drawn(logits: Floats, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` words for each row of logits [n,V], by the probabilities they mean: [n,count]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    np.exp(wide, out=wide)
    np.cumsum(wide, axis=1, out=wide)
    places = rng.random((len(wide), count)) * wide[:, -1:]
    found = np.stack([np.searchsorted(row, place, side="right") for row, place in zip(wide, places, strict=True)])
    words: npt.NDArray[np.int64] = np.minimum(found, logits.shape[1] - 1)
    return words


def sampled_kl(rows: Floats, change: Floats) -> float:
    """1/2 Var(e . delta) over the words drawn at each place, the mean over places.

    Args:
        rows: [T,m,K], the head's rows of m words.
        change: [T,K].
    """
    logits = np.matmul(rows, change[:, :, None])[..., 0].astype(np.float64)
    return float(0.5 * logits.var(1, ddof=1).mean())


def _units(part: Part, plans: Mapping[str, Plan]) -> list[tuple[str, ...]]:
    """Weights of a layer that are chosen for together: q and k of one stream; others alone."""
    found: list[tuple[str, ...]] = []
    for names in part.streams.values():
        chosen = [name for name in names if name in plans]
        joined = tuple(name for name in chosen if plans[name].roles[0] in _JOINED)
        found += ([joined] if joined else []) + [(name,) for name in chosen if name not in joined]
    return found


def _numbers(row: object, count: int) -> bool:
    """Whether it is a list of `count` finite numbers."""
    return isinstance(row, list) and len(row) == count and all(isinstance(one, float | int) and np.isfinite(one) for one in row)
