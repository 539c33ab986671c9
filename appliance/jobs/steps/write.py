"""Step `write`: the report as it stands, into the output folder.

Knows: when. Does not know: how a report looks (`appliance.jobs.report`) or is kept (`appliance.jobs.publish`).
A run that has no such step writes its report all the same, at its end.
"""

from typing import Literal

from appliance.jobs.publish import publish
from appliance.jobs.work import Work
from appliance.strict import StrictModel

TOOLS: tuple[str, ...] = ()


class Settings(StrictModel):
    """Keys of the step."""

    kind: Literal["write"]


def run(work: Work, settings: Settings, name: str) -> None:
    """Check if that has not been done, and write."""
    publish(work, name)
