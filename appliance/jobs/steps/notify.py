"""Step `notify`: tell a program on the local network how the run stands.

Knows: the message. Does not know: HTTP, or how a message is kept from being told twice (`appliance.jobs.toolbox`).
"""

from typing import Literal

from pydantic import Field

from appliance.jobs.toolbox import use
from appliance.jobs.work import Work
from appliance.strict import StrictModel

TOOLS = ("notify",)


class Settings(StrictModel):
    """Keys of the step."""

    kind: Literal["notify"]
    url: str = Field(min_length=1, description="Address to post to; grants.urls must name it too.")
    text: str = Field(default="", description="Message; empty = the run's id.")


def run(work: Work, settings: Settings, name: str) -> None:
    """Post once; a refusal or failure is told in the report."""
    use(work, name, TOOLS[0], {"url": settings.url, "text": settings.text or work.run})
