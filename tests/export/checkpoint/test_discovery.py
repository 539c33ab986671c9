"""Which format opens what, and what is refused before any format is asked."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest

import export.checkpoint
from appliance.errors import CheckpointError
from export.checkpoint import formats, open_checkpoint
from tests.checkpoints import Llama, write_gguf, write_safetensors

MODEL = Llama()


def torch_zip() -> bytes:
    """What torch.save writes, without torch."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": 1}, protocol=2))
    return buffer.getvalue()


def test_every_format_file_is_found() -> None:
    assert {"gguf", "safetensors"} <= set(formats())
    assert not {"source", "tensors", "sidecars", "pickled"} & set(formats())


def test_a_new_file_is_a_new_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fresh.py").write_text("def matches(path): return path.suffix == '.fresh'\ndef open(path): return path.name\n")
    monkeypatch.setattr(export.checkpoint, "__path__", [*export.checkpoint.__path__, str(tmp_path)])
    (tmp_path / "x.fresh").write_text("")
    assert open_checkpoint(tmp_path / "x.fresh") == "x.fresh"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl", "consolidated.00.PTH"])
@pytest.mark.parametrize("content", [b"", torch_zip(), pickle.dumps({}, protocol=2)], ids=["empty", "zip", "pickle"])
def test_pickles_are_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    for named in (path, tmp_path):
        with pytest.raises(CheckpointError, match=rf"{name} is a pickle and is not read; .*convert it to safetensors"):
            open_checkpoint(named)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "weights", "model.dat"])
@pytest.mark.parametrize("content", [torch_zip(), *(pickle.dumps([1], protocol) for protocol in (2, 3, 4, 5))])
def test_a_pickle_under_another_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is a pickle and is not read"):
        open_checkpoint(path)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    for name in ("pytorch_model.bin", "model.safetensors", "model.gguf"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_safetensors_beside_a_pickle_is_read(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL)
    (folder / "pytorch_model.bin").write_bytes(torch_zip())
    checkpoint = open_checkpoint(folder)
    assert checkpoint.files() == (folder / "model.safetensors",)


def test_two_formats_in_one_folder(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL)
    write_gguf(folder / "model.gguf", MODEL)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of the formats gguf and safetensors; name the file"):
        open_checkpoint(folder)
    assert open_checkpoint(folder / "model.gguf").format == "gguf"
    assert open_checkpoint(folder / "model.safetensors").format == "safetensors"


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*nowhere; check the path"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is no checkpoint; formats that are read: gguf, safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes.txt is no checkpoint"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"is no checkpoint"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match=r"pipe.gguf is neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe.gguf")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match=r"loop"):
        open_checkpoint(tmp_path / "loop")
    with pytest.raises(CheckpointError, match=r"cannot be read: File name too long"):
        open_checkpoint(tmp_path / ("x" * 300))


def test_every_refusal_exits_2(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert (raised.value.exit_code, raised.value.status) == (2, 400)
