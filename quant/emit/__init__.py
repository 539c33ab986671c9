"""Emission: decided nodes in the form that a target's matrix operator takes. Every module here is one form.

Knows: the folder, and which nodes are to be written. Does not know: any form.
A form's module holds OPERATOR and ELEMENT (as `WeightForms` names them), OPSET (the lowest ai.onnx version it needs, 0 = any),
DOMAINS, `refusal(form, roles)`, and a class `Emitter(target)` with `linear(node)` and `embedding(node)`. One whose opset is newer
than what lowering writes offers `upgrade(model)`.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol

import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN, QUANT_EMBEDDING, QUANT_LINEAR
from appliance.errors import TargetError
from appliance.targets.capabilities import Target
from quant.graph import canonical, drop_unused, replace
from quant.scheme import Form

STAND_IN = "stand-in"
"""The operator of forms that are only there to be measured: what runs decided parts here when the bundle's target is elsewhere
asks for elements that its target does not take. `quant.plan` lets no build come that far."""


class Emitter(Protocol):
    """Writes one model's nodes."""

    def linear(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantLinear's."""

    def embedding(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantEmbedding's."""


def refusal(operator: str, form: Form, roles: tuple[str, ...]) -> str | None:
    """Why the operator cannot hold a matrix of these roles in this form; None when it can."""
    reason: str | None = _form(operator, form.element).refusal(form, roles)
    return reason


def emit(model: ir.Model, target: Target) -> None:
    """Write every QuantLinear and QuantEmbedding of a lowered `model`, in place, as `target` takes it.

    Weights that several nodes share stay one initializer. All new initializers are lazy.

    Raises:
        TargetError: the target's operator cannot hold a node's form, or the model's opset is too old for it.
    """
    graph = model.graph
    nodes = canonical(graph, QUANT_LINEAR, QUANT_EMBEDDING)
    if not nodes:
        return
    elements = [node.attributes["element"].as_string() if "element" in node.attributes else "int" for node in nodes]
    takes = target.weights
    forms = {element: _form(takes.operator if element in takes.elements else STAND_IN, element) for element in elements}
    emitters = {element: _emitter(model, form, target) for element, form in forms.items()}
    weights = [value for node in nodes for value in (*node.inputs[1:3], *node.inputs[4:6]) if value is not None]
    for node, element in zip(nodes, elements, strict=True):
        emitter = emitters[element]
        output = emitter.linear(node) if node.op_type == QUANT_LINEAR else emitter.embedding(node)
        replace(node, output)
    drop_unused(graph, weights)
    graph.opset_imports.update({domain: 1 for form in forms.values() for domain in form.DOMAINS})
    if not any(node.domain == DOMAIN for node in graph):
        graph.opset_imports.pop(DOMAIN, None)


def _emitter(model: ir.Model, form: ModuleType, target: Target) -> Emitter:
    if hasattr(form, "upgrade"):
        form.upgrade(model)
    have = model.graph.opset_imports.get("", 0)
    if have < form.OPSET:
        raise TargetError(f"{form.OPERATOR} weights need opset {form.OPSET}, the graph has {have}", "build it with a newer one")
    emitter: Emitter = form.Emitter(target)
    return emitter


def _form(operator: str, element: str) -> ModuleType:
    for module in pkgutil.iter_modules(__path__):
        form = importlib.import_module(f"{__name__}.{module.name}")
        if (operator, element) == (form.OPERATOR, form.ELEMENT):
            return form
    raise TargetError(f'no form writes {element} weights for the operator "{operator}"', "add a module to quant/emit")
