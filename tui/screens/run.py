"""One run of a job: its trace and its report.

Knows: what is shown of a recorded call. Does not know: HTTP, or what the calls were for.
"""

from datetime import UTC, datetime
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Markdown, Static, TabbedContent, TabPane

from tui.client import Client, Failure
from tui.job_shapes import Run, Step
from tui.screens.dialogs import TextDialog
from tui.widgets.notice import Notice
from tui.widgets.table import Table

LOOK_SECONDS = 2.0  # between two looks while the run is under way
COLUMNS = [("at (UTC)", 8), ("step", 22), ("kind", 5), ("ended", 6), ("time", 8), ("tokens", 6), ("what", 0)]
LONGEST_LINE = 200  # letters of a cell


class RunScreen(Screen[None]):
    """The trace on one page, the report on another.

    Args:
        client: the daemon.
        run: job@slot.
    """

    CSS_PATH = "run.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back"),
        Binding("t", "page('trace')", "Trace"),
        Binding("p", "page('report')", "Report"),
        Binding("ctrl+r", "retry", "Refresh"),
    ]

    def __init__(self, client: Client, run: str) -> None:
        super().__init__()
        self._client = client
        self._run = run
        self._shown: Run | None = None

    def compose(self) -> ComposeResult:
        yield Notice()
        yield Static(id="head", markup=False)
        with TabbedContent(initial="trace"):
            with TabPane("Trace", id="trace"):
                yield Table("", COLUMNS, id="steps")
            with TabPane("Report", id="report"), VerticalScroll(id="page"):
                yield Markdown("", open_links=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#head", Static).update(Content.styled(self._run, "bold"))
        self.query_one("#steps").focus()
        self.set_interval(LOOK_SECONDS, self._look_while_open)
        self._refresh()

    def _look_while_open(self) -> None:
        if self.is_current and self._shown is not None and self._shown.slot.open:
            self._refresh()

    @work(exclusive=True, group="refresh")
    async def _refresh(self) -> None:
        try:
            run = await self._client.run(self._run)
        except Failure as failure:
            self.query_one(Notice).show(failure, "Ctrl+R tries again; Esc goes back")
            return
        self.query_one(Notice).hide()
        before, self._shown = self._shown, run
        self.query_one("#head", Static).update(_head(run))
        self.query_one("#steps", Table).show((str(at), _cells(step)) for at, step in enumerate(run.steps))
        if before is None or before.report_text != run.report_text:
            await self.query_one(Markdown).update(run.report_text or "*There is no report yet.*")

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show a call whole."""
        if self._shown is not None and event.row_key.value is not None:
            self.app.push_screen(TextDialog(_whole(self._shown.steps[int(event.row_key.value)])))

    def action_page(self, name: str) -> None:
        """Turn to a page."""
        self.query_one(TabbedContent).active = name
        self.query_one("#steps" if name == "trace" else "#page").focus()

    def action_retry(self) -> None:
        """Ask for the newest state."""
        self._refresh()


def _head(run: Run) -> Content:
    slot = run.slot
    facts = [slot.state, f"{slot.seconds:.1f} s", f"{slot.tokens} tokens"]
    facts += [part for part in (run.model, run.provider) if part]
    lines = [Content.assemble((slot.run, "bold"), "  ", " · ".join(facts))]
    lines += [Content.styled(text, "$text-warning") for text in (slot.reason,) if text]
    lines += [Content.styled(f"report: {run.report}", "$text-muted")] if run.report else []
    return Content("\n").join(lines)


def _cells(step: Step) -> tuple[str, ...]:
    at = "" if step.started is None else datetime.fromtimestamp(step.started, UTC).strftime("%H:%M:%S")
    what = " ".join((step.error or step.output).split())[:LONGEST_LINE]
    return at, step.name, step.kind, step.outcome, f"{step.seconds:.2f} s", str(step.tokens or ""), what


def _whole(step: Step) -> str:
    """Everything of a call as Markdown. The fences are longer than any run of backticks inside."""
    fence = "`" * (max(_longest_fence(step.inputs), _longest_fence(step.output)) + 3)
    parts = [f"## {step.name}: {step.kind}, {step.outcome}, {step.seconds:.2f} s"]
    if step.error:
        parts.append(f"### Error\n\n{fence}\n{step.error}\n{fence}")
    parts += [f"### Inputs\n\n{fence}json\n{step.inputs}\n{fence}", f"### Output\n\n{fence}\n{step.output}\n{fence}"]
    return "\n\n".join(parts)


def _longest_fence(text: str) -> int:
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    return longest
