"""A message that stays until it no longer holds.

Knows: how a failure is shown. Does not know: when one is over.
"""

from textual.content import Content
from textual.widgets import Static

from tui.client import Failure


class Notice(Static):
    """What is wrong, what to do about it, and which key goes on; hidden while nothing is."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.display = False

    def show(self, failure: Failure, key: str = "") -> None:
        """Show a failure, with what a key does about it."""
        lines = [Content.styled(failure.what, "bold"), Content(failure.fix)]
        if key:
            lines.append(Content.styled(key, "$text-muted"))
        self.update(Content("\n").join([line for line in lines if line]))
        self.display = True

    def hide(self) -> None:
        """It is over."""
        self.display = False
