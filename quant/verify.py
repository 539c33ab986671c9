"""Everything that is measured of a bundle that writes text, by running its files and its parts: the evaluation in its record.

Knows: the order of measurements, and how much is measured of each. Does not know: how checkpoints are opened or bundles written
(the composer hands in canonical graphs and an opener), what loss is too much (`quant.band`).

    shipped graphs -- logits of windows --+-- statistics on each text
    float graph, part by part ------------+
    both, part by part -- local and accumulated loss of each layer, ablations, operators against numpy, loss of each output
    shipped graphs -- write greedily -- the float graph reads along: where would it have written something else?
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance.bundle.record import (
    AblationRecord,
    EmulationRecord,
    EvaluationRecord,
    GreedyRecord,
    LayerRecord,
    Share,
    TextRecord,
    TokenizerRecord,
)
from appliance.bundle.store import Bundle
from appliance.bundle.vocabulary import QUANT_LINEAR
from appliance.errors import DeviceError
from appliance.runtime.session import give_back_memory
from appliance.runtime.tokenizer import Tokenizer, load_tokenizer
from appliance.targets.capabilities import Target
from quant import greedy, output_loss, structure
from quant.ablations import ACTIVATIONS, KV, SAID, WEIGHTS, kv_scales
from quant.emulate import ROWS, Emulated, emulate_part
from quant.evaluate import Floats, Likeness, Quality, Tally, compare, rows_at_once
from quant.head import Head, node_of
from quant.layers import Opener, Part
from quant.running import Shipped, open_shipped
from quant.side_by_side import FLOAT, QUANTIZED, Models, Walk, layer_record, walk
from quant.texts import Text
from quant.windows import LENGTH, Window, cut

Progress = Callable[[int, int], None]
"""(steps done, steps in all)."""

CHECKED_ROWS = 8
"""Last rows of the first window that a reshaped float model's logits are compared on."""


_DEAR = 3
"""By so much answers are shorter where a step is that slow."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        windows: of each text, evenly spread; 0 = all.
        probes: windows of the first text that layers and ablations are measured on.
        prompts: how many are answered greedily.
        tokens: of each answer.
    """

    windows: int = 2
    probes: int = 1
    prompts: int = 4
    tokens: int = 48


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        bundle: opened; of one being written, its files so far.
        target: whose graphs are run.
        models: canonical graphs, in parts.
        reference: the float model as the checkpoint has it, where `models.plain` is another form of it; None = the same.
        opener: opens parts.
        texts: what it is measured on.
        work: folder for hidden states; it is removed.
        command: measures it again.
        tokenizer: the comparison with another reader, if there is one.
        targets: folder with more target files.
        threads: 0 = all cores.
    """

    bundle: Bundle
    target: Target
    models: Models
    opener: Opener
    texts: Sequence[Text]
    work: Path
    command: str
    reference: tuple[Part, ...] | None = None
    tokenizer: TokenizerRecord | None = None
    targets: Path | None = None
    threads: int = 0


def verify(subject: Subject, effort: Effort, progress: Progress) -> EvaluationRecord:
    """Measure the bundle.

    Raises:
        BadInput: a text is too short, or the model cannot be cut into parts.
        BundleError: the graphs or the tokenizer are damaged.
    """
    began = time.monotonic()
    measuring = _Measuring(subject, effort, progress)
    try:
        with np.errstate(all="ignore"):  # numbers that are none are what is looked for, and counted
            found = measuring.run()
    finally:
        measuring.close()
        shutil.rmtree(subject.work, ignore_errors=True)
    return found.model_copy(update={"seconds": round(time.monotonic() - began, 1)})


def windows_of(bundle: Bundle, tokenizer: Tokenizer, text: Text, context: int, count: int) -> list[Window]:
    """The windows of a text as this model is to see them."""
    info = bundle.manifest.tokenizer
    ids = tokenizer.encode(text.content, special=False, bos=False)
    return cut(text.name, ids, length=min(LENGTH, context), count=count, bos=info.bos if info.add_bos else None)


@dataclass
class _Measuring:
    """One evaluation under way."""

    subject: Subject
    effort: Effort
    progress: Progress
    provider: str = ""
    ran: str = "files"
    emulated: list[Emulated] = field(default_factory=list)
    lost: dict[str, float | None] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)

    def run(self) -> EvaluationRecord:
        """All of it."""
        subject = self.subject
        self.tokenizer = load_tokenizer(subject.bundle)
        self.context = subject.bundle.variant(subject.target.name).context
        per_text = [windows_of(subject.bundle, self.tokenizer, text, self.context, self.effort.windows) for text in subject.texts]
        windows = [one for found in per_text for one in found]
        self.windows, self.parts = windows, len(subject.models.plain)
        self.steps = self.parts * (1 if subject.reference is None else 2) + 2 * len(windows)
        self.progress(0, self.steps)
        answers = self._write()
        inputs = [*(one.ids[None] for one in windows), *(one.ids() for one in answers)]
        going, layers = self._walk(inputs)
        texts, told = self._against_float(self._reference(inputs, going), going, answers)
        ablated, head = self._alone(going)
        return EvaluationRecord(
            target=subject.target.name,
            provider=self.provider,
            ran=self.ran,
            window=max(len(one.ids) for one in windows),
            texts=tuple(texts),
            layers=(*layers, head) if layers else (),
            ablations=tuple(ablated),
            greedy=tuple(told),
            tokenizer=subject.tokenizer,
            emulation=_worst(self.emulated),
            output_loss={name: lost for name, lost in self.lost.items() if lost is not None},
            command=subject.command,
            seconds=0,
        )

    def close(self) -> None:
        """Free what is open, whatever happened."""
        for head in self.heads.values():
            head.close()

    def _open(self) -> Shipped:
        subject = self.subject
        return open_shipped(subject.bundle, subject.target.name, subject.threads, subject.targets)

    def _write(self) -> list[greedy.Answer]:
        """What the shipped graphs answer. Closed again afterwards: they and a large part need not be in memory together.

        Where they cannot be opened here, because they are for another machine, `ran` says why and their parts stand in for them.
        """
        try:
            shipped = self._open()
        except DeviceError as failure:
            self.provider = "onnxruntime's processor kernels, part by part"
            self.ran = f"the graphs cannot run here ({failure.what})"
            return []
        self.provider, found = shipped.provider, []
        for name, ids in greedy.prompts(self.subject.bundle, self.tokenizer, self.windows, self.effort.prompts):
            count = min(self.effort.tokens // (_DEAR if self._dequantizes() else 1), self.context - len(ids))
            if count >= greedy.SHORTEST:
                found.append(greedy.Answer(name, ids, tuple(shipped.write(ids, count, self.tokenizer.vocab_size))))
        shipped.close()
        return found

    def _dequantizes(self) -> bool:
        """Whether every step works all weights out anew: with one scale a row that is two seconds a token on a small model."""
        return self.subject.target.weights.operator == "DequantizeLinear"

    def _walk(self, inputs: Sequence[np.ndarray]) -> tuple[Walk, tuple[LayerRecord, ...]]:
        """Everything through the float parts; the probes through the decided ones and the ablations too."""
        subject = self.subject
        probes = list(range(min(self.effort.probes, len(self.windows))))
        quantized = any(node.op_type == QUANT_LINEAR for part in subject.models.decided for node in part.linears)
        names = [WEIGHTS, ACTIVATIONS] if quantized else []
        names += [KV] if any(kv_scales(part) for part in subject.models.decided) else []

        def visit(part: Part, streams: Mapping[str, np.ndarray]) -> None:
            self.emulated += emulate_part(part, streams, subject.target, subject.threads)

        def compare(plain: Part, decided: Part, streams: Mapping[str, np.ndarray]) -> None:
            self.lost.update(output_loss.losses(plain, decided, streams, inputs[0]))

        going = Walk(
            inputs=inputs,
            folder=subject.work / "hidden",
            probes=probes if self.ran == "files" else range(len(self.windows)),
            chains={name: probes for name in names},
            visit=visit,
            compare=compare,
        )
        return going, walk(subject.models, going, subject.opener, self._told(0))

    def _reference(self, inputs: Sequence[np.ndarray], going: Walk) -> Walk:
        """The walk whose float chain is the checkpoint's own."""
        parts = self.subject.reference
        if parts is None:
            return going
        alone = Walk(inputs, self.subject.work / "reference")
        walk(Models(parts, parts), alone, self.subject.opener, self._told(self.parts))
        return alone

    def _told(self, first: int) -> Progress:
        return lambda done, _: self.progress(first + done, self.steps)

    def _head(self, name: str, parts: Sequence[Part]) -> Head:
        """The head of these parts; opened once, so that what is not used again must be closed."""
        if name not in self.heads:
            self.heads[name] = Head(node_of(parts[-1]), self.subject.work / f"head.{name}")
        return self.heads[name]

    def _against_float(
        self, reference: Walk, going: Walk, answers: Sequence[greedy.Answer]
    ) -> tuple[list[TextRecord], list[GreedyRecord]]:
        """The shipped graphs' logits against the float model's on every window; where their answers part."""
        subject = self.subject
        plain = subject.models.plain if subject.reference is None else subject.reference
        head = self._head("plain" if subject.reference is None else "reference", plain)
        if subject.reference is not None:
            self._check_reshaped(reference, going, head)
        decided = node_of(subject.models.decided[-1])
        tallies = {text.name: Tally() for text in subject.texts}
        give_back_memory()
        shipped = self._open() if self.ran == "files" else None
        for at, window in enumerate(self.windows):
            self.progress(self.steps - 2 * len(self.windows) + at, self.steps)
            if shipped is not None:
                other = shipped.logits(window.ids)
            else:
                other = self._head("decided", subject.models.decided).of_window(going.last(QUANTIZED, at), decided)
            _tally(tallies[window.text], window, reference.last(FLOAT, at), head, other)
        if shipped is not None:
            shipped.close()
        texts = [_text_record(text, tallies[text.name].quality()) for text in subject.texts]
        first = len(self.windows)
        told = [
            greedy.read_along(answer, reference.last(FLOAT, first + at), head.logits, self.tokenizer)
            for at, answer in enumerate(answers)
        ]
        if subject.reference is not None:
            self.heads.pop("reference").close()
        return texts, told

    def _check_reshaped(self, reference: Walk, going: Walk, head: Head) -> None:
        """The float model that was quantized must be the checkpoint's own: no rotation or equalization may move a logit."""
        rows = [np.asarray(one.last(FLOAT, 0)[0, -CHECKED_ROWS:], np.float32) for one in (reference, going)]
        own = self._head("plain", self.subject.models.plain)
        structure.check_equal(head.logits(rows[0]), own.logits(rows[1]), "the rotation and equalization of the float model")

    def _alone(self, going: Walk) -> tuple[list[AblationRecord], LayerRecord]:
        """What each thing costs by itself, and what the head does."""
        models = self.subject.models
        plain, decided = self._head("plain", models.plain), node_of(models.decided[-1])
        quantized = self._head("decided", models.decided) if decided.op_type == QUANT_LINEAR else plain
        found = []
        for name, probes in going.chains.items():
            tally = Tally()
            for at in probes:
                hidden = going.last(name, at)
                head, entering = (quantized, None) if name == WEIGHTS else (plain, decided if name == ACTIVATIONS else None)
                _tally(tally, self.windows[at], going.last(FLOAT, at), plain, head.of_window(hidden, entering))
            found.append(self._ablation(name, tally))
        local, along, tally = Likeness(), Likeness(), Tally()
        for number, at in enumerate(going.probes):
            self.progress(self.steps - len(self.windows) + number, self.steps)
            rows = plain.of_window(going.last(FLOAT, at))
            own = quantized.of_window(going.last(FLOAT, at), decided)
            after = quantized.of_window(going.last(QUANTIZED, at), decided)
            _tally(tally, self.windows[at], going.last(FLOAT, at), plain, quantized.of_window(going.last(FLOAT, at), decided))
            for first, second, third in zip(rows, own, after, strict=True):
                local.add(_centred(first), _centred(second))
                along.add(_centred(first), _centred(third))
        if quantized is not plain:
            found.append(self._ablation("head", tally))
        self.progress(self.steps, self.steps)
        return found, layer_record("head", local, along)

    def _ablation(self, name: str, tally: Tally) -> AblationRecord:
        one = tally.quality()
        return AblationRecord(
            name=name, what=SAID[name], text=self.subject.texts[0].name, windows=one.windows, delta=_rounded(one.delta),
            delta_se=_rounded(one.delta_se), kl_mean=_rounded(one.kl_mean), same_top=_rounded(one.same_top),
        )  # fmt: skip


def _tally(tally: Tally, window: Window, hidden: np.ndarray, head: Head, other: Iterable[Floats]) -> None:
    """Rows of `other`, in pieces of any size, against the head's of `hidden` [1,S,K]; the last row predicts nothing known."""
    tally.begin()
    first, predicting, step = 0, len(window.ids) - 1, rows_at_once(head.words)
    for logits in other:
        count = min(len(logits), predicting - first)
        reference = head.logits(np.asarray(hidden[0, first : first + count], np.float32))
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            targets = window.ids[first + 1 + rows.start : first + 1 + rows.stop]
            tally.add(compare(reference[rows], logits[rows], targets))
        first += len(logits)


def _centred(logits: Floats) -> Floats:
    """Without each row's mean, which changes no probability."""
    found: Floats = logits - logits.mean(1, keepdims=True)
    return found


def _worst(found: Sequence[Emulated]) -> EmulationRecord | None:
    if not found:
        return None
    broken = [one for one in found if not np.isfinite(one.error)]
    worst = broken[0] if broken else max(found, key=lambda one: one.error)
    return EmulationRecord(
        matrices=len(found), rows=ROWS, worst=None if broken else float(f"{worst.error:.3g}"), worst_matrix=worst.name
    )


def _text_record(text: Text, found: Quality) -> TextRecord:
    return TextRecord(
        name=text.name, sha256=text.sha256, windows=found.windows, tokens=found.tokens, broken=found.broken,
        reference_nll=_rounded(found.reference_nll), delta=_rounded(found.delta), delta_se=_rounded(found.delta_se),
        kl_mean=_rounded(found.kl_mean), kl_median=_rounded(found.kl_median), kl_p99=_rounded(found.kl_p99),
        same_top=_rounded(found.same_top),
        by_position=tuple(Share(first=one.first, last=one.last, kl=float(f"{one.kl:.6g}")) for one in found.by_position),
    )  # fmt: skip


def _rounded(value: float | None) -> float | None:
    """Six digits that count: the same measurement, run again, prints the same."""
    return None if value is None else float(f"{value:.6g}")
