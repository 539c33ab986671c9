"""Strict reading of typed files and objects: an unknown key is an error that names the nearest right one.

Knows: how a pydantic failure becomes one clear sentence. Does not know: any particular file.
Source: pydantic v2 error dictionaries (`ValidationError.errors()`).
"""

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from appliance.errors import ApplianceError, BadInput


class StrictModel(pydantic.BaseModel):
    """Base of every typed file: frozen, no unknown keys, no NaN, no silent conversions from text to number."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


Model = TypeVar("Model", bound=pydantic.BaseModel)


def read(model: type[Model], data: Mapping[str, Any], where: str, error: type[ApplianceError] = BadInput) -> Model:
    """Check `data` against `model`; raise `error` with one sentence that names the place and the mend.

    Args:
        model: the pydantic model to read into.
        data: decoded JSON or TOML.
        where: what is being read, for the message: a file's path or a request's name.
        error: the class of error to raise.
    """
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as failure:
        raise error(f"{where}: {_sentence(model, _cause(failure.errors(include_url=False)))}") from None


def _cause(errors: Sequence[Any]) -> Any:
    """The first failure; where that is a missing key beside an unknown one, the unknown one: it is the key mistyped."""
    first = errors[0]
    if first["type"] == "missing":
        beside = [one for one in errors if one["type"] == "extra_forbidden" and one["loc"][:-1] == first["loc"][:-1]]
        return beside[0] if beside else first
    return first


def _sentence(model: type[pydantic.BaseModel], error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        key = str(error["loc"][-1])
        known = sorted(_keys_at(model, error["loc"][:-1]))
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
        return f'unknown key "{path}"; {hint}'
    if error["type"] == "missing":
        return f'key "{path}" is missing'
    message = error["msg"].removeprefix("Value error, ")  # pydantic's word for a check of ours, whose sentence follows
    message = message.replace("valid tuple", "list")  # Python's word; the files that are read here say list
    return f'"{path}": {message[:1].lower()}{message[1:]}' if path else message


def _keys_at(model: type[pydantic.BaseModel], path: tuple[int | str, ...]) -> set[str]:
    """The keys allowed at `path` below `model`; those of all its models where the place is a union or a list."""
    models: set[Any] = {model}
    for part in path:
        inner: set[Any] = set()
        for one in models:
            field = one.model_fields.get(str(part))
            if field is not None:
                inner |= set(_models_in(field.annotation))
        models = inner or models
    keys: set[str] = set()
    for one in models:
        keys |= {field.alias or name for name, field in one.model_fields.items()}
    return keys


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [found for inner in typing.get_args(annotation) for found in _models_in(inner)]
