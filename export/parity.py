"""Run a lowered graph through onnxruntime and compare it with reference logits.

Knows: the inputs of the dynamic form, with joined and with in-place state. Does not know: where references come from,
the static pair (`appliance.runtime` runs that).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from appliance.bundle import vocabulary
from appliance.bundle.manifest import StateTensor
from appliance.targets import load
from appliance.targets.capabilities import Target
from export.arch import Opened
from export.lower import Lowered, lower
from export.save import save_all

LIMIT = 1e-3
"""Largest difference of a logit from the reference that counts as the same model."""


@dataclass(frozen=True)
class FloatModel:
    """A float graph in a session, with what it carries."""

    session: Any
    lowered: Lowered


def reference_target() -> Target:
    """Plain ONNX operators, dynamic shapes, a past that grows by joining: the float reference of every parity check."""
    cpu = load("cpu")
    flags = cpu.flags.model_copy(update={"attention": "decomposed", "contrib_ops": False, "quantized_embedding": False})
    return cpu.model_copy(update={"name": "reference", "summary": "the float reference", "flags": flags})


def open_float(opened: Opened, target: Target, *, context: int = 0, threads: int = 0) -> FloatModel:
    """Lower the undecided canonical graph for `target` (dynamic form) and open it on the CPU provider."""
    return open_lowered(lower(opened.build, target, context, target.chunk), threads=threads)


def open_lowered(lowered: Lowered, *, threads: int = 0) -> FloatModel:
    """Open the graph "model" of a lowering. Its weights pass through a temporary folder, one tensor at a time."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory(prefix="appliance-parity-") as folder:
        path = save_all({"model": lowered.graphs["model"]}, Path(folder), "weights.bin")["model"]
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return FloatModel(session, lowered)


def logits(model: FloatModel, ids: Sequence[int], chunks: Sequence[int] = ()) -> np.ndarray:
    """Logits of every position, [len(ids), V] float32.

    Args:
        model: from `open_float`.
        ids: one sequence of token ids.
        chunks: how many tokens each run takes, the last size repeated to the end; empty = all in one run.
    """
    sizes = list(chunks) or [len(ids)]
    inplace = any(tensor.update == "inplace" for tensor in model.lowered.state)
    run = _InPlace(model, len(ids)) if inplace else _Joined(model)
    found, done = [], 0
    while done < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = np.array([ids[done : done + size]], np.int64)
        done += part.shape[1]
        found.append(run.step(part, done))
    return np.asarray(np.concatenate(found))


def embeddings(model: FloatModel, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Unit vectors [B,D] float32 of a model whose task is "embed", for ids and mask [B,S] int64."""
    feeds = {vocabulary.INPUT_IDS: ids, vocabulary.ATTENTION_MASK: mask}
    return np.asarray(model.session.run([vocabulary.SENTENCE], feeds)[0])


class _Joined:
    """The output state of a step is the next one's input."""

    def __init__(self, model: FloatModel):
        self._model = model
        self._past = {one.input: _empty(one, 0) for one in model.lowered.state}

    def step(self, ids: np.ndarray, total: int) -> np.ndarray:
        """Logits [S,V] of `ids` [1,S], the last of `total` tokens."""
        state = self._model.lowered.state
        names = [vocabulary.LOGITS, *(one.output for one in state)]
        first, *present = self._model.session.run(names, {**_inputs(ids, total), **self._past})
        self._past = {one.input: array for one, array in zip(state, present, strict=True)}
        return np.asarray(first[0])


class _InPlace:
    """Inputs and outputs of the state are the same buffers, as long as the whole sequence."""

    def __init__(self, model: FloatModel, length: int):
        import onnxruntime

        self._model = model
        self._buffers = {one.input: onnxruntime.OrtValue.ortvalue_from_numpy(_empty(one, length)) for one in model.lowered.state}

    def step(self, ids: np.ndarray, total: int) -> np.ndarray:
        """Logits [S,V] of `ids` [1,S], the last of `total` tokens."""
        import onnxruntime

        binding = self._model.session.io_binding()
        for name, array in _inputs(ids, total).items():
            # As an OrtValue: the array form looks the name up among the inputs, and an overridable initializer is none.
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for one in self._model.lowered.state:
            binding.bind_ortvalue_input(one.input, self._buffers[one.input])
            binding.bind_ortvalue_output(one.output, self._buffers[one.input])
        binding.bind_output(vocabulary.LOGITS)
        self._model.session.run_with_iobinding(binding)
        return np.asarray(binding.get_outputs()[-1].numpy()[0])


def _inputs(ids: np.ndarray, total: int) -> dict[str, np.ndarray]:
    return {
        vocabulary.INPUT_IDS: ids,
        vocabulary.ATTENTION_MASK: np.ones((1, total), np.int64),
        vocabulary.LOGITS_TO_KEEP: np.array([ids.shape[1]], np.int64),
    }


def _empty(tensor: StateTensor, length: int) -> np.ndarray:
    words = {"batch": 1, "context": length}
    return np.zeros([words[size] if isinstance(size, str) else size for size in tensor.shape], tensor.dtype)
