"""Calibration text that the model writes itself: plain text, and turns of its own chat template.

Knows: batched decoding of one token a step over state that stays in place, drawing, turns. Does not know: how the model was
quantized for it, what the text is used for.

Every row starts from an empty past and takes one token a step, so all rows of a batch are equally long at any time: that is
what GroupQueryAttention takes for a batch (several new tokens over a past are for one row only). What a row must say next
(the template's words between two turns) waits in a queue of its own; without one, the next token is drawn.

    row of plain text:  begin token - drawn ... end token - begin token - drawn ...
    row of turns:       template - drawn (the user) ... template - drawn (the answer) ... template - drawn ...

A model that was not trained to see a begin token gets a frequent token at random in its place. A row that says the same
again and again begins anew: small models fall into that, and nothing more is learnt from it.
Each row draws with numbers of its own, so what it says does not depend on how many rows are worked on at once.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from appliance.bundle.manifest import StateTensor
from appliance.bundle.store import Bundle
from appliance.bundle.vocabulary import ATTENTION_MASK, INPUT_IDS, LOGITS, LOGITS_TO_KEEP
from appliance.errors import CheckpointError, RequestError
from appliance.runtime.chat_template import ChatTemplate, load_chat_template
from appliance.runtime.session import give_back_memory
from appliance.runtime.tokenizer import Tokenizer, load_tokenizer
from quant.calibration_text import CalibrationText, Ids
from quant.spill import replace_file

VERSION = 1
SEED = 1

_STATE_BYTES = 384 << 20
"""Attention state of a batch; it decides how many rows are written at once (SmolLM2: 17)."""
_MOST_ROWS = 32
_TEMPERATURE = 1.0
_LEAST_WEIGHT = 0.02
"""Tokens less likely than this, the likeliest being 1, are not drawn: a small model does not find back from one of them."""
_USER_TOKENS = 64
"""A user's turn is ended after so many: what matters more are answers."""
_FREQUENT = 8192
"""Tokens that a text may begin with: byte-pair vocabularies are in the order of merging, which is about that of frequency."""
_ECHO, _EARSHOT = 12, 256
"""A row repeats itself when its last 12 tokens were said in the same order among its last 256."""
_MARKS = ("First0Mark", "Second0Mark", "Third0Mark")

Progress = Callable[[int, int], None]
"""(tokens written, tokens in all)."""


@dataclass(frozen=True)
class Writer:
    """A lowered and emitted model on disk that takes one token of each of several rows a step.

    Attributes:
        path: the .onnx file of its dynamic graph.
        state: what it carries, in place.
        vocabulary: width of its logits.
    """

    path: Path
    state: tuple[StateTensor, ...]
    vocabulary: int
    threads: int = 0


@dataclass(frozen=True)
class Wish:
    """What is to be written: `windows` rows of `window` tokens, the first `turns` of them in turns."""

    windows: int
    window: int
    turns: int
    seed: int = SEED


@dataclass(frozen=True)
class Turns:
    """Token ids of the template before a user's words, after them, and after the answer up to the next user's words."""

    before: tuple[int, ...]
    after_user: tuple[int, ...]
    after_answer: tuple[int, ...]


def turns_of(template: ChatTemplate | None, tokenizer: Tokenizer) -> Turns | None:
    """The template's words around the turns; None where there is no template, or it does not show turns in order."""
    if template is None:
        return None
    first, second, third = _MARKS
    roles = (("user", first), ("assistant", second), ("user", third))
    try:
        text = template.render([{"role": role, "content": mark} for role, mark in roles])
    except RequestError:
        return None
    before, found, rest = text.partition(first)
    after_user, found_second, rest = rest.partition(second)
    after_answer, found_third, _ = rest.partition(third)
    if not (found and found_second and found_third):
        return None
    return Turns(*(tuple(tokenizer.encode(part, special=True, bos=False)) for part in (before, after_user, after_answer)))


def write_text(
    make: Callable[[], Writer], words: Bundle, wish: Wish, work: Path, source: str, progress: Progress | None = None
) -> CalibrationText:
    """Let the model write. Finished batches are kept in `work`, so a stopped run goes on with its batch.

    Args:
        make: gives the model that writes.
        words: a bundle with the model's tokenizer and template.
        source: fingerprint of the model's weights.
    """
    tokenizer = load_tokenizer(words)
    turns = turns_of(load_chat_template(words, tokenizer), tokenizer)
    writer = make()
    rows = rows_at_once(writer.state, wish)
    said = [VERSION, source, wish.windows, wish.window, wish.turns if turns else 0, wish.seed, rows]
    key = sha256(json.dumps(said).encode()).hexdigest()[:32]
    session, found = None, []
    for start in range(0, wish.windows, rows):
        numbers = range(start, min(start + rows, wish.windows))
        path = work / f"text.{key}.{start}.npy"
        done = _finished(path, (len(numbers), wish.window))
        if done is None:
            session = session or _open(writer)
            made = [_Row(number, wish, turns if number < wish.turns else None, tokenizer) for number in numbers]
            done = _batch(session, writer, made, wish.window, _telling(progress, wish, start, len(numbers)))
            _keep(path, done)
        found.append(done)
        _telling(progress, wish, start, len(numbers))(wish.window)
    del session
    give_back_memory()
    told = {
        "seed": wish.seed,
        "in_turns": wish.turns if turns else 0,
        "temperature": _TEMPERATURE,
        "least_weight": _LEAST_WEIGHT,
        "writer": VERSION,
    }
    return CalibrationText("self-written", np.concatenate(found), told)


def rows_at_once(state: Sequence[StateTensor], wish: Wish) -> int:
    """Rows of a batch, by the memory that their attention state takes."""
    per_token = sum(np.dtype(one.dtype).itemsize * _per_token(one) for one in state)
    return int(max(1, min(wish.windows, _MOST_ROWS, _STATE_BYTES // max(1, per_token * wish.window))))


def draw(logits: npt.NDArray[np.float32], number: float) -> int:
    """The token that `number` in [0,1) picks among those of weight, logits [V]."""
    most = float(logits.max())
    if not np.isfinite(most):
        raise CheckpointError("the model's predictions are not finite", "the checkpoint is damaged; fetch it again")
    likely = np.flatnonzero(logits >= most + _TEMPERATURE * np.log(_LEAST_WEIGHT))
    weights = np.cumsum(np.exp((logits[likely].astype(np.float64) - most) / _TEMPERATURE))
    return int(likely[np.searchsorted(weights, number * weights[-1], side="right").clip(max=len(likely) - 1)])


class _Row:
    """One text under way."""

    def __init__(self, number: int, wish: Wish, turns: Turns | None, tokenizer: Tokenizer):
        self._random = np.random.default_rng([wish.seed, number])
        self._turns, self._info = turns, tokenizer.info
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), np.array(sorted(tokenizer.special_ids), np.int64))
        self._frequent = ordinary[:_FREQUENT]
        self._barred = np.array(sorted(tokenizer.special_ids - set(self._info.eos)), np.int64)
        self._queue: deque[int] = deque()
        self._said: deque[int] = deque(maxlen=_EARSHOT)
        self._user, self._length = True, 0
        self._start()

    def next(self, logits: npt.NDArray[np.float32] | None) -> int:
        """The next token, given the logits [V] after the last one (None before the first)."""
        if self._queue:
            return self._queue.popleft()
        assert logits is not None
        logits[self._barred] = -np.inf
        token = draw(logits, self._random.random())
        self._length += 1
        self._said.append(token)
        ended = token in self._info.eos or self._repeats()
        if self._turns is not None and (ended or (self._user and self._length >= _USER_TOKENS)):
            self._queue.extend(self._turns.after_user if self._user else self._turns.after_answer)
            self._user, self._length = not self._user, 0
            self._said.clear()
            return self._queue.popleft() if self._queue else token
        if ended:
            self._start()
        return token

    def _start(self) -> None:
        self._said.clear()
        if self._turns is not None:
            self._queue.extend(self._turns.before)
        elif self._info.add_bos and self._info.bos is not None:
            self._queue.append(self._info.bos)
        else:
            self._queue.append(int(self._random.choice(self._frequent)))

    def _repeats(self) -> bool:
        said = list(self._said)
        last = said[-_ECHO:]
        return any(said[start : start + _ECHO] == last for start in range(len(said) - _ECHO))


def _batch(session: "object", writer: Writer, rows: list[_Row], window: int, told: Callable[[int], None]) -> Ids:
    """Write all rows to their end: [rows, window]."""
    from onnxruntime import InferenceSession

    assert isinstance(session, InferenceSession)
    binding = session.io_binding()
    buffers = []
    for one in writer.state:
        words = {"batch": len(rows), "context": window}
        shape = [size if isinstance(size, int) else words[size] for size in one.shape]
        buffer = np.zeros(shape, one.dtype)
        buffers.append(buffer)  # kept: the binding holds addresses alone
        for bind, name in ((binding.bind_input, one.input), (binding.bind_output, one.output)):
            bind(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
    ids, keep = np.zeros((len(rows), 1), np.int64), np.ones(1, np.int64)
    logits = np.zeros((len(rows), 1, writer.vocabulary), np.float32)
    takes = {one.name for one in (*session.get_inputs(), *session.get_overridable_initializers())}
    if LOGITS_TO_KEEP in takes:
        binding.bind_input(LOGITS_TO_KEEP, "cpu", 0, np.int64, keep.shape, keep.ctypes.data)
    binding.bind_input(INPUT_IDS, "cpu", 0, np.int64, ids.shape, ids.ctypes.data)
    binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
    written = np.zeros((len(rows), window), np.int64)
    for step in range(window):
        for number, row in enumerate(rows):
            ids[number, 0] = written[number, step] = row.next(logits[number, 0] if step else None)
        if step + 1 == window:
            break  # nobody asks what would come after the last
        mask = np.ones((len(rows), step + 1), np.int64)
        binding.bind_input(ATTENTION_MASK, "cpu", 0, np.int64, mask.shape, mask.ctypes.data)
        session.run_with_iobinding(binding)
        if step % 16 == 15:
            told(step + 1)
    return written


def _open(writer: Writer) -> object:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = writer.threads
    return onnxruntime.InferenceSession(str(writer.path), options, providers=["CPUExecutionProvider"])


def _per_token(tensor: StateTensor) -> int:
    return int(np.prod([size for size in tensor.shape if isinstance(size, int)]))


def _telling(progress: Progress | None, wish: Wish, start: int, rows: int) -> Callable[[int], None]:
    """Tells of a step of the batch of `rows` rows from `start` on."""

    def told(step: int) -> None:
        if progress:
            progress(start * wish.window + step * rows, wish.windows * wish.window)

    return told


def _finished(path: Path, shape: tuple[int, int]) -> Ids | None:
    try:
        found: Ids = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.int64 else None


def _keep(path: Path, ids: Ids) -> None:
    def save(place: Path) -> None:
        with open(place, "wb") as file:
            np.save(file, ids)

    replace_file(path, save)
