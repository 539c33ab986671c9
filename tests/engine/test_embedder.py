"""The embedding engine over a tiny real model: order, batches, limits, what it refuses, and its worker."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from appliance.bundle.store import Bundle
from appliance.engine.embedder import BATCH_TEXTS, BATCH_TOKENS, Embedder, batches
from appliance.engine.pool import ModelPool, open_onnx
from appliance.engine.protocol import EmbeddingEngine, GenerateRequest, TextPrompt
from appliance.errors import BundleError, ContextLengthError, RequestError, TargetError, Unavailable
from appliance.runtime.encoder import Encoder, open_encoder
from appliance.targets import load
from export.build import build, default_scheme
from tests import tiny_embedder
from tests.api.fake_engine import install_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("embedder")
    return tiny_embedder.install(folder / "models", folder)


@pytest.fixture
def engine(bundle: Bundle) -> Iterator[Embedder]:
    made = Embedder(bundle, target="cpu", threads=1)
    made.load()
    yield made
    made.unload()


def test_order_is_kept_whatever_the_batches(engine: Embedder) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    chance = np.random.default_rng(seed)
    texts = ["".join(chance.choice(list("abc ."), size)) for size in chance.integers(1, 44, 3 * BATCH_TEXTS)]
    together, counts = engine.embed_counted(texts)
    for text, vector, count in zip(texts, together, counts, strict=True):
        alone, one = engine.embed_counted([text])
        assert np.abs(np.array(alone[0]) - vector).max() < 1e-5 and one == [count], seed
        assert abs(np.linalg.norm(vector) - 1) < 1e-5, seed


def test_tokens_are_the_frame_and_every_character(engine: Embedder) -> None:
    texts = ["ab c.", "a" * (tiny_embedder.CONTEXT - 2), "[SEP]", ""]
    assert engine.embed_counted(texts)[1] == [6, tiny_embedder.CONTEXT, 7, 2]  # uncut, unpadded; "[SEP]" is five characters
    assert engine.embed([]) == []


def test_a_text_that_is_too_long_is_refused_with_both_numbers(engine: Embedder) -> None:
    with pytest.raises(ContextLengthError, match="text 1 has 49 tokens, tiny-embedder takes 48"):
        engine.embed(["fine", "a" * 47])


def test_what_it_cannot_do_is_refused(engine: Embedder, bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="generates no text"):
        engine.stream(GenerateRequest("1", TextPrompt("x")))
    with pytest.raises(RequestError, match="surrogate"):
        engine.embed(["\ud800"])
    with pytest.raises(Unavailable, match="not loaded"):
        Embedder(bundle, target="cpu").embed(["x"])


def test_statistics_tell_provider_and_ticks(engine: Embedder) -> None:
    before = engine.stats()
    engine.embed(["one", "two"])
    after = engine.stats()
    assert (after.provider, after.fallbacks, after.context_length) == ("CPUExecutionProvider", (), tiny_embedder.CONTEXT)
    assert after.prompt_tokens == 10 and after.ticks > before.ticks
    end = time.monotonic() + 10
    while engine.stats().ticks == after.ticks:  # idle it ticks too, or a watchdog would take it for hanging
        assert time.monotonic() < end
        time.sleep(0.1)


class SlowEncoder:
    """One batch at a time, each waiting to be let go."""

    context = 10
    placement = None

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.fail = False

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [[1, 2] for _ in texts]

    def run(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        self.entered.set()
        assert self.go_on.wait(30)
        if self.fail:
            raise RuntimeError("the session failed")
        return np.ones((len(rows), 1), np.float32)

    def close(self) -> None:
        pass


def test_unloading_ends_the_waiting(bundle: Bundle) -> None:
    encoder = SlowEncoder()
    engine = Embedder(bundle, target="cpu", open_with=lambda: encoder)  # type: ignore[arg-type,return-value]
    engine.load()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            engine.embed(["x"] * 40)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert encoder.entered.wait(30)
    unloading = threading.Thread(target=engine.unload)
    unloading.start()
    time.sleep(0.05)
    encoder.go_on.set()
    for thread in [*threads, unloading]:
        thread.join(30)
    assert [type(one) for one in failures] == [Unavailable] * 2


def test_a_failure_reaches_who_asked_and_the_next_is_served(bundle: Bundle) -> None:
    encoder = SlowEncoder()
    encoder.fail = True
    encoder.go_on.set()
    engine = Embedder(bundle, target="cpu", open_with=lambda: encoder)  # type: ignore[arg-type,return-value]
    engine.load()
    with pytest.raises(RuntimeError, match="the session failed"):
        engine.embed(["x"])
    encoder.fail = False
    assert engine.embed(["x"]) == [[1.0]]
    engine.unload()


def test_batches_hold_every_text_once_and_stay_small() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    lengths = np.random.default_rng(seed).integers(1, 512, 300).tolist()
    made = batches(lengths)
    assert sorted(at for batch in made for at in batch) == list(range(300)), seed
    for batch in made:
        assert len(batch) <= BATCH_TEXTS and len(batch) * max(lengths[at] for at in batch) <= BATCH_TOKENS, seed


def test_the_pool_opens_it_by_its_task_and_never_takes_it_for_a_chat_model(tmp_path: Path) -> None:
    tiny_embedder.install(tmp_path / "models", tmp_path, name="a-first-by-name")
    pool = ModelPool(tmp_path / "models", open_onnx("an-npu", 1))
    assert pool.find().manifest.name == "a-first-by-name"
    install_bundle(tmp_path / "models", "b-chat")
    assert pool.find().manifest.name == "b-chat"
    found = pool.embedder()
    assert found is not None and found.manifest.name == "a-first-by-name"
    engine = pool.model("a-first-by-name").engine
    assert isinstance(engine, EmbeddingEngine) and engine.stats().provider == "CPUExecutionProvider"
    pool.close()


def test_what_is_no_embedding_graph_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    opened = open_encoder(bundle, "cpu", 1)
    path = bundle.file(bundle.manifest.tokenizer.file)
    with pytest.raises(BundleError, match="more tokens than the model"):
        Encoder(opened._session, (path.read_bytes(), path), 48, 50)
    chat = install_bundle(tmp_path)
    with pytest.raises(BundleError):
        open_encoder(chat, "cpu", 1)


def test_builds_are_dynamic_and_8_bit_unless_told_otherwise(bundle: Bundle, tmp_path: Path) -> None:
    from dataclasses import replace

    from export.build import BuildRequest
    from quant import schemes

    checkpoint = tiny_embedder.write_checkpoint(tmp_path / "checkpoint")
    assert default_scheme(checkpoint, load("cpu")) == "w8a8"
    request = BuildRequest(checkpoint, (load("cpu"),), schemes.find("w8a8"), tmp_path / "m", "m", 0, "none")
    with pytest.raises(TargetError, match="embedding models are built in the dynamic form"):
        build(replace(request, targets=(load("cpu-static"),)), lambda stage, done, total: None)
    made = build(request, lambda stage, done, total: None)
    assert made.manifest.task == "embed" and made.manifest.scheme.roles["mlp.up"].bits == 8
    texts = ["one text.", "and another one!", "zzz"]
    vectors = []
    for one in (bundle, made):
        engine = Embedder(one, target="cpu", threads=1)
        engine.load()
        vectors.append(np.array(engine.embed(texts)))
        engine.unload()
    assert (vectors[0] * vectors[1]).sum(axis=1).min() > 0.99
