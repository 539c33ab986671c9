"""State of one sequence: the tensors that a step hands on, as the manifest's state spec names them.

Knows: shapes, growth and in-place buffers of carried tensors. Does not know: sessions or how a step is run.
"""

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.manifest import StateTensor
from appliance.errors import BundleError
from appliance.runtime import huge_pages

Buffer = NDArray[Any]

ARENA = 64 << 20
"""Bytes of state that are allocated together: many huge pages, and little that stands twice while a state grows."""
ALIGNMENT = 64


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
    return {name: buffer for group in arenas(spec, context) for name, buffer in new_arena(group, context).items()}


def arenas(spec: Sequence[StateTensor], context: int) -> list[list[StateTensor]]:
    """The tensors in order, in groups that are allocated together."""
    groups: list[list[StateTensor]] = []
    room = 0
    for tensor in spec:
        size = _bytes_of(tensor, context)
        if size > room or not groups:
            groups.append([])
            room = ARENA
        groups[-1].append(tensor)
        room -= size
    return groups


def new_arena(group: Sequence[StateTensor], context: int) -> dict[str, Buffer]:
    """Zeroed buffers side by side in pages of their own: they cost memory once written, and go back to the system when
    the last of them goes. (The C library's allocator keeps freed buffers of this size, which a daemon would carry through
    its idle days.)"""
    shapes = [resolve(tensor, 1, context).shape for tensor in group]
    sizes = [_bytes_of(tensor, context) for tensor in group]
    if not sum(sizes):
        return {tensor.name: np.zeros(shape, tensor.dtype) for tensor, shape in zip(group, shapes, strict=True)}
    # Private: shared memory, Python's default, gets no huge pages.
    memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge_pages.advise(memory)
    offsets = [sum(sizes[:at]) for at in range(len(sizes))]
    return {
        tensor.name: np.frombuffer(memory, tensor.dtype, math.prod(shape), offset).reshape(shape)
        for tensor, shape, offset in zip(group, shapes, offsets, strict=True)
    }


def grown(group: Sequence[StateTensor], buffers: Mapping[str, Buffer], length: int, context: int) -> dict[str, Buffer]:
    """Larger buffers that hold the first `length` rows of the group's; what has no context axis is copied whole."""
    larger = new_arena(group, context)
    for tensor in group:
        axis = resolve(tensor, 1, context).context_axis
        rows = () if axis is None else (slice(None),) * axis + (slice(0, length),)
        larger[tensor.name][rows] = buffers[tensor.name][rows]
    return larger


def _bytes_of(tensor: StateTensor, context: int) -> int:
    """Bytes of a tensor, up to the next boundary that vector loads like."""
    size = math.prod(resolve(tensor, 1, context).shape) * np.dtype(tensor.dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
