"""Property: whatever bytes a file holds, opening and reading it works or raises CheckpointError, in bounded memory."""

import tempfile
import tracemalloc
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import CheckpointError
from export.checkpoint import open_checkpoint
from export.checkpoint.gguf_header import read_header as read_gguf_header
from export.checkpoint.safetensors import read_header as read_safetensors_header
from tests.checkpoints import Llama, write_gguf, write_safetensors

TINY = Llama(layers=1, hidden=8, heads=2, kv_heads=1, intermediate=8, vocab=260)
ROOM = 32 << 20
"""Bytes one opening and reading may take: the files have some ten thousand."""
SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def sound(name: str) -> bytes:
    """The bytes of an undamaged file."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "x.gguf":
            return write_gguf(Path(folder) / name, TINY).read_bytes()
        write_safetensors(Path(folder), TINY)
        return (Path(folder) / name).read_bytes()


def header_length(name: str) -> int:
    raw = sound(name)
    return 8 + int.from_bytes(raw[:8], "little") if name != "x.gguf" else len(raw) - TINY_BYTES


TINY_BYTES = 4 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in TINY.shapes().values())
INTERESTING = st.sampled_from(
    [b"\x00", b"\xff", b"\x7f", b"\x80", b"{", b"[", b'"', b",", b"-", b"\x00" * 8, b"\xff" * 8, b"\xff" * 4, b"9" * 30,
     (1 << 31).to_bytes(8, "little"), (1 << 62).to_bytes(8, "little"), b"NaN", b"1e999"]
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """One change of a file: where it begins, as a share of the header or of the whole file, and what it does."""

    what: str
    share: float
    other: float
    data: bytes
    whole: bool

    def apply(self, raw: bytearray, header: int) -> None:
        end = len(raw) if self.whole else min(header, len(raw))
        at, other = int(self.share * end), int(self.other * end)
        match self.what:
            case "replace":
                raw[at : at + len(self.data)] = self.data
            case "insert":
                raw[at:at] = self.data
            case "delete":
                del raw[at : at + 1 + other % 64]
            case "copy":
                raw[at : at + 16] = raw[other : other + 16]
            case "cut":
                del raw[at:]


SHARES = st.floats(0, 1, exclude_max=True)
EDITS = st.builds(
    Edit,
    what=st.sampled_from(["replace", "insert", "delete", "copy", "cut"]),
    share=SHARES,
    other=SHARES,
    data=st.one_of(INTERESTING, st.binary(min_size=1, max_size=12)),
    whole=st.sampled_from([False, False, False, True]),
)


def survive(name: str, raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text("{}")
        (folder / name).write_bytes(raw)
        tracemalloc.start()
        try:
            checkpoint = open_checkpoint(folder / name)
            for tensor in checkpoint.names():
                assert checkpoint.read(tensor).shape == checkpoint.shape(tensor)
        except CheckpointError as refusal:
            assert "\n" not in str(refusal) and len(str(refusal)) < 2000
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < ROOM, f"{peak} bytes for a file of {len(raw)}"


@pytest.mark.parametrize("name", ["x.gguf", "model.safetensors"])
@SETTINGS
@given(edits=st.lists(EDITS, min_size=1, max_size=4))
def test_damaged_files(name: str, edits: list[Edit]) -> None:
    raw = bytearray(sound(name))
    for edit in edits:
        edit.apply(raw, header_length(name))
    survive(name, bytes(raw))


@pytest.mark.parametrize("name", ["x.gguf", "model.safetensors"])
@SETTINGS
@given(raw=st.binary(max_size=400))
def test_noise(name: str, raw: bytes) -> None:
    survive(name, raw)
    survive(name, (b"GGUF\x03\x00\x00\x00" if name == "x.gguf" else (len(raw) + 1).to_bytes(8, "little") + b"{") + raw)


@pytest.mark.parametrize("name", ["x.gguf", "model.safetensors"])
def test_every_header_cut_short(tmp_path: Path, name: str) -> None:
    read_header = read_gguf_header if name == "x.gguf" else read_safetensors_header
    path = tmp_path / name
    path.write_bytes(sound(name))
    read_header(path)
    for size in range(0, header_length(name) - 32, 7):
        path.write_bytes(sound(name)[:size])
        with pytest.raises(CheckpointError):
            read_header(path)


@pytest.mark.parametrize("name", ["x.gguf", "model.safetensors"])
def test_the_sound_files_open(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(sound(name))
    assert len(open_checkpoint(tmp_path / name).names()) == len(TINY.shapes())
