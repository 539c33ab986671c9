"""Discovery of providers: one file each in this folder, named as a target's `provider` key names it.

Knows: how a provider's file is found and what it must offer. Does not know: any provider.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from appliance.errors import TargetError
from appliance.runtime.session import OpenSession
from appliance.targets.capabilities import Target


@dataclass(frozen=True, slots=True)
class SessionChoice:
    """What the opener of a session may choose, whatever the provider."""

    threads: int = 0  # 0 = one for each physical core
    forbid_fallback: bool = False  # refuse a graph that does not run whole on the provider
    overrides: tuple[tuple[str, str], ...] = ()  # session config entries, for measurements and tests


class Provider(Protocol):
    """What a file in this folder offers as module functions."""

    def open_session(self, path: Path, target: Target, choice: SessionChoice) -> OpenSession:
        """Open one graph file with its external data and read back its placement.

        Raises:
            BundleError: the file is no graph that onnxruntime can read.
            DeviceError: the provider is not there, or refused the graph.
        """


def names() -> list[str]:
    """Every provider there is a file for, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Provider:
    """The provider called `name`; `TargetError` with the known names when there is none."""
    if name not in names():
        raise TargetError(f'unknown provider "{name}"', f"known providers: {', '.join(names())}")
    return cast(Provider, importlib.import_module(f"{__name__}.{name}"))
