"""Discovery of tools: each file here with a function of its own name is one.

A tool takes the desk and then plain typed arguments; its docstring says what it does, and in "name: text" lines what each
argument means. That is all a model is told of it.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic

from appliance.errors import RequestError
from appliance.tools.desk import Desk


@dataclass(frozen=True)
class Tool:
    """One tool: what a model is told, and what runs."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments
    arguments: type[pydantic.BaseModel]
    function: Callable[..., Any]

    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's tool object."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def run(self, desk: Desk, arguments: dict[str, Any]) -> Any:
        """Call it; gives a JSON value. `RequestError` when the arguments are not what the schema says."""
        try:
            checked = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as failure:
            first = failure.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RequestError(f"{self.name}: {where}: {first['msg']}", "see the tool's parameters", param=where) from None
        return self.function(desk, **{name: getattr(checked, name) for name in self.arguments.model_fields})


def known() -> dict[str, Tool]:
    """Every tool by name."""
    found = {}
    for _, name, _ in pkgutil.iter_modules(__path__):
        function = getattr(importlib.import_module(f"{__name__}.{name}"), name, None)
        if inspect.isfunction(function):
            found[name] = describe(function)
    return found


def describe(function: Callable[..., Any]) -> Tool:
    """The tool that a typed function with a docstring is."""
    text, notes = _split(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:  # the first is the desk
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, pydantic.Field(default, description=notes.get(parameter.name)))
    name = function.__name__
    arguments = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    schema = arguments.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return Tool(name, text, schema, arguments, function)


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """A docstring's text, and what it says of each argument."""
    head, _, rest = doc.partition("\nArgs:\n")
    lines = (line.strip().partition(": ") for line in rest.splitlines() if line.strip())
    return " ".join(head.split()), {name: text for name, _, text in lines}
