"""The list of kept conversations.

Knows: titles and their order. Does not know: the daemon.
"""

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.messages import ConversationPicked, DeleteWanted, RenameWanted
from tui.shapes import Head


class ConversationList(OptionList):
    """Kept conversations, newest first; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "rename", "Rename"),
        Binding("d,delete", "delete", "Delete"),
    ]

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._heads: list[Head] = []
        self.border_title = "Conversations"

    def show(self, heads: list[Head], open_id: str | None) -> None:
        """Show these, with the open one marked; it is highlighted too, unless the person is choosing."""
        before = self._highlighted() if self.has_focus else None
        self._heads = heads
        self.clear_options()
        self.add_options(Option(Content(f"{'▌' if head.id == open_id else ' '}{head.title}"), id=head.id) for head in heads)
        wanted = before.id if before else open_id
        if heads:
            self.highlighted = next((at for at, head in enumerate(heads) if head.id == wanted), 0)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_id is not None:
            self.post_message(ConversationPicked(event.option_id))

    def action_rename(self) -> None:
        """Ask for another title of the highlighted conversation."""
        if head := self._highlighted():
            self.post_message(RenameWanted(head.id, head.title))

    def action_delete(self) -> None:
        """Ask whether the highlighted conversation is to go."""
        if head := self._highlighted():
            self.post_message(DeleteWanted(head.id, head.title))

    def _highlighted(self) -> Head | None:
        at = self.highlighted
        return self._heads[at] if at is not None and at < len(self._heads) else None
