"""The routes of kept conversations and of the device, over a real port."""

import json
from pathlib import Path

import pytest

from appliance.api.device import read_memory
from appliance.api.wire.device import Memory
from tests.api.conftest import Serve, Served
from tests.api.fake_engine import PROVIDER, wait_until

LIST = "/appliance/v1/conversations"
FIGURES = {
    "model": "fake/model", "provider": PROVIDER, "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 4,
    "tokens_per_second": 20.5,
}  # fmt: skip


def begin(served: Served, title: str = "a title") -> str:
    response = served.http.post(LIST, json={"title": title, "model": "fake/model"})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def test_a_conversation_from_its_beginning_to_its_end(serve: Serve) -> None:
    served = serve()
    other, id = begin(served), begin(served, "mine")
    question = served.http.post(f"{LIST}/{id}/messages", json={"role": "user", "content": "hello"}).json()
    assert (question["position"], question["content"], question["provider"]) == (0, "hello", None)
    said = {"role": "assistant", "content": "hi", "position": 1, **FIGURES}
    assert (
        served.http.post(f"{LIST}/{id}/messages", json=said).json() == served.http.post(f"{LIST}/{id}/messages", json=said).json()
    )
    whole = served.http.get(f"{LIST}/{id}").json()
    assert [message["content"] for message in whole["messages"]] == ["hello", "hi"]
    assert {key: whole["messages"][1][key] for key in FIGURES} == FIGURES
    assert served.http.patch(f"{LIST}/{id}", json={"title": "better"}).json()["title"] == "better"
    listed = served.http.get(LIST).json()["data"]
    assert [(one["id"], one["title"], one["message_count"]) for one in listed] == [(id, "better", 2), (other, "a title", 0)]
    assert served.http.get(LIST, params={"limit": 1}).json()["data"] == listed[:1]
    assert served.http.delete(f"{LIST}/{id}").json() == {"id": id, "object": "conversation.deleted", "deleted": True}
    for response in (served.http.get(f"{LIST}/{id}"), served.http.delete(f"{LIST}/{id}")):
        assert response.status_code == 404 and id in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"title": ""}, "title"),
        ({"title": "x" * 201}, "title"),
        ({"titel": "x"}, "title"),
        ({"title": "x", "more": 1}, "more"),
        ({"title": "x", "id": "../../etc"}, "id"),
        ({"title": "\ud800"}, "title"),
    ],
    ids=["empty", "long", "misspelt", "unknown", "id", "surrogate"],
)
def test_a_bad_beginning_is_refused_by_name(serve: Serve, body: dict[str, object], names: str) -> None:
    served = serve()
    response = served.http.post(LIST, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400 and names in response.json()["error"]["message"]
    assert served.http.get(LIST).json()["data"] == []


@pytest.mark.parametrize(
    "fields",
    [{"role": "tool"}, {"position": -1}, {"position": 2}, {"tokens_per_second": -1}, {"prompt_tokens": 2**63}, {"content": None}],
    ids=str,
)
def test_a_bad_message_is_refused(serve: Serve, fields: dict[str, object]) -> None:
    served = serve()
    id = begin(served)
    response = served.http.post(f"{LIST}/{id}/messages", json={"role": "user", "content": "x", **fields})
    assert response.status_code == 400
    assert served.http.get(f"{LIST}/{id}").json()["messages"] == []


def test_the_device_says_what_really_runs(serve: Serve) -> None:
    served = serve()
    assert wait_until(lambda: served.http.get("/readyz").status_code == 200)
    device = served.http.get("/appliance/v1/device").json()
    assert device["default"] == "fake/model"
    (model,) = device["models"]
    assert model["card"] == served.http.get("/v1/models/fake/model").json()
    assert model["card"]["provider"] == PROVIDER
    assert set(model["work"]) == {"running", "waiting", "prompt_tokens", "completion_tokens", "tokens_per_second"}
    memory = device["memory"]
    assert 0 < memory["resident"] < memory["total"] and 0 < memory["available"] <= memory["total"]


def test_a_device_without_a_model(serve: Serve) -> None:
    device = serve(install=False).http.get("/appliance/v1/device").json()
    assert (device["default"], device["models"]) == (None, [])


def test_memory_is_read_from_the_system_or_not_claimed(tmp_path: Path) -> None:
    machine, own = tmp_path / "meminfo", tmp_path / "statm"
    assert read_memory(machine, own) == Memory(resident=None, available=None, total=None)
    machine.write_text("MemTotal:       16000 kB\nMemFree: 5 kB\nHugePages_Total: 0\n")
    own.write_text("900 300 20 1 0 5 0\n")
    read = read_memory(machine, own)
    assert (read.total, read.available) == (16000 * 1024, None)
    assert read.resident is not None and read.resident % 300 == 0 and read.resident > 300 * 1000
