"""Discovery of schemes: every module here that holds a `SCHEME` is one, under its file's name with - for _.

Knows: the folder. Does not know: what any scheme does.
"""

import importlib
import pkgutil
from dataclasses import replace

from appliance.errors import TargetError
from quant.scheme import Options, Scheme, nearest


def known() -> list[str]:
    """Every scheme that can be named, sorted."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find(name: str, options: Options | None = None) -> Scheme:
    """The scheme called `name`, with `options` applied; `TargetError` with the nearest name when there is none."""
    if name not in known():
        raise TargetError(f'unknown scheme "{name}"', nearest(name, known()))
    scheme: Scheme = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").SCHEME
    return replace(scheme, options=options) if options is not None else scheme
