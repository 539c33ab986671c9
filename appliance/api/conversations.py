"""`/appliance/v1/conversations`: conversations kept for clients that come back.

Knows: the routes. Does not know: how they are stored (`store.conversations`); nothing here asks a model.
"""

from dataclasses import asdict

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from appliance.api.wire.conversations import (
    ConversationChange,
    ConversationDeleted,
    ConversationHead,
    ConversationList,
    ConversationStart,
    KeptMessage,
    MessageAppend,
    WholeConversation,
)
from appliance.store.conversations import Conversation, Conversations, Head, Message, NewMessage

LIST = "/appliance/v1/conversations"
ONE = f"{LIST}/{{id}}"


def conversations_router(kept: Conversations) -> APIRouter:
    """The routes over what is kept."""
    router = APIRouter()

    @router.get(LIST)
    async def list_conversations(limit: int = Query(default=1000, ge=1, le=10000)) -> ConversationList:
        """The newest conversations, newest first."""
        return ConversationList(data=[_head(one) for one in await run_in_threadpool(kept.heads, limit)])

    @router.post(LIST)
    async def create_conversation(body: ConversationStart) -> ConversationHead:
        """Begin one."""
        return _head(await run_in_threadpool(kept.create, body.title, body.model, body.id))

    @router.get(ONE)
    async def retrieve_conversation(id: str) -> WholeConversation:
        """One with its messages."""
        return _whole(await run_in_threadpool(kept.get, id))

    @router.patch(ONE)
    async def change_conversation(id: str, body: ConversationChange) -> ConversationHead:
        """Give it another title."""
        return _head(await run_in_threadpool(kept.rename, id, body.title))

    @router.delete(ONE)
    async def delete_conversation(id: str) -> ConversationDeleted:
        """Forget it with its messages."""
        await run_in_threadpool(kept.delete, id)
        return ConversationDeleted(id=id)

    @router.post(f"{ONE}/messages")
    async def append_message(id: str, body: MessageAppend) -> KeptMessage:
        """Keep one more message of it."""
        said = NewMessage(**body.model_dump(exclude={"position"}))
        return _message(await run_in_threadpool(kept.append, id, said, body.position))

    return router


def _head(head: Head) -> ConversationHead:
    return ConversationHead(
        id=head.id, title=head.title, model=head.model, created=head.created, updated=head.updated, message_count=head.messages
    )


def _whole(conversation: Conversation) -> WholeConversation:
    messages = [_message(one) for one in conversation.messages]
    return WholeConversation(**_head(conversation.head).model_dump(), messages=messages)


def _message(message: Message) -> KeptMessage:
    return KeptMessage(position=message.position, created=message.created, **asdict(message.said))
