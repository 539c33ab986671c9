"""Where a question is written.

Knows: keys that send and keys that break a line. Does not know: what becomes of the text.
"""

from textual import events
from textual.widgets import TextArea

from tui.messages import Submitted

NEW_LINE = ("ctrl+j", "shift+enter", "alt+enter")


class Composer(TextArea):
    """A few lines of text; Enter sends them, Ctrl+J breaks a line."""

    def __init__(self) -> None:
        super().__init__(placeholder="Ask something. Enter sends, Ctrl+J breaks the line.", show_line_numbers=False, compact=True)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self.text.strip():
                self.post_message(Submitted(self.text.strip()))
        elif event.key in NEW_LINE:
            event.stop()
            event.prevent_default()
            self.insert("\n")

    def take_back(self, text: str) -> None:
        """Put a text that could not be sent before what has been written since."""
        written = self.text
        self.load_text(f"{text}\n{written}" if written.strip() else text)
        self.move_cursor(self.document.end)
