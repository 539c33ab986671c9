"""Discovery of step kinds: each file here is one.

A kind has `Settings` (its keys in a [[step]] table), `TOOLS` (what it cannot work without) and
`run(work, settings, name)`, which changes the work's draft and does everything that reaches outside through the work's record.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import ConfigError
from appliance.jobs.work import Work
from appliance.strict import StrictModel, read


@dataclass(frozen=True)
class Kind:
    """One kind of step."""

    name: str
    settings: type[StrictModel]
    tools: tuple[str, ...]
    run: Callable[[Work, Any, str], None]


def known() -> dict[str, Kind]:
    """Every kind by name."""
    found = {}
    for _, name, _ in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{name}")
        found[name] = Kind(name, module.Settings, module.TOOLS, module.run)
    return found


def read_step(table: Mapping[str, Any], where: str) -> tuple[Kind, StrictModel]:
    """A [[step]] table, checked. `ConfigError` names an unknown kind or key and the nearest right one."""
    kinds = known()
    name = table.get("kind")
    if name not in kinds:
        near = difflib.get_close_matches(str(name), kinds, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"kinds: {', '.join(kinds)}"
        raise ConfigError(f'{where}: "kind": {"it is missing" if name is None else f"unknown kind {name!r}"}', hint)
    return kinds[name], read(kinds[name].settings, table, where, ConfigError)
