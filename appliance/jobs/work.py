"""What every kind of step is given.

Knows: which parts a run is made of. Does not know: any kind of step.
"""

from dataclasses import dataclass
from pathlib import Path

from appliance.jobs.draft import Draft
from appliance.jobs.endpoint import ChatModel, Endpoint
from appliance.jobs.grants import Grants
from appliance.jobs.jobfile import JobFile
from appliance.jobs.record import Record
from appliance.knowledge.index import Knowledge


@dataclass(frozen=True)
class Work:
    """One run under way."""

    job: JobFile
    slot: str
    grants: Grants
    draft: Draft
    record: Record
    library: Knowledge
    model: ChatModel
    endpoint: Endpoint
    folder: Path  # of the run

    @property
    def run(self) -> str:
        """The run's id, `job@slot`."""
        return f"{self.job.name}@{self.slot}"
