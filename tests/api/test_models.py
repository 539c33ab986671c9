"""Which models there are, and whether the appliance is ready."""

import asyncio
import threading
from pathlib import Path

import httpx
import openai
import pytest

from appliance.api.app import create_app
from appliance.api.settings import ApiSettings
from appliance.engine.pool import ModelPool
from appliance.errors import BundleError
from tests.api.conftest import Serve
from tests.api.fake_engine import PROVIDER, FakeEngine, install_bundle, wait_until


def test_list_and_retrieve(serve: Serve) -> None:
    served = serve()
    install_bundle(served.config.paths.models, "plain")
    assert wait_until(lambda: served.http.get("/readyz").status_code == 200)
    models = served.openai.models.list().data
    assert [model.id for model in models] == ["fake/model", "plain"]
    assert models[0].object == "model" and models[0].created == 1767323045 and models[0].owned_by == "appliance"
    extra = models[0].model_extra or {}
    assert extra["condition"] == "loaded"
    assert (extra["provider"], extra["context_length"], extra["scheme"]) == (PROVIDER, 100, "w4a8")
    assert extra["fallbacks"] == []
    other = models[1].model_extra or {}
    assert (other["provider"], other["condition"], other["context_length"]) == (None, "unloaded", 4096)
    assert served.openai.models.retrieve("fake/model") == models[0]
    assert served.openai.models.retrieve("gpt-4o-mini").id == "fake/model"
    assert served.http.get("/v1/models/fake/model").json()["id"] == "fake/model"
    answer = served.chat().json()
    assert answer["system_fingerprint"] == extra["system_fingerprint"]
    with pytest.raises(openai.NotFoundError, match="installed: fake/model, plain"):
        served.openai.models.retrieve("other/model")


def test_ready_only_when_the_default_model_is_loaded(serve: Serve) -> None:
    gate = threading.Event()
    served = serve(FakeEngine(loading=gate))
    try:
        assert served.http.get("/healthz").json() == {"status": "ok"}
        response = served.http.get("/readyz")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == 'model "fake/model" is being loaded; ask again soon'
        assert response.headers["retry-after"]
        assert served.http.get("/v1/models").json()["data"][0]["condition"] == "loading"
    finally:
        gate.set()
    assert wait_until(lambda: served.http.get("/readyz").status_code == 200)
    assert served.http.get("/readyz").json() == {"status": "ready", "model": "fake/model"}


def test_a_model_that_cannot_be_loaded_says_why(serve: Serve) -> None:
    served = serve(FakeEngine(load_failure=BundleError("the graph is damaged", "build it again")))
    assert wait_until(lambda: "the graph is damaged" in served.http.get("/readyz").text)
    assert served.http.get("/readyz").status_code == 503
    assert served.chat().json()["error"]["code"] == "bad_bundle"
    served.engine.load_failure = None
    assert served.chat().status_code == 200  # the next request tries again
    assert served.http.get("/readyz").status_code == 200


def test_without_a_model_it_says_how_to_get_one(serve: Serve) -> None:
    served = serve(install=False)
    assert served.http.get("/v1/models").json() == {"object": "list", "data": []}
    for response in (served.http.get("/readyz"), served.chat()):
        assert "appliance pull" in response.json()["error"]["message"]
    assert served.http.get("/readyz").status_code == 503
    install_bundle(served.config.paths.models, "late")  # no restart is needed
    assert served.chat(model="late").status_code == 200


def test_the_openapi_document_needs_no_network(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/healthz", "/readyz"} <= set(paths)
    assert served.http.get("/docs").status_code == 404


@pytest.mark.parametrize(("preloaded", "status"), [(True, 503), (False, 200)])
def test_a_model_not_loaded_yet_is_unready_only_if_it_was_to_be_preloaded(tmp_path: Path, preloaded: bool, status: int) -> None:
    install_bundle(tmp_path)
    app = create_app(ModelPool(tmp_path, lambda bundle: FakeEngine()), ApiSettings(preloaded=preloaded))

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://appliance") as client:
            return (await client.get("/readyz")).status_code

    assert asyncio.run(ask()) == status
