"""Wire types of `GET /appliance/v1/device`.

Knows: the JSON. Does not know: where the values come from.
"""

from pydantic import BaseModel, ConfigDict

from appliance.api.wire.models import ModelCard


class WireDevice(BaseModel):
    """Part of the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Work(WireDevice):
    """What a loaded model has done and is doing."""

    running: int  # requests
    waiting: int  # requests
    prompt_tokens: int  # since it was loaded
    completion_tokens: int  # since it was loaded
    tokens_per_second: float | None  # decode speed of the last answer with more than one token; null before there is one


class DeviceModel(WireDevice):
    """An installed model; `work` is null unless it is loaded."""

    card: ModelCard
    work: Work | None


class Memory(WireDevice):
    """Bytes; null where the system does not tell."""

    resident: int | None  # of the daemon
    available: int | None  # of the machine
    total: int | None  # of the machine


class Device(WireDevice):
    """The machine and what runs on it."""

    default: str | None  # id of the model that answers when none is named
    models: list[DeviceModel]
    memory: Memory
