"""The knowledge index of this appliance: its file, with the installed embedding model behind it.

Knows: where the index lies, how an embedder is found among the models. Does not know: documents, graphs, HTTP.
"""

from collections.abc import Sequence
from pathlib import Path

from appliance.engine.pool import ModelPool
from appliance.knowledge.index import Knowledge
from appliance.knowledge.vectors import Embedder

FILE = "knowledge.db"


def open_library(state: Path, pool: ModelPool) -> Knowledge:
    """The index in the state folder. The embedder is loaded on first use; one installed later is found without a restart."""

    def find() -> Embedder | None:
        bundle = pool.embedder()
        if bundle is None:
            return None
        name = bundle.manifest.name

        def embed(texts: Sequence[str]) -> list[list[float]]:
            return pool.model(name).engine.embed(texts)

        # With the hash: the same model built in another way gives vectors that should not be mixed.
        return Embedder(embed, f"{name} {bundle.hash[:12]}")

    return Knowledge(state / FILE, find_embedder=find)
