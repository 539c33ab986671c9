"""State of one sequence: the tensors that a step hands on, as the manifest's state spec names them.

Knows: shapes, growth and in-place buffers of carried tensors. Does not know: sessions or how a step is run.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.manifest import StateTensor
from appliance.errors import BundleError
from appliance.runtime import huge_pages

Buffer = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of a carried tensor with its free dimensions filled in."""

    shape: tuple[int, ...]
    context_axis: int | None  # axis that grows with the tokens; None for fixed state


def resolve(tensor: StateTensor, batch: int, context: int) -> StateShape:
    """Put numbers in place of the words "batch" and "context".

    Raises:
        BundleError: a growing tensor names no context axis, or the shape holds another word.
    """
    shape: list[int] = []
    axis = None
    for at, dimension in enumerate(tensor.shape):
        if dimension == "batch":
            shape.append(batch)
        elif dimension == "context":
            shape.append(context)
            axis = at
        elif isinstance(dimension, int):
            shape.append(dimension)
        else:
            raise BundleError(f"state {tensor.name}: unknown dimension {dimension!r}", "build the bundle again")
    if tensor.growth == "growing" and axis is None:
        raise BundleError(f"state {tensor.name} grows but names no context dimension", "build the bundle again")
    return StateShape(tuple(shape), axis)


def empty_buffers(spec: Sequence[StateTensor], context: int) -> dict[str, Buffer]:
    """Zeroed buffers for one sequence of up to `context` tokens, by name of the state tensor."""
    return {tensor.name: new_buffer(resolve(tensor, 1, context).shape, tensor.dtype) for tensor in spec}


def new_buffer(shape: tuple[int, ...], dtype: str) -> Buffer:
    """A zeroed array in pages of its own: they cost memory once written, and go back to the system with the array.

    (The C library's allocator keeps freed buffers of this size, which a daemon would carry through its idle days.)
    """
    count = math.prod(shape)
    if count == 0:
        return np.zeros(shape, dtype)
    # Private: shared memory, Python's default, gets no huge pages. Neighbours merge in the kernel, so small ones gain too.
    memory = mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge_pages.advise(memory)
    buffer: Buffer = np.frombuffer(memory, dtype).reshape(shape)
    return buffer


def grown(tensor: StateTensor, buffer: Buffer, length: int, context: int) -> Buffer:
    """A larger buffer that holds the first `length` rows of `buffer`; one without a context axis is returned as it is."""
    target = resolve(tensor, 1, context)
    if target.context_axis is None:
        return buffer
    larger = new_buffer(target.shape, tensor.dtype)
    rows = (slice(None),) * target.context_axis + (slice(0, length),)
    larger[rows] = buffer[rows]
    return larger
