"""`appliance models`: what is on this machine.

Knows: the two folders and how they are listed. Does not know: whether a bundle's hashes hold (`appliance show --verify`).
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLE = "appliance models"


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the models that can be served and the checkpoints they can be built from."""
    from appliance.config import load_config
    from appliance.pull.checkpoints import installed

    paths = load_config().paths
    bundles = [_bundle(path) for path in bundle_folders(paths.models)]
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
        print(json.dumps({"bundles": bundles, "checkpoints": checkpoints}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not bundles and not checkpoints:
        print("no models yet; get one: appliance pull smollm2-135m")
        return
    if bundles:
        table = Table("model", "architecture", "scheme", "targets", "context", "size", title="Bundles", title_justify="left")
        for one in bundles:
            if one["error"]:
                table.add_row(one["name"], f"damaged: {one['error']}")
            else:
                size = f"{one['bytes'] / 1e6:.0f} MB"
                targets = ", ".join(one["targets"])
                table.add_row(one["name"], one["architecture"], one["scheme"], targets, str(one["context_length"]), size)
        console.print(table)
    if checkpoints:
        table = Table("checkpoint", "licence", "size", "from", title="Checkpoints", title_justify="left")
        for one in checkpoints:
            table.add_row(one["name"], one["license"], f"{one['bytes'] / 1e6:.0f} MB", one["origin"])
        console.print(table)


def bundle_folders(folder: Path) -> list[Path]:
    """Every installed bundle's folder, whole or damaged, by name."""
    from appliance.bundle.store import is_bundle

    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and is_bundle(path))


def _bundle(path: Path) -> dict[str, Any]:
    from appliance.bundle.store import open_bundle
    from appliance.errors import ApplianceError

    try:
        manifest = open_bundle(path, verify=False).manifest
    except ApplianceError as failure:
        return {"name": path.name, "path": str(path), "error": str(failure)}
    return {
        "name": manifest.name,
        "path": str(path),
        "error": None,
        "architecture": manifest.architecture,
        "scheme": manifest.scheme.name,
        "targets": sorted(manifest.variants),
        "context_length": manifest.context_length,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "license": manifest.provenance.license,
    }
