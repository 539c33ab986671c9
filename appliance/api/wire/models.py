"""Wire types of `/v1/models`.

Knows: OpenAI's four fields and the appliance's own beside them. Does not know: where the values come from.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ModelCard(BaseModel):
    """One installed model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    object: Literal["model"] = "model"
    created: int  # Unix seconds when the bundle was built
    owned_by: str = "appliance"
    # The appliance's own.
    condition: Literal["unloaded", "loading", "loaded", "failed"]
    provider: str | None  # which execution provider runs it, read back from the session; null until it is loaded
    fallbacks: list[str] | None  # what runs elsewhere and why; null until it is loaded
    context_length: int  # tokens of prompt and answer together
    scheme: str  # of quantization
    architecture: str
    parameters: int
    task: Literal["generate", "embed"]
    system_fingerprint: str | None  # as in the answers; null until it is loaded


class ModelList(BaseModel):
    """Every installed model, by id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    object: Literal["list"] = "list"
    data: list[ModelCard]
