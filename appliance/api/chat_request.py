"""From a checked wire request to what an engine is asked, or to a refusal that names the field.

Knows: which of OpenAI's fields an engine can honour, which do nothing here on purpose, and which would give a wrong answer
if they were ignored. Does not know: HTTP or answers.
"""

import difflib
from typing import Any

from appliance.api.tool_calls import check_calls, check_tools
from appliance.api.wire.chat import ChatRequest, ContentPart, Message
from appliance.engine.protocol import ChatPrompt, GenerateRequest, Priority, Sampling
from appliance.errors import RequestError, UnsupportedField

MAX_STOPS = 64
LEAST_TOP_P = 1e-6
"""Stands for OpenAI's top_p=0, which keeps the likeliest token alone; engines take values above 0 only."""

# Field -> the values that ask for nothing beyond plain text. Anything else is refused, for to ignore it would mislead.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # What other servers call constrained output.
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
}


def to_engine(request: ChatRequest, id: str, priority: Priority = "interactive") -> GenerateRequest:
    """What the engine is asked; `RequestError` or `UnsupportedField` with the field in `param`."""
    _refuse_unsupported(request)
    _refuse_contradictions(request)
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings", f"give at most {MAX_STOPS}", param="stop")
    if "" in stops:
        raise RequestError("stop holds an empty string", "leave it out", param="stop")
    return GenerateRequest(
        id=id,
        prompt=ChatPrompt(
            tuple(_message(message, f"messages[{at}]", request.model) for at, message in enumerate(request.messages)),
            check_tools(request.tools, request.tool_choice, bool(request.stream)),
        ),
        sampling=_sampling(request),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=stops,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        priority=priority,
    )


def _refuse_unsupported(request: ChatRequest) -> None:
    extra = request.model_extra or {}
    for name, harmless in HARMLESS.items():
        value = extra.get(name) if name in extra else getattr(request, name, None)
        if value is not None and value not in harmless:
            raise UnsupportedField(f"{name} is not supported here", f"leave {name} out", param=name)
    for name in sorted(extra.keys() - HARMLESS.keys()):
        # Clients send many fields that do nothing here; one that is nearly a known one was meant to do something.
        near = difflib.get_close_matches(name, ChatRequest.model_fields, n=1, cutoff=0.85)
        if near:
            raise RequestError(f'unknown field "{name}"', f'did you mean "{near[0]}"?', param=name)
    if (request.n or 1) > 1:
        raise UnsupportedField(f"n={request.n} is not supported: there is one answer a request", "send it n times", param="n")


def _refuse_contradictions(request: ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream", "set stream to true", param="stream_options")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs", "set logprobs to true", param="top_logprobs")
    short, long = request.max_tokens, request.max_completion_tokens
    if short is not None and long is not None and short != long:
        raise RequestError(
            f"max_tokens={short} and max_completion_tokens={long} contradict each other",
            "give max_completion_tokens alone",
            param="max_tokens",
        )


def _sampling(request: ChatRequest) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_k=None if request.top_k is None else max(request.top_k, 0),  # -1 is another way to write off
        top_p=LEAST_TOP_P if request.top_p == 0 else request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=tuple((_token_id(key), bias) for key, bias in (request.logit_bias or {}).items()),
        seed=None if request.seed is None else request.seed % 2**64,  # generators take no negative seed
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise RequestError(
            f'logit_bias names "{key}", which is no token id', "use ids from the model's tokenizer", param="logit_bias"
        )
    return int(key)


def _message(message: Message, where: str, model: str) -> dict[str, Any]:
    """OpenAI's message object as a chat template takes it: the content is one text."""
    if message.role == "function":
        raise UnsupportedField('the role "function" is not supported here', 'use "tool"', param=f"{where}.role")
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where} calls tools", "only an assistant's turn can", param=f"{where}.tool_calls")
    calls = check_calls(message.tool_calls or (), f"{where}.tool_calls")
    if message.content is None and not calls:
        raise RequestError(f"{where} has no content", "give it text", param=f"{where}.content")
    # Templates know "system" only; "developer" is OpenAI's newer word for it.
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": None}
    if message.content is not None:
        whole = [message.content] if isinstance(message.content, str) else _texts(message.content, f"{where}.content", model)
        plain["content"] = "".join(whole)
    if calls:
        plain["tool_calls"] = calls
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id or ""
    return plain if message.name is None else {**plain, "name": message.name}


def _texts(parts: list[ContentPart], where: str, model: str) -> list[str]:
    texts = []
    for at, part in enumerate(parts):
        place = f"{where}[{at}]"
        if part.type in ("image_url", "input_image", "image"):
            raise UnsupportedField(f'{place} is an image and model "{model}" has no vision', "send text only", param=place)
        if part.type in ("input_audio", "audio"):
            raise UnsupportedField(f'{place} is sound and model "{model}" cannot hear', "send text only", param=place)
        if part.type != "text":
            raise UnsupportedField(f'{place} has the type "{part.type}"', "send text parts only", param=f"{place}.type")
        if part.text is None:
            raise RequestError(f"{place} has no text", "give it text", param=f"{place}.text")
        texts.append(part.text)
    return texts
