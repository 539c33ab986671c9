"""Bundles on disk: whole or not there, and refused in one sentence when they are not what their manifest says."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.bundle import store
from appliance.bundle.manifest import Manifest
from appliance.bundle.store import UNWRITABLE, Bundle, open_bundle, writing
from appliance.errors import ApplianceError, BundleError, NotFound, StorageError
from tests.api.fake_engine import install_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return install_bundle(tmp_path / "models", "small")


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = json.loads((path / "manifest.json").read_text())
        change(data)
        (path / "manifest.json").write_text(json.dumps(data))

    return edit


def first_file(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["files"]["tokenizer.json"]
    return found


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (edited(lambda data: data.update(colour=1)), 'manifest.json: unknown key "colour"; known keys: architecture,'),
        (
            edited(lambda data: data.update(architectur=data.pop("architecture"))),
            'unknown key "architectur"; did you mean "architecture"?',
        ),
        (edited(lambda data: data["tokenizer"].update(bso=1)), 'unknown key "tokenizer.bso"; did you mean "bos"?'),
        (edited(lambda data: data.pop("files")), 'manifest.json: key "files" is missing'),
        (edited(lambda data: data.update(format=2)), "manifest.json: format 2 is newer than this program reads (1); upgrade"),
        (edited(lambda data: first_file(data).update(sha256="0" * 64)), "tokenizer.json has sha256 "),
        (edited(lambda data: first_file(data).update(bytes=7)), "the manifest says 7; build the bundle again"),
        (edited(lambda data: data["files"].update({"../x": first_file(data)})), "names '../x', which is outside the bundle"),
        (edited(lambda data: data["files"].update({"/x": first_file(data)})), "names '/x', which is outside the bundle"),
        (edited(lambda data: data["files"].update({"gone": first_file(data)})), "gone is missing; build the bundle again"),
        (
            edited(lambda data: next(iter(data["variants"].values()))["graphs"].update(model="x.onnx")),
            "'x.onnx', which the manifest does not list",
        ),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json: not valid JSON: "),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json: not a JSON object; "),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff"), "manifest.json: not valid JSON: "),
    ],
)
def test_a_damaged_bundle_is_refused_with_what_and_where(bundle: Bundle, damage: Callable[[Path], Any], says: str) -> None:
    damage(bundle.path)
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle.path)
    line = str(caught.value)
    assert says in line and str(bundle.path) in line and "\n" not in line
    assert (caught.value.exit_code, caught.value.status) == (2, 400)


def test_a_link_out_of_the_bundle_is_not_followed(bundle: Bundle, tmp_path: Path) -> None:
    inside = bundle.path / "tokenizer.json"
    inside.rename(tmp_path / "elsewhere.json")
    inside.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(BundleError, match="is missing"):
        open_bundle(bundle.path)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is no bundle"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("code", UNWRITABLE)
def test_a_place_that_takes_no_more_is_named(tmp_path: Path, code: int) -> None:
    with pytest.raises(StorageError) as caught, writing(tmp_path / "new") as writer:
        writer.path("a/b").write_text("begun")
        raise OSError(code, os.strerror(code))
    assert str(caught.value).startswith(f"cannot write {tmp_path / 'new'}: {os.strerror(code)}; ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("odd"), OSError(errno.EIO, "broken")])
def test_any_other_end_leaves_nothing_and_keeps_what_was_there(tmp_path: Path, failure: BaseException) -> None:
    old = install_bundle(tmp_path, "small")
    before = old.hash
    with pytest.raises(type(failure)), writing(old.path) as writer:
        writer.path("a/b").write_text("begun")
        raise failure
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert open_bundle(old.path).hash == before


def test_what_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file/new: Not a directory; "), writing(tmp_path / "file" / "new"):
        pass


def test_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ApplianceError, match="exists and is no bundle"), writing(tmp_path / "mine"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "two renames"])
def test_a_new_bundle_takes_the_place_of_the_old_and_of_what_a_killed_one_left(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(store, "_exchange", lambda one, other: False)
    old = install_bundle(tmp_path, "small")
    for name in (".small.partial", ".small.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rest").write_text("x")
    manifest: Manifest = old.manifest
    before = old.hash
    with writing(old.path) as writer:
        for relative in manifest.files:
            writer.path(relative).write_text("new")
        made = writer.finish(manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert open_bundle(old.path) == made and made.hash != before


def test_two_folders_change_names_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    assert store._exchange(tmp_path / "one", tmp_path / "other")
    assert [(tmp_path / name / "is").read_text() for name in ("one", "other")] == ["other", "one"]
    assert not store._exchange(tmp_path / "one", tmp_path / "none")
