"""The model's own chat template: messages to one prompt text.

Knows: OpenAI's message objects and what templates expect of them. Does not know: HTTP, tokens, or how templates are bounded
(`appliance.runtime.template_limits`).
Source: the Hugging Face documentation of chat templates, for the names a template finds; OpenAI's API reference, for messages.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from appliance.bundle.store import Bundle
from appliance.bundle.template_dialect import check_syntax
from appliance.errors import BundleError, RequestError
from appliance.runtime.template_limits import BUDGET, Budget, LimitedEnvironment, LimitExceeded, Namespace, check_size
from appliance.runtime.tokenizer import Tokenizer

SPECIAL_TOKENS = "special_tokens_map.json"
FIX = "build the bundle again"
RESERVED = frozenset({"messages", "tools", "self", "loop", "caller", "varargs", "kwargs"})
PROBE = "a text of three lines:\nthe second\nthe third."


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    Args:
        source: the template's text.
        tokens: special tokens as they are written, by the names templates use ("bos_token", "eos_token", ...).
        where: what the template is, for messages.

    Raises:
        BundleError: it does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str = "chat_template.jinja"):
        check_syntax(source, where, BundleError, FIX)
        self._source = source
        self._tokens = dict(tokens)
        functions = {"raise_exception": _refuse, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": Namespace}
        try:
            self._template = LimitedEnvironment({"tojson": _to_json}, functions).from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as failure:
            raise BundleError(f"{where}: the chat template does not compile: {_line(failure)}", FIX) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for a conversation; it brings its own BOS, so encode it with `bos=False`.

        Args:
            messages: OpenAI's message objects.
            tools: OpenAI's tool objects.
            options: further variables of the template; `add_generation_prompt` is true unless said otherwise.

        Raises:
            RequestError: the template refuses the conversation, cannot show what it holds (an image, tools, tool calls),
                fails, or wants more time or room than a chat template can need.
        """
        options = dict(options or {})
        if taken := sorted(RESERVED.intersection(options)) or [name for name in options if not name.isidentifier()]:
            raise RequestError(f"{taken[0]!r} is no template option", "choose another name", param="chat_template_kwargs")
        if tools and "tools" not in self._source:
            raise RequestError("this model's chat template knows no tools", "leave tools out", param="tools")
        plain = [self._message(message, at) for at, message in enumerate(messages)]
        if self._wants_parts:
            plain = [_in_parts(message) for message in plain]
        return self._run(plain, list(tools) or None, options)

    @property
    def knows_tools(self) -> bool:
        """Whether it shows tools and tool calls in its model's own way."""
        return "tools" in self._source and "tool_calls" in self._source

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows text only when it comes as a list of parts: tried, as no syntax says it."""
        message = {"role": "user", "content": PROBE}
        try:
            if PROBE in self._run([message], None, {}):
                return False
            return PROBE in self._run([_in_parts(message)], None, {})
        except RequestError:
            return False  # a template that wants more than one user's message is asked as most are

    def _run(self, messages: list[dict[str, Any]], tools: list[Mapping[str, Any]] | None, options: Mapping[str, Any]) -> str:
        given: dict[str, Any] = {"add_generation_prompt": True, "documents": None, **self._tokens, **options}
        given |= {"messages": messages, "tools": tools, BUDGET: Budget()}
        try:
            return self._template.render(given)
        except RequestError:
            raise
        except LimitExceeded as failure:
            raise RequestError(str(failure), "shorten the conversation or use another model", param="messages") from None
        except Exception as failure:  # a stranger's program: it may raise anything, and all of it means the same
            raise RequestError(
                f"the model's chat template cannot show this conversation: {_line(failure)}",
                "check the order of roles and what the messages hold",
                param="messages",
            ) from None

    def _message(self, message: Mapping[str, Any], at: int) -> dict[str, Any]:
        """One message as templates expect it: text for content, objects for arguments, a role the template knows."""
        found = dict(message)
        role = found.get("role")
        if not isinstance(role, str):
            raise RequestError(f"message {at} has no role", 'add "role"', param="messages")
        if role == "developer" and "developer" not in self._source:
            found["role"] = "system"
        calls = found.get("tool_calls")
        if not calls:
            found.pop("tool_calls", None)
        elif "tool_calls" not in self._source:
            raise RequestError("this model's chat template knows no tool calls", "leave them out", param="messages")
        else:
            found["tool_calls"] = [_call(call) for call in calls]
        found["content"] = _text(found.get("content"), at)
        if found["content"] is None and not calls:
            found["content"] = ""
        return found


def load_chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The bundle's template; None when its model has none.

    Begin and end tokens that the bundle does not name are written as the tokenizer writes them.

    Raises:
        BundleError: a file is damaged, or the template does not compile.
    """
    name = bundle.manifest.chat_template
    if name is None:
        return None
    path = bundle.file(name)
    try:
        source = path.read_bytes().decode("utf-8")
        tokens = json.loads(bundle.file(SPECIAL_TOKENS).read_bytes()) if SPECIAL_TOKENS in bundle.manifest.files else {}
    except ValueError as failure:
        raise BundleError(f"{path}: the template or its special tokens cannot be read: {failure}", FIX) from None
    if not isinstance(tokens, dict) or not all(isinstance(text, str) for text in tokens.values()):
        raise BundleError(f"{path.with_name(SPECIAL_TOKENS)}: not names and texts of tokens", FIX)
    info = bundle.manifest.tokenizer
    for name, token in (("bos_token", info.bos), ("eos_token", info.eos[0] if info.eos else None)):
        if token is not None:
            tokens.setdefault(name, tokenizer.token_bytes(token).decode("utf-8", "replace"))
    return ChatTemplate(source, tokens, str(path))


def _text(content: object, at: int) -> str | None:
    """Text of a message's content; parts of text are joined by a line end."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"the content of message {at} is neither text nor a list of parts", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                f"message {at} has a part of type {kind!r}; this model takes text only", "send text", param="messages"
            )
        if not isinstance(part.get(key), str):
            raise RequestError(f"message {at} has a part of text without text", f'add "{key}"', param="messages")
        texts.append(part[key])
    return "\n".join(texts)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI sends them as text, templates write them with `tojson`."""
    found = dict(call)
    function = found.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return found  # what the model once wrote badly is shown as it was
        if isinstance(arguments, dict):
            found["function"] = {**function, "arguments": arguments}
    return found


class _Dict:
    """`dict(...)` for templates; an object, as the class would show its insides."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _refuse(message: str) -> None:
    raise RequestError(f"the model's chat template refuses this conversation: {str(message)[:500]}", param="messages")


def _strftime_now(pattern: str) -> str:
    check_size(1000 * len(pattern))
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes, which jinja2's own filter of that name puts in."""
    if separators is not None:
        check_size(100_000 * sum(map(len, separators)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line(failure: BaseException) -> str:
    text = " ".join(str(failure).split())[:300]
    return text or type(failure).__name__
