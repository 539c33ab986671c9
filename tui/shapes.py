"""What the daemon says, as typed objects.

Knows: the fields the screens show, and where they stand in the JSON. Does not know: HTTP or how anything is shown.
Keys that are not shown are ignored here: a newer daemon may say more.
"""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One installed model."""

    id: str
    condition: str  # unloaded, loading, loaded or failed
    provider: str | None  # None until it is loaded
    fallbacks: tuple[str, ...]
    context_length: int  # tokens
    scheme: str
    task: str  # generate or embed


@dataclass(frozen=True)
class Figures:
    """What is known of one answer beside its text. Numbers that nobody measured are None."""

    model: str
    provider: str
    finish_reason: str  # stop, length; stopped = by the person; broken = the daemon or the connection ended it
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_second: float | None = None

    @property
    def context_used(self) -> int | None:
        """Tokens of prompt and answer together."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Turn:
    """One message of a conversation; answers carry their figures."""

    role: str  # user, assistant or system
    content: str
    figures: Figures | None = None


@dataclass(frozen=True)
class Head:
    """A conversation without its messages."""

    id: str
    title: str
    updated: float  # Unix seconds


@dataclass(frozen=True)
class Conversation:
    """A conversation as the daemon keeps it."""

    head: Head
    turns: tuple[Turn, ...]


def to_model(data: Json) -> Model:
    """A card of `GET /v1/models`; the appliance's own fields may lack, on another server."""
    return Model(
        id=data["id"],
        condition=data.get("condition") or "loaded",
        provider=data.get("provider"),
        fallbacks=tuple(data.get("fallbacks") or ()),
        context_length=data.get("context_length") or 0,
        scheme=data.get("scheme") or "",
        task=data.get("task") or "generate",
    )


def to_head(data: Json) -> Head:
    """A conversation of the list."""
    return Head(data["id"], data["title"], data["updated"])


def to_conversation(data: Json) -> Conversation:
    """A whole conversation."""
    return Conversation(to_head(data), tuple(_to_turn(one) for one in data["messages"]))


def _to_turn(data: Json) -> Turn:
    if data["role"] != "assistant" or not data.get("provider"):
        return Turn(data["role"], data["content"])
    figures = Figures(
        data.get("model") or "",
        data["provider"],
        data.get("finish_reason") or "",
        data.get("prompt_tokens"),
        data.get("completion_tokens"),
        data.get("tokens_per_second"),
    )
    return Turn(data["role"], data["content"], figures)


def from_turn(turn: Turn) -> Json:
    """A turn as the daemon takes it to keep."""
    body: Json = {"role": turn.role, "content": turn.content}
    if turn.figures is not None:
        figures = turn.figures
        body |= {
            "model": figures.model,
            "provider": figures.provider,
            "finish_reason": figures.finish_reason,
            "prompt_tokens": figures.prompt_tokens,
            "completion_tokens": figures.completion_tokens,
            "tokens_per_second": figures.tokens_per_second,
        }
    return body
