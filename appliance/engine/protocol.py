"""The engine protocol: what an engine is asked and what it answers, whatever runs underneath.

Knows: requests, events, statistics. Does not know: HTTP, OpenAI's shapes, onnxruntime.
Synchronous on purpose: async lives only in api, daemon and tui.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Priority = Literal["interactive", "job"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Fields that are None take the model's own default, then the one named here."""

    temperature: float | None = None  # 1.0; 0 = greedy
    top_k: int | None = None  # 0 = off
    top_p: float | None = None  # 1.0 = off
    min_p: float | None = None  # 0.0 = off
    repetition_penalty: float | None = None  # 1.0 = off; over prompt and answer
    presence_penalty: float = 0.0  # over the answer, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None = fresh


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's own template."""

    messages: tuple[dict[str, Any], ...]  # OpenAI's message objects, checked by the edge
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue, as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue, as they stand."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer asked of one model."""

    id: str
    prompt: ChatPrompt | TextPrompt | TokenPrompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None  # None = up to the context's end
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # None = none; n = the chosen token's and the n best
    ignore_eos: bool = False  # benches only
    priority: Priority = "interactive"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log probability (natural logarithm, of the unmodified distribution)."""

    id: int
    text: str  # with U+FFFD where the bytes are no whole character
    bytes: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """First event: the prompt was accepted and fits. Everything that can be refused was refused before it."""

    prompt_tokens: int
    provider: str  # e.g. "CPUExecutionProvider", read back from the session


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that is final: no stop string can still swallow it. May be empty when only log probabilities came."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, measured by the engine's clock."""

    queued: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: Timings


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine can say of itself at any time."""

    model: str
    provider: str
    fallbacks: tuple[str, ...]  # what did not run on the provider and why; empty = everything did
    context_length: int
    waiting: int
    running: int
    steps: int  # decode steps so far
    prompt_tokens: int
    completion_tokens: int
    ticks: int
    """How often the loop that does the work went round: at every decode step, every prefill chunk, and at least once a
    second while idle. A loop that hangs does not count, so it must be counted by the loop's own thread."""
    tokens_per_second: float | None = None
    """Decode speed of the newest answer that ended, its first token left out, which prefill made; None before there is one
    with more tokens than that."""


class Stream(Protocol):
    """An answer under way: iterate it for events; cancel it from any thread."""

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> None:
        """Stop within one step or prefill chunk; the iteration then ends with `Finished("cancelled")`."""


class Engine(Protocol):
    """One loaded model."""

    def load(self) -> None:
        """Open the model and start its worker; raises `BundleError` or `DeviceError`."""

    def unload(self) -> None:
        """Cancel what runs, stop the worker, free the model."""

    def stream(self, request: GenerateRequest) -> Stream:
        """Queue a request. Refusals (`RequestError`, `ContextLengthError`, `Unavailable`) are raised here."""

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Embedding of each text, unit length; `RequestError` when the model is no embedder."""

    def stats(self) -> EngineStats: ...


@runtime_checkable
class EmbeddingEngine(Engine, Protocol):
    """A loaded model that makes embeddings."""

    def embed_counted(self, texts: Sequence[str]) -> tuple[list[list[float]], list[int]]:
        """What `embed` gives, and the tokens of each text; `ContextLengthError` when one is too long."""
