"""Wire types of `/appliance/v1/conversations`.

Knows: the JSON. Does not know: where conversations are kept.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Title = Annotated[str, Field(min_length=1, max_length=200)]


class WireConversations(BaseModel):
    """Part of a request or an answer; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ConversationStart(WireConversations):
    """What a new conversation is made of. An id chosen by the client makes a second try harmless."""

    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{8,64}$")
    title: Title
    model: str = Field(default="", max_length=500)


class ConversationChange(WireConversations):
    """What can be changed of one."""

    title: Title


class MessageBody(WireConversations):
    """A message; the figures are those of an answer, None elsewhere."""

    role: Literal["system", "user", "assistant"]
    content: str
    model: str | None = Field(default=None, max_length=500)
    provider: str | None = Field(default=None, max_length=500)
    finish_reason: str | None = Field(default=None, max_length=100)
    prompt_tokens: int | None = Field(default=None, ge=0, lt=2**63)
    completion_tokens: int | None = Field(default=None, ge=0, lt=2**63)
    tokens_per_second: float | None = Field(default=None, ge=0)


class MessageAppend(MessageBody):
    """A message to keep. `position` counts from 0 and makes a second try harmless; without one it is the next."""

    position: int | None = Field(default=None, ge=0, lt=2**63)


class KeptMessage(MessageBody):
    """A kept message."""

    position: int
    created: float  # Unix seconds


class ConversationHead(WireConversations):
    """A conversation without its messages."""

    id: str
    object: Literal["conversation"] = "conversation"
    title: str
    model: str  # that it was begun with
    created: float  # Unix seconds
    updated: float  # Unix seconds of the last message
    message_count: int


class WholeConversation(ConversationHead):
    """A conversation with its messages, in order."""

    messages: list[KeptMessage]


class ConversationList(WireConversations):
    """The newest conversations first."""

    object: Literal["list"] = "list"
    data: list[ConversationHead]


class ConversationDeleted(WireConversations):
    """It is gone."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
