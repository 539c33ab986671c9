"""The embedding engine: one bundle, one encoder, one worker thread.

Knows: how texts are put into batches and waited for. Does not know: graphs, tokenizers, HTTP.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.store import Bundle
from appliance.engine.protocol import EngineStats, GenerateRequest, Priority, Stream
from appliance.engine.worker import Worker
from appliance.errors import ContextLengthError, RequestError, Unavailable
from appliance.runtime.encoder import open_encoder
from appliance.runtime.session import Placement

BATCH_TEXTS = 16
BATCH_TOKENS = 2048
"""Of one step, padding included: about a tenth of a second on two cores, so that others wait no longer than that."""


class TextEncoder(Protocol):
    """What the engine needs of an encoder (see `runtime.encoder.Encoder`)."""

    context: int

    @property
    def placement(self) -> Placement: ...
    def tokenize(self, texts: Sequence[str]) -> list[list[int]]: ...
    def run(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]: ...
    def close(self) -> None: ...


class Embedder:
    """`appliance.engine.protocol.Engine` for models whose task is "embed".

    Args:
        bundle: an opened bundle.
        target: whose graphs to run.
        threads: processor threads of one step; 0 = one for each physical core.
        targets: folder with more target files.
        open_with: opens the encoder in another way; for tests.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        target: str,
        threads: int = 0,
        targets: Path | None = None,
        open_with: Callable[[], TextEncoder] | None = None,
    ):
        self._name = bundle.manifest.name
        opening = functools.partial(open_encoder, bundle, target, threads, targets=targets)
        self._open_with = open_with or cast(Callable[[], TextEncoder], opening)
        self._encoder: TextEncoder | None = None
        self._worker: Worker | None = None
        self._tokens = 0
        self._lock = threading.Lock()

    def load(self) -> None:
        with self._lock:
            if self._encoder is None:
                self._encoder = self._open_with()
                self._worker = Worker(f"engine {self._name}")

    def unload(self) -> None:
        with self._lock:
            encoder, worker = self._encoder, self._worker
            self._encoder = self._worker = None
            if worker is not None:
                for work in worker.stop():
                    work.cancel_unstarted()
            if encoder is not None:
                encoder.close()

    def stream(self, request: GenerateRequest) -> Stream:
        raise RequestError(f"{self._name} makes embeddings, it generates no text", "name another model", param="model")

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """See the protocol; order is kept. `ContextLengthError` names the text that is too long, and both numbers."""
        return self.embed_counted(texts)[0]

    def embed_counted(self, texts: Sequence[str]) -> tuple[list[list[float]], list[int]]:
        """What `embed` gives, and the tokens of each text, the model's begin and end tokens included."""
        encoder, worker = self._loaded()
        rows = encoder.tokenize(texts)
        for at, row in enumerate(rows):
            if len(row) > encoder.context:
                what = f"text {at} has {len(row)} tokens, {self._name} takes {encoder.context}"
                raise ContextLengthError(what, "split it", param="input")
        if not rows:
            return [], []
        work = _Embedding(encoder, rows)
        worker.submit(work)
        vectors = work.done.result()
        self._tokens += sum(map(len, rows))
        return [vector.tolist() for vector in vectors], [len(row) for row in rows]

    def stats(self) -> EngineStats:
        encoder, worker = self._loaded()
        return EngineStats(
            model=self._name,
            provider=encoder.placement.provider,
            fallbacks=encoder.placement.fallbacks,
            context_length=encoder.context,
            waiting=worker.waiting,
            running=worker.running,
            steps=0,
            prompt_tokens=self._tokens,
            completion_tokens=0,
            ticks=worker.ticks,
        )

    def _loaded(self) -> tuple[TextEncoder, Worker]:
        encoder, worker = self._encoder, self._worker
        if encoder is None or worker is None:
            raise Unavailable("the model is not loaded", "load it first")
        return encoder, worker


class _Embedding:
    """Texts of one call as work in steps of one batch; see `worker.Work`."""

    priority: Priority = "interactive"

    def __init__(self, encoder: TextEncoder, rows: Sequence[Sequence[int]]):
        self._encoder = encoder
        self._rows = rows
        self._batches = batches([len(row) for row in rows])
        self._vectors: dict[int, NDArray[np.float32]] = {}
        self.done: Future[list[NDArray[np.float32]]] = Future()

    def advance(self) -> bool:
        """Embed one batch; the last one, and a failure, end the waiting of the caller."""
        batch = self._batches.pop(0)
        try:
            for at, vector in zip(batch, self._encoder.run([self._rows[at] for at in batch]), strict=True):
                self._vectors[at] = vector
        except Exception as failure:  # raised where the answer is waited for
            self.done.set_exception(failure)
            return True
        if not self._batches:
            self.done.set_result([self._vectors[at] for at in range(len(self._rows))])
        return not self._batches

    def cancel_unstarted(self) -> None:
        self.done.set_exception(Unavailable("the model was unloaded meanwhile", "try again"))


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of the texts of each batch: texts of similar length together, so that little is padded."""
    found: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lambda at: lengths[at]):
        # Sorted, so the newest is the longest and the batch's width.
        if found and len(found[-1]) < BATCH_TEXTS and (len(found[-1]) + 1) * lengths[at] <= BATCH_TOKENS:
            found[-1].append(at)
        else:
            found.append([at])
    return found
