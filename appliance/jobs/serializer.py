"""How DBOS stores what steps gave: as JSON, so that code of a later version, or a person, can read it.

Knows: JSON values and the errors a workflow may end in. Does not know: what is stored. Nothing stored can be code.
"""

import json
from typing import Any

from dbos import Serializer

from appliance.errors import ApplianceError

_ERROR = "__error__"


class JsonSerializer(Serializer):
    """JSON; an exception comes back as an `ApplianceError` with its text."""

    def serialize(self, data: Any) -> str:
        """`TypeError` for what is no JSON value: that is a fault of ours."""
        return json.dumps(data, ensure_ascii=False, default=_plain)

    def deserialize(cls, serialized_data: str) -> Any:
        """What was stored."""
        data = json.loads(serialized_data)
        return ApplianceError(data[_ERROR]) if isinstance(data, dict) and _ERROR in data else data

    def name(self) -> str:
        """Stands beside what is stored."""
        return "appliance_json"


def _plain(data: Any) -> Any:
    if isinstance(data, BaseException):
        return {_ERROR: f"{type(data).__name__}: {data}"}
    raise TypeError(f"{type(data).__name__} is no JSON value")
