"""Jobs and the ledger of their slots.

Knows: what is shown of a job and a slot, and what the keys do. Does not know: HTTP, or how a run goes.
"""

from collections.abc import Iterable
from typing import ClassVar

from textual import work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from tui.client import Client, Failure, NoSuchRoute
from tui.job_shapes import Job, Jobs, Slot
from tui.screens.run import RunScreen
from tui.widgets.notice import Notice
from tui.widgets.table import Table

LOOK_SECONDS = 2.0  # between two looks while a run is under way
MARKS = {"done": "✓", "failed": "✗", "running": "▶", "queued": "·", "skipped": "-", "missed": "!"}
NONE_YET = "there is no job yet; docs/jobs.md tells how to write one"
TOO_OLD = Failure("this daemon does no jobs", "one that does: update the appliance, then appliance serve")


class JobsScreen(Screen[None]):
    """Jobs above, the ledger below.

    Args:
        client: the daemon.
    """

    CSS_PATH = "jobs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+t", "leave", "Back", key_display="esc"),
        Binding("r", "run_now", "Run now"),
        Binding("ctrl+r", "retry", "Refresh"),
    ]

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._running = False

    def compose(self) -> ComposeResult:
        yield Notice()
        yield Table("Jobs", [("job", 12), ("schedule", 0), ("next due", 12), ("last", 0)], id="jobs")
        yield Static(id="problems", markup=False)
        columns = [("slot", 12), ("job", 12), ("state", 9), ("time", 7), ("tokens", 6), ("reason", 0)]
        yield Table("Ledger", columns, id="ledger")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#jobs").focus()
        self.query_one("#problems").display = False
        self.set_interval(LOOK_SECONDS, self._look_while_running)
        self._refresh()

    def on_screen_resume(self) -> None:
        self._refresh()

    def _look_while_running(self) -> None:
        if self._running and self.is_current:
            self._refresh()

    @work(exclusive=True, group="refresh")
    async def _refresh(self) -> None:
        try:
            jobs, ledger = await self._client.jobs(), await self._client.ledger()
        except NoSuchRoute:
            self.query_one(Notice).show(TOO_OLD)
        except Failure as failure:
            self.query_one(Notice).show(failure, "Ctrl+R tries again")
        else:
            self.query_one(Notice).hide()
            self._show(jobs, ledger)

    def _show(self, jobs: Jobs, ledger: list[Slot]) -> None:
        self._running = any(slot.open for slot in ledger)
        self.query_one("#jobs", Table).show((job.name, _job_cells(job)) for job in jobs.jobs)
        self.query_one("#ledger", Table).show((slot.run, _slot_cells(slot)) for slot in ledger)
        problems = self.query_one("#problems", Static)
        lines = jobs.problems or (() if jobs.jobs else (NONE_YET,))
        problems.display = bool(lines)
        problems.update(Content("\n".join(lines)))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the run of a slot; of a job, that of its last one."""
        key = event.row_key.value
        if key is None:
            return
        if event.data_table.id == "ledger":
            self.app.push_screen(RunScreen(self._client, key))
        else:
            self._open_last(key)

    def _open_last(self, job: str) -> None:
        ledger = self.query_one("#ledger", Table)
        last = next((key.value for key in ledger.rows if key.value and key.value.startswith(f"{job}@")), None)
        if last is None:
            self.notify(f"{job} has not run yet; R runs it now")
        else:
            self.app.push_screen(RunScreen(self._client, last))

    @work(exclusive=True, group="run")
    async def action_run_now(self) -> None:
        """Have the marked job run now."""
        job = self.query_one("#jobs", Table).marked
        if job is None:
            self.notify(NONE_YET, severity="warning")
            return
        try:
            slot, new = await self._client.start_run(job)
        except Failure as failure:
            self.query_one(Notice).show(failure, "Ctrl+R tries again")
            return
        self.notify(f"{slot.run} is {slot.state}" if new else f"{slot.run} was asked for already: {slot.state}")
        self._refresh()

    def action_retry(self) -> None:
        """Ask for the newest state."""
        self._refresh()

    def action_leave(self) -> None:
        """Back to the chat."""
        self.app.pop_screen()

    def palette(self) -> Iterable[SystemCommand]:
        """This screen's commands, by name."""
        yield SystemCommand("Run now", "Have the marked job run now", self.action_run_now)
        yield SystemCommand("Refresh", "Ask for the newest state", self.action_retry)
        yield SystemCommand("Back to the chat", "Leave the jobs", self.action_leave)


def _job_cells(job: Job) -> tuple[str, ...]:
    due = _moment(job.next) if job.enabled else "off"
    last = f"{_state(job.last)} {_moment(job.last.slot)}" if job.last else "never"
    return job.name, job.schedule or "when asked", due or "-", last


def _slot_cells(slot: Slot) -> tuple[str, ...]:
    return _moment(slot.slot), slot.job, _state(slot), f"{slot.seconds:.1f} s", str(slot.tokens), slot.reason


def _state(slot: Slot) -> str:
    return f"{MARKS.get(slot.state, '?')} {slot.state}"


def _moment(slot: str) -> str:
    """Without the year: a narrow terminal has no room for it, and a run's own screen shows the whole slot."""
    return slot.replace("T", " ")[5:]
