"""Step `search`: bring the index up to date with the granted folders and find passages in them.

Knows: which passages a run goes on with. Does not know: how search works.
"""

from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from appliance.jobs.draft import Passage
from appliance.jobs.indexing import index_folders
from appliance.jobs.record import Outcome
from appliance.jobs.toolbox import use
from appliance.jobs.work import Work
from appliance.strict import StrictModel

TOOLS = ("knowledge_search",)
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
    index_folders(work, name)
    found = use(work, f"{name}.find", TOOLS[0], {"query": settings.query, "limit": settings.limit})
    if found.error is not None:
        work.draft.failures.append(f"nothing was searched: {found.error}")
        return
    readable = {document.path for document in work.draft.ready}
    passages = [Passage.model_validate(hit) for hit in found.output if hit["path"] in readable]
    work.draft.passages += [passage for passage in passages if passage not in work.draft.passages]  # of an earlier search
    if settings.documents == "found":
        return
    hit_paths = {passage.path for passage in work.draft.passages}
    for at, document in enumerate(work.draft.ready):
        if document.path not in hit_paths:
            opened = work.record.call(
                f"{name}.open.{at}", "code", {"path": document.path}, partial(_open, work, Path(document.path))
            )
            work.draft.passages += [Passage.model_validate(one) for one in opened.output or ()]


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
