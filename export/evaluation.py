"""An installed bundle measured again, beside the checkpoint it was made from.

Knows: how the checkpoint is found and checked, what is handed to the measurements. Does not know: how anything is measured
(`quant.verify`), how it is shown (`export.evaluate_command`). It never writes into the bundle.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.bundle.record import EvaluationRecord, Record
from appliance.bundle.store import Bundle, sha256
from appliance.errors import BadInput
from appliance.targets.capabilities import Target
from export import arch
from export.checkpoint import open_checkpoint
from export.stages.evaluation import PASSAGES, PIECE, opener_of, parity_of
from quant import restored
from quant.embedders import verify_embedder
from quant.layers import Part, cut
from quant.reshape import Reshaping
from quant.side_by_side import Models
from quant.texts import Text
from quant.verify import Effort, Subject, verify

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure.

    Attributes:
        bundle: opened, every hash checked.
        record: of the bundle.
        source: the checkpoint it was made from.
        target: whose graphs are run.
        texts: what it is measured on.
        windows: of each text; 0 = all.
        scratch: folder for hidden states; a folder in it is made and removed.
        command: measures it again.
        targets: folder with more target files.
    """

    bundle: Bundle
    record: Record
    source: Path
    target: Target
    texts: Sequence[Text]
    windows: int
    scratch: Path
    command: str
    targets: Path | None = None


def evaluate(request: EvaluationRequest, progress: Progress) -> EvaluationRecord:
    """Measure the bundle.

    Raises:
        BadInput: the checkpoint is not the one it was made from, or a text is too short.
        BundleError: the graphs are damaged.
    """
    bundle, manifest = request.bundle, request.bundle.manifest
    opened = arch.open_model(open_checkpoint(request.source))
    opened = replace(opened, config=replace(opened.config, context_length=manifest.context_length))
    check_source(bundle, opened.checkpoint.files())
    parity = parity_of(opened, bundle, (text.content[:PIECE] for text in request.texts))
    request.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="evaluate-", dir=request.scratch) as folder:
        work = Path(folder) / "work"
        opener = opener_of(bundle.variant(request.target.name).context, work, request.target)
        if opened.task == "embed":
            return verify_embedder(
                bundle, request.target, opened.build(), opener, request.texts, command=request.command, tokenizer=parity,
                passages=PASSAGES * (request.windows or 64) // 2 or 1, targets=request.targets,
            )  # fmt: skip
        models, reference, probes = _models(request, opened)
        subject = Subject(
            bundle=bundle,
            target=request.target,
            models=models,
            opener=opener,
            texts=request.texts,
            work=work,
            command=request.command,
            reference=reference,
            tokenizer=parity,
            targets=request.targets,
        )
        return verify(subject, Effort(windows=request.windows, probes=probes), progress)


def _models(request: EvaluationRequest, opened: arch.Opened) -> tuple[Models, tuple[Part, ...] | None, int]:
    """The float model and the bundle's in parts; the checkpoint's own where the bundle was made from a reshaped one; and on how
    many windows layers can be measured: none where the file does not say all about them."""
    plain, decided = opened.build(), opened.build()
    reference = None
    if request.record.reshaped is not None:
        reference, reshaping = cut(opened.build()), Reshaping()
        for model in (plain, decided):
            reshaping.apply(model)
    if not restored.can_restore(request.record, request.target.name):
        return Models.of(plain, plain), reference, 0
    graphs = request.bundle.variant(request.target.name).graphs
    path = request.bundle.file(graphs.get("model") or graphs["prefill"])
    decided = restored.restore(decided, path, request.record, request.target.name)
    return Models.of(plain, decided), reference, Effort().probes


def check_source(bundle: Bundle, files: Sequence[Path]) -> None:
    """Whether these are the very files that the bundle was made from.

    Raises:
        BadInput: one of them has another hash, or the bundle was made from others.
    """
    wanted = bundle.manifest.provenance.source_sha256
    found = {path.name: sha256(path) for path in files}
    other = next((name for name, digest in found.items() if digest not in wanted.values()), "")
    if other:
        raise BadInput(
            f"{other} is not what {bundle.manifest.name} was made from ({bundle.manifest.provenance.source})",
            "name that checkpoint: --source",
        )
