"""An engine's events as OpenAI's answer objects: one whole, or a chunk a time.

Knows: the two shapes and their order. Does not know: HTTP or where events come from.
Chunks are put together from prebuilt pieces: building and dumping a model of each takes 20 times as long, on a machine
whose cores the decode threads already fill.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.api.tool_calls import parse_calls
from appliance.api.wire import chat as wire
from appliance.engine.protocol import Delta, Event, Finished, TokenLogprob
from appliance.errors import Unavailable

DONE = b"data: [DONE]\n\n"
# ASCII only: some clients' line splitters take U+2028 and U+0085 inside a string for the end of a line.
_quote = json.encoder.encode_basestring_ascii


@dataclass(frozen=True)
class AnswerHead:
    """What every part of one answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str


class ChunkWriter:
    """Server-sent events of one answer, in order: role, text pieces, finish reason, usage if asked for, [DONE]."""

    def __init__(self, head: AnswerHead, include_usage: bool):
        self._include_usage = include_usage
        start = {"id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model}
        rest = {"service_tier": "default", "system_fingerprint": head.fingerprint}
        shared = json.dumps({**start, **rest})[:-1]
        self._start = f'data: {shared}, "choices": [{{"index": 0, "delta": '
        self._usage = f'data: {shared}, "choices": [], "usage": '
        self._end = "}]" + (', "usage": null' if include_usage else "") + "}\n\n"

    def open(self) -> bytes:
        """The first chunk: who speaks."""
        return self._chunk('{"role": "assistant", "content": "", "refusal": null}', "null", "null").encode()

    def write(self, events: Sequence[Event]) -> bytes:
        """The chunks of some events, in one piece. `Unavailable` when the answer was cancelled on this side."""
        out = []
        for event in events:
            if isinstance(event, Delta):
                logprobs = "null" if not event.logprobs else to_logprobs(event.logprobs).model_dump_json()
                out.append(self._chunk(f'{{"content": {_quote(event.text)}}}', logprobs, "null"))
            elif isinstance(event, Finished):
                out.append(self._chunk("{}", "null", f'"{finish_reason(event)}"'))
                if self._include_usage:
                    out.append(f"{self._usage}{to_usage(event).model_dump_json()}}}\n\n")
                out.append(DONE.decode())
        return "".join(out).encode()

    def _chunk(self, delta: str, logprobs: str, reason: str) -> str:
        return f'{self._start}{delta}, "logprobs": {logprobs}, "finish_reason": {reason}{self._end}'


def error_event(body: dict[str, object]) -> bytes:
    """A failure in the middle of a stream; the stream ends after it, without [DONE]."""
    return f"data: {json.dumps(body)}\n\n".encode()


def to_completion(head: AnswerHead, events: Sequence[Event], logprobs: bool, tools: bool = False) -> wire.ChatCompletion:
    """The whole answer; with `tools`, the tool calls in it are taken out of its text.

    `Unavailable` when it was cancelled on this side.
    """
    finished = next(event for event in events if isinstance(event, Finished))
    deltas = [event for event in events if isinstance(event, Delta)]
    tokens = [token for delta in deltas for token in delta.logprobs]
    text = "".join(delta.text for delta in deltas)
    text, calls = parse_calls(text) if tools else (text, [])
    reason = finish_reason(finished)
    choice = wire.Choice(
        message=wire.ToolCallMessage(content=text or None, tool_calls=calls) if calls else wire.AnswerMessage(content=text),
        logprobs=to_logprobs(tokens) if logprobs else None,
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
    )
    return wire.ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[choice],
        usage=to_usage(finished),
        system_fingerprint=head.fingerprint,
    )


def finish_reason(event: Finished) -> wire.FinishReason:
    """OpenAI's word; a cancelled answer has none, so it is an error."""
    if event.reason == "cancelled":
        raise Unavailable("the answer was stopped by the appliance", "ask again")
    return event.reason


def to_usage(event: Finished) -> wire.Usage:
    """Token counts."""
    return wire.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        total_tokens=event.prompt_tokens + event.completion_tokens,
        prompt_tokens_details=wire.PromptTokensDetails(cached_tokens=event.cached_tokens),
    )


def to_logprobs(tokens: Sequence[TokenLogprob]) -> wire.Logprobs:
    """Log probabilities of the answer's tokens."""
    return wire.Logprobs(
        content=[
            wire.TokenLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=list(token.bytes),
                top_logprobs=[
                    wire.TopLogprob(token=other.text, logprob=other.logprob, bytes=list(other.bytes)) for other in token.top
                ],
            )
            for token in tokens
        ]
    )
