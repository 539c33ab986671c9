"""Cut tables that have a row a position down to the context that is asked for.

Knows: which initializers those are. Does not know: what fills them.
A table for 131072 positions of head size 128 has 67 MB; a context of 8192 needs 4.
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import lazy, sizes
from export.step import Step

STAGE = 0


def wanted(flags: Flags) -> bool:
    """Every target."""
    return True


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Keep the first `step.context` rows of every initializer with the role rope or position."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if value.metadata_props.get(vocabulary.ROLE) not in ("rope", "position") or tensor is None:
            continue
        rows, *rest = sizes(tensor)
        if rows > step.context:
            value.const_value = _first_rows(tensor, (step.context, *rest))
            value.shape = ir.Shape((step.context, *rest))


def _first_rows(tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> ir.LazyTensor:
    assert tensor.name is not None
    return lazy(tensor.name, shape, tensor.dtype, lambda: tensor.numpy()[: shape[0]])
