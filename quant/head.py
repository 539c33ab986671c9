"""Logits from last hidden states, where the head's matrix is too large to be opened like a layer.

Knows: the last linear of a model, float or decided, read from disk in pieces of rows where it is large. Does not know: where
hidden states come from. Gemma's head has 262144 rows of 640: a session would hold 1.4 GB for it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from appliance.bundle.vocabulary import QUANT_LINEAR
from appliance.errors import BadInput
from quant.ablations import pieces_of, rounded
from quant.evaluate import Floats
from quant.graph import sizes, tensor_of
from quant.layers import Part
from quant.running import ELEMENTS

IN_MEMORY = 1 << 26
"""Bytes of a matrix that is kept as it is; a larger one is read in pieces from a file of its own for every few rows of logits,
which costs a third of what the products cost (the file is in the system's cache) and leaves the memory to the graphs."""
_PIECE = 1 << 25


def node_of(tail: Part) -> ir.Node:
    """The linear that makes the logits.

    Raises:
        BadInput: something is computed after it.
    """
    node = tail.linears[-1]
    if node.outputs[0] is not tail.leaving:
        raise BadInput(f"{tail.name} goes on after its head {node.name}", "it cannot be evaluated in parts yet")
    return node


def _pieces(node: ir.Node) -> Iterator[Floats]:
    """The matrix [V,K], some rows at a time where it can be read so."""
    if node.op_type == QUANT_LINEAR:
        yield from pieces_of(node)
    else:
        yield np.ascontiguousarray(tensor_of(node.inputs[1], node).numpy(), np.float32)


class Head:
    """x [n,K] -> logits [n,V], x being normed already.

    Args:
        node: a Linear or QuantLinear; of a decided one the integers' values are taken, and `round_` says what enters it.
        path: for the file of a large matrix; `close` removes it.
    """

    def __init__(self, node: ir.Node, path: Path):
        decided = node.op_type == QUANT_LINEAR
        self.words, self._columns = sizes(tensor_of(node.inputs[1], node))
        bias = node.inputs[3 if decided else 2] if len(node.inputs) > (3 if decided else 2) else None
        self._bias = None if bias is None else tensor_of(bias, node).numpy().astype(np.float32)
        self._path = path
        self._weight: Floats | None = None
        if 4 * self.words * self._columns <= IN_MEMORY:
            self._weight = np.concatenate(list(_pieces(node)))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for piece in _pieces(node):
                file.write(np.ascontiguousarray(piece).data)  # tofile hides why a disk takes no more

    def logits(self, hidden: Floats) -> Floats:
        """Of rows [n,K]."""
        rows = np.ascontiguousarray(hidden, np.float32)
        found = np.empty((len(rows), self.words), np.float32)
        if self._weight is not None:
            np.matmul(rows, self._weight.T, out=found)
        else:
            count = max(1, _PIECE // (4 * self._columns))
            with open(self._path, "rb") as file:
                for start in range(0, self.words, count):
                    piece = np.fromfile(file, np.float32, min(count, self.words - start) * self._columns)
                    found[:, start : start + count] = rows @ piece.reshape(-1, self._columns).T
        return found if self._bias is None else np.add(found, self._bias, out=found)

    def rows(self, words: npt.NDArray[np.int64]) -> Floats:
        """Rows of the matrix, [n,K]."""
        if self._weight is not None:
            return self._weight[words]
        whole = np.memmap(self._path, np.float32, "r", shape=(self.words, self._columns))
        return np.array(whole[words])

    def of_window(self, hidden: np.ndarray, node: ir.Node | None = None) -> Iterator[Floats]:
        """Logits of all rows of [1,S,K], a few at a time; with a QuantLinear, of what it makes of rows that enter it."""
        step = max(1, ELEMENTS // self.words)
        for start in range(0, hidden.shape[1], step):
            rows: Floats = np.asarray(hidden[0, start : start + step], np.float32)
            yield self.logits(rows if node is None or node.op_type != QUANT_LINEAR else rounded(rows, node))

    def close(self) -> None:
        """Free the memory and the file."""
        self._weight = None
        self._path.unlink(missing_ok=True)
