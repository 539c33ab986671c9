"""The decoder of dynamic graphs: one graph for prompts and single tokens, attention state kept in place.

Knows: the dynamic form's inputs and outputs (`appliance.bundle.vocabulary`), bound buffers, growth of state.
Does not know: providers, sampling, text.

    input_ids ---------------+                                +--> logits [1, keep, V]
    attention_mask (ones) ---+--> graph (bound once a state) -+
    past = present, one buffer for both, capacity in steps ---+

A step of one token allocates nothing here: ids and logits lie in fixed buffers, the mask is a growing view of ones.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.manifest import StateTensor, Variant
from appliance.bundle.store import Bundle
from appliance.bundle.vocabulary import ATTENTION_MASK, INPUT_IDS, LOGITS, LOGITS_TO_KEEP
from appliance.errors import BundleError, ContextLengthError, DeviceError
from appliance.runtime import providers
from appliance.runtime.decoder import Logits
from appliance.runtime.session import OpenSession, Placement, give_back_memory
from appliance.runtime.state import Buffer, arenas, empty_buffers, grown
from appliance.targets.capabilities import Target

FIRST_CAPACITY = 640
"""Tokens of state a sequence starts with; doubled whenever it is full. Unused room costs no time (docs/LOG.md), but in huge
pages touching one row of each head makes the whole context resident. A quarter over a power of two: prompts that are cut to
one, as many are, leave room for an answer, whose first token would else copy the whole state."""


class DynamicState:
    """One sequence: its carried tensors, bound to the session once and again only when they grow.

    Args:
        opened: the session.
        spec: the tensors to carry.
        limit: tokens that it may ever hold.
    """

    def __init__(self, opened: OpenSession, spec: Sequence[StateTensor], limit: int):
        self.length = 0
        self.limit = limit
        self._capacity = 0  # tokens that the in-place buffers hold now
        self._binding = opened.session.io_binding()
        self._outputs: list[str] = []  # names in the order of their first binding, as the binding lists their values
        self._inplace = [tensor for tensor in spec if tensor.update == "inplace"]
        self._replaced = [tensor for tensor in spec if tensor.update == "replace"]
        self._buffers = empty_buffers(spec, 0)
        for tensor in self._replaced:
            self.bind_input(tensor.input, self._buffers[tensor.name])

    def bind_input(self, name: str, array: Buffer) -> None:
        """Let the graph read `array`, which must live as long as this state or until it is bound anew."""
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: Buffer | None) -> None:
        """Let the graph write into `array`; None = into memory of its own, because the shape is not known before."""
        if name not in self._outputs:
            self._outputs.append(name)
        if array is None:
            self._binding.bind_output(name, "cpu")
        else:
            self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def make_room(self, tokens: int) -> None:
        """Grow the in-place buffers until they hold `tokens` more; contents are kept."""
        wanted = self.length + tokens
        if wanted <= self._capacity or not self._inplace:
            return
        capacity = max(2 * self._capacity, FIRST_CAPACITY)
        while capacity < wanted:
            capacity *= 2
        capacity = min(capacity, self.limit)
        for group in arenas(self._inplace, capacity):
            for name, larger in grown(group, self._buffers, self.length, capacity).items():
                self._buffers[name] = larger
            for tensor in group:
                self.bind_input(tensor.input, self._buffers[tensor.name])
                self.bind_output(tensor.output, self._buffers[tensor.name])
        self._capacity = capacity

    def step(self, opened: OpenSession, tokens: int) -> None:
        """Run what is bound; the state then holds `tokens` more."""
        for tensor in self._replaced:
            self.bind_output(tensor.output, None)
        opened.session.run_with_iobinding(self._binding)
        if self._replaced:
            values = dict(zip(self._outputs, self._binding.get_outputs(), strict=True))
            for tensor in self._replaced:
                self._binding.bind_ortvalue_input(tensor.input, values[tensor.output])
        self.length += tokens


class DynamicDecoder:
    """See `appliance.runtime.decoder.Decoder`.

    Args:
        opened: the session of the dynamic graph.
        variant: state spec, chunk and context.
        vocab_size: width of a row of logits.
    """

    def __init__(self, opened: OpenSession, variant: Variant, vocab_size: int):
        if wrong := [tensor.name for tensor in variant.state if tensor.update == "append"]:
            raise BundleError(f"state {wrong[0]} is to be appended to", "dynamic graphs update their state in place")
        self.chunk = variant.chunk
        self.context = variant.context
        self.vocab_size = vocab_size
        self._opened: OpenSession | None = opened
        self._spec = variant.state
        self._ids = np.zeros((1, variant.chunk), np.int64)
        self._mask = np.ones((1, variant.context), np.int64)
        self._keep = np.ones(1, np.int64)
        self._logits = np.zeros((1, 1, vocab_size), np.float32)
        self._check(opened)

    @classmethod
    def open(cls, bundle: Bundle, variant: Variant, target: Target, threads: int) -> "DynamicDecoder":
        """Open the variant's graph with the target's provider."""
        provider = providers.find(target.provider)
        path = bundle.file(variant.graphs["model"])
        opened = provider.open_session(path, target, providers.SessionChoice(threads=threads))
        return cls(opened, variant, bundle.manifest.vocab_size)

    @property
    def placement(self) -> Placement:
        return self._session.placement

    @property
    def _session(self) -> OpenSession:
        if self._opened is None:
            raise DeviceError("the model is closed", "load it again")
        return self._opened

    def _check(self, opened: OpenSession) -> None:
        """The graph has every input and output that will be bound."""
        inputs = {one.name for one in opened.session.get_inputs()}
        outputs = {one.name for one in opened.session.get_outputs()}
        extra = {one.name for one in opened.session.get_overridable_initializers()}
        self._keeps = LOGITS_TO_KEEP in extra | inputs
        wanted = {INPUT_IDS} | {tensor.input for tensor in self._spec}
        made = {LOGITS} | {tensor.output for tensor in self._spec}
        self._masked = ATTENTION_MASK in inputs
        missing = sorted((wanted - inputs) | (made - outputs))
        unknown = sorted((inputs - wanted - {ATTENTION_MASK, LOGITS_TO_KEEP}) | (outputs - made))
        if missing or unknown:
            word = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the manifest does not name"
            raise BundleError(f"the graph {word}", "build the bundle again")

    def new_state(self, capacity: int) -> DynamicState:
        if capacity > self.context:
            raise ContextLengthError(f"{capacity} tokens asked for, the context holds {self.context}", "ask for fewer")
        state = DynamicState(self._session, self._spec, capacity)
        if self._keeps:
            state.bind_input(LOGITS_TO_KEEP, self._keep)
        return state

    def run(self, state: DynamicState, ids: Sequence[int] | NDArray[np.int64], keep: int = 1) -> Logits:
        count = len(ids)
        if not 0 < count <= self.chunk or not 0 <= keep <= count:
            raise ValueError(f"{count} tokens, {keep} kept: a run takes 1 to {self.chunk} tokens")
        if state.length + count > state.limit:
            raise ContextLengthError(f"the state was made for {state.limit} tokens", "make a larger one")
        state.make_room(count)
        self._ids[0, :count] = ids
        state.bind_input(INPUT_IDS, self._ids[:, :count])
        if self._masked:
            state.bind_input(ATTENTION_MASK, self._mask[:, : state.length + count])
        rows = max(keep, 1) if self._keeps else count
        self._keep[0] = rows
        logits = self._logits if rows == 1 else np.empty((1, rows, self.vocab_size), np.float32)
        state.bind_output(LOGITS, logits)
        state.step(self._session, count)
        kept: Logits = logits[0, rows - keep :]
        return kept

    def close(self) -> None:
        self._opened = None
        give_back_memory()
