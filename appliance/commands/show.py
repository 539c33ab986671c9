"""`appliance show`: what a bundle is, what it lost and how that was measured.

Knows: how manifest and record are laid out for a terminal. Does not know: how anything was measured, HTML (`appliance.report`).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from appliance.bundle.manifest import Variant
    from appliance.bundle.record import EvaluationRecord, Record
    from appliance.bundle.store import Bundle

EXAMPLE = "appliance show smollm2-135m"

_WIDE = 140
"""Columns of a table that no terminal shows."""


def show(
    model: Annotated[str, typer.Argument(help="Name of an installed model, or the folder of a bundle.")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file and compare it with the manifest.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Show the loss of every layer and matrix.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report, one HTML page, here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's manifest and the record of how it was verified."""
    from appliance.bundle.record import read_record
    from appliance.report.page import write_page

    bundle = find_bundle(model, verify=verify)
    record = read_record(bundle)
    if report is not None:
        if record is None:
            raise BadInput(f"{bundle.path} has no record to report", "build it again: appliance build")
        write_page(report, bundle.manifest, record)
    if as_json:
        told = None if record is None else record.model_dump()
        print(
            json.dumps({"path": str(bundle.path), "hash": bundle.hash, "manifest": bundle.manifest.model_dump(), "record": told})
        )
        return
    _print_manifest(bundle, verify)
    if record is None:
        print("\nrecord: none")
        return
    print()
    print_evaluation(record, whole=layers)


def find_bundle(model: str, *, verify: bool = False) -> "Bundle":
    """The bundle in a folder, or of an installed model's name as the endpoint knows it; `ModelNotFound` otherwise."""
    from appliance.bundle.store import is_bundle, open_bundle
    from appliance.config import load_config
    from appliance.engine.pool import ModelPool, open_onnx

    if is_bundle(Path(model)):
        return open_bundle(Path(model), verify=verify)
    config = load_config()
    pool = ModelPool(config.paths.models, open_onnx("", 0), default=config.models.default, aliases=config.models.aliases)
    found = pool.find(model)
    return open_bundle(found.path, verify=True) if verify else found


def _kept(variant: "Variant") -> str:
    """How the state is kept and what a token of context takes of memory."""
    kinds = sorted({tensor.dtype for tensor in variant.state})
    return f"{' and '.join(kinds)}, {variant.bytes_a_token / 1024:.1f} KiB a token" if kinds else "none"


def _print_manifest(bundle: "Bundle", verified: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    manifest = bundle.manifest
    size = sum(entry.bytes for entry in manifest.files.values())
    bits = 8 * size / max(1, manifest.parameters)
    facts = {
        "model": manifest.name,
        "folder": str(bundle.path),
        "hash": f"{bundle.hash[:16]}... ({'every file checked' if verified else 'sizes checked; --verify hashes every file'})",
        "architecture": f"{manifest.architecture}, {manifest.parameters / 1e6:.1f} M parameters, {manifest.vocab_size} tokens",
        "context": f"{manifest.context_length} tokens",
        "size": f"{size / 1e6:.1f} MB in {len(manifest.files)} files, {bits:.2f} bits a parameter",
        "licence": manifest.provenance.license,
        "source": manifest.provenance.source,
        "made by": f"{manifest.provenance.command} ({manifest.provenance.created})",
    }
    for key, value in facts.items():
        print(f"{key:<13}{value}")
    console = Console()
    table = Table("target", "form", "context", "chunk", "activations", "keys and values")
    for name, variant in sorted(manifest.variants.items()):
        row = (variant.form, str(variant.context), str(variant.chunk), variant.activation, _kept(variant))
        table.add_row(name, *row)
    console.print(table)
    table = Table(
        "role", "bits", "group", "activation", "parameters", "MB", title=f"scheme {manifest.scheme.name}", title_justify="left"
    )
    for role, form in sorted(manifest.scheme.roles.items()):
        group = str(form.group or "row")
        table.add_row(role, str(form.bits), group, form.activation, str(form.parameters), f"{form.bytes / 1e6:.2f}")
    console.print(table)


def print_evaluation(record: "Record", *, whole: bool) -> None:
    """What was measured, on a screen; with `whole` also every layer and matrix."""
    from appliance.report import conditions, words

    print(words.lost(record))
    found = record.evaluation
    for key, value in {**_figures(record), **conditions.lines(record)}.items():
        print(f"{key:<13}{value}")
    for number, line in enumerate(words.kept_quantized(record)):
        print(f"{'' if number else 'kept':<13}{line}")
    if record.verdict is not None and record.verdict.complaint:
        accepted = " (accepted: --accept-loss)" if record.verdict.accepted else ""
        print(f"{'out of band':<13}{record.verdict.complaint}{accepted}")
    if whole:
        _print_layers(found)
        _print_matrices(record)
        _print_streams(record)
        _print_state(record)


def _figures(record: "Record") -> dict[str, str]:
    """One line a measurement."""
    from appliance.report import words

    lines: dict[str, str] = {}
    found = record.evaluation
    if record.bits_per_weight is not None:
        body = "" if record.bits_per_body_weight is None else f", {record.bits_per_body_weight:.2f} without embedding and head"
        lines["bits a weight"] = f" {record.bits_per_weight:.2f}{body}"
    if found is not None:
        for number, text in enumerate(found.texts):
            lines["loss" if number == 0 else " " * (number + 1)] = words.of_text(text)
        for number, one in enumerate(found.embeddings):
            said = f"{one.text}: cosine mean {words.number(one.cosine_mean)} lowest {words.number(one.cosine_min)}, "
            said += f"same nearest {words.share(one.top1)}, of ten {words.share(one.top10)} ({one.passages} passages)"
            lines["loss" if number == 0 else " " * (number + 1)] = said
        if found.ablations:
            lines["alone"] = ", ".join(f"{one.name} {words.signed(one.delta)}" for one in found.ablations)
        if agreed := words.agreed(found):
            lines["same text"] = agreed
        if found.tokenizer is not None:
            one_ = found.tokenizer
            said = f"the same {one_.tokens} tokens" if one_.equal else f"differs: {one_.first_difference}"
            lines["tokenizer"] = f"{said} (against {one_.against})"
        if found.emulation is not None:
            worst = "no number" if found.emulation.worst is None else f"{found.emulation.worst:.1e} at most"
            lines["operators"] = f"{worst} from numpy's, {found.emulation.matrices} matrices"
        lines["run by"] = f"{found.provider}, {found.seconds:.0f} s" + ("" if found.ran == "files" else f"; {found.ran}")
        lines["again"] = found.command
    kept = {one.role or "constants" for one in record.float}
    if kept:
        size = sum(one.bytes for one in record.float)
        lines["float"] = f"{', '.join(sorted(kept))}: {len(record.float)} tensors, {words.size(size)}"
    return lines


def _print_layers(found: "EvaluationRecord | None") -> None:
    from rich.console import Console
    from rich.table import Table

    from appliance.report import words

    if found is None or not found.layers:
        return
    table = Table("part", "local SNR", "cosine", "accumulated SNR", "cosine")
    for one in found.layers:
        local = (words.decibels(one.local_snr_db, one.local_cosine), words.number(one.local_cosine))
        table.add_row(one.name, *local, words.decibels(one.snr_db, one.cosine), words.number(one.cosine))
    Console().print(table)


def _print_matrices(record: "Record") -> None:
    from rich.table import Column, Table

    from appliance.report import words

    head = ("form", "activation", "SNR", "output loss", "proxy", "clipped", Column("solver, why", overflow="fold"))
    table = Table(Column("matrix", no_wrap=True), *head)
    for one in record.matrices:
        why = ": ".join(filter(None, (one.solver, one.reason or one.fell_back, one.activation_reason)))
        name = one.name.removeprefix("model.").removesuffix(".weight")
        losses = (words.decibels(one.snr_db), words.number(one.output_loss), words.number(one.proxy), f"{one.saturation:.1%}")
        table.add_row(name, f"{one.bits} / {one.group or 'row'}", one.activation, *losses, why)
    _print_wide(table)


def _print_wide(table: "Table") -> None:
    """As wide as the terminal; where there is none (a file, a pipe) as wide as such a table needs."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=_WIDE)).print(table)


def _print_streams(record: "Record") -> None:
    from rich.table import Table

    from appliance.report import words

    for target, streams in record.ranges.items():
        table = Table("stream", "bits", "lowest", "highest", "why", title=f"static activations, {target}", title_justify="left")
        for one in streams:
            table.add_row(one.stream, str(one.bits), words.number(one.low), words.number(one.high), one.reason)
        _print_wide(table)


def _print_state(record: "Record") -> None:
    from rich.console import Console
    from rich.table import Table

    from appliance.report import words

    if record.kv is None:
        return
    table = Table("layer", "SNR of keys", "of values", title=f"keys and values in {record.kv.dtype}", title_justify="left")
    for one in record.kv.layers:
        table.add_row(str(one.layer), words.decibels(one.key_snr_db), words.decibels(one.value_snr_db))
    Console().print(table)
