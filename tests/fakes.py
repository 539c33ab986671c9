"""Stand-ins that need no weights: a decoder whose next token depends on everything before it, a byte tokenizer.

Knows: the protocols of `appliance.runtime`. Does not know: onnxruntime.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.manifest import TokenizerInfo
from appliance.errors import ContextLengthError
from appliance.runtime.decoder import Logits
from appliance.runtime.session import Placement

BYTES = 256
EOS = 256
VOCAB = 258


@dataclass
class FakeState:
    """The whole history, so that mixing two sequences up changes every later token."""

    capacity: int
    history: list[int] = field(default_factory=list)
    prompt: int | None = None  # tokens before the first logits were asked for

    @property
    def length(self) -> int:
        return len(self.history)


class FakeDecoder:
    """Logits are a hash of the whole history: printable ASCII mostly, the end token now and then.

    Args:
        eos: one in how many tokens is the end token; 0 = never.
        delay: seconds that one `run` takes.
        script: bytes to say, whatever the prompt, then the end token; instead of the hash.
    """

    def __init__(
        self,
        *,
        context: int = 512,
        chunk: int = 8,
        eos: int = 0,
        delay: float = 0.0,
        script: bytes | None = None,
        fail_at: int = 0,
    ):
        self.chunk = chunk
        self.context = context
        self.vocab_size = VOCAB
        self.placement = Placement("FakeExecutionProvider", (("FakeExecutionProvider", 1),), ())
        self.closed = False
        self.runs: list[tuple[int, int]] = []  # (tokens taken in, rows kept) of each run
        self._eos = eos
        self._delay = delay
        self._script = script
        self._fail_at = fail_at

    def new_state(self, capacity: int) -> FakeState:
        if capacity > self.context:
            raise ContextLengthError(f"{capacity} tokens asked for, the context holds {self.context}")
        return FakeState(capacity)

    def run(self, state: FakeState, ids: Sequence[int] | NDArray[np.int64], keep: int = 1) -> Logits:
        assert not self.closed
        assert 1 <= len(ids) <= self.chunk, len(ids)
        assert 0 <= keep <= len(ids)
        assert state.length + len(ids) <= state.capacity, "more tokens than the state was made for"
        self.runs.append((len(ids), keep))
        if self._fail_at and len(self.runs) == self._fail_at:
            raise RuntimeError("the fake device is gone")
        if self._delay:
            time.sleep(self._delay)
        rows = []
        for token in ids:
            state.history.append(int(token))
            rows.append(self.logits_after(state.history))
        if self._script is not None and keep:
            state.prompt = state.length if state.prompt is None else state.prompt
            said = state.length - state.prompt
            rows[-1] = _peak(self._script[said] if said < len(self._script) else EOS)
        return np.stack(rows)[len(rows) - keep :].astype(np.float32)

    def logits_after(self, history: Sequence[int]) -> NDArray[np.float32]:
        """[V] what the model says after exactly these tokens."""
        digest = hashlib.blake2b(np.asarray(history, np.int64).tobytes(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        logits = np.random.default_rng(number).normal(0, 1, VOCAB).astype(np.float32)
        logits[:32] = logits[127:] = -20.0
        if self._eos and number % self._eos == 0:
            logits[EOS] = 20.0
        return logits

    def close(self) -> None:
        self.closed = True


def _peak(token: int) -> NDArray[np.float32]:
    logits = np.full(VOCAB, -20.0, np.float32)
    logits[token] = 20.0
    return logits


class ByteTokenizer:
    """One token a byte; 256 ends an answer, 257 starts a prompt and is never added by itself."""

    vocab_size = VOCAB
    special_ids = frozenset({EOS, 257})
    strips_leading_space = False
    info = TokenizerInfo(kind="tokenizers", file="none", eos=(EOS,))

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return bytes(one for one in ids if one < BYTES).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BYTES else {EOS: b"<end>", 257: b"<start>"}[token]

    def token_id(self, text: str) -> int | None:
        return {"<end>": EOS, "<start>": 257}.get(text)


class PlainTemplate:
    """A chat template that joins the messages."""

    knows_tools = False

    def render(
        self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]], options: dict[str, object]
    ) -> str:
        return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: "
