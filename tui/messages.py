"""Everything that widgets tell their screen.

Knows: what can happen. Does not know: who says it or what follows.
"""

from dataclasses import dataclass

from textual.message import Message


@dataclass
class Submitted(Message):
    """A question was sent off from the composer."""

    text: str


@dataclass
class ConversationPicked(Message):
    """A conversation of the list is to be opened."""

    id: str


@dataclass
class RenameWanted(Message):
    """A conversation of the list is to get another title."""

    id: str
    title: str


@dataclass
class DeleteWanted(Message):
    """A conversation of the list is to be forgotten."""

    id: str
    title: str
