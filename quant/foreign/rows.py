"""Which rows of a packed matrix are whose.

Knows: how a product's columns are cut apart. Does not know: what the parts are for.

    product -(+ bias)- Reshape - Split  -+-> ...        or Slice, several of them
                                         +-> ...
"""

import itertools
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from quant.foreign.products import Matrix, behind, computed, constant, integer

FOLLOWED = frozenset({"Add", "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def rows_of(
    matrix: Matrix, parts: Mapping[str, Sequence[ir.Value]], heads: tuple[int, int] | None
) -> Mapping[str, tuple[int, int]] | None:
    """Part -> (first row, end). None where the rows of parts do not follow one another, or it cannot be told.

    Args:
        parts: what leaves the product as each part.
        heads: (query heads, key heads) of an operator that takes q, k and v one after the other.
    """
    count = matrix.shape[0]
    if heads is not None:
        wide, narrow = heads
        size, rest = divmod(count, wide + 2 * narrow)
        ends = [wide * size, (wide + narrow) * size, count]
        return None if rest else dict(zip(parts, zip([0, *ends[:2]], ends, strict=True), strict=True))
    cuts = _cuts(matrix)
    found: dict[str, tuple[int, int]] = {}
    for part, values in parts.items():
        passed = {id(value) for value in values}
        for node in behind(list(values), {id(matrix.node)}):
            passed |= {id(value) for value in computed(node)}
        own = {rows for key, rows in cuts.items() if key in passed}
        if len(own) != 1:
            return None
        found[part] = own.pop()
    ordered = sorted(found.values())
    whole = ordered[0][0] == 0 and ordered[-1][1] == count
    return found if whole and all(left[1] == right[0] for left, right in itertools.pairwise(ordered)) else None


def _cuts(matrix: Matrix) -> dict[int, tuple[int, int]]:
    """Id of a value -> which columns of the product it is."""
    count, found = matrix.shape[0], dict[int, tuple[int, int]]()
    waiting, seen = list(matrix.node.outputs), set[int]()
    while waiting:
        for use in waiting.pop().uses():
            node = use.node
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.op_type == "Split":
                found |= _split(node, count)
            elif node.op_type == "Slice":
                found |= _slice(node, count)
            elif node.op_type in FOLLOWED and len(computed(node)) <= 2:
                waiting.extend(node.outputs)
    return found


def _split(node: ir.Node, count: int) -> dict[int, tuple[int, int]]:
    """Only one that cuts all columns: of a split along another axis the sizes do not add up to them."""
    sizes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if sizes is None:
        parts = integer(node, "num_outputs", len(node.outputs))
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        if shape is None or shape[-1] != count or integer(node, "axis", 0) not in (-1, len(shape) - 1):
            return {}
        sizes = [count // parts] * parts
    if sum(sizes) != count:
        return {}
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return {id(value): (end - size, end) for value, size, end in zip(node.outputs, sizes, ends, strict=True)}


def _slice(node: ir.Node, count: int) -> dict[int, tuple[int, int]]:
    starts, ends = constant(node.inputs[1]), constant(node.inputs[2])
    steps = constant(node.inputs[4]) if len(node.inputs) > 4 else [1]
    if starts is None or ends is None or len(starts) != 1 or steps != [1]:
        return {}
    first = starts[0] + count if starts[0] < 0 else starts[0]
    end = min(ends[0] + count if ends[0] < 0 else ends[0], count)
    return {id(node.outputs[0]): (first, end)}
