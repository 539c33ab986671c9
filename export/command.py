"""`appliance build`: from a checkpoint to a bundle.

Knows: the questions, where a name is looked up, how progress is shown. Does not know: how a bundle is made (`export.build`).
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from appliance.bundle.store import RECORD
from appliance.errors import BadInput

if TYPE_CHECKING:
    from appliance.bundle.store import Bundle
    from export.build import BuildRequest
    from quant.asked import Asked
    from quant.scheme import Scheme

LEAST_CONTEXT = 64
"""Tokens; a chat template alone may take half of that, and the new bundle would replace a useful one."""
WINDOWS = 2
"""Of each text: the quick cut that a build takes. `appliance evaluate` measures on as many as one likes."""
TOKENS, LEAST_TOKENS = 32768, 1024
"""Of calibration text: what small models need, and the fewest that say anything."""
EXAMPLE = "appliance build smollm2-135m --target cpu"


def build(
    source: Annotated[str, typer.Argument(help="A GGUF file, a folder with safetensors, or the name of a pulled model.")],
    target: Annotated[list[str] | None, typer.Option(help="What it will run on; may be given several times.")] = None,
    scheme: Annotated[
        str, typer.Option(help="How it is quantized; empty = the first target's default, 8 bits for embedding models.")
    ] = "",
    group: Annotated[int | None, typer.Option(help="Weights that share a scale: 16, 32, 64 or 128.")] = None,
    name: Annotated[str, typer.Option(help="The model's id on the endpoint; empty = after the source.")] = "",
    output: Annotated[Path | None, typer.Option(help="Folder of the bundle; by default among the installed models.")] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens of context; 0 = what the model was made for.")] = 0,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give groups of 4-bit weights a zero point each.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(min=4, max=9, help="Bits a weight of the body; exceptions are chosen by what they cost."),
    ] = None,
    exception: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=BITS[/GROUP]",
            help="Another form for weights by name, e.g. '*.v_proj.weight=8/32'; 0 bits = float. May be given several times.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text to calibrate on: a file, a folder, or a bundle's record.json (MODEL/record.json of an installed one); "
            "without it the model writes its own."
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=LEAST_TOKENS, help="Tokens of text to calibrate on.")] = TOKENS,
    kv: Annotated[
        Literal["float32", "int8"],
        typer.Option(help="How keys and values are kept; int8: a quarter of their memory, long prompts slower."),
    ] = "float32",
    keep_quantized: Annotated[
        bool, typer.Option("--keep-quantized", help="Carry over, to the last bit, what the checkpoint has on a 4- or 8-bit grid.")
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(help="Keep in this folder what the build works out; another one of the same model goes on from it."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Pieces of each text that the loss is measured on.")] = WINDOWS,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Install it even if it lost more than its scheme may; the record says so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn a checkpoint into a W4A8 bundle for this machine."""
    from appliance import targets
    from appliance.config import load_config
    from appliance.progress import stages
    from export.build import BuildRequest, default_scheme
    from export.build import build as make
    from quant import asked, schemes
    from quant.scheme import Options

    if 0 < context < LEAST_CONTEXT:
        raise BadInput(f"a context of {context} tokens answers nothing", f"ask for {LEAST_CONTEXT} or more")
    config = load_config()
    wanted = tuple(targets.load(one, config.paths.targets) for one in target or [config.engine.target])
    found = find_source(source, config.paths.cache / "checkpoints")
    name = _named(name or found.name)
    chosen = scheme or default_scheme(found.path, wanted[0])
    exceptions = tuple(asked.read(one) for one in exception or ())
    flags = ("--keep-quantized",) * keep_quantized + ("--windows", str(windows)) * (windows != WINDOWS)
    flags += ("--accept-loss",) * accept_loss + ("--asymmetric",) * asymmetric
    flags += ("--kv", kv) if kv != "float32" else ()
    flags += tuple(word for one in exceptions for word in ("--exception", one.text))
    flags += ("--budget", repr(budget)) if budget is not None else ()
    text = _text(calibration, config.paths.models)
    flags += ("--calibration", _text_again(text, name)) if text is not None else ()
    flags += ("--calibration-tokens", str(calibration_tokens)) * (calibration_tokens != TOKENS)
    request = BuildRequest(
        source=found.path,
        targets=wanted,
        scheme=_checked(schemes.find(chosen, Options(group=group, symmetric=not asymmetric, kv=kv)), budget, exceptions),
        destination=(output or config.paths.models / name).absolute(),
        name=name,
        context=context,
        license=found.license,
        command=_again(found.again, wanted, chosen, group, name, context, flags=flags),
        said=found.again,
        calibration=text,
        calibration_tokens=calibration_tokens,
        target_files=config.paths.targets,
        keep_quantized=keep_quantized,
        exceptions=exceptions,
        windows=windows,
        accept_loss=accept_loss,
        kept=work.expanduser().absolute() if work is not None else None,
    )
    with stages() as progress:
        bundle = make(request, progress)
    if as_json:
        print(json.dumps(_facts(bundle)))
    else:
        _tell(bundle, request)


def _checked(scheme: "Scheme", budget: float | None, exceptions: "Sequence[Asked]") -> "Scheme":
    """The scheme with its budget; refused where that, or zero points, would mean nothing."""
    from quant import solvers

    if not (scheme.options.symmetric or scheme.has_four_bits or any(one.bits == 4 for one in exceptions)):
        raise BadInput(f"scheme {scheme.name} has no 4-bit weights that could have zero points", "leave out --asymmetric")
    if budget is None:
        return scheme
    if scheme.budget is None and not solvers.find(scheme.solver).NEEDS_MOMENTS:
        raise BadInput(f"scheme {scheme.name} is not calibrated, so nothing can be chosen", "choose --scheme w4a8-mixed")
    return replace(scheme, budget=budget, budget_grows=False)


def _text(said: Path | None, models: Path) -> Path | None:
    """The text to calibrate on; MODEL/record.json is looked up among the installed models when there is no such file here."""
    if said is None:
        return None
    path = said.expanduser().absolute()
    if said.is_absolute() or path.exists() or said.name != RECORD or ".." in said.parts:
        return path
    return installed if (installed := models / said).is_file() else path


def _text_again(text: Path, name: str) -> str:
    """What gives the same tokens again: the text by its file name, and instead of a record the new bundle's own, which holds them
    too."""
    return f"{name}/{RECORD}" if text.suffix == ".json" and text.is_file() else text.name


@dataclass(frozen=True)
class Found:
    """A checkpoint on this machine.

    Attributes:
        path: what to open.
        name: what to call the model.
        license: the one it was pulled under, or "".
        again: how a command names it anywhere: a pulled model's name, else the name of the file or folder.
    """

    path: Path
    name: str
    license: str
    again: str


def find_source(source: str, checkpoints: Path) -> Found:
    """What a build of `source` reads: a file or folder, or a pulled model by its name; `BadInput` when there is none."""
    from appliance.pull.checkpoints import RECORD as PULLED
    from appliance.pull.checkpoints import open_pulled

    pulled = checkpoints / source
    if "/" not in source and (pulled / PULLED).is_file():
        found = open_pulled(pulled)
        return Found(found.source_path, source, found.record.license, source)
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise BadInput(
            f"there is no file, folder or pulled model called {source}",
            "get one (appliance pull --list) or look (appliance models)",
        )
    for folder in (path, path.parent):
        if (folder / PULLED).is_file():
            found = open_pulled(folder)
            by_name = folder.parent == checkpoints and found.source_path == path
            return Found(path, folder.name, found.record.license, folder.name if by_name else path.name)
    return Found(path, path.stem if path.is_file() else path.name, "", path.name)


def _named(name: str) -> str:
    """The name, if it can be a folder among the models: MODEL or OWNER/MODEL, as the catalogue of models reads them."""
    parts = name.split("/")
    if len(parts) > 2 or not all(part and part[0] != "." and part.isprintable() and len(part) <= 96 for part in parts):
        raise BadInput(f"{name!r} cannot be a model's name", "give one like my-model or owner/my-model: --name NAME")
    return name


def _again(
    source: str, targets: tuple[object, ...], scheme: str, group: int | None, name: str, context: int, *, flags: tuple[str, ...]
) -> str:
    """The command that makes the same bundle again; no path of this machine goes along."""
    words = ["appliance", "build", source]
    for target in targets:
        words += ["--target", str(getattr(target, "name", target))]
    words += ["--scheme", scheme, "--name", name]
    words += ["--group", str(group)] if group is not None else []
    words += ["--context", str(context)] if context else []
    return shlex.join([*words, *flags])


def _facts(bundle: "Bundle") -> dict[str, object]:
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "path": str(bundle.path),
        "hash": bundle.hash,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "scheme": manifest.scheme.name,
        "targets": sorted(manifest.variants),
        "context_length": manifest.context_length,
    }


def _tell(bundle: "Bundle", request: "BuildRequest") -> None:
    from appliance.bundle.record import read_record
    from appliance.report import words

    facts = _facts(bundle)
    megabytes = sum(file.bytes for file in bundle.manifest.files.values()) / 1e6
    targets = ", ".join(sorted(bundle.manifest.variants))
    print(f"{facts['name']}: {megabytes:.0f} MB, {facts['scheme']}, for {targets}, in {bundle.path}")
    record = read_record(bundle)
    if record is not None:
        print(words.lost(record))
        for line in words.kept_quantized(record):
            print(line)
    use = "appliance knowledge index FOLDER" if bundle.manifest.task == "embed" else f'appliance chat {request.name} "Hello"'
    print(f"next: {use}    what it is made of: appliance show {request.name}")
