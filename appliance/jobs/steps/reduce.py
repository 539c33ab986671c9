"""Step `reduce`: one summary over all documents, from what is claimed of each.

Knows: the claims so far. Does not know: documents; its own sentences are tied to the same passages again.
"""

from typing import Literal

from pydantic import Field

from appliance.jobs.citations import bind_all
from appliance.jobs.draft import Passage, Section
from appliance.jobs.summary import LONGEST_TEXT, ask
from appliance.jobs.work import Work
from appliance.strict import StrictModel

TOOLS: tuple[str, ...] = ()
INSTEAD = "Nothing the model said over all documents could be tied to them; these are the first sentences on each."
MOST_INSTEAD = 10  # claims that stand in for a summary which nothing supports


class Settings(StrictModel):
    """Keys of the step."""

    kind: Literal["reduce"]
    title: str = Field(default="Overall", description="Heading of the summary.")
    prompt: str = Field(default="Summarize these notes in at most four sentences.", min_length=1, description="Asked once.")
    max_tokens: int = Field(default=240, ge=1, le=8192, description="Length of the answer at most.")


def run(work: Work, settings: Settings, name: str) -> None:
    """One section of claims before the others."""
    claims = work.draft.claims
    if not claims:
        return
    notes, left = [], LONGEST_TEXT
    for claim in claims:
        left -= len(claim.sentence) + 1
        if left < 0:
            break
        notes.append(claim.sentence)
    result = ask(work, name, settings.prompt, "Notes", notes, settings.max_tokens)
    if result.error is not None:
        work.draft.failures.append(f"no summary over all documents: {result.error}")
        return
    # The quotes that the notes already carry come first: they are short, and known to support what was said.
    quoted = [Passage(path=claim.path, anchor=claim.anchor, text=claim.quote) for claim in claims]
    found, dropped = bind_all(str(result.output), [*quoted, *work.draft.passages])
    note = ""
    if not found:  # then the documents speak for themselves
        note = INSTEAD
        found = tuple(section.claims[0] for section in work.draft.sections if section.claims)[:MOST_INSTEAD]
    work.draft.add(Section(title=settings.title, note=note, claims=found, dropped=dropped), first=True)
