"""The report of a bundle as one HTML page that needs nothing else: no network, no script, good on paper.

Knows: what stands where. Does not know: how plots are drawn (`appliance.report.plots`) or numbers are put into words
(`appliance.report.words`).
"""

from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from appliance.bundle.manifest import Manifest
from appliance.bundle.record import EvaluationRecord, GreedyRecord, KeptRecord, Record
from appliance.errors import StorageError
from appliance.report import conditions, plots, words
from appliance.report.marks import Safe, element, escape, joined, table

FILE = "report.html"


def page(manifest: Manifest, record: Record) -> str:
    """The whole page.

    Args:
        manifest: of the bundle; one whose `files` are not filled in yet will do, the record has their hashes.
        record: of the same bundle.
    """
    style = files("appliance.report").joinpath("style.css").read_text(encoding="utf-8")
    parts = [_head(manifest, record), _tiles(record), _texts(record), _plots(record), _greedy(record), _checks(record),
             _conditions(record), _exceptions(record), _kept(record), _again(manifest, record), _details(record)]  # fmt: skip
    body = element("body", {}, *(part for part in parts if part is not None))
    title = f"{manifest.name}: what {record.scheme} lost"
    head = joined(
        [
            Safe('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            element("title", {}, title),
            Safe(f"<style>\n{style}</style>"),
        ]
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


def write_page(path: Path, manifest: Manifest, record: Record) -> None:
    """Write the page.

    Raises:
        StorageError: it cannot be written there.
    """
    try:
        path.write_text(page(manifest, record), encoding="utf-8")
    except OSError as failure:
        raise StorageError(f"cannot write {path}: {failure.strerror}", "choose another --report") from failure


def _head(manifest: Manifest, record: Record) -> Safe:
    broken = record.verdict is not None and bool(record.verdict.complaint)
    kind = f"{manifest.architecture}, {manifest.parameters / 1e6:.0f} million parameters, scheme {record.scheme}"
    parts: list[object] = [
        element("h1", {}, manifest.name),
        element("div", {"class": "soft"}, f"{kind}, built {manifest.provenance.created[:10]} for {', '.join(manifest.variants)}"),
        element("p", {"class": "lead bad" if broken else "lead"}, words.lost(record)),
    ]
    if record.verdict is not None and record.verdict.complaint:
        said = "Installed all the same, as asked (--accept-loss)." if record.verdict.accepted else ""
        parts.append(element("p", {}, element("strong", {}, f"Outside the scheme's band: {record.verdict.complaint}. {said}")))
    parts.append(
        element(
            "p",
            {},
            "Quantization stores the numbers of a model in fewer bits, so that it fits and runs fast on a small machine. "
            + words.measured_on(record),
        )
    )
    return element("header", {}, *parts)


def _tiles(record: Record) -> Safe:
    tiles: list[tuple[str, str, str]] = []
    found = record.evaluation
    if found is not None and found.texts:
        one = found.texts[0]
        tiles += [
            ("delta ln PPL", words.signed(one.delta), f"{words.error(one.delta_se).strip()} on {one.name}"),
            ("KL, mean", words.number(one.kl_mean), "nats to the float model"),
            ("same next word", words.share(one.same_top), "likeliest token"),
        ]
    if found is not None and found.embeddings:
        vectors = found.embeddings[0]
        tiles += [
            ("cosine, mean", words.number(vectors.cosine_mean), f"lowest {words.number(vectors.cosine_min)}"),
            ("same nearest", words.share(vectors.top1), f"of {vectors.passages} passages"),
        ]
    if found is not None and (agreed := words.agreed(found)):
        middle, _, rest = agreed.partition(" ")
        tiles.append(("greedy text agrees for", f"{middle} tokens", rest.partition(" ")[2].strip("()")))
    if record.bits_per_weight is not None:
        body = f"{record.bits_per_body_weight:.2f} without the tables" if record.bits_per_body_weight else ""
        tiles.append(("bits a weight", f"{record.bits_per_weight:.2f}", body))
    if (size := record.sizes.get(record.target)) is not None:
        tiles.append(("graph files", words.size(size.bytes), f"{4 * record.parameters / 1e6:.0f} MB as float32"))
    made = (
        element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note)))
        for name, value, note in tiles
    )
    return element("dl", {"class": "tiles"}, *made)


def _texts(record: Record) -> Safe | None:
    found = record.evaluation
    if found is None or not (found.texts or found.embeddings):
        return None
    parts: list[object] = [element("h2", {}, "Loss on text")]
    if found.texts:
        head = ("text", "delta ln PPL", "KL mean", "median", "p99", "same top-1", "windows", "tokens")
        rows = [
            (one.name, f"{words.signed(one.delta)}{words.error(one.delta_se)}", words.number(one.kl_mean),
             words.number(one.kl_median), words.number(one.kl_p99), words.share(one.same_top), one.windows, one.tokens)
            for one in found.texts
        ]  # fmt: skip
        parts.append(table(head, rows))
        parts.append(
            element(
                "p",
                {"class": "soft"},
                f"Windows of {found.window} tokens, run by {found.provider}. ln PPL is the mean surprise at the next token; "
                "delta is how much more the bundle has, on the same tokens, with its standard error over windows. KL is how far "
                "its probabilities are from the float model's: 0 = the same model.",
            )
        )
    if found.embeddings:
        columns = ("text", "cosine, mean", "lowest", "same nearest", "of ten nearest", "rank correlation", "passages")
        rows_ = [
            (one.text, words.number(one.cosine_mean), words.number(one.cosine_min), words.share(one.top1),
             words.share(one.top10), words.number(one.rank_correlation), one.passages)
            for one in found.embeddings
        ]  # fmt: skip
        parts.append(table(columns, rows_))
    if found.ran != "files":
        parts.append(element("p", {}, element("strong", {}, f"Not from the shipped graphs: {found.ran}.")))
    return element("section", {}, *parts)


def _plots(record: Record) -> Safe | None:
    found = record.evaluation
    made: list[Safe | None] = []
    if found is not None:
        made += [plots.layers(found.layers), plots.positions(found.texts), plots.ablations(found.ablations)]
    made.append(plots.sizes(record))
    shown = [one for one in made if one is not None]
    map_ = plots.heat(record.matrices)
    if map_ is not None:
        shown.append(element("div", {"class": "whole"}, map_))
    if not shown:
        return None
    return element("section", {}, element("h2", {}, "Where it was lost"), element("div", {"class": "plots"}, *shown))


def _greedy(record: Record) -> Safe | None:
    found = record.evaluation
    if found is None or not found.greedy:
        return None

    def text_of(one: GreedyRecord) -> Safe:
        parts: list[object] = [element("span", {"class": "soft"}, one.prompt), element("span", {"class": "same"}, one.common)]
        if one.next or one.reference_next:
            parts += [
                " ", element("code", {"class": "ours"}, f"[{one.next}]"),
                " ", element("code", {"class": "theirs"}, f"[{one.reference_next}]"),
            ]  # fmt: skip
        return joined(parts)

    rows = [(text_of(one), one.name, f"{one.agreed} of {one.tokens}") for one in found.greedy]
    explained = joined(
        [
            "Both models always take the likeliest token. Grey is the prompt; then comes the text that both write, and where "
            "they part: ",
            element("code", {"class": "ours"}, "[the bundle's token]"),
            " and ",
            element("code", {"class": "theirs"}, "[the float model's]"),
            ". A fork early in the text need not make it worse.",
        ]
    )
    head = ("text", "prompt", "agreed tokens")
    return element(
        "section", {}, element("h2", {}, "Until the texts part"), element("p", {"class": "soft"}, explained), table(head, rows, 2)
    )


def _checks(record: Record) -> Safe | None:
    found = record.evaluation
    if found is None:
        return None
    rows: list[tuple[str, str]] = []
    if found.tokenizer is not None:
        one = found.tokenizer
        said = f"the same {one.tokens} tokens for {one.texts} texts" if one.equal else f"differs: {one.first_difference}"
        blind = f"; not seen: {one.blind_to}" if one.blind_to else ""
        rows.append(("tokenizer", f"{said} (against {one.against}{blind})"))
    if found.emulation is not None:
        em = found.emulation
        worst = "no number" if em.worst is None else f"{em.worst:.1e} of the largest output at most"
        said = f"{worst}, in {em.matrices} matrices ({em.worst_matrix}), each run alone on the processor"
        rows.append(("operators against numpy", said))
    if record.verdict is not None:
        limits = ", ".join(words.limit(name, value) for name, value in record.verdict.band.items())
        rows.append(("the scheme's band", f"{'held' if not record.verdict.complaint else 'left'}: {limits}"))
    if not rows:
        return None
    return element("section", {}, element("h2", {}, "Checks"), table(("what", "found"), rows, 2))


def _conditions(record: Record) -> Safe | None:
    """How it was quantized, and the streams whose activations are not the scheme's."""
    rows = list(conditions.lines(record).items())
    if not rows:
        return None
    parts = [element("h2", {}, "How it was quantized"), table(("what", "how"), rows, 2)]
    streams = [
        (one.stream, one.reason, target, one.bits, words.number(one.low), words.number(one.high))
        for target, found in record.ranges.items()
        for one in found
        if one.reason
    ]
    if streams:
        head = ("stream with other activations", "why", "target", "bits", "lowest value", "highest")
        parts.append(table(head, streams, 3))
    return element("section", {}, *parts)


def _exceptions(record: Record) -> Safe | None:
    chosen = [one for one in record.matrices if one.reason or one.fell_back]
    if not chosen:
        return None
    rows = [(one.name, one.reason or one.fell_back, one.bits, one.group or "row", words.decibels(one.snr_db)) for one in chosen]
    head = ("matrix", "why", "bits", "group", "SNR")
    return element("section", {}, element("h2", {}, "Exceptions to the scheme"), table(head, rows, 2))


def _kept(record: Record) -> Safe | None:
    if not record.float:
        return None
    groups: dict[tuple[str, str], list[KeptRecord]] = defaultdict(list)
    for one in record.float:
        groups[one.role or "constant", one.reason].append(one)
    rows = [(role, reason, len(kept), words.size(sum(one.bytes for one in kept))) for (role, reason), kept in groups.items()]
    head = ("role", "why", "tensors", "size")
    return element("section", {}, element("h2", {}, "What stayed as it was"), table(head, rows, 2))


def _again(manifest: Manifest, record: Record) -> Safe:
    commands = [record.command or manifest.provenance.command]
    if record.evaluation is not None:
        commands.append(record.evaluation.command)
    facts = [("source", manifest.provenance.source), ("licence", manifest.provenance.license)]
    facts += [(f"source {name}", digest) for name, digest in sorted(manifest.provenance.source_sha256.items())]
    if record.evaluation is not None:
        facts += [(f"text {one.name}", one.sha256) for one in record.evaluation.texts]
    facts += sorted(record.files.items())
    facts.append(("versions", ", ".join(f"{name} {version}" for name, version in manifest.provenance.versions.items())))
    if record.calibration:
        facts += [(f"calibration {key}", _short(value)) for key, value in record.calibration.items()]
    return element(
        "section",
        {},
        element("h2", {}, "Make and measure it again"),
        element("pre", {}, "\n".join(commands)),
        table(("what", "sha256 or value"), [(name, element("code", {}, value)) for name, value in facts], 2),
    )


def _short(value: object) -> str:
    said = str(value)
    return said if len(said) <= 200 else f"{said[:200]}... ({len(said)} characters in record.json)"


def _details(record: Record) -> Safe | None:
    if not record.matrices:
        return None
    costs = any(one.cost_kl is not None for one in record.matrices)
    rows = [
        (one.name, "+".join(one.roles), f"{one.shape[0]} x {one.shape[1]}", one.bits, one.group or "row", one.activation,
         words.decibels(one.snr_db), words.number(one.output_loss), words.number(one.proxy), f"{one.saturation:.2%}",
         words.size(one.bytes), *((words.small(one.cost_kl),) if costs else ()))
        for one in record.matrices
    ]  # fmt: skip
    head = ["matrix", "role", "shape", "bits", "group", "activations", "SNR", "output loss", "proxy loss", "clipped", "size"]
    head += ["cost, nats"] if costs else []
    explained = (
        "SNR, clipped share and proxy loss are the quantizer's own account. Output loss: of the matrix's products with what the "
        "float model hands to it on the first text, the share that is error; every scheme has it. Proxy loss: the same on the "
        "calibration text, where the solver looked, its vectors counting by their effect on the rest."
    )
    if costs:
        explained += (
            " Cost: nats of KL a token that the float model lost on held-out calibration text with this matrix alone in the form "
            "that the scheme gives it (q and k of a layer together), measured before the budget chose. What was expected of each "
            "form stands in record.json (cost_by_form)."
        )
    inner = (table(head, rows, 2), element("p", {"class": "soft"}, explained), *_layers(record.evaluation), *_state(record))
    return element("details", {}, element("summary", {}, f"All {len(rows)} matrices"), *inner)


def _state(record: Record) -> Sequence[Safe]:
    """Keys and values by layer, where they are kept in integers."""
    if record.kv is None or not record.kv.layers:
        return ()
    rows = [(f"layers.{one.layer}", words.decibels(one.key_snr_db), words.decibels(one.value_snr_db)) for one in record.kv.layers]
    return (escape(table(("layer", f"SNR of keys in {record.kv.dtype}", "of values"), rows)),)


def _layers(found: EvaluationRecord | None) -> Sequence[Safe]:
    if found is None or not found.layers:
        return ()
    rows = [
        (one.name, words.decibels(one.local_snr_db, one.local_cosine), words.number(one.local_cosine),
         words.decibels(one.snr_db, one.cosine), words.number(one.cosine))
        for one in found.layers
    ]  # fmt: skip
    return (escape(table(("layer", "local SNR", "cosine", "accumulated SNR", "cosine"), rows)),)
