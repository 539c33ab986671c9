"""The onnx engine: one bundle, one decoder, one worker thread.

Knows: how a request becomes a task and a step becomes an event. Does not know: graphs, providers, HTTP.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from appliance.bundle.generation import GenerationDefaults
from appliance.bundle.store import Bundle
from appliance.engine.answer import Answer, Counts
from appliance.engine.answer_stream import AnswerStream
from appliance.engine.protocol import (
    ChatPrompt,
    EngineStats,
    GenerateRequest,
    Sampling,
    Started,
    TextPrompt,
)
from appliance.engine.worker import Worker
from appliance.errors import BundleError, RequestError, Unavailable
from appliance.runtime.decoder import Decoder, open_decoder
from appliance.runtime.detokenizer import Detokenizer
from appliance.runtime.generate import Task, generate, plan
from appliance.runtime.sampling import Choice
from appliance.runtime.stop_strings import StopStrings
from appliance.runtime.tokenizer import Tokenizer, load_tokenizer
from appliance.runtime.tool_text import has_tools, write_tools
from appliance.strict import read

Number = TypeVar("Number", int, float)


class Template(Protocol):
    """What the engine needs of a chat template."""

    @property
    def knows_tools(self) -> bool: ...

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], options: dict[str, Any]) -> str: ...


@dataclass(frozen=True, slots=True)
class OpenModel:
    """Everything of a bundle that answering takes."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    template: Template | None
    defaults: GenerationDefaults


def open_model(bundle: Bundle, target: str, threads: int, targets: Path | None = None) -> OpenModel:
    """Open a bundle's graphs, tokenizer, template and defaults. `BundleError` or `DeviceError` when one of them fails."""
    from appliance.runtime.chat_template import load_chat_template

    tokenizer = load_tokenizer(bundle)
    template = load_chat_template(bundle, tokenizer)
    defaults = load_defaults(bundle)
    return OpenModel(bundle.manifest.name, open_decoder(bundle, target, threads, targets=targets), tokenizer, template, defaults)


def load_defaults(bundle: Bundle) -> GenerationDefaults:
    """What `generation.json` says; nothing at all when the bundle has none."""
    if bundle.manifest.generation is None:
        return GenerationDefaults()
    path = bundle.file(bundle.manifest.generation)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as failure:
        raise BundleError(f"{path}: not valid JSON: {failure}", "build the bundle again") from None
    return read(GenerationDefaults, data, str(path), BundleError)


class OnnxEngine:
    """`appliance.engine.protocol.Engine` over onnxruntime.

    Args:
        bundle: an opened bundle.
        target: whose graphs to run.
        threads: processor threads of one step; 0 = one for each physical core.
        targets: folder with more target files.
        most_waiting: requests that may wait; one more is refused.
        open_with: opens the model in another way; for tests.
    """

    def __init__(
        self,
        bundle: Bundle | None,
        *,
        target: str,
        threads: int = 0,
        targets: Path | None = None,
        most_waiting: int = 64,
        open_with: Callable[[], OpenModel] | None = None,
    ):
        self._open_with = open_with or functools.partial(open_model, cast(Bundle, bundle), target, threads, targets)
        self._most_waiting = most_waiting
        self._model: OpenModel | None = None
        self._worker: Worker | None = None
        self._counts = Counts()
        self._lock = threading.Lock()

    def load(self) -> None:
        with self._lock:
            if self._model is None:
                self._model = self._open_with()
                self._worker = Worker(f"engine {self._model.name}", self._most_waiting)

    def unload(self) -> None:
        with self._lock:
            model, worker = self._model, self._worker
            self._model = self._worker = None
            if worker is not None:
                for work in worker.stop():
                    work.cancel_unstarted()
            if model is not None:
                model.decoder.close()

    def stream(self, request: GenerateRequest) -> AnswerStream:
        model, worker = self._loaded()
        stops = StopStrings(request.stop)
        task = task_of(request, model)
        steps = generate(model.decoder, Detokenizer(model.tokenizer), stops, task, lambda: answer.stream.cancelled)
        answer = Answer(request.priority, task, steps, model.tokenizer, self._counts, lambda: worker.cancel(answer))
        answer.stream.put(Started(len(task.prompt), model.decoder.placement.provider))
        worker.submit(answer)
        return answer.stream

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        raise RequestError("this model makes no embeddings, it generates text", "name an embedding model", param="model")

    def stats(self) -> EngineStats:
        model, worker = self._loaded()
        placement = model.decoder.placement
        return EngineStats(
            model=model.name,
            provider=placement.provider,
            fallbacks=placement.fallbacks,
            context_length=model.decoder.context,
            waiting=worker.waiting,
            running=worker.running,
            steps=self._counts.steps,
            prompt_tokens=self._counts.prompt_tokens,
            completion_tokens=self._counts.completion_tokens,
            ticks=worker.ticks,
            tokens_per_second=self._counts.tokens_per_second,
        )

    def _loaded(self) -> tuple[OpenModel, Worker]:
        model, worker = self._model, self._worker
        if model is None or worker is None:
            raise Unavailable("the model is not loaded", "load it first")
        return model, worker


def task_of(request: GenerateRequest, model: OpenModel) -> Task:
    """What the decoder is to do for a request; every refusal is raised here."""
    return plan(
        prompt_ids(request, model),
        choice_of(request.sampling, model.defaults),
        context=model.decoder.context,
        vocab_size=min(model.tokenizer.vocab_size, model.decoder.vocab_size),
        max_tokens=request.max_tokens,
        stop_tokens=frozenset() if request.ignore_eos else frozenset((*model.defaults.stop_token_ids, *model.tokenizer.info.eos)),
        logprobs=request.logprobs,
    )


def prompt_ids(request: GenerateRequest, model: OpenModel) -> Sequence[int]:
    """Token ids of a request's prompt."""
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        if model.template is None:
            raise RequestError(f"{model.name} has no chat template", "use a model made for chat", param="model")
        messages, tools = prompt.messages, prompt.tools
        if not model.template.knows_tools and (tools or has_tools(messages)):
            messages, tools = tuple(write_tools(messages, tools)), ()
        text = model.template.render(messages, tools, prompt.template_options)
        return model.tokenizer.encode(text, bos=False)  # the template writes its own
    if isinstance(prompt, TextPrompt):
        return model.tokenizer.encode(prompt.text)
    return prompt.ids


def choice_of(sampling: Sampling, defaults: GenerationDefaults) -> Choice:
    """The request's wish where it has one, then the model's, then no filter at all."""

    def first(asked: Number | None, own: Number | None, otherwise: Number) -> Number:
        return asked if asked is not None else own if own is not None else otherwise

    return Choice(
        temperature=first(sampling.temperature, defaults.temperature, 1.0),
        top_k=first(sampling.top_k, defaults.top_k, 0),
        top_p=first(sampling.top_p, defaults.top_p, 1.0),
        min_p=first(sampling.min_p, defaults.min_p, 0.0),
        repetition_penalty=first(sampling.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
    )
