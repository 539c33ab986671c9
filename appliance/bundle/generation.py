"""`generation.json`: the model's own sampling defaults and stop tokens.

Knows: its keys. Does not know: how a request overrides them (`appliance.runtime.sampling`).
"""

from pydantic import Field

from appliance.strict import StrictModel


class GenerationDefaults(StrictModel):
    """Used where a request is silent; `None` means that the model names no value."""

    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop_token_ids: tuple[int, ...] = ()
