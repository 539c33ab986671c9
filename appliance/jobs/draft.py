"""What a run has so far: documents, passages, claims, refusals.

Knows: the shapes. Does not know: where they come from or how they are shown. Everything here is rebuilt, after a restart, from
the recorded results of the steps, so nothing in it may come from anywhere else.
"""

from dataclasses import dataclass, field
from typing import Literal

from appliance.strict import StrictModel

DocumentState = Literal["ready", "unread"]


class Passage(StrictModel):
    """Text of a document as it was when it was found, with the place it can be found again at."""

    path: str
    anchor: str  # as `Library.locate` takes it: page, heading path or line range
    text: str


class Document(StrictModel):
    """A file the run looked at."""

    path: str
    state: DocumentState
    reason: str = ""  # why it is unread
    sha256: str = ""


class Claim(StrictModel):
    """One sentence of the report, tied to its source."""

    sentence: str
    path: str
    anchor: str
    quote: str  # verbatim from the source
    problem: str | None = None  # after the check: why it does not hold


class Section(StrictModel):
    """A heading of the report with what is claimed under it."""

    title: str
    path: str = ""  # "" = over all documents
    note: str = ""  # what a reader must know of the claims
    claims: tuple[Claim, ...] = ()
    dropped: int = 0  # sentences of the model that nothing in the source supports


class Refusal(StrictModel):
    """A tool call that was not allowed, or that failed."""

    tool: str
    reason: str
    denied: bool = True


@dataclass
class Draft:
    """The run's growing result; one thread alone changes it."""

    passages: list[Passage] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    text: str = ""  # an agent's own words, beyond what is claimed in sections
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # reasons the run cannot be done
    indexed: bool = False
    checked: bool = False
    published: str = ""  # the report as it was last written

    def add(self, section: Section, *, first: bool = False) -> None:
        """Put a section in, after the others or before them. What a check found before says nothing of it."""
        self.sections.insert(0 if first else len(self.sections), section)
        self.checked = False

    @property
    def claims(self) -> list[Claim]:
        """Every claim of every section."""
        return [claim for section in self.sections for claim in section.claims]

    @property
    def unread(self) -> list[Document]:
        """Documents and folders that could not be read."""
        return [document for document in self.documents if document.state == "unread"]

    @property
    def ready(self) -> list[Document]:
        """Documents that could."""
        return [document for document in self.documents if document.state == "ready"]
