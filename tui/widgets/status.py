"""The line that says what answers and how fast.

Knows: how figures are written. Does not know: where they come from.
"""

from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static


@dataclass(frozen=True)
class Facts:
    """What the line shows; what is not known is left out of it."""

    model: str = ""
    provider: str = ""  # as the daemon read it back from the session
    fallback: str = ""  # what ran elsewhere and why
    tokens_per_second: float | None = None
    context_used: int | None = 0  # tokens
    context_length: int | None = None  # tokens
    busy: str = ""  # what is going on now


class StatusLine(Static):
    """Model, provider really used, tokens a second, context used."""

    facts: reactive[Facts] = reactive(Facts())

    def render(self) -> Content:
        """The facts, joined; the first ones matter most on a narrow terminal."""
        facts = self.facts
        parts = [Content.styled(facts.busy, "italic $text-accent")] if facts.busy else []
        parts += [Content.styled(facts.model or "no model", "bold"), Content(facts.provider)]
        if facts.fallback:
            parts.append(Content.styled(f"partly elsewhere: {facts.fallback}", "$text-warning"))
        if facts.tokens_per_second is not None:
            parts.append(Content(f"{facts.tokens_per_second:.1f} tokens/s"))
        if facts.context_length:
            used, length = facts.context_used, facts.context_length
            share = "" if used is None else f"{used} ({used / length:.0%}) "
            parts.append(Content(f"context {share}of {length}"))
        return Content(" · ").join([part for part in parts if part])
