"""Bringing the knowledge index up to date for a run.

Knows: which documents a run may read, why some cannot be. Does not know: readers, search.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

from appliance.errors import Unavailable
from appliance.jobs.draft import Document
from appliance.jobs.record import Outcome, Parked
from appliance.jobs.work import Work
from appliance.knowledge.records import IndexReport

WAIT_SECONDS = 0.5


def index_folders(work: Work, name: str) -> None:
    """Index every granted folder, once a run, and put what was found into the draft's documents, each once."""
    if work.draft.indexed:
        return
    work.draft.indexed = True
    for at, folder in enumerate(work.grants.folders):
        result = work.record.call(f"{name}.index.{at}", "code", {"folder": str(folder)}, partial(_index, work, folder))
        found = [Document.model_validate(file) for file in result.output or ()]
        if result.error is not None:
            found.append(Document(path=str(folder), state="unread", reason=result.error))
        known = {document.path for document in work.draft.documents}
        work.draft.documents += [document for document in found if document.path not in known]


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
