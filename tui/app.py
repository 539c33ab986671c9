"""The terminal application: its screens, its keys everywhere, its end.

Knows: what holds on every screen. Does not know: what is on one, or how the daemon is asked.
"""

import time
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol, runtime_checkable

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from tui.client import Client
from tui.screens.chat import ChatScreen
from tui.screens.dialogs import HelpDialog
from tui.screens.jobs import JobsScreen


@runtime_checkable
class HasPalette(Protocol):
    """A screen with commands of its own."""

    def palette(self) -> Iterable[SystemCommand]:
        """What the command palette offers on it."""


class ApplianceApp(App[None]):
    """A client of one daemon.

    Args:
        client: the daemon; closed at the end.
        clock: seconds, for the speed of answers.
    """

    TITLE = "appliance"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help"),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._client = client
        self._chat = ChatScreen(client, clock)

    def on_mount(self) -> None:
        self.push_screen(self._chat)

    def action_help(self) -> None:
        """Show what the keys do."""
        if not isinstance(self.screen, HelpDialog):
            self.push_screen(HelpDialog())

    def action_jobs(self) -> None:
        """To the jobs."""
        if self.screen is self._chat:
            self.push_screen(JobsScreen(self._client))

    async def action_quit(self) -> None:
        """Stop what is going on, keep what has come, and end."""
        await self._chat.wind_up()
        self.exit()

    async def on_unmount(self) -> None:
        await self._client.close()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The commands of the screen, then those of every screen."""
        if isinstance(screen, HasPalette):
            yield from screen.palette()
        yield SystemCommand("Help", "What the keys do", self.action_help)
        if screen is self._chat:
            yield SystemCommand("Jobs", "Jobs, their ledger and their runs", self.action_jobs)
        yield from super().get_system_commands(screen)
