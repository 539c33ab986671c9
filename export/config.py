"""Reading a model's config: typed, and every refusal names the key.

Knows: types and ranges. Does not know: any architecture's keys.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.errors import CheckpointError


class Keys:
    """Typed access to config.json or to GGUF metadata below `prefix`. A key set to null counts as absent."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = ""):
        self._data = data
        self._where = where
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._data.get(self._prefix + key) is not None

    def require(self, *keys: str) -> None:
        """Refuse a config that does not have these keys at all (null will do): their defaults are not safe to guess."""
        for key in keys:
            if self._prefix + key not in self._data:
                raise self._lacks(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1; `default` may be 0 to stand for "none"."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != default):
            raise self.wrong(f'"{self._prefix}{key}" must be a whole number of at least 1, it is {value!r}')
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(f'"{self._prefix}{key}" must be a number above 0, it is {value!r}')
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(f'"{self._prefix}{key}" must be true or false, it is {value!r}')
        return value

    def text(self, key: str, default: str) -> str:
        """A word."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(f'"{self._prefix}{key}" must be a word, it is {value!r}')
        return value

    def inner(self, key: str) -> "Keys":
        """The object under `key`; an empty one when it is absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(f'"{self._prefix}{key}" must be an object, it is {value!r}')
        return Keys(value, f"{self._where}: {self._prefix}{key}")

    def items(self, key: str) -> tuple[Any, ...]:
        """The items of the list under `key`; none when it is absent."""
        value = self._get(key, ())
        if not isinstance(value, list | tuple):
            raise self.wrong(f'"{self._prefix}{key}" must be a list, it is {value!r}')
        return tuple(value)

    def refuse_unless(self, harmless: Mapping[str, Sequence[Any]]) -> None:
        """Refuse any of these keys that has another value than the given ones."""
        for key, values in harmless.items():
            value = self._data.get(self._prefix + key)
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
                raise self.refused(key, value, [one for one in values if one is not None])

    def refused(self, key: str, value: object, known: Sequence[object]) -> CheckpointError:
        """The error that says that this value of `key` is not supported."""
        shown = f" {value!r}" if isinstance(value, str | int | float) else ""
        words = f"supported: {', '.join(str(one) for one in known)}" if known else "use a checkpoint without it"
        return CheckpointError(f'{self._where}: "{self._prefix}{key}"{shown} is not supported for this architecture', words)

    def wrong(self, what: str) -> CheckpointError:
        """The error for a config that contradicts itself."""
        return CheckpointError(f"{self._where}: {what}", "the config is damaged; fetch the checkpoint again")

    def _get(self, key: str, default: Any) -> Any:
        value = self._data.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise self._lacks(key)
        return value

    def _lacks(self, key: str) -> CheckpointError:
        return CheckpointError(f'{self._where}: the config lacks "{self._prefix}{key}"', "fetch the checkpoint again")
