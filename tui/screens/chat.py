"""The chat: conversations, the open one, the composer, the line of figures.

Knows: what follows from each key and each answer of the daemon. Does not know: HTTP; no method waits for the network but
in a worker.

    Submitted --> _ask --Opened--> Piece, Piece, ... Closed --> kept by the daemon
                     \\--failed before it began--> the question goes back into the composer
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from tui.client import BrokenOff, Client, Closed, Failure, NoSuchRoute, Opened, Piece, Unreachable
from tui.messages import ConversationPicked, DeleteWanted, RenameWanted, Submitted
from tui.meter import Meter
from tui.screens.dialogs import ConfirmDialog, ModelDialog, TitleDialog
from tui.shapes import Figures, Model, Turn
from tui.talk import Talk
from tui.widgets.composer import Composer
from tui.widgets.conversations import ConversationList
from tui.widgets.notice import Notice
from tui.widgets.status import StatusLine
from tui.widgets.transcript import Answer, Transcript

RETRY_SECONDS = 3.0
WIND_UP_SECONDS = 5.0  # for a daemon that does not take the last answer; then it is lost
SHOW_SECONDS = 0.25  # between two looks at the speed of an answer that is coming
TRY_AGAIN = "Ctrl+R tries again now; it is tried every few seconds as well."


@dataclass
class Coming:
    """An answer under way."""

    text: str = ""
    opened: Opened | None = None
    closed: Closed | None = None
    shown: float = 0.0


class ChatScreen(Screen[None]):
    """One conversation at a time, beside the list of all.

    Args:
        client: the daemon.
        clock: seconds, for the speed of answers.
    """

    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 (typed by Textual)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+n", "new", "New"),
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+l", "list", "List"),
        Binding("ctrl+o", "model", "Model"),
        Binding("ctrl+t", "app.jobs", "Jobs"),
        Binding("ctrl+r", "retry", "Retry", show=False),
    ]

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._client = client
        self._clock = clock
        self._talk = Talk()
        self._models: list[Model] = []
        self._model = ""
        self._away = False  # the daemon did not answer the last time
        self._sticks = False  # what is told stays until the next question
        self._asking = False
        self._answering: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="desk"):
            yield ConversationList()
            with Vertical(id="talk"):
                yield Transcript()
                yield Notice()
                yield Composer()
        yield StatusLine()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Composer).focus()
        self.set_interval(RETRY_SECONDS, self._retry_while_away)
        self._refresh()

    # The daemon and what it has

    def _retry_while_away(self) -> None:
        waiting = any(model.condition == "loading" for model in self._models)
        if self._away or waiting:
            self._refresh()

    def action_retry(self) -> None:
        """Look for the daemon and ask for everything anew."""
        self._sticks = False
        self._refresh()

    @work(exclusive=True, group="refresh")
    async def _refresh(self) -> None:
        """Models, conversations, and what could not be kept while the daemon was away."""
        try:
            self._models = [model for model in await self._client.models() if model.task == "generate"]
            if self._model not in [model.id for model in self._models]:
                self._model = await self._client.default_model()
            await self._keep()
            self.query_one(ConversationList).show(await self._client.conversations(), self._talk.id)
        except Failure as failure:
            self._tell(failure)
        else:
            self._back()
        self._show_facts()

    def _tell(self, failure: Failure, sticks: bool = False) -> None:
        """Say what failed: the daemon's absence until it is back, a refused question until the next one."""
        self._away = isinstance(failure, Unreachable | BrokenOff)
        self._sticks = sticks and not self._away
        self.query_one(Notice).show(failure, TRY_AGAIN if self._away else "")
        self._show_facts()

    def _back(self) -> None:
        """A call has worked."""
        self._away = False
        if not self._sticks:
            self.query_one(Notice).hide()

    def _card(self) -> Model | None:
        return next((model for model in self._models if model.id == self._model), None)

    def _show_facts(self, **changes: object) -> None:
        """Bring the line of figures up to date with the model, and with what has changed beside it."""
        line, card = self.query_one(StatusLine), self._card()
        facts = replace(line.facts, model=self._model, context_length=card.context_length if card else None)
        if card is not None and card.provider:
            facts = replace(facts, provider=card.provider, fallback="; ".join(card.fallbacks))
        elif card is not None:
            facts = replace(facts, provider=f"model {card.condition}", fallback="")
        if not self._asking:
            facts = replace(facts, busy="daemon away" if self._away else "")
        line.facts = replace(facts, **changes)  # type: ignore[arg-type]

    async def _keep(self) -> None:
        """Hand the open conversation over; a daemon that keeps none is told of once and is no obstacle."""
        try:
            await self._talk.keep(self._client, self._model)
        except NoSuchRoute:
            self.notify("this daemon keeps no conversations; update it to have them kept", severity="warning")

    # Asking

    def on_submitted(self, event: Submitted) -> None:
        """Send a question off, unless one is under way; then it stays where it is."""
        if self._busy():
            return
        self._asking, self._sticks = True, False
        self.query_one(Composer).clear()
        self._ask(event.text)

    def _busy(self) -> bool:
        if self._asking:
            self.notify("an answer is coming; Esc stops it", severity="warning")
        return self._asking

    @work(exclusive=True, group="answer")
    async def _ask(self, text: str) -> None:
        """One question and its answer, whatever becomes of it."""
        transcript = self.query_one(Transcript)
        talk, meter, coming = self._talk, Meter(self._clock), Coming()
        question = await transcript.add_question(text)
        answer = await transcript.add_answer()
        turns = [*talk.turns, Turn("user", text)]
        self._answering = asyncio.create_task(self._receive(turns, answer, meter, coming))
        self._show_facts(busy="waiting", tokens_per_second=None)
        failure: Failure | None = None
        try:
            await asyncio.wait([self._answering])
        finally:
            task, self._answering = self._answering, None
            task.cancel()
        if not task.cancelled() and (problem := task.exception()) is not None:
            if not isinstance(problem, Failure):
                raise problem
            failure = problem
        if coming.opened is None:
            await question.remove()
            await answer.remove()
            self.query_one(Composer).take_back(text)
        else:
            figures = _figures(self._model, coming, meter, failure)
            await answer.close(figures)
            talk.turns += [Turn("user", text), Turn("assistant", coming.text, figures)]
            self._show_answer(figures)
        self._asking = False
        if failure is not None:
            self._tell(failure, sticks=True)
        else:
            self._refresh()

    async def _receive(self, turns: list[Turn], answer: Answer, meter: Meter, coming: Coming) -> None:
        """Show the answer as it comes. Cancelling this closes the connection, which frees the model."""
        async with contextlib.aclosing(self._client.answer(self._model, turns)) as events:
            async for event in events:
                match event:
                    case Opened():
                        coming.opened = event
                        self._show_facts(provider=event.provider, fallback=event.fallback, busy="answering")
                    case Piece():
                        meter.tick()
                        coming.text += event.text
                        await answer.write(event.text)
                        if meter.last - coming.shown >= SHOW_SECONDS:
                            coming.shown = meter.last
                            self._show_facts(tokens_per_second=meter.rate(), busy="answering")
                    case Closed():
                        coming.closed = event

    def _show_answer(self, figures: Figures) -> None:
        rate, used = figures.tokens_per_second, figures.context_used
        self._show_facts(provider=figures.provider, tokens_per_second=rate, context_used=used)

    def action_stop(self) -> None:
        """Stop the answer that is coming; without one, go back to the composer."""
        if self._answering is not None:
            self._answering.cancel()
        else:
            self.query_one(Composer).focus()

    async def wind_up(self) -> None:
        """Before the end: stop the answer and see it kept."""
        self.action_stop()
        with contextlib.suppress(TimeoutError, Failure):
            async with asyncio.timeout(WIND_UP_SECONDS):
                while self._asking:
                    await asyncio.sleep(0.01)
                await self._talk.keep(self._client, self._model)

    # Conversations and models

    def action_new(self) -> None:
        """Begin another conversation; what is in the composer stays there."""
        if not self._busy():
            self._show_talk(Talk())

    def action_list(self) -> None:
        """To the list of conversations; from there back to the composer."""
        heads = self.query_one(ConversationList)
        self._show_list(not heads.has_focus)

    def _show_list(self, wanted: bool) -> None:
        """On a narrow terminal the list lies over the talk while it is used."""
        heads = self.query_one(ConversationList)
        heads.set_class(wanted, "-wanted")
        (heads if wanted else self.query_one(Composer)).focus()

    @work(exclusive=True, group="show")
    async def _show_talk(self, talk: Talk) -> None:
        self._talk, self._sticks = talk, False
        await self.query_one(Transcript).show(talk.turns)
        last = next((turn.figures for turn in reversed(talk.turns) if turn.figures), None)
        self._show_facts(context_used=last.context_used if last else 0, tokens_per_second=None)
        self._show_list(False)
        self._refresh()

    def on_conversation_picked(self, event: ConversationPicked) -> None:
        """Open a kept conversation."""
        if not self._busy():
            self._open(event.id)

    @work(exclusive=True, group="open")
    async def _open(self, id: str) -> None:
        try:
            talk = Talk(await self._client.conversation(id))
        except Failure as failure:
            self._tell(failure)
        else:
            self._show_talk(talk)

    @work(exclusive=True, group="dialog")
    async def on_rename_wanted(self, event: RenameWanted) -> None:
        """Ask for the title, then have it changed."""
        title = await self.app.push_screen_wait(TitleDialog(event.title))
        if title:
            await self._change(self._client.rename_conversation(event.id, title))

    @work(exclusive=True, group="dialog")
    async def on_delete_wanted(self, event: DeleteWanted) -> None:
        """Ask, then have it forgotten."""
        if await self.app.push_screen_wait(ConfirmDialog(f"Delete “{event.title}” for ever?")):
            gone = await self._change(self._client.delete_conversation(event.id))
            if gone and event.id == self._talk.id and not self._asking:
                self._show_talk(Talk())

    async def _change(self, call: Awaitable[None]) -> bool:
        """Whether the daemon did it."""
        try:
            await call
        except Failure as failure:
            self._tell(failure)
            return False
        self._refresh()
        return True

    @work(exclusive=True, group="dialog")
    async def action_model(self) -> None:
        """Choose which model answers from now on."""
        if not self._models:
            self.notify("no model is known; get one: appliance pull --list, or Ctrl+R asks again", severity="warning")
            return
        chosen = await self.app.push_screen_wait(ModelDialog(self._models, self._model))
        self._model = chosen or self._model
        self._show_facts()

    def palette(self) -> Iterable[SystemCommand]:
        """This screen's commands, by name."""
        yield SystemCommand("New conversation", "Begin another conversation", self.action_new)
        yield SystemCommand("Stop", "Stop the answer that is coming", self.action_stop)
        yield SystemCommand("Conversations", "To the list of conversations", self.action_list)
        yield SystemCommand("Model", "Choose which model answers", self.action_model)
        yield SystemCommand("Retry", "Look for the daemon again", self.action_retry)


def _figures(model: str, coming: Coming, meter: Meter, failure: Failure | None) -> Figures:
    """What can be said of an answer that ended, or was ended."""
    assert coming.opened is not None
    provider, closed = coming.opened.provider, coming.closed
    if closed is None:
        return Figures(model, provider, "broken" if failure else "stopped", tokens_per_second=meter.rate())
    counted = closed.completion_tokens
    return Figures(closed.model, provider, closed.finish_reason, closed.prompt_tokens, counted, meter.rate(counted))
