"""Reading GGUF: values and metadata against the `gguf` package, and every way a file can lie."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from appliance.errors import CheckpointError
from export.checkpoint import open_checkpoint
from export.checkpoint.tensors import PIECE
from tests.checkpoints import Llama, byte_tokens, gguf_name, write_gguf

MODEL = Llama(tied=False, attention_bias=True)
Kind = gguf.GGMLQuantizationType
U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 12
UNREADABLE = {"Q8_1", "Q8_K", "Q1_0"}
PLAIN = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}


def random_blocks(rng: np.random.Generator, kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random bytes of `kind` whose values are finite (a random fp16 scale may not be): uint8 [rows, bytes of a row]."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    wanted, found = rows * columns // block, np.empty((0, size), np.uint8)
    while len(found) < wanted:
        drawn = rng.integers(0, 256, (2 * wanted, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(drawn, kind).reshape(len(drawn), -1)
        found = np.concatenate([found, drawn[np.isfinite(values).all(axis=1)]])
    return found[:wanted].reshape(rows, -1)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name not in UNREADABLE | set(PLAIN)], ids=lambda kind: kind.name)
def test_every_type_the_package_dequantizes(tmp_path: Path, kind: Kind) -> None:
    seed = np.random.SeedSequence().entropy
    raw = random_blocks(np.random.default_rng(seed), kind, 37, 768)
    if kind.name in ("F32", "F16"):
        raw = raw.view({"F32": np.float32, "F16": np.float16}[kind.name])
    path = tmp_path / "x.gguf"
    write(path, {"first": (np.ones(3, np.float32), Kind.F32), "x": (raw, kind)})
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "x")
    checkpoint = open_checkpoint(path)
    assert (checkpoint.shape("x"), checkpoint.stored_type("x")) == ((37, 768), kind.name)
    found = checkpoint.read("x")
    assert found.dtype == np.float32 and found.flags.c_contiguous and found.flags.writeable
    np.testing.assert_array_equal(found, gguf.dequantize(np.array(stored.data), kind), err_msg=f"seed {seed}")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers(tmp_path: Path, name: str) -> None:
    values = np.array([[1, -2, 3]], PLAIN[name])
    write(tmp_path / "x.gguf", {"x": (values, Kind[name])})
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "x.gguf").read("x"), values.astype(np.float32))


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_types_without_a_dequantizer_are_refused_when_read(tmp_path: Path, name: str) -> None:
    size = gguf.GGML_QUANT_SIZES[Kind[name]][1]
    write(tmp_path / "x.gguf", {"x": (np.zeros((2, size), np.uint8), Kind[name]), "n": (np.ones(3, np.float32), Kind.F32)})
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.read("n").tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=rf"tensor 'x' is stored as {name}, which is not read; use a copy"):
        checkpoint.read("x")


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_pieces_join_without_a_seam(tmp_path: Path, kind: str) -> None:
    seed = np.random.SeedSequence().entropy
    rows = PIECE * 2 // 768 + 3
    raw = random_blocks(np.random.default_rng(seed), Kind[kind], rows, 768)
    write(tmp_path / "x.gguf", {"x": (raw, Kind[kind])})
    expected = gguf.dequantize(raw, Kind[kind])
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "x.gguf").read("x"), expected, err_msg=f"seed {seed}")


def test_names_shapes_and_values_of_a_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", MODEL, "F32", license="mit"))
    assert (checkpoint.format, checkpoint.license) == ("gguf", "mit")
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == {
        gguf_name(name): shape for name, shape in MODEL.shapes().items()
    }
    for name, expected in MODEL.weights().items():
        if "q_proj" not in name and "k_proj" not in name:  # llama.cpp permutes those; undoing it is the architecture's work
            np.testing.assert_array_equal(checkpoint.read(gguf_name(name)), expected)


def test_metadata_is_what_the_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", MODEL, license="mit")
    config = dict(open_checkpoint(path).config)
    assert config["tokenizer.ggml.tokens"] == byte_tokens(MODEL.vocab)
    expected = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    assert config.pop("tokenizer.ggml.merges", []) == []  # the package leaves an empty array out
    expected.pop("tokenizer.ggml.merges", None)
    assert config == expected
    assert {name: type(value) for name, value in config.items()} == {name: type(value) for name, value in expected.items()}


def test_every_kind_of_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
        expected[f"a.{kind}"] = 7
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "héllo\n世界")
    writer.add_array("a.floats", [0.5, -2.0])
    writer.add_array("a.bools", [True, False])
    writer.add_array("a.strings", ["", "a", "世"])
    expected |= {"a.float32": 0.5, "a.float64": 0.1, "a.bool": True, "a.string": "héllo\n世界", "a.floats": [0.5, -2.0]}
    expected |= {"a.bools": [True, False], "a.strings": ["", "a", "世"]}
    finish(writer)
    config = open_checkpoint(tmp_path / "x.gguf").config
    assert config == expected and config["a.bool"] is True


# Splits and folders.


def test_splits_are_one_model(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "model" / "x.gguf", MODEL, split_tensors=5)
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", MODEL))
    files = tuple(sorted(first.parent.iterdir()))
    for named in (first.parent, first, files[2]):
        checkpoint = open_checkpoint(named)
        assert checkpoint.files() == files and len(files) > 2
        assert sorted(checkpoint.names()) == sorted(whole.names())
        assert checkpoint.config["llama.block_count"] == MODEL.layers
        for name in whole.names():
            np.testing.assert_array_equal(checkpoint.read(name), whole.read(name))


def test_a_missing_split(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "x.gguf", MODEL, split_tensors=5)
    second = sorted(tmp_path.iterdir())[1]
    second.rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=rf"{second.name} is missing; fetch every split"):
        open_checkpoint(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{second.name} says it is not split 1 of"):
        open_checkpoint(first)


def test_a_renamed_split(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "x.gguf", MODEL, split_tensors=5)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model.gguf is one of \d+ splits but is not named so; give the splits"):
        open_checkpoint(renamed)


def test_several_models_in_one_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x-Q4.gguf", MODEL)
    assert open_checkpoint(tmp_path).files() == (tmp_path / "x-Q4.gguf",)
    write_gguf(tmp_path / "x-Q8.gguf", MODEL, split_tensors=9)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: x-Q4.gguf, x-Q8-00001-of-0000\d.gguf; name one"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "x-Q4.gguf").files() == (tmp_path / "x-Q4.gguf",)


def test_a_gguf_of_another_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", MODEL).rename(tmp_path / "sha256-0123")
    assert open_checkpoint(path).format == "gguf"


# Forged headers.


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + value


def info(name: str | bytes, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def forge(
    pairs: Sequence[bytes] = (), infos: Sequence[bytes] = (), data: int = 64, counts: tuple[int, int] | None = None
) -> bytes:
    tensors, metadata = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, metadata) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


NAN = struct.pack("<f", math.nan)
FORGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is cut off: the magic"),
    "magic": (b"GGML" + bytes(60), "is no GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(60), "is of GGUF version 1"),
    "version 9": (b"GGUF" + struct.pack("<I", 9) + bytes(60), "is of GGUF version 9"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "is big-endian"),
    "tensor count": (forge(counts=(1 << 63, 0)), "too many"),
    "pair count": (forge(counts=(0, (1 << 64) - 1)), "too many"),
    "tensors cut": (forge(counts=(9, 0))[:24], "is cut off"),
    "pairs cut": (forge(counts=(0, 9))[:24], "is cut off"),
    "key length": (forge([struct.pack("<Q", 1 << 62)]), "is cut off: a metadata key ends at"),
    "key bytes": (forge([pair(b"\xff\xfe", U32, bytes(4))]), "a metadata key is not UTF-8"),
    "key shown": (forge([pair("\x1b[2J", U32, bytes(4))]), "unusable name"),
    "key twice": (forge([pair("a", U32, bytes(4))] * 2), "key 'a' stands there twice"),
    "value type": (forge([pair("a", 13, bytes(8))]), "'a' has the unknown value type 13"),
    "string length": (forge([pair("a", STRING, struct.pack("<Q", 1 << 40))]), "'a' ends at byte"),
    "string bytes": (forge([pair("a", STRING, text(b"\xc3"))]), "'a' is not UTF-8"),
    "bool": (forge([pair("a", BOOL, b"\x02")]), "'a' is neither true nor false"),
    "nan": (forge([pair("a", F32, NAN)]), "'a' is NaN"),
    "infinity": (forge([pair("a", F64, struct.pack("<d", -math.inf))]), "'a' is -inf"),
    "nan in array": (forge([pair("a", ARRAY, array(F32, 2, bytes(4) + NAN))]), "'a' is NaN"),
    "array length": (forge([pair("a", ARRAY, array(U32, 1 << 60, b""))]), "claims 1152921504606846976 items"),
    "array cut": (forge([pair("a", ARRAY, array(U64, 1_000_000, b""))]), "'a' ends at byte"),
    "strings cut": (forge([pair("a", ARRAY, array(STRING, 5, text("b")))], data=0), "is cut off"),
    "array type": (forge([pair("a", ARRAY, array(77, 1, b""))]), "unknown value type 77"),
    "nested": (forge([pair("a", ARRAY, array(ARRAY, 1, array(U8, 1, b"1")))]), "an array of arrays"),
    "alignment 0": (forge([pair("general.alignment", U32, bytes(4))]), "general.alignment is 0"),
    "alignment 3": (forge([pair("general.alignment", U32, struct.pack("<I", 3))]), "general.alignment is 3"),
    "alignment huge": (forge([pair("general.alignment", U32, struct.pack("<I", 1 << 31))]), "general.alignment is 2147483648"),
    "alignment text": (forge([pair("general.alignment", STRING, text("x"))]), "general.alignment is 'x'"),
    "alignment bool": (forge([pair("general.alignment", BOOL, b"\x01")]), "general.alignment is True"),
    "split count": (forge([pair("split.count", U32, struct.pack("<I", 1 << 20))]), "split.count is 1048576"),
    "split negative": (forge([pair("split.count", I32, struct.pack("<i", -1))]), "split.count is -1"),
    "split text": (forge([pair("split.count", STRING, text("2"))]), "split.count is '2'"),
    "split tensors": (forge([pair("split.tensors.count", U32, struct.pack("<I", 2))], [info("x", [2])]), "hold 1 tensors, 2 are"),
    "rank": (forge([], [text("x") + struct.pack("<I", 1 << 31)]), "2147483648 dimensions"),
    "shape": (forge([], [info("x", [1 << 40, 1 << 40])]), "impossible shape"),
    "shape past a zero": (forge([], [info("x", [0, 1 << 63])]), "impossible shape"),
    "tensor type": (forge([], [info("x", [4], 999)]), "'x' has the unknown type number 999; upgrade the gguf package"),
    "row": (forge([], [info("x", [33], 2)]), "'x': rows of 33 are no whole number of Q4_0 blocks of 32"),
    "outside": (forge([], [info("x", [17])]), "outside the file"),
    "offset": (forge([], [info("x", [4], 0, 1 << 63)]), "outside the file"),
    "unaligned": (forge([], [info("x", [4], 0, 8)]), "alignment of 32"),
    "overlap": (forge([], [info("x", [16]), info("y", [2], 0, 32)]), "'x' and 'y' overlap"),
    "tensor twice": (forge([], [info("x", [2]), info("x", [2], 0, 32)]), "'x' stands there twice"),
    "tensor name": (forge([], [info("a\nb", [2])]), "unusable name"),
    "tensor bytes": (forge([], [info(b"\xff", [2])]), "not UTF-8"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_lying_header(tmp_path: Path, case: str) -> None:
    raw, message = FORGED[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_an_honest_forgery_opens(tmp_path: Path) -> None:
    # Otherwise the cases above might be refused for a fault of `forge`.
    path = tmp_path / "x.gguf"
    path.write_bytes(forge([pair("a", U32, struct.pack("<I", 5))], [info("x", [2, 3]), info("y", [], 0, 32), info("z", [0, 4])]))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == {"a": 5}
    assert [checkpoint.read(name).shape for name in checkpoint.names()] == [(3, 2), (), (4, 0)]


def test_one_tensor_in_two_splits(tmp_path: Path) -> None:
    for number in range(2):
        pairs = [pair("split.no", U32, struct.pack("<I", number)), pair("split.count", U32, struct.pack("<I", 2))]
        (tmp_path / f"x-0000{number + 1}-of-00002.gguf").write_bytes(forge(pairs, [info("x", [2])]))
    with pytest.raises(CheckpointError, match=r"tensor 'x' is both in .*x-00001-of-00002.gguf and in .*x-00002-of-00002.gguf"):
        open_checkpoint(tmp_path)


def test_damaged_scales(tmp_path: Path) -> None:
    raw = np.zeros((1, 2 * 18), np.uint8)
    raw[0, 18:20] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    write(tmp_path / "x.gguf", {"x": (raw, Kind.Q4_0)})
    with pytest.raises(CheckpointError, match=r"tensor 'x' holds -?inf at element 32, the file is damaged"):
        open_checkpoint(tmp_path / "x.gguf").read("x")


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", MODEL)
    checkpoint = open_checkpoint(path)
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size - 5000)
    with pytest.raises(CheckpointError, match=r"is cut off at byte"):
        checkpoint.read(checkpoint.names()[-1])
    with pytest.raises(CheckpointError, match=r"outside the file"):
        open_checkpoint(path)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.model
def test_the_starter_model(starter_gguf: Path) -> None:
    checkpoint = open_checkpoint(starter_gguf)
    reader = gguf.GGUFReader(starter_gguf)
    assert checkpoint.license == "apache-2.0"
    assert [(name, checkpoint.shape(name)) for name in checkpoint.names()] == [
        (tensor.name, tuple(tensor.shape[::-1].tolist())) for tensor in reader.tensors
    ]
    for field in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template", "llama.rope.freq_base"):
        assert checkpoint.config[field] == reader.fields[field].contents()
    for tensor in reader.tensors[:12]:  # the embedding (Q8_0) and a whole layer (Q4_1, F32)
        expected = gguf.dequantize(np.array(tensor.data), tensor.tensor_type).reshape(checkpoint.shape(tensor.name))
        np.testing.assert_array_equal(checkpoint.read(tensor.name), expected)
