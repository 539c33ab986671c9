"""The turns of a conversation, one below the other.

Knows: how a question and an answer look, and how an answer grows. Does not know: where they come from.
"""

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownStream

from tui.shapes import Figures, Turn

ENDINGS = {
    "length": "cut off: the context or the limit of tokens is used up",
    "stopped": "stopped",
    "broken": "broken off",
}


class Question(Static):
    """What the person said, as it was typed."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(text), markup=False)


class Answer(Vertical):
    """What the model said, as Markdown that may still grow, and a line below when it did not end by itself."""

    def __init__(self, turn: Turn | None = None) -> None:
        super().__init__()
        self._turn = turn
        self._stream: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        yield Markdown(self._turn.content if self._turn else None, open_links=False)
        yield Static(classes="ending", markup=False)

    def on_mount(self) -> None:
        if self._turn is not None:
            self.end(self._turn.figures)

    async def write(self, text: str) -> None:
        """Add text. The screen follows within a frame or two, whatever the rate."""
        if self._stream is None:
            self._stream = Markdown.get_stream(self.query_one(Markdown))
        await self._stream.write(text)

    async def close(self, figures: Figures) -> None:
        """No more text comes."""
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        self.end(figures)

    def end(self, figures: Figures | None) -> None:
        """Say how the answer ended, when that is not as usual."""
        ending = ENDINGS.get(figures.finish_reason, "") if figures else ""
        line = self.query_one(".ending", Static)
        line.update(Content(ending))
        line.display = bool(ending)


class Transcript(VerticalScroll):
    """The whole conversation; follows its end until the person scrolls away."""

    def on_mount(self) -> None:
        self.anchor()

    async def show(self, turns: list[Turn]) -> None:
        """Show another conversation."""
        await self.remove_children()
        await self.mount_all(Question(turn.content) if turn.role == "user" else Answer(turn) for turn in turns)
        self.anchor()

    async def add_question(self, text: str) -> Question:
        """One more question."""
        question = Question(text)
        await self.mount(question)
        self.anchor()
        return question

    async def add_answer(self) -> Answer:
        """An answer that has nothing in it yet."""
        answer = Answer()
        await self.mount(answer)
        return answer
