"""Step `check`: hold every citation and quote against its source as it is on disk now.

Knows: the draft's claims. Does not know: how one is judged (`appliance.jobs.citations`).
A run that has no such step is checked all the same, before its report is written.
"""

import functools
from pathlib import Path
from typing import Literal

from appliance.jobs.citations import check
from appliance.jobs.record import Outcome
from appliance.jobs.work import Work
from appliance.knowledge.document import Document
from appliance.strict import StrictModel

TOOLS: tuple[str, ...] = ()


class Settings(StrictModel):
    """Keys of the step."""

    kind: Literal["check"]


def run(work: Work, settings: Settings, name: str) -> None:
    """Put its problem, if any, into each claim."""
    claims = work.draft.claims

    @functools.cache  # a document is read anew once a check, not once a claim
    def document(path: str) -> Document:
        return work.library.document(Path(path))

    def locate(path: str, anchor: str) -> str:
        return document(path).at(anchor)

    inputs = {"claims": [claim.model_dump(exclude={"problem"}) for claim in claims]}
    result = work.record.call(name, "code", inputs, lambda: Outcome([check(claim, locate) for claim in claims]))
    problems = iter(result.output if result.error is None else [f"the check failed: {result.error}"] * len(claims))
    work.draft.sections = [
        section.model_copy(
            update={"claims": tuple(claim.model_copy(update={"problem": next(problems)}) for claim in section.claims)}
        )
        for section in work.draft.sections
    ]
    work.draft.checked = True
