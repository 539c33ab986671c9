"""Which model a name means, and that each is loaded once."""

import threading
from pathlib import Path

import pytest

from appliance.bundle.store import Bundle
from appliance.engine.catalog import read_catalog
from appliance.engine.pool import ModelPool
from appliance.errors import BundleError, ModelNotFound, Unavailable
from tests.api.fake_engine import FakeEngine, install_bundle, wait_until


class Opener:
    """Opens fake engines and remembers them."""

    def __init__(self, gate: threading.Event | None = None):
        self.opened: list[str] = []
        self.engines: list[FakeEngine] = []
        self.gate = gate

    def __call__(self, bundle: Bundle) -> FakeEngine:
        self.opened.append(bundle.manifest.name)
        assert self.gate is None or self.gate.wait(10)
        self.engines.append(FakeEngine())
        return self.engines[-1]


def test_names(tmp_path: Path) -> None:
    install_bundle(tmp_path, "b")
    install_bundle(tmp_path, "org/a")
    pool = ModelPool(tmp_path, Opener(), aliases={"gpt": "org/a"})
    assert pool.find("").manifest.name == "b"
    assert pool.find("org/a").manifest.name == pool.find("gpt").manifest.name == "org/a"
    assert ModelPool(tmp_path, Opener(), default="gpt", aliases={"gpt": "org/a"}).find().manifest.name == "org/a"
    with pytest.raises(ModelNotFound, match=r'there is no model "org/b" here; did you mean "org/a"\? installed: b, org/a'):
        pool.find("org/b")
    with pytest.raises(ModelNotFound, match=r"no model is installed in .*appliance pull"):
        ModelPool(tmp_path / "none", Opener()).find("x")


def test_the_catalog_hides_nothing_behind_a_damaged_bundle(tmp_path: Path) -> None:
    install_bundle(tmp_path, "good")
    install_bundle(tmp_path, "bad")
    manifest = tmp_path / "bad" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"architecture"', '"architectuer"'))
    install_bundle(tmp_path, "twin")
    twin = tmp_path / "twin" / "manifest.json"
    twin.write_text(twin.read_text().replace('"twin"', '"good"'))
    (tmp_path / ".hidden.partial").mkdir()
    (tmp_path / "a-file").write_text("")
    catalog = read_catalog(tmp_path)
    assert list(catalog.bundles) == ["good"]
    assert 'unknown key "architectuer"; did you mean "architecture"?' in catalog.problems[0]
    assert "same id" in catalog.problems[1] and "twin" in catalog.problems[1]


def test_a_damaged_model_is_called_damaged_not_absent(tmp_path: Path) -> None:
    for name in ("good", "bad", "bad-too"):
        install_bundle(tmp_path, name)
    (tmp_path / "bad" / "manifest.json").write_text("{")
    models = ModelPool(tmp_path, lambda bundle: FakeEngine())
    with pytest.raises(BundleError, match=r"bad/manifest\.json"):
        models.find("bad")
    assert models.find("bad-too").manifest.name == "bad-too"
    with pytest.raises(ModelNotFound, match="installed: bad-too, good"):
        models.find("ba")
    for name in ("good", "bad-too"):
        (tmp_path / name / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match=r"manifest\.json"):  # nothing else is there: not "no model is installed"
        models.find()


def test_many_callers_load_a_model_once(tmp_path: Path) -> None:
    install_bundle(tmp_path, "a")
    gate = threading.Event()
    opener = Opener(gate)
    pool = ModelPool(tmp_path, opener)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(pool.model("a").engine)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: pool.status("a").condition == "loading")
    gate.set()
    for thread in threads:
        thread.join()
    assert opener.opened == ["a"] and len(set(map(id, found))) == 1
    assert pool.status("a").condition == "loaded"


def test_an_altered_weight_does_not_answer(tmp_path: Path) -> None:
    bundle = install_bundle(tmp_path, "a")
    (bundle.path / "tokenizer.json").write_text("[]")  # of the same size
    pool = ModelPool(tmp_path, Opener())
    with pytest.raises(BundleError, match="sha256"):
        pool.model("a")
    assert pool.status("a").condition == "failed" and "sha256" in (pool.status("a").failure or "")
    (bundle.path / "tokenizer.json").write_text("{}")
    assert pool.model("a").fingerprint == bundle.hash[:12]


def test_closing_unloads_and_refuses(tmp_path: Path) -> None:
    install_bundle(tmp_path, "a")
    opener = Opener()
    pool = ModelPool(tmp_path, opener)
    pool.model()
    pool.close()
    assert opener.engines[0].unloaded
    with pytest.raises(Unavailable, match="stopping"):
        pool.model()


def test_an_alias_of_a_loaded_model_reads_no_file(tmp_path: Path) -> None:
    bundle = install_bundle(tmp_path, "a")
    pool = ModelPool(tmp_path, Opener(), aliases={"x": "a"})
    first = pool.model("x")
    (bundle.path / "manifest.json").unlink()
    assert pool.model("x") is first and pool.model("a") is first
