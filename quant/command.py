"""`appliance quantize`: a float ONNX decoder of any exporter becomes a W4A8 one.

Knows: the questions, and how what was inferred is shown. Does not know: how it is done (`quant.foreign.quantize`).
"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quant.foreign.infer import Inference

EXAMPLE = "appliance quantize model.onnx --scheme w4a8"


def quantize(
    model: Annotated[Path, typer.Argument(help="The .onnx file of a float decoder; its weights may lie beside it.")],
    scheme: Annotated[str, typer.Option(help="How it is quantized; one that needs no calibration.")] = "w4a8",
    group: Annotated[int | None, typer.Option(help="Weights that share a scale: 16, 32, 64 or 128.")] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give groups of 4-bit weights a zero point each.")] = False,
    exception: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=BITS[/GROUP]", help="Another form for weights by name, e.g. '*.v_proj.*=8/32'; 0 = float."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File or folder; by default MODEL.SCHEME.onnx beside the model.")] = None,
    leave_float: Annotated[bool, typer.Option("--leave-float", help="Leave weights float whose role cannot be told.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what each weight is taken for.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Quantize an ONNX model that another exporter made, telling from its structure what each weight is for."""
    from appliance import targets
    from appliance.config import load_config
    from appliance.errors import BadInput
    from appliance.progress import stages
    from quant import asked, schemes
    from quant.foreign.infer import infer
    from quant.foreign.quantize import Request, open_graph, refuse, told
    from quant.foreign.quantize import quantize as make
    from quant.foreign.widen import widen
    from quant.scheme import Options

    source = model.expanduser().absolute()
    if dry_run:
        graph = open_graph(source)
        widened = widen(graph).told()
        inference = infer(graph)
        facts: dict[str, Any] = {"read_as_float32": widened, "inferred": [told(one) for one in inference.matrices]}
        facts["not_understood"] = [{"weight": one.name, "node": one.node, "why": one.why} for one in inference.unknown]
        print(json.dumps(facts)) if as_json else print(*types(widened), table(inference), sep="\n")
        if not leave_float:
            refuse(inference)
        return
    chosen = schemes.find(scheme, Options(group=group, symmetric=not asymmetric))
    exceptions = tuple(asked.read(one) for one in exception or ())
    if asymmetric and not (chosen.has_four_bits or any(one.bits == 4 for one in exceptions)):
        raise BadInput(f"scheme {scheme} has no 4-bit weights that could have zero points", "leave out --asymmetric")
    request = Request(
        source=source,
        scheme=chosen,
        target=targets.load("cpu", load_config().paths.targets),
        output=_place(source, output, scheme),
        leave_float=leave_float,
        exceptions=exceptions,
        command=_again(source, scheme, group, ("--asymmetric",) * asymmetric + ("--leave-float",) * leave_float, exception or ()),
    )
    with stages() as progress:
        made = make(request, progress)
    size = sum(one["bytes"] for one in made.record["files"].values())
    if as_json:
        kept = {
            key: made.record[key]
            for key in ("scheme", "bits_per_weight", "inferred", "not_understood", "files", "loss", "read_as_float32")
        }
        print(json.dumps({"output": str(request.output), "record": str(request.record), "bytes": size, **kept}))
        return
    print(*types(made.record["read_as_float32"]), table(made.inference), sep="\n")
    print(f"{request.output}: {size / 1e6:.0f} MB, {scheme}, {made.record['bits_per_weight']} bits a weight")
    print(lost(made.record["loss"]))
    print(f"record: {request.record}")


def lost(loss: "Mapping[str, Any]") -> str:
    """One line of what the logits lost."""
    if loss["why_not"]:
        return f"what it lost was not measured: {loss['why_not']}"
    found = f"logits off by {loss['relative_difference']:.2g} of theirs, KL {loss['kl_mean']:.2g} nats"
    return f"on {loss['tokens']} random tokens: {found}, the same first choice on {loss['same_top']:.0%}"


def types(widened: "Mapping[str, Any] | None") -> list[str]:
    """One line of what was no float32, if anything was."""
    if widened is None:
        return []
    tensors = " and ".join(f"{count} tensors of {kind}" for kind, count in widened["tensors"].items())
    casts = f"{widened['casts']} casts" if widened["casts"] else ""
    ends = [f"{len(widened[side])} {side}" for side in ("inputs", "outputs") if widened[side]]
    return [f"read as float32, and float32 now: {', '.join(filter(None, (tensors, casts, *ends)))}"]


def table(inference: "Inference") -> str:
    """One line for all weights that are taken for the same thing, then one for each that is not understood."""
    lines: dict[tuple[str, str], list[int]] = {}
    for one in inference.matrices:
        shape = " x ".join(map(str, one.matrix.shape))
        lines.setdefault((" + ".join(one.roles), shape), []).append(-1 if one.layer is None else one.layer)
    rows = [("role", "shape", "weights", "layers")]
    for (roles, shape), layers in lines.items():
        numbers = sorted({layer for layer in layers if layer >= 0})
        rows.append((roles, shape, str(len(layers)), _span(numbers)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    told += [f"not understood: {one.name or one.node} ({one.node}): {one.why}" for one in inference.unknown]
    return "\n".join(told)


def _span(numbers: list[int]) -> str:
    """0-29, or all of them where some are missing."""
    if not numbers:
        return "-"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))


def _place(source: Path, output: Path | None, scheme: str) -> Path:
    if output is None:
        return source.with_name(f"{source.stem}.{scheme}.onnx")
    output = output.expanduser().absolute()
    if output.suffix == ".onnx":
        output.parent.mkdir(parents=True, exist_ok=True)
        return output
    output.mkdir(parents=True, exist_ok=True)
    return output / source.name


def _again(source: Path, scheme: str, group: int | None, flags: "Sequence[str]", exceptions: "Sequence[str]") -> str:
    """The command that makes the same file again, without paths of this machine."""
    words = ["appliance", "quantize", source.name, "--scheme", scheme]
    words += ["--group", str(group)] if group is not None else []
    words += flags
    words += [word for one in exceptions for word in ("--exception", one)]
    return shlex.join(words)
