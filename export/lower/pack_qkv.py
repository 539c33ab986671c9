"""Join the q, k and v projections of a layer into one, so that their input is read (and quantized) once.

Knows: which linears may be joined: those of one attention, with the same input and the same form.
Does not know: what the attention becomes. Joining gate and up was measured to gain nothing, so it is not done.

    x -+- Linear q -+                x -- Linear [q;k;v] -- Split -+-- Attention
       +- Linear k -+-- Attention  =>                              +--
       +- Linear v -+                                              +--
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, add_initializer, join_rows, nodes_of, replace, sizes
from export.step import Step

STAGE = 10


def wanted(flags: Flags) -> bool:
    """Targets whose attention takes q, k and v in one tensor."""
    return flags.attention == "contrib"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Join what can be joined; rows are joined when the weight is read, the tag `parts` says whose they are."""
    for node in nodes_of(model.graph, vocabulary.ATTENTION):
        producers = [value.producer() for value in node.inputs[:3] if value is not None]
        linears = [one for one in producers if one is not None]
        if len(linears) == 3 and _alike(linears):
            _join(model.graph, linears)


def _alike(linears: list[ir.Node]) -> bool:
    first = linears[0]
    if first.domain != vocabulary.DOMAIN or first.op_type not in (vocabulary.LINEAR, vocabulary.QUANT_LINEAR):
        return False
    return all(
        one.op_type == first.op_type
        and one.domain == first.domain
        and one.inputs[0] is first.inputs[0]
        and _attributes(one) == _attributes(first)
        and [value is None for value in one.inputs] == [value is None for value in first.inputs]
        and _trailing(one) == _trailing(first)
        and len(one.outputs[0].uses()) == 1
        for one in linears
    )


def _attributes(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _trailing(node: ir.Node) -> list[object]:
    """dtype and all sizes but the rows of every weight-like input."""
    found: list[object] = []
    for value in node.inputs[1:]:
        tensor = value.const_value if value is not None else None
        found.append(None if tensor is None else (tensor.dtype, tuple(tensor.shape)[1:]))
    return found


def _join(graph: ir.Graph, linears: list[ir.Node]) -> None:
    first = linears[0]
    path = (first.name or "").rpartition("/")[0].rpartition("/")[0]
    at = Nodes(graph, f"{path}/qkv_proj", first)
    inputs: list[ir.Value | None] = [first.inputs[0]]
    for index in range(1, len(first.inputs)):
        parts = [one.inputs[index] for one in linears]
        inputs.append(_joined(graph, [part for part in parts if part is not None]))
    node = at.node(first.op_type, inputs, {}, domain=vocabulary.DOMAIN)
    node.attributes.update(first.attributes)
    node.metadata_props.update({key: value for key, value in first.metadata_props.items() if key != vocabulary.ROLE})
    rows = [_rows(one.inputs[1]) for one in linears]
    split = at.node("Split", [node.outputs[0], at.ints(*rows)], {"axis": -1}, outputs=3)
    for one, value in zip(linears, split.outputs, strict=True):
        replace(graph, one, [value])


def _rows(value: ir.Value | None) -> int:
    assert value is not None and value.const_value is not None
    return sizes(value.const_value)[0]


def _joined(graph: ir.Graph, parts: list[ir.Value]) -> ir.Value | None:
    """One initializer of the rows of all parts, tagged with whose they are."""
    if not parts:
        return None
    tensors = [part.const_value for part in parts if part.const_value is not None]
    assert len(tensors) == 3 and all(part.name for part in parts)
    name = str(parts[0].name).replace(".q_proj.", ".qkv_proj.")
    assert name != parts[0].name, f"{parts[0].name} does not name a q projection"
    tags, first, said = dict(parts[0].metadata_props), 0, []
    for part in parts:
        role, rows = part.metadata_props.get(vocabulary.ROLE, ""), _rows(part)
        said.append(f"{role}:{first}:{first + rows}")
        first += rows
    tags.pop(vocabulary.ROLE, None)
    return add_initializer(graph, name, join_rows(name, tensors), {**tags, vocabulary.PARTS: ",".join(said)})
