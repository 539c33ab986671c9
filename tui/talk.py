"""The conversation on the screen, and how much of it the daemon keeps already.

Knows: turns and their order. Does not know: Textual, or how an answer comes.
"""

import asyncio
import secrets

from tui.client import Client
from tui.shapes import Conversation, Turn

TITLE_LETTERS = 48


class Talk:
    """Turns in order. What the daemon could not take while it was away is kept here and handed over by the next `keep`."""

    def __init__(self, conversation: Conversation | None = None):
        self.id = conversation.head.id if conversation else f"conv_{secrets.token_hex(12)}"
        """Chosen here, so that a beginning which the daemon may or may not have heard of can be told again."""
        self.turns: list[Turn] = list(conversation.turns) if conversation else []
        self._begun = conversation is not None
        self._kept = len(self.turns)
        self._keeping = asyncio.Lock()

    async def keep(self, client: Client, model: str) -> None:
        """Hand over what the daemon does not have yet; `Failure` leaves the rest for the next time."""
        async with self._keeping:
            while self._kept < len(self.turns):
                if not self._begun:
                    await client.create_conversation(self.id, title_of(self.turns[0].content), model)
                    self._begun = True
                await client.append_turn(self.id, self._kept, self.turns[self._kept])
                self._kept += 1


def title_of(text: str) -> str:
    """The first words of a text, as many as a title takes."""
    words = " ".join(text.split())
    if len(words) <= TITLE_LETTERS:
        return words
    cut = words[:TITLE_LETTERS].rsplit(" ", 1)[0]
    return f"{cut}…"
