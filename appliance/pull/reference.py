"""How a model on a hub is written: PREFIX:OWNER/NAME[@REVISION]."""

import re

from appliance.errors import BadInput

# What both hubs allow in names; anything else would change the meaning of an address.
_PATTERN = re.compile(r"^(?:[a-z]+:)?(?P<model>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?$", re.ASCII)


def parse_reference(text: str, form: str) -> tuple[str, str | None]:
    """("owner/name", revision or None); `BadInput` naming the form otherwise."""
    found = _PATTERN.match(text)
    if not found or ".." in text:
        raise BadInput(f"{text!r} names no model on a hub", f"write {form.split(' ', 1)[0]}")
    return found["model"], found["revision"]
