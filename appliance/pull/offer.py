"""What a source offers before anything is taken: a name, a licence, a size, and how to get the files.

Knows: the shape of an offer and of a source. Does not know: any particular source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Wishes:
    """What the person asked for besides the source itself."""

    include: tuple[str, ...] = ()
    """Shell patterns; where given, only weight files whose name fits one are taken."""
    endpoint: str | None = None
    """Base URL of a mirror of the hub; None = the hub's own."""


@dataclass(frozen=True)
class Offer:
    """A checkpoint that can be had."""

    name: str
    """Folder that it gets, unless the person names another."""
    origin: str
    """The source in full, with version or revision: the same words get the same files again."""
    license: str
    """Short name, or "unknown"."""
    license_at: str
    """Where the licence can be read; empty when nobody says."""
    size: int | None
    """Bytes to get; None = not known beforehand."""
    fetch: Callable[[Path, Path], None]
    """`fetch(folder, work)`: put the files into `folder`, verified; `work` keeps what a second try can go on from."""
    exact: bool = True
    """Whether `size` is to the byte."""


class Source(Protocol):
    """A module of `appliance.pull.sources`."""

    ORDER: int
    """Sources are asked in this order; the first one that matches takes it."""
    FORM: str
    """How a person writes it, with a word on what it is."""

    def matches(self, text: str) -> bool:
        """Whether `text` names something of this kind; looks at no network."""

    def look(self, text: str, wishes: Wishes) -> Offer:
        """Find out what is offered. Raises `CheckpointError`, `NotFound` or `Unavailable`."""
