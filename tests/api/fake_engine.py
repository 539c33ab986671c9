"""An engine that says what it is told, and a models folder with a bundle for it.

Knows: the engine protocol. Does not know: tokens or weights.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.bundle.manifest import Manifest, Provenance, SchemeSummary, TokenizerInfo, Variant
from appliance.bundle.store import Bundle, writing
from appliance.engine.protocol import (
    ChatPrompt,
    Delta,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Started,
    Timings,
    TokenLogprob,
)  # fmt: skip
from appliance.errors import ContextLengthError, RequestError

PROVIDER = "FakeExecutionProvider"


class FakeStream:
    """Events fed by a worker thread, as a real engine's are."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.over = threading.Event()

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self.events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeEngine:
    """Says `pieces`, one a token, or as many of them as max_tokens allows.

    Attributes:
        delay: seconds before each piece; long prefills are a long first delay.
        fail_at: raise `failure` in place of that piece.
        refusal: raised by `stream` itself.
        loading: `load` waits for it, if given.
        requests, streams: everything asked so far.
    """

    pieces: Sequence[str] = ("The capital", " of France", " is Paris", ".")
    delay: float = 0.0
    fail_at: int | None = None
    failure: BaseException = field(default_factory=lambda: RuntimeError("secret detail"))
    refusal: Exception | None = None
    loading: threading.Event | None = None
    load_failure: Exception | None = None
    context: int = 100
    fallbacks: tuple[str, ...] = ()
    requests: list[GenerateRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    unloaded: bool = False

    def load(self) -> None:
        if self.loading is not None:
            self.loading.wait(30)
        if self.load_failure is not None:
            raise self.load_failure

    def unload(self) -> None:
        for stream in self.streams:
            stream.cancel()
        self.unloaded = True

    def stream(self, request: GenerateRequest) -> FakeStream:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        assert isinstance(request.prompt, ChatPrompt)
        prompt = sum(len((message["content"] or "").split()) for message in request.prompt.messages)
        if prompt >= self.context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, the context holds {self.context}", "shorten it", param="messages"
            )
        stream = FakeStream()
        self.streams.append(stream)
        threading.Thread(target=self._work, args=(request, stream, prompt), daemon=True).start()
        return stream

    def _work(self, request: GenerateRequest, stream: FakeStream, prompt: int) -> None:
        pieces = self.pieces[: request.max_tokens] if request.max_tokens else self.pieces
        reason: FinishReason = "stop" if len(pieces) == len(self.pieces) else "length"
        stream.events.put(Started(prompt, PROVIDER))
        said = 0
        for at, piece in enumerate(pieces):
            if stream.cancelled.wait(self.delay) if self.delay else stream.cancelled.is_set():
                reason = "cancelled"
                break
            if at == self.fail_at:
                stream.events.put(self.failure)
                stream.over.set()
                return
            stream.events.put(Delta(piece, self._logprobs(piece, at, request.logprobs)))
            said += 1
        stream.over.set()
        stream.events.put(Finished(reason, prompt, said, 0, Timings(0.001, 0.02, 0.3)))

    def _logprobs(self, piece: str, at: int, best: int | None) -> tuple[TokenLogprob, ...]:
        if best is None:
            return ()
        top = tuple(TokenLogprob(n, f"t{n}", f"t{n}".encode(), -0.5 - n) for n in range(best))
        return (TokenLogprob(at, piece, piece.encode(), -0.25, top),)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        raise RequestError("this model makes no embeddings, it generates text", "name an embedding model", param="model")

    def stats(self) -> EngineStats:
        return EngineStats("fake", PROVIDER, self.fallbacks, self.context, 0, 0, 0, 0, 0, ticks=time.monotonic_ns())


def install_bundle(models: Path, name: str = "fake/model") -> Bundle:
    """A whole bundle, except that its graph is empty."""
    manifest = Manifest(
        format=1, name=name, architecture="llama", parameters=1000, context_length=4096, vocab_size=258, hidden_size=8,
        scheme=SchemeSummary(name="w4a8", roles={}), tokenizer=TokenizerInfo(kind="tokenizers", file="tokenizer.json"),
        variants={"cpu": Variant(
            target="cpu", form="dynamic", graphs={"model": "cpu/model.onnx"}, chunk=8, context=4096, activation="block-dynamic")},
        files={}, provenance=Provenance(source="made up", command="none", versions={}, created="2026-01-02T03:04:05+00:00"),
    )  # fmt: skip
    destination = models / name
    destination.parent.mkdir(parents=True, exist_ok=True)
    with writing(destination) as writer:
        writer.path("cpu/model.onnx").write_bytes(b"")
        writer.path("tokenizer.json").write_text("{}")
        return writer.finish(manifest)


def wait_until(true: object, seconds: float = 5.0) -> bool:
    """Whether `true()` came to hold in time."""
    assert callable(true)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.005)
    return False
