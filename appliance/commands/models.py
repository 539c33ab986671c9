"""`appliance models`: what is on this machine.

Knows: the two folders and how they are listed. Does not know: whether a bundle's hashes hold (`appliance show --verify`).
"""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from appliance.bundle.store import Bundle

EXAMPLE = "appliance models"


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the models that can be served and the checkpoints they can be built from."""
    from appliance.config import load_config
    from appliance.engine.catalog import read_catalog
    from appliance.pull.checkpoints import installed

    paths = load_config().paths
    catalog = read_catalog(paths.models)
    bundles = [_describe(bundle) for bundle in catalog.bundles.values()]
    checkpoints: list[dict[str, Any]] = [
        {
            "name": one.record.name,
            "path": str(one.path),
            "model": str(one.model_path),
            "bytes": one.bytes,
            "license": one.record.license,
            "origin": one.record.origin,
        }
        for one in installed(paths.cache / "checkpoints")
    ]
    if as_json:
        print(json.dumps({"bundles": bundles, "checkpoints": checkpoints, "problems": catalog.problems}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not bundles and not checkpoints and not catalog.problems:
        print("no models yet; get one: appliance pull smollm2-135m")
        return
    if bundles:
        table = Table("model", "architecture", "scheme", "targets", "context", "size", title="Models", title_justify="left")
        for one in bundles:
            size = f"{one['bytes'] / 1e6:.0f} MB"
            targets = ", ".join(one["targets"])
            table.add_row(one["name"], one["architecture"], one["scheme"], targets, str(one["context_length"]), size)
        console.print(table)
    if checkpoints:
        table = Table("checkpoint", "licence", "size", "from", title="Checkpoints", title_justify="left")
        for one in checkpoints:
            table.add_row(one["name"], one["license"], f"{one['bytes'] / 1e6:.0f} MB", one["origin"])
        console.print(table)
    for problem in catalog.problems:
        print(f"damaged: {problem}")


def _describe(bundle: "Bundle") -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "path": str(bundle.path),
        "architecture": manifest.architecture,
        "scheme": manifest.scheme.name,
        "targets": sorted(manifest.variants),
        "context_length": manifest.context_length,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "license": manifest.provenance.license,
    }
