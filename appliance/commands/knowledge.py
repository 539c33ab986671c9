"""`appliance knowledge`: index folders of documents, search them, see what is in the index.

Knows: the three actions and how their results are shown. Does not know: documents or vectors (`appliance.knowledge`).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from appliance.errors import BadInput

if TYPE_CHECKING:
    from appliance.knowledge.index import Knowledge
    from appliance.knowledge.records import Hit, IndexReport

EXAMPLE = "appliance knowledge index ~/Documents"
SHOWN = 240  # characters of a passage


Action = Literal["index", "search", "status"]
Mode = Literal["auto", "lexical", "vector", "hybrid"]


def knowledge(
    action: Annotated[Action, typer.Argument(help="index: read a folder; search: find passages; status: list files.")],
    what: Annotated[str, typer.Argument(help="index, status: a folder; search: what to look for.")] = "",
    folder: Annotated[list[Path] | None, typer.Option(help="search: only below this folder; may be given several times.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="search: passages at most.")] = 8,
    mode: Annotated[Mode, typer.Option(help="search: by words, by vectors or both.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Index folders of documents and search them."""
    from appliance.config import load_config
    from appliance.engine.pool import ModelPool, open_onnx
    from appliance.library import open_library

    config = load_config()
    engine = config.engine
    pool = ModelPool(config.paths.models, open_onnx(engine.target, engine.threads, config.paths.targets))
    library = open_library(config.paths.state, pool)
    try:
        if action == "index":
            return _index(library, _needed(what, "a folder", "index ~/Documents"), as_json)
        if action == "search":
            query = _needed(what, "what to look for", 'search "warranty period"')
            hits = library.search(query, limit, folder, mode)
            _emit({"query": query, "hits": [asdict(hit) for hit in hits]}) if as_json else _show_hits(hits)
            return 0
        _status(library, Path(what) if what else None, as_json)
        return 0
    finally:
        pool.close()


def _needed(what: str, name: str, example: str) -> str:
    if not what.strip():
        raise BadInput(f"{name} is missing", f"for example: appliance knowledge {example}")
    return what


def _index(library: "Knowledge", folder: str, as_json: bool) -> int:
    from contextlib import ExitStack

    from appliance.progress import Advance, bar

    with ExitStack() as stack:
        shown: list[tuple[Advance, int]] = []  # the bar, begun when the number of files is known, and how far it is

        def progress(done: int, total: int, name: str) -> None:
            advance, before = shown.pop() if shown else (stack.enter_context(bar(f"Indexing {folder}", total)), 0)
            advance(done - before)
            shown.append((advance, done))

        report = library.index(Path(folder), progress)
    if as_json:
        _emit(asdict(report))
    else:
        _show_report(report)
    return 2 if report.problem else 0


def _show_report(report: "IndexReport") -> None:
    if report.problem:
        print(report.problem)
        return
    ready = len(report.files) - len(report.failed)
    counts = f"{report.added} new, {report.changed} changed, {report.removed} gone, {report.unchanged} unchanged"
    print(f"{report.folder}: {ready} of {len(report.files)} files can be searched ({counts})")
    for one in report.failed:
        print(f"  {one.condition}: {one.path}: {one.reason}")
    if report.vectors:
        print(f"  some passages are found by their words alone: {report.vectors}")


def _show_hits(hits: list["Hit"]) -> None:
    if not hits:
        print("nothing found")
    for hit in hits:
        text = " ".join(hit.text.split())
        place = f", {hit.anchor}" if hit.anchor else ""
        print(f"{hit.path}{place}  ({' and '.join(hit.rankers)}, {hit.score:.4f})")
        print(f"  {text[:SHOWN]}{'...' if len(text) > SHOWN else ''}")


def _status(library: "Knowledge", folder: Path | None, as_json: bool) -> None:
    files, folders = library.status(folder), library.folders()
    if as_json:
        _emit(
            {"embedder": library.embedder, "folders": [asdict(one) for one in folders], "files": [asdict(one) for one in files]}
        )
        return
    print(f"embedding model: {library.embedder or 'none, search is by words alone'}")
    for folder_status in folders:
        print(f"{folder_status.path}: {folder_status.problem or 'indexed ' + folder_status.indexed}")
    for one in files:
        reason = f": {one.reason}" if one.reason else f", {one.chunks} passages, {one.embedded} with vectors"
        print(f"  {one.condition}: {one.path}{reason}")


def _emit(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str))
