"""`appliance evaluate`: measure again what a bundle lost, from its own files and the checkpoint it was made from.

Knows: the questions, where a checkpoint is looked up, how figures are shown. Does not know: how they come about
(`export.evaluation`).
"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.errors import BadInput, LossError

if TYPE_CHECKING:
    from appliance.bundle.record import Record
    from appliance.bundle.store import Bundle

EXAMPLE = "appliance evaluate smollm2-135m --windows 8"


def evaluate(
    model: Annotated[str, typer.Argument(help="Name of an installed model, or the folder of a bundle.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text to measure on; may be given several times.")] = None,
    source: Annotated[
        str,
        typer.Option(help="The checkpoint it was made from: a file, a folder or a pulled model; empty = looked up by its hash."),
    ] = "",
    target: Annotated[str, typer.Option(help="Whose graphs to run; empty = those that the record is about.")] = "",
    windows: Annotated[int, typer.Option(min=0, help="Pieces of 1024 tokens of each text, evenly spread; 0 = all.")] = 8,
    report: Annotated[Path | None, typer.Option(help="Write a page with these figures here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what a model lost against the checkpoint it was made from, on any text."""
    from appliance import targets
    from appliance.bundle.record import read_record
    from appliance.commands.show import find_bundle, print_evaluation
    from appliance.config import load_config
    from appliance.progress import bar
    from appliance.report.page import write_page
    from export.evaluation import EvaluationRequest
    from export.evaluation import evaluate as measure
    from quant import texts

    config = load_config()
    bundle = find_bundle(model, verify=True)
    record = read_record(bundle)
    if record is None:
        raise BadInput(f"{bundle.path} has no record of what was quantized", "build it again: appliance build")
    path, again = _source(bundle, source, config.paths.cache / "checkpoints")
    request = EvaluationRequest(
        bundle=bundle,
        record=record,
        source=path,
        target=targets.load(target or record.target, config.paths.targets),
        texts=[texts.read(one) for one in text or ()] or [texts.load(name) for name in texts.known()],
        windows=windows,
        scratch=config.paths.cache,
        command=_again(bundle, again, text or [], target, windows),
        targets=config.paths.targets,
    )
    with bar("Measuring", 1000) as advance:
        told = 0

        def progress(done: int, total: int) -> None:
            nonlocal told
            now = 1000 * done // max(total, 1)
            advance(now - told)
            told = now

        found = measure(request, progress)
    measured = record.measured(found)
    if report is not None:
        write_page(report, bundle.manifest, measured)
    if as_json:
        print(json.dumps(found.model_dump()))
    else:
        print_evaluation(measured, whole=False)
    _judge(measured)


def _judge(record: "Record") -> None:
    """Exit code 4 when the loss is outside the band of the bundle's scheme."""
    from quant import band, schemes

    assert record.evaluation is not None
    limits = schemes.find(record.scheme).band if record.scheme in schemes.known() else band.Band()
    complaint = band.complaint(limits, record.matrices, record.evaluation)
    if complaint:
        raise LossError(f"outside the band of scheme {record.scheme}: {complaint}")


def _source(bundle: "Bundle", said: str, checkpoints: Path) -> tuple[Path, str]:
    """The checkpoint, as it was named or the pulled one that has the files the manifest tells of; and how a command names it."""
    from appliance.pull.checkpoints import installed
    from export.command import find_source

    if said:
        found = find_source(said, checkpoints)
        return found.path, found.again
    wanted = set(bundle.manifest.provenance.source_sha256.values())
    for one in installed(checkpoints):
        if wanted and wanted <= {file.sha256 for file in one.record.files.values()}:
            return one.source_path, one.path.name
    raise BadInput(
        f"none of the pulled checkpoints is {bundle.manifest.provenance.source}, which {bundle.manifest.name} was made from",
        "name it: --source FILE",
    )


def _again(bundle: "Bundle", source: str, texts: list[Path], target: str, windows: int) -> str:
    from export.stages.evaluation import said_of

    name = said_of(bundle.manifest.name, bundle.path.resolve())
    words = ["appliance", "evaluate", name, "--source", source, "--windows", str(windows)]
    words += [word for one in texts for word in ("--text", one.name)]
    words += ["--target", target] if target else []
    return shlex.join(words)
