"""all-MiniLM-L6-v2 from its checkpoint to vectors, against those that transformers computed (`tests/golden/make_bert.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from appliance import targets
from appliance.engine.embedder import Embedder
from appliance.knowledge.index import Knowledge
from export.build import BuildRequest, build
from quant import schemes

GOLDEN = Path(__file__).parents[1] / "golden" / "bert" / "minilm.npz"
LOWEST = {"float": 0.9999, "w8a8": 0.995}
"""Lowest cosine to the golden embedding that a scheme may have."""


@contextmanager
def built(checkpoint: Path, folder: Path, scheme: str) -> Iterator[Embedder]:
    target = targets.load("cpu")
    request = BuildRequest(checkpoint, (target,), schemes.find(scheme), folder / scheme, scheme, 0, "none")
    engine = Embedder(build(request, lambda stage, done, total: None), target="cpu", threads=2)
    engine.load()
    try:
        yield engine
    finally:
        engine.unload()


@pytest.mark.model
@pytest.mark.parametrize("scheme", LOWEST)
def test_embeddings_are_those_of_transformers(scheme: str, minilm_folder: Path, tmp_path: Path) -> None:
    with np.load(GOLDEN) as file:
        texts, tokens, golden = file["texts"].tolist(), file["tokens"].tolist(), file["embeddings"]
    with built(minilm_folder, tmp_path, scheme) as engine:
        vectors, counts = engine.embed_counted(texts)
    assert counts == tokens
    cosines = (np.array(vectors) * golden).sum(axis=1)
    assert cosines.min() > LOWEST[scheme], dict(zip(texts, cosines.round(5), strict=True))
    others = np.array(vectors) @ golden.T
    assert (others.argmax(axis=1) == np.arange(len(texts))).all()


@pytest.mark.model
def test_the_index_finds_by_meaning(minilm_folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "router.md").write_text(
        "# Router\n## Reset\nPress and hold the small button for ten seconds to restore the factory state.\n"
    )
    (docs / "garden.md").write_text("# Garden\nTomatoes like sun and need water every morning.\n")
    (docs / "bill.txt").write_text("The invoice has to be settled by 30 November. " * 3 + "1234567890" * 150)
    with built(minilm_folder, tmp_path, "w8a8") as engine:
        index = Knowledge(tmp_path / "k.db", engine.embed)
        report = index.index(docs)
        assert report.vectors == "" and all(one.embedded == one.chunks for one in report.files)
        for question, name in (
            ("How do I wipe my modem's settings?", "router.md"),
            ("growing vegetables", "garden.md"),
            ("when must I pay?", "bill.txt"),
        ):
            assert index.search(question, mode="vector")[0].path.name == name
