"""`appliance show`: what a bundle is and how it was checked.

Knows: how manifest and record are laid out for reading. Does not know: what the record's keys mean; quant and export
write them, and every one is shown.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from appliance.bundle.store import Bundle

EXAMPLE = "appliance show smollm2-135m"
LONGEST_LIST = 5
WIDEST = 240


def show(
    model: Annotated[str, typer.Argument(help="Name of an installed model, or the folder of a bundle.")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file and compare it with the manifest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's manifest and the record of how it was verified."""
    from appliance.bundle.store import RECORD

    bundle = find_bundle(model, verify=verify)
    record_path = bundle.path / RECORD
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.is_file() else None
    if as_json:
        print(
            json.dumps(
                {"path": str(bundle.path), "hash": bundle.hash, "manifest": bundle.manifest.model_dump(), "record": record}
            )
        )
        return
    _print_manifest(bundle, verify)
    if record is None:
        print("\nrecord: none")
    else:
        print("\nrecord")
        _print_tree(record, 1)


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
    table = Table("target", "form", "context", "chunk", "activations", "state tensors")
    for name, variant in sorted(manifest.variants.items()):
        row = (variant.form, str(variant.context), str(variant.chunk), variant.activation, str(len(variant.state)))
        table.add_row(name, *row)
    console.print(table)
    table = Table(
        "role", "bits", "group", "activation", "parameters", "MB", title=f"scheme {manifest.scheme.name}", title_justify="left"
    )
    for role, form in sorted(manifest.scheme.roles.items()):
        group = str(form.group or "row")
        table.add_row(role, str(form.bits), group, form.activation, str(form.parameters), f"{form.bytes / 1e6:.2f}")
    console.print(table)


def _print_tree(value: Any, depth: int) -> None:
    """Any JSON value as indented lines, what fits on one line on one; long lists are cut and say so."""
    space = "  " * depth
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for number, (key, inner) in enumerate(items):
        if isinstance(value, list) and number == LONGEST_LIST:
            print(f"{space}... {len(value) - LONGEST_LIST} more (--json shows all)")
            return
        name = "-" if isinstance(value, list) else f"{key}:"
        if isinstance(inner, dict | list) and inner and not _is_flat(inner):
            print(f"{space}{name}")
            _print_tree(inner, depth + 1)
        else:
            print(f"{space}{name} {_line(inner)}")


def _is_flat(value: Any) -> bool:
    """Whether it is short enough to be read on one line: no more than a list inside a table, and no wider than `WIDEST`."""
    below = value.values() if isinstance(value, dict) else value
    return not any(isinstance(one, dict) and one for one in below) and len(_line(value)) <= WIDEST


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_line(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(_line(one) for one in value) or "none"
    return _short(value)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
