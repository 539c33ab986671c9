"""Step `search`: bring the index up to date with the granted folders and find passages in them.

Knows: which documents there are, why some cannot be read. Does not know: how search works.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from appliance.errors import Unavailable
from appliance.jobs.draft import Document, Passage
from appliance.jobs.record import Outcome, Parked
from appliance.jobs.toolbox import use
from appliance.jobs.work import Work
from appliance.knowledge.records import IndexReport
from appliance.strict import StrictModel

TOOLS = ("knowledge_search",)
WAIT_SECONDS = 0.5
OPENING = 3  # sections of a document that the search did not hit


class Settings(StrictModel):
    """Keys of the step."""

    kind: Literal["search"]
    query: str = Field(min_length=1, description="What to look for.")
    limit: int = Field(default=24, ge=1, le=50, description="Passages at most, over all documents.")
    documents: Literal["all", "found"] = Field(
        default="all", description="all: a document without a hit is read from its beginning; found: it is left out."
    )


def run(work: Work, settings: Settings, name: str) -> None:
    """Fill the draft's documents and passages."""
    for at, folder in enumerate(work.grants.folders):
        result = work.record.call(f"{name}.index.{at}", "code", {"folder": str(folder)}, partial(_index, work, folder))
        if result.error is not None:
            work.draft.documents.append(Document(path=str(folder), state="unread", reason=result.error))
        work.draft.documents += [Document.model_validate(file) for file in result.output or ()]
    found = use(work, f"{name}.find", TOOLS[0], {"query": settings.query, "limit": settings.limit})
    if found.error is not None:
        work.draft.failures.append(f"nothing was searched: {found.error}")
        return
    readable = {document.path for document in work.draft.ready}
    work.draft.passages += [Passage.model_validate(hit) for hit in found.output if hit["path"] in readable]
    if settings.documents == "found":
        return
    hit_paths = {passage.path for passage in work.draft.passages}
    for at, document in enumerate(work.draft.ready):
        if document.path not in hit_paths:
            opened = work.record.call(
                f"{name}.open.{at}", "code", {"path": document.path}, partial(_open, work, Path(document.path))
            )
            work.draft.passages += [Passage.model_validate(one) for one in opened.output or ()]


def _index(work: Work, folder: Path) -> Outcome:
    """Bring the index up to date with a folder; gives its documents by path."""
    report = _update(work, folder)
    if report.problem:
        return Outcome([_unread(folder, report.problem)])
    documents = []
    for file in report.files:
        if file.condition == "ready":
            documents.append(Document(path=str(file.path), state="ready", sha256=file.sha256).model_dump())
        else:
            reason = f"{file.condition}: {file.reason}" if file.reason else file.condition
            documents.append(_unread(file.path, reason))
    return Outcome(documents)


def _update(work: Work, folder: Path) -> IndexReport:
    """Index the folder; while somebody else does that, wait."""
    end = time.monotonic() + work.record.left
    while True:
        try:
            return work.library.index(folder)
        except Unavailable:
            if work.record.stopping():
                raise Parked from None
            if time.monotonic() > end:
                raise
        time.sleep(WAIT_SECONDS)


def _unread(path: Path, reason: str) -> dict[str, Any]:
    return Document(path=str(path), state="unread", reason=reason).model_dump()


def _open(work: Work, path: Path) -> Outcome:
    """A document's first sections."""
    document = work.library.document(path)
    sections = [section for section in document.sections if document.text[section.start : section.end].strip()]
    return Outcome(
        [
            {"path": str(path), "anchor": section.anchor, "text": document.text[section.start : section.end].strip()}
            for section in sections[:OPENING]
        ]
    )
