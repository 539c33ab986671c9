"""`POST /v1/embeddings`.

Knows: one request's way from texts to vectors on the wire. Does not know: how vectors are made, how models are found.
"""

import base64

import numpy as np
from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from appliance.api.wire.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from appliance.engine.pool import ModelPool
from appliance.engine.protocol import EmbeddingEngine
from appliance.errors import ModelNotFound, RequestError, UnsupportedField

MOST_TEXTS = 2048
"""As many as OpenAI takes."""


def embeddings_router(pool: ModelPool) -> APIRouter:
    """The route over the embedding models of `pool`."""
    router = APIRouter()

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        """A vector of unit length for each text."""
        answer, headers = await run_in_threadpool(_answer, pool, body, _texts(body))
        return Response(answer.model_dump_json(), media_type="application/json", headers=headers)

    return router


def _texts(body: EmbeddingRequest) -> list[str]:
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise RequestError("input is empty", "send at least one text", param="input")
    if len(texts) > MOST_TEXTS:
        raise RequestError(f"input has {len(texts)} texts", f"send at most {MOST_TEXTS} at once", param="input")
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise UnsupportedField("input holds token ids", "send texts", param="input")
    if empty := [at for at, text in enumerate(found) if not text]:
        raise RequestError(f"text {empty[0]} is empty", "leave it out", param="input")
    return found


def _answer(pool: ModelPool, body: EmbeddingRequest, texts: list[str]) -> tuple[EmbeddingList, dict[str, str]]:
    model = pool.model(body.model or _default(pool))
    if not isinstance(model.engine, EmbeddingEngine):
        raise RequestError(f"{model.id} makes no embeddings, it generates text", "name an embedding model", param="model")
    vectors, tokens = model.engine.embed_counted(texts)
    if body.dimensions not in (None, len(vectors[0])):
        raise UnsupportedField(
            f"{model.id} has vectors of {len(vectors[0])} numbers, not of {body.dimensions}", "leave it out", param="dimensions"
        )
    packed = body.encoding_format == "base64"
    stats = model.engine.stats()
    headers = {"x-appliance-provider": stats.provider}
    if stats.fallbacks:
        headers["x-appliance-fallback"] = "; ".join(stats.fallbacks).encode("ascii", "replace").decode()
    total = sum(tokens)
    data = [Embedding(index=at, embedding=_packed(one) if packed else one) for at, one in enumerate(vectors)]
    return EmbeddingList(data=data, model=model.id, usage=EmbeddingUsage(prompt_tokens=total, total_tokens=total)), headers


def _packed(vector: list[float]) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def _default(pool: ModelPool) -> str:
    bundle = pool.embedder()
    if bundle is None:
        fix = "get one: appliance pull all-minilm-l6-v2, then appliance build all-minilm-l6-v2"
        raise ModelNotFound("no embedding model is installed", fix, param="model")
    return bundle.manifest.name
