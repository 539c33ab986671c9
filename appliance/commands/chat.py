"""`appliance chat`: ask once, pipe text in, or talk.

Knows: words, pipes, terminals, what is printed where (the answer to stdout, everything else to stderr).
Does not know: who answers (`appliance.answerer`).
"""

import contextlib
import dataclasses
import difflib
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from appliance.config import load_config
from appliance.errors import BadInput, ModelNotFound

if TYPE_CHECKING:
    from appliance.answerer import Answerer, Outcome, Question

EXAMPLE = 'appliance chat "What is the capital of France?"'


def chat(
    words: list[str] = typer.Argument(
        None, metavar="[MODEL] [PROMPT]...", help="A model's id, if the first word is one; then the prompt."
    ),
    model: str = typer.Option("", "--model", "-m", help="Model to ask; then every word is prompt."),
    system: str = typer.Option("", "--system", "-s", help="What the model is told before the conversation."),
    max_tokens: int | None = typer.Option(None, "--max-tokens", min=1, help="Longest answer, tokens."),
    temperature: float | None = typer.Option(
        None, "--temperature", "-t", min=0.0, max=2.0, help="0 = always the likeliest token."
    ),
    seed: int | None = typer.Option(None, "--seed", min=0, help="Same seed and prompt, same answer."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of streaming."),
    local: bool = typer.Option(False, "--local", help="Do not look for the daemon; run the model in this process."),
    config: Path | None = typer.Option(None, "--config", help="Settings file instead of the usual one."),
) -> int:
    """Ask a model; piped text becomes, or is added to, the prompt. On a terminal without a prompt: a conversation."""
    from appliance.answerer import Question, find_answerer  # httpx takes 0.1 s to import

    answerer = find_answerer(load_config(config), local=local)
    with contextlib.closing(answerer):
        model, words = split_model(answerer, model, words or [])
        prompt = "\n\n".join(text for text in (" ".join(words), _piped()) if text)
        opening = ({"role": "system", "content": system},) if system else ()
        question = Question(model, opening, max_tokens, temperature, seed)
        if not prompt.strip() and (as_json or not sys.stdin.isatty()):
            raise BadInput("there is nothing to ask", f"give a prompt: {EXAMPLE}")
        if answerer.where == "in-process" and not local:
            answerer.check(model)  # a missing model is told alone, not after a word on where it would run
            _tell("no daemon answers, so the model runs in this process; start one: appliance serve")
        if prompt.strip():
            _ask_once(answerer, _with(question, "user", prompt), as_json)
        else:
            _converse(answerer, question)
    return 0


def split_model(answerer: "Answerer", model: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Which model is meant and which words are prompt.

    The first word is a model when there is one of that name. One that is almost a model's name, or alone and shaped like
    an id, is a slip of the pen and not a prompt: `ModelNotFound`.
    """
    rest = list(words)
    if model or not rest:
        return model, rest
    first = rest[0]
    if not first or any(letter.isspace() for letter in first) or first in (".", ".."):
        return "", rest
    if answerer.knows(first):
        return first, rest[1:]
    installed = answerer.models()
    near = difflib.get_close_matches(first.lower(), [name.lower() for name in installed], n=1, cutoff=0.75)
    if near:
        names = ", ".join(installed)
        raise ModelNotFound(
            f'there is no model "{first}" here', f"installed: {names}; if it is prompt, put it in quotes with the rest"
        )
    return "", rest


def _piped() -> str:
    """What was piped or redirected in; nothing when standard input is a terminal or /dev/null.

    Other kinds, such as the sockets that service managers hand over, may stay open for ever and are not read.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as failure:
        raise BadInput(f"standard input is not UTF-8 text (byte {failure.start})", "convert it first") from None


def _ask_once(answerer: "Answerer", question: "Question", as_json: bool) -> None:
    text, outcome = _stream(answerer, question, show=not as_json)
    if as_json:
        print(json.dumps(_as_object(text, outcome, answerer.where)))
    else:
        _tell(_figures(outcome))


def _converse(answerer: "Answerer", question: "Question") -> None:
    """Turns until the end of input. Ctrl-C stops an answer, and at the prompt the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for `input`)
    _tell("Ctrl-C stops an answer, Ctrl-D ends the conversation")
    while True:
        try:
            said = input("> ")
        except EOFError:
            _tell("")
            return
        if not said.strip():
            continue
        question = _with(question, "user", said)
        try:
            text, outcome = _stream(answerer, question, show=True)
        except KeyboardInterrupt:
            _tell("\n(stopped)")
            question = dataclasses.replace(question, messages=question.messages[:-1])
            continue
        _tell(_figures(outcome))
        question = _with(question, "assistant", text)


def _stream(answerer: "Answerer", question: "Question", show: bool) -> tuple[str, "Outcome"]:
    """The whole text and the outcome, printed as it comes when `show`. Cancels the answer when interrupted."""
    pieces: list[str] = []
    with contextlib.closing(answerer.answer(question)) as events:
        for event in events:
            if isinstance(event, str):
                pieces.append(event)
                if show:
                    sys.stdout.write(event)
                    sys.stdout.flush()
            else:
                if show:
                    print(flush=True)
                return "".join(pieces), event
    raise AssertionError("an answer always ends with its outcome")


def _with(question: "Question", role: str, text: str) -> "Question":
    return dataclasses.replace(question, messages=(*question.messages, {"role": role, "content": text}))


def _as_object(text: str, outcome: "Outcome", where: str) -> dict[str, Any]:
    return {
        "model": outcome.model,
        "answer": text,
        "finish_reason": outcome.finish_reason,
        "usage": {
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
            "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        },
        "seconds_to_first_token": round(outcome.first_token, 4),
        "tokens_per_second": round(outcome.tokens_per_second, 2),
        "provider": outcome.provider,
        "where": where,
    }


def _figures(outcome: "Outcome") -> str:
    cut = ", cut at the limit" if outcome.finish_reason == "length" else ""
    return (
        f"[{outcome.model}: {outcome.completion_tokens} tokens, {outcome.tokens_per_second:.1f} tokens/s, "
        f"first after {outcome.first_token * 1000:.0f} ms, {outcome.provider}{cut}]"
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
