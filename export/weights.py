"""Weights of a checkpoint as lazy, tagged initializers under their Hugging Face names.

Knows: that a tensor is there, has the shape the architecture needs, what it is for, and that none is left over.
Does not know: operators, or what a tensor means beyond its tag. Numbers are read only when somebody asks for them.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.errors import CheckpointError
from export.checkpoint.source import Checkpoint, Grid, StoredGrid
from export.graph import add_initializer, lazy


@dataclass(frozen=True)
class Tag:
    """What a weight is for.

    Attributes:
        role: one of `vocabulary.ROLES`.
        stream: which hidden state enters it ("layers.3.attn_in"); linears with the same stream share statistics.
        layer: number of the layer, or None.
    """

    role: str
    stream: str = ""
    layer: int | None = None

    def props(self) -> dict[str, str]:
        """The tag as metadata of an initializer."""
        assert self.role in vocabulary.ROLES, f"{self.role} is no role"
        props = {vocabulary.ROLE: self.role}
        if self.stream:
            props[vocabulary.STREAM] = self.stream
        if self.layer is not None:
            props[vocabulary.LAYER] = str(self.layer)
        return props


@dataclass(frozen=True)
class Stored:
    """Where a file keeps a tensor, and what brings it to the form that Hugging Face's name stands for.

    Attributes:
        restore: takes and gives an array.
        moves_rows: `restore` does no more than put rows in another order, so it works on integers and scales too.
    """

    name: str
    restore: Callable[[np.ndarray], np.ndarray] | None = None
    moves_rows: bool = False


class Weights:
    """Hands out a checkpoint's tensors by their Hugging Face names.

    Args:
        checkpoint: opened checkpoint.
        layout: for formats with names of their own: Hugging Face name -> where it is kept. None = names are the same.
        ignore: patterns of file names that are not wanted and not missed (buffers that can be computed).
    """

    def __init__(self, checkpoint: Checkpoint, layout: Mapping[str, Stored] | None = None, ignore: Sequence[str] = ()):
        self.checkpoint = checkpoint
        self._layout = layout
        self._ignore = tuple(ignore)
        self._left = set(checkpoint.names())
        self._all = frozenset(self._left)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        stored = self._stored(name)
        return stored is not None and stored.name in self._all

    def take(self, graph: ir.Graph, name: str, shape: tuple[int, ...], tag: Tag) -> ir.Value:
        """The tensor as a lazy float32 initializer of `graph`; taken a second time, the same initializer.

        Raises:
            CheckpointError: there is no such tensor, or it has another shape; both are named.
        """
        known = graph.initializers.get(name)
        if known is not None:
            return known
        stored = self._stored(name)
        if stored is None or stored.name not in self._all:
            asked = name if stored is None or stored.name == name else f"{stored.name} ({name})"
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {asked} of shape {list(shape)} is missing", "fetch the checkpoint again"
            )
        found = tuple(self.checkpoint.shape(stored.name))
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {stored.name} has shape {list(found)}, the model needs {list(shape)}",
                "the config and the weights do not belong together; fetch both again",
            )
        self._left.discard(stored.name)
        return add_initializer(graph, name, self._tensor(name, stored, shape), tag.props())

    def finish(self) -> None:
        """Call when the model is built.

        Raises:
            CheckpointError: tensors are left that the architecture has no use for; they are named.
        """
        left = sorted(name for name in self._left if not any(fnmatch.fnmatchcase(name, glob) for glob in self._ignore))
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{self.checkpoint.path}: {len(left)} tensors that this architecture does not have: {', '.join(left[:5])}{more}",
                "the checkpoint holds another model than its config says, or one with parts that are not supported",
            )

    def _stored(self, name: str) -> Stored | None:
        return Stored(name) if self._layout is None else self._layout.get(name)

    def _tensor(self, name: str, stored: Stored, shape: tuple[int, ...]) -> ir.LazyTensor:
        checkpoint, restore = self.checkpoint, stored.restore

        def read() -> np.ndarray:
            array = checkpoint.read(stored.name)
            return array if restore is None else restore(array)

        tensor = lazy(name, shape, ir.DataType.FLOAT, read)
        tensor.meta[vocabulary.STORED_TYPE] = checkpoint.stored_type(stored.name)
        grid = checkpoint.stored_grid(stored.name)
        if grid is not None and (restore is None or stored.moves_rows):
            tensor.meta[vocabulary.STORED_GRID] = grid if restore is None else _moved(grid, restore)
        return tensor


def _moved(stored: StoredGrid, restore: Callable[[np.ndarray], np.ndarray]) -> StoredGrid:
    """The grid with its rows in another order."""

    def read() -> Grid:
        grid = stored.read()
        return Grid(restore(grid.q), restore(grid.scales), None if grid.offsets is None else restore(grid.offsets))

    return replace(stored, read=read)


def check_tags(graph: ir.Graph) -> None:
    """Every weight of a Linear or Embedding, decided or not, says its role (or, packed, those of its parts)."""
    weighted = {vocabulary.EMBEDDING, vocabulary.LINEAR, vocabulary.QUANT_LINEAR, vocabulary.QUANT_EMBEDDING}
    for node in graph:
        if node.domain != vocabulary.DOMAIN or node.op_type not in weighted:
            continue
        weight = node.inputs[1]
        assert weight is not None and weight.is_initializer(), f"{node.name}: the weight is no initializer"
        parts = weight.metadata_props.get(vocabulary.PARTS, "")
        roles = [part.split(":")[0] for part in parts.split(",")] if parts else [weight.metadata_props.get(vocabulary.ROLE)]
        for role in roles:
            assert role in vocabulary.ROLES, f"{node.name}: weight {weight.name} has the role {role!r}, which is none"
