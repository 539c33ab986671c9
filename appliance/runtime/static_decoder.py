"""The static pair as a decoder: prefill takes whole chunks, decode one token, and the state lies outside the graphs.

Knows: masks, positions, padding, where new rows of keys and values go. Does not know: sampling, text, providers.

    ids  ... [chunk] [chunk] [rest, padded]  -> prefill(chunk)     one token -> decode(1)
    state [1,Hkv,context,d] filled up to `length`: the graph reads it, answers with new rows, and only those of real
    tokens are copied in. Padding may compute what it likes: no mask lets a token see it and no copy keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.manifest import StateTensor, Variant
from appliance.bundle.store import Bundle
from appliance.bundle.vocabulary import INPUT_IDS, LAST_INDEX, LOGITS, MASKED, POSITION_IDS, window_mask_name, window_of_mask
from appliance.errors import BundleError, ContextLengthError
from appliance.runtime import providers
from appliance.runtime.providers import SessionChoice
from appliance.runtime.session import OpenSession, Placement, joined
from appliance.runtime.state import Buffer, empty_buffers, resolve
from appliance.targets.capabilities import Target

if TYPE_CHECKING:
    import onnxruntime

Logits = NDArray[np.float32]


@dataclass(slots=True)
class StaticState:
    """One sequence: a buffer for each carried tensor, of the full context, and how many rows of it count."""

    buffers: dict[str, Buffer]
    capacity: int
    length: int = 0


@dataclass(slots=True)
class _Step:
    """One graph of the pair with the arrays that it reads from and writes to at every step.

    Inputs are bound anew at each step: where the provider has memory of its own, `bind_input` copies there and then, and
    what is written into the array later is never seen (OpenVINO's plugin: logits of the first step again and again).
    """

    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    tokens: int
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    last: NDArray[np.int64]
    masks: dict[int, NDArray[np.float32]]  # by window, 0 = full
    new_rows: dict[str, Buffer]  # by name of the state tensor
    logits: Logits  # [1,1,V]

    def run(self, state: StaticState, spec: Sequence[StateTensor]) -> None:
        """Run the graph on what the arrays and the state hold now."""
        for name, array in ((INPUT_IDS, self.ids), (POSITION_IDS, self.positions), (LAST_INDEX, self.last)):
            _bind_input(self.binding, name, array)
        for window, mask in self.masks.items():
            _bind_input(self.binding, window_mask_name(window), mask)
        for tensor in spec:
            _bind_input(self.binding, tensor.input, state.buffers[tensor.name])
        self.session.run_with_iobinding(self.binding)


def fill_mask(mask: NDArray[np.float32], past: int, new: int, window: int) -> None:
    """Write the mask of one step in place.

    Args:
        mask: [S, context+S] float32; columns are the rows of the buffer, then the step's own rows.
        past: rows of the buffer that count, which hold the positions 0..past-1.
        new: real tokens of the step, 1..S; the rest is padding.
        window: tokens that one may see, itself included; 0 = all before it.
    """
    tokens = mask.shape[0]
    context = mask.shape[1] - tokens
    own = np.arange(tokens)
    # Padding looks at what the last token sees: a row without any column would be a softmax over nothing.
    rows = (past + np.minimum(own, new - 1))[:, None]
    columns = np.concatenate([np.arange(context), past + own])
    there = np.concatenate([np.arange(context) < past, own < new])
    seen = there & (columns <= rows)
    if window:
        seen &= columns > rows - window
    np.copyto(mask, np.where(seen, np.float32(0), np.float32(MASKED)))


class StaticDecoder:
    """See `appliance.runtime.decoder.Decoder`."""

    def __init__(self, prefill: OpenSession, decode: OpenSession, spec: Sequence[StateTensor], chunk: int, context: int):
        """Use `open`; this takes sessions that are already open.

        Raises:
            BundleError: a graph has not the inputs, outputs and shapes of a static step.
        """
        for tensor in spec:
            if tensor.update != "append" or tensor.growth != "growing":
                raise BundleError(
                    f"state {tensor.name}: {tensor.growth} with update {tensor.update} is not known in the static form",
                    "build the bundle again with this version",
                )
        self._spec = tuple(spec)
        self._chunk = chunk
        self._context = context
        self._placement = joined([prefill.placement, decode.placement])
        self._prefill = _open_step(prefill.session, chunk, context, self._spec)
        self._decode = _open_step(decode.session, 1, context, self._spec)

    @classmethod
    def open(cls, bundle: Bundle, variant: Variant, target: Target, threads: int) -> StaticDecoder:
        """Open both graphs; errors as `appliance.runtime.decoder.open_decoder` names them."""
        provider = providers.find(target.provider)
        paths = [bundle.file(variant.graphs["prefill"]), bundle.file(variant.graphs["decode"])]
        prefill, decode = (provider.open_session(path, target, SessionChoice(threads=threads)) for path in paths)
        return cls(prefill, decode, variant.state, variant.chunk, variant.context)

    @property
    def chunk(self) -> int:
        """Tokens of one prefill step."""
        return self._chunk

    @property
    def context(self) -> int:
        """Rows of the state's buffers."""
        return self._context

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return int(self._decode.logits.shape[-1])

    @property
    def placement(self) -> Placement:
        """Where the nodes of both graphs run."""
        return self._placement

    def new_state(self, capacity: int) -> StaticState:
        """See `Decoder.new_state`. The buffers have the full context, whose pages cost memory once they are written."""
        if capacity > self._context:
            raise ContextLengthError(
                f"{capacity} tokens do not fit the context of {self._context}", "shorten the prompt or ask for fewer tokens"
            )
        return StaticState(empty_buffers(self._spec, self._context), capacity)

    def run(self, state: StaticState, ids: Sequence[int] | NDArray[np.int64], keep: int = 1) -> Logits:
        """See `Decoder.run`.

        A step has one row of logits, so for `keep` > 1 the last `keep` tokens are taken in one by one.
        """
        tokens = np.asarray(ids, np.int64)
        assert tokens.ndim == 1 and 1 <= len(tokens) <= self._chunk and 0 <= keep <= len(tokens), "see Decoder.run"
        if state.length + len(tokens) > state.capacity:
            raise ContextLengthError(
                f"{len(tokens)} more tokens after {state.length} do not fit a state for {state.capacity}",
                "shorten the prompt or ask for fewer tokens",
            )
        together = len(tokens) if keep <= 1 else len(tokens) - keep
        if together:
            logits = self._take(state, tokens[:together])
        if keep <= 1:
            return logits[:keep]
        kept = np.empty((keep, self.vocab_size), np.float32)
        for row, token in enumerate(range(together, len(tokens))):
            kept[row] = self._take(state, tokens[token : token + 1])[0]
        return kept

    def close(self) -> None:
        """Free the sessions; no more steps can be run."""
        del self._prefill, self._decode

    def _take(self, state: StaticState, tokens: NDArray[np.int64]) -> Logits:
        """Run one step over at most a chunk and keep its new rows; logits of the last token, [1,V]."""
        step = self._decode if len(tokens) == 1 else self._prefill
        past, new = state.length, len(tokens)
        step.ids[0, :new] = tokens
        step.ids[0, new:] = 0
        step.positions[0] = past + np.minimum(np.arange(step.tokens), new - 1)
        step.last[0] = new - 1
        for window, mask in step.masks.items():
            fill_mask(mask[0, 0], past, new, window)
        step.run(state, self._spec)
        for tensor in self._spec:
            state.buffers[tensor.name][:, :, past : past + new] = step.new_rows[tensor.name][:, :, :new]
        state.length = past + new
        logits: Logits = step.logits[0]
        return logits


def _open_step(session: onnxruntime.InferenceSession, tokens: int, context: int, spec: Sequence[StateTensor]) -> _Step:
    shapes = {value.name: value.shape for value in [*session.get_inputs(), *session.get_outputs()]}
    windows = {name: window for name in shapes if (window := window_of_mask(name)) is not None}
    wanted = {INPUT_IDS: [1, tokens], POSITION_IDS: [1, tokens], LAST_INDEX: [1]}
    wanted |= {name: [1, 1, tokens, context + tokens] for name in windows}
    for tensor in spec:
        full = resolve(tensor, 1, context)
        wanted[tensor.input] = list(full.shape)
        wanted[tensor.output] = [tokens if axis == full.context_axis else size for axis, size in enumerate(full.shape)]
    found = {name: shape for name, shape in shapes.items() if name != LOGITS}
    if found != wanted:
        name = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))[0]
        raise BundleError(
            f"graph of {tokens} tokens: {name} has shape {found.get(name)}, the manifest asks for {wanted.get(name)}",
            "build the bundle again",
        )
    step = _Step(
        session=session,
        binding=session.io_binding(),
        tokens=tokens,
        ids=np.zeros((1, tokens), np.int64),
        positions=np.zeros((1, tokens), np.int64),
        last=np.zeros(1, np.int64),
        masks={window: np.zeros(wanted[name], np.float32) for name, window in windows.items()},
        new_rows={tensor.name: np.zeros(wanted[tensor.output], tensor.dtype) for tensor in spec},
        logits=np.zeros(shapes[LOGITS], np.float32),
    )
    for tensor in spec:
        _bind_output(step.binding, tensor.output, step.new_rows[tensor.name])
    _bind_output(step.binding, LOGITS, step.logits)
    return step


def _bind_input(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
