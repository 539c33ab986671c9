"""Small questions that stand over a screen: which model, which title, really delete, what the keys do.

Knows: one question each, and hands back its answer. Does not know: what follows from it.
"""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Markdown, OptionList, Static
from textual.widgets.option_list import Option

from tui.shapes import Model

KEYS = (
    ("Enter", "send the question; on a list, open what is marked"),
    ("Ctrl+J", "break the line in a question"),
    ("Esc", "stop the answer that is coming; close what is open"),
    ("Ctrl+N", "new conversation"),
    ("Ctrl+L", "to the list of conversations, and back"),
    ("R, D", "on the list: rename, delete"),
    ("Ctrl+O", "choose the model"),
    ("Ctrl+T", "jobs, their ledger and their runs"),
    ("Ctrl+R", "look for the daemon again; ask for the newest state"),
    ("Ctrl+P", "every command, by name; themes too"),
    ("Tab, Shift+Tab", "to the next part of the screen, and back"),
    ("PgUp, PgDn", "scroll the part you are in"),
    ("Ctrl+Q", "quit"),
)
KEPT = "Conversations are kept by the daemon. What you have typed is never lost: a question that could not be sent comes back."


class Dialog(ModalScreen[str | None]):
    """A box over the screen below; Esc closes it without an answer."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Close")]


class HelpDialog(Dialog):
    """What the keys do."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Static("Keys", classes="title")
            yield Static(Content("\n").join(Content.assemble((f"{key:16}", "bold"), does) for key, does in KEYS))
            yield Static(f"\n{KEPT}")
        yield Footer()


class TextDialog(Dialog):
    """A Markdown text to be read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Markdown(self._text, open_links=False)
        yield Footer()


class ModelDialog(Dialog):
    """Which of the installed models is to answer; hands back its id."""

    def __init__(self, models: list[Model], chosen: str) -> None:
        super().__init__()
        self._models = models
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Which model answers", classes="title")
            yield OptionList(*[Option(self._line(model), id=model.id) for model in self._models], markup=False)
        yield Footer()

    def on_mount(self) -> None:
        ids = [model.id for model in self._models]
        self.query_one(OptionList).highlighted = ids.index(self._chosen) if self._chosen in ids else 0

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def _line(self, model: Model) -> Content:
        parts = (model.scheme, f"{model.context_length} tokens", model.condition, model.provider)
        facts = " · ".join(part for part in parts if part)
        return Content.assemble((model.id, "bold"), "\n", (facts, "$text-muted"))


class TitleDialog(Dialog):
    """Another title; hands it back."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("New title", classes="title")
            yield Input(self._title, select_on_focus=False)
        yield Footer()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class ConfirmDialog(Dialog):
    """Really? Hands back "yes" or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "dismiss('yes')", "Yes"), Binding("n", "dismiss(None)", "No")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(Content(self._question), markup=False)
        yield Footer()
