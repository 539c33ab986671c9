"""Wire types of `/v1/chat/completions`.

Knows: the names, types and ranges that OpenAI's reference gives each field, and the extensions that local servers share
(top_k, min_p, repetition_penalty). Does not know: which of them a model can honour (`appliance.api.chat_request`).
Source: OpenAI API reference, "Create chat completion" and "The chat completion chunk object".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

FinishReason = Literal["stop", "length", "tool_calls"]

TEXT_TAG, PARTS_TAG = "<text>", "<parts>"
"""Tags of the two forms of a message's content; the angle brackets keep them out of the field's name in an error."""


class WireRequest(BaseModel):
    """Part of a request: no conversion from text to numbers, unknown fields are kept and do nothing."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)


class ContentPart(WireRequest):
    """One piece of a message: text, or a kind of input that a model may not take."""

    type: str
    text: str | None = None


def _content_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return TEXT_TAG
    return PARTS_TAG if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag(TEXT_TAG)] | Annotated[list[ContentPart], Tag(PARTS_TAG)],
    Discriminator(_content_tag, custom_error_type="content_type", custom_error_message="input should be text or a list of parts"),
]


class Message(WireRequest):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(WireRequest):
    """Only with `stream`."""

    include_usage: bool | None = None


class ChatRequest(WireRequest):
    """Body of a request. None = not given."""

    model: str
    messages: list[Message] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Typed loosely and checked by hand, which names the field better than a union of shapes would.
    tools: Any = None
    tool_choice: Any = None
    # Honoured by no model yet; refused by name when they ask for something.
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class WireAnswer(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PromptTokensDetails(WireAnswer):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(WireAnswer):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(WireAnswer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TopLogprob(WireAnswer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(WireAnswer):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(WireAnswer):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    annotations: list[Any] = Field(default_factory=list)


class ToolCallFunction(WireAnswer):
    name: str
    arguments: str  # a JSON object, as text


class ToolCall(WireAnswer):
    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ToolCallMessage(WireAnswer):
    """An answer that calls tools; the text beside the calls is None when there is none."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[Any] = Field(default_factory=list)
    tool_calls: list[ToolCall]


class Choice(WireAnswer):
    index: int = 0
    message: AnswerMessage | ToolCallMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(WireAnswer):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    service_tier: Literal["default"] = "default"
    system_fingerprint: str


class Delta(WireAnswer):
    """What a chunk adds; a field that is absent is not sent."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChunkChoice(WireAnswer):
    index: int = 0
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(WireAnswer):
    """One event of a streamed answer. `usage` is absent unless the request asked for it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    service_tier: Literal["default"] = "default"
    system_fingerprint: str
    usage: Usage | None = None
