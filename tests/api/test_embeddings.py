"""`/v1/embeddings` with the official client, over a tiny real model."""

import base64
import contextlib
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from appliance.daemon import Daemon
from appliance.engine.pool import ModelPool, open_onnx
from tests import tiny_embedder
from tests.api.conftest import make_config, running
from tests.api.fake_engine import FakeEngine, install_bundle


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with a chat model and an embedder."""
    folder = tmp_path_factory.mktemp("appliance")
    config = make_config(folder)
    install_bundle(config.paths.models)
    tiny_embedder.install(config.paths.models, folder)
    real = open_onnx("cpu", 1)
    pool = ModelPool(config.paths.models, lambda bundle: real(bundle) if bundle.manifest.task == "embed" else FakeEngine())
    with running(Daemon(config, pool)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with contextlib.closing(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)) as made:
        yield made


def test_texts_come_back_in_order_in_both_forms(client: openai.OpenAI) -> None:
    texts = ["the longest of all these texts.", "b", "a text"]
    packed = client.embeddings.create(model="tiny-embedder", input=texts)  # this client asks for base64
    plain = client.embeddings.create(model="tiny-embedder", input=texts, encoding_format="float")
    assert packed.object == "list" and packed.model == "tiny-embedder"
    assert [one.index for one in packed.data] == [0, 1, 2] and packed.data[0].object == "embedding"
    assert np.array_equal(
        np.array([one.embedding for one in packed.data], np.float32), np.array([one.embedding for one in plain.data], np.float32)
    )
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(len(text.replace(" ", "")) + 2 for text in texts)
    alone = client.embeddings.create(model="tiny-embedder", input=texts[1], encoding_format="float")
    assert np.abs(np.array(alone.data[0].embedding) - plain.data[1].embedding).max() < 1e-5
    assert abs(np.linalg.norm(alone.data[0].embedding) - 1) < 1e-5 and len(alone.data[0].embedding) == 64


def test_base64_is_little_endian_float32(url: str) -> None:
    body = {"input": "text", "encoding_format": "base64"}
    answer = httpx.post(f"{url}/v1/embeddings", json=body)
    assert answer.headers["x-appliance-provider"] == "CPUExecutionProvider"
    assert answer.json()["model"] == "tiny-embedder"  # the one installed embedder, when none is named
    found = np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), "<f4")
    assert found.shape == (64,) and abs(np.linalg.norm(found) - 1) < 1e-5


REFUSED: dict[str, tuple[dict[str, object], str, str, str]] = {
    "too long": ({"input": ["x", "a" * 60]}, "input", "context_length_exceeded", "text 1 has 62 tokens, tiny-embedder takes 48"),
    "no text": ({"input": []}, "input", "invalid_value", "input is empty"),
    "an empty text": ({"input": ["x", ""]}, "input", "invalid_value", "text 1 is empty"),
    "too many": ({"input": ["x"] * 2049}, "input", "invalid_value", "2049 texts"),
    "token ids": ({"input": [1, 2]}, "input", "unsupported_parameter", "token ids"),
    "lists of token ids": ({"input": [[1, 2]]}, "input", "unsupported_parameter", "token ids"),
    "a number": ({"input": 7}, "input", "invalid_value", "a text or a list of texts"),
    "other dimensions": ({"input": "x", "dimensions": 32}, "dimensions", "unsupported_parameter", "64 numbers, not of 32"),
    "a chat model": ({"input": "x", "model": "fake/model"}, "model", "invalid_value", "makes no embeddings"),
    "another encoding": ({"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid_value", "encoding_format"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_field(case: str, url: str) -> None:
    body, param, code, words = REFUSED[case]
    answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code) and words in error["message"]


def test_right_dimensions_are_taken(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="tiny-embedder", input="x", dimensions=64).data


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="installed: fake/model, tiny-embedder"):
        client.embeddings.create(model="nothing-like-it", input="x")


def test_an_embedder_does_not_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.chat.completions.create(model="tiny-embedder", messages=[{"role": "user", "content": "hi"}])
