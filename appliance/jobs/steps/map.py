"""Step `map`: a short summary of each document, every sentence of it tied to a passage.

Knows: one document at a time. Does not know: how passages were found, or whether their quotes still hold.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from appliance.jobs.citations import bind_all, leading
from appliance.jobs.draft import Passage, Section
from appliance.jobs.summary import LONGEST_TEXT, ask
from appliance.jobs.work import Work
from appliance.strict import StrictModel

TOOLS: tuple[str, ...] = ()
INSTEAD = "Nothing the model said could be tied to the document; these are sentences of its own."


class Settings(StrictModel):
    """Keys of the step."""

    kind: Literal["map"]
    prompt: str = Field(
        default="Summarize this text in at most three sentences.", min_length=1, description="Asked per document."
    )
    max_tokens: int = Field(default=160, ge=1, le=8192, description="Length of each answer at most.")


def run(work: Work, settings: Settings, name: str) -> None:
    """One section of claims per document that has passages."""
    for at, document in enumerate(work.draft.ready):
        passages = [passage for passage in work.draft.passages if passage.path == document.path]
        if not passages:
            continue
        title = Path(document.path).name
        result = ask(work, f"{name}.{at}", settings.prompt, f"Text of {title}", _clip(passages), settings.max_tokens)
        if result.error is not None:
            work.draft.failures.append(f"no summary of {title}: {result.error}")
            continue
        claims, dropped = bind_all(str(result.output), passages)
        note = ""
        if not claims:
            claims = leading(passages)
            note = INSTEAD if claims else ""
        work.draft.add(Section(title=title, path=document.path, note=note, claims=claims, dropped=dropped))


def _clip(passages: list[Passage]) -> list[str]:
    """Texts of the passages, as many as fit."""
    texts, left = [], LONGEST_TEXT
    for passage in passages:
        texts.append(passage.text[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    return texts
