"""Discovery of sources: every module here that has `matches` and `look`."""

import importlib
import pkgutil
from typing import cast

from appliance.errors import BadInput
from appliance.pull.offer import Source


def known() -> list[Source]:
    """Every source, in the order in which they are asked."""
    modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
    return sorted((cast(Source, module) for module in modules), key=lambda source: source.ORDER)


def find(text: str) -> Source:
    """The source that takes `text`; `BadInput` with all the forms when none does."""
    for source in known():
        if source.matches(text):
            return source
    forms = ", ".join(source.FORM.split(" ", 1)[0] for source in known())
    raise BadInput(f"cannot tell what {text!r} is: no such file or folder, and none of the known forms", f"write one of: {forms}")
