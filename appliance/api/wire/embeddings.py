"""Wire types of `/v1/embeddings`.

Knows: the names and types that OpenAI's reference gives each field. Does not know: which texts a model can take.
Source: OpenAI API reference, "Create embeddings" and "The embedding object".
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from appliance.api.wire.chat import WireRequest


def _tag(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<texts>" if all(isinstance(one, str) for one in value) else "<tokens>"
    return None


class EmbeddingRequest(WireRequest):
    """Body of a request."""

    model: str = ""
    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Tag("<texts>")]
        | Annotated[list[int] | list[list[int]], Tag("<tokens>")],
        Discriminator(_tag, custom_error_type="input_type", custom_error_message="input should be a text or a list of texts"),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)


class Embedding(BaseModel):
    """One vector: numbers, or base64 of little-endian float32."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The answer; `data` is in the order of the texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
