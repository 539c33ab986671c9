"""Reading safetensors: values against the `safetensors` package, and every way a file can lie."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from appliance.errors import CheckpointError
from export.checkpoint import open_checkpoint
from export.checkpoint.tensors import PIECE
from tests.checkpoints import Llama, write_safetensors

MODEL = Llama(tied=False, attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_those_of_the_package(tmp_path: Path, dtype: str, shards: int) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL, dtype, shards)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.path, checkpoint.config["model_type"]) == ("safetensors", folder, "llama")
    assert sorted(checkpoint.names()) == sorted(MODEL.shapes())
    assert len(checkpoint.files()) == shards
    for file in checkpoint.files():
        for name, expected in safetensors.numpy.load_file(file).items():
            found = checkpoint.read(name)
            assert found.dtype == np.float32 and found.flags.c_contiguous and found.flags.writeable
            assert found.shape == checkpoint.shape(name) == MODEL.shapes()[name]
            assert checkpoint.stored_type(name) == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
            np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_a_read_tensor_is_the_callers_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "model", MODEL))
    first = checkpoint.read("model.norm.weight")
    kept = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), kept)


@pytest.mark.parametrize("elements", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7])
@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_pieces_join_without_a_seam(tmp_path: Path, elements: int, kind: Any) -> None:
    seed = np.random.SeedSequence().entropy
    values = np.random.default_rng(seed).standard_normal(elements).astype(kind)
    checkpoint = open_checkpoint(folder_with(tmp_path, {"a": np.ones(3, np.float32), "b": values}))
    np.testing.assert_array_equal(checkpoint.read("b"), values.astype(np.float32), err_msg=f"seed {seed}")


@pytest.mark.parametrize("kind", ["f8", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"])
def test_other_numbers_are_read_exactly(tmp_path: Path, kind: str) -> None:
    values = np.array([[0, 1], [1, 100]]).astype(kind)
    checkpoint = open_checkpoint(folder_with(tmp_path, {"x": values}))
    np.testing.assert_array_equal(checkpoint.read("x"), values.astype(np.float32))


@pytest.mark.parametrize("value", [(1 << 24) + 1, -(1 << 24) - 1, -(1 << 63), (1 << 63) - 1])
def test_whole_numbers_that_would_be_rounded_are_refused(tmp_path: Path, value: int) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path, {"x": np.array([0, value])}))
    with pytest.raises(CheckpointError, match=r"tensor 'x' holds whole numbers above 16777216"):
        checkpoint.read("x")


def test_fp8_is_refused_with_the_mend_and_the_rest_is_read(tmp_path: Path) -> None:
    values = {"w": np.ones((2, 4), ml_dtypes.float8_e4m3fn), "n": np.ones(4, np.float32)}
    checkpoint = open_checkpoint(folder_with(tmp_path, values))
    assert checkpoint.stored_type("w") == "F8_E4M3"
    np.testing.assert_array_equal(checkpoint.read("n"), values["n"])
    with pytest.raises(CheckpointError, match=r"tensor 'w' is stored as F8_E4M3, which is not read; convert it to bf16"):
        checkpoint.read("w")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_damage(tmp_path: Path, value: float) -> None:
    values = np.zeros(PIECE + 10, np.float32)
    values[PIECE + 4] = value
    checkpoint = open_checkpoint(folder_with(tmp_path, {"x": values}))
    with pytest.raises(CheckpointError, match=rf"tensor 'x' holds {value} at element {PIECE + 4}"):
        checkpoint.read("x")


def test_a_number_beyond_float32_is_damage_and_no_warning(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path, {"x": np.array([1.0, 1e300])}))
    with pytest.raises(CheckpointError, match=r"tensor 'x' holds inf at element 1"):
        checkpoint.read("x")


def test_a_header_of_640_bytes_is_no_pickle(tmp_path: Path) -> None:
    # Its first two bytes, 0x80 0x02, are exactly those of a pickle of protocol 2.
    path = folder_with(tmp_path, {"x": np.ones(4, np.float32)}) / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes((640).to_bytes(8, "little") + raw[8 : 8 + length].ljust(640) + raw[8 + length :])
    np.testing.assert_array_equal(open_checkpoint(path).read("x"), np.ones(4, np.float32))


def test_a_file_cut_after_opening_is_damage(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL)
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"is cut off at byte"):
        for name in checkpoint.names():
            checkpoint.read(name)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: No such file"):
        checkpoint.read("model.norm.weight")


def test_an_unknown_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "model", MODEL))
    for ask in (checkpoint.read, checkpoint.shape, checkpoint.stored_type):
        with pytest.raises(CheckpointError, match=r"has no tensor 'nope'"):
            ask("nope")


# Headers.

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "list": ([], "is not a JSON object"),
    "number": (3, "is not a JSON object"),
    "entry": ({"x": 3}, "'x' is not described by exactly"),
    "missing": ({"x": {"dtype": "F32", "shape": [4]}}, "'x' is not described by exactly"),
    "extra": ({"x": {**GOOD, "stride": 1}}, "'x' is not described by exactly"),
    "dtype": ({"x": {**GOOD, "dtype": "F33"}}, "'x' has the unknown type 'F33'"),
    "dtype kind": ({"x": {**GOOD, "dtype": ["F32"]}}, "unknown type"),
    "shape kind": ({"x": {**GOOD, "shape": "22"}}, "a shape that is no list"),
    "negative": ({"x": {**GOOD, "shape": [-2, -2]}}, "no whole number"),
    "fraction": ({"x": {**GOOD, "shape": [2.0, 2]}}, "no whole number"),
    "truth": ({"x": {**GOOD, "shape": [True, 4]}}, "no whole number"),
    "overflow": ({"x": {**GOOD, "shape": [2**40, 2**40]}}, "impossible shape"),
    "overflow past a zero": ({"x": {**GOOD, "shape": [0, 2**63, 2**63], "data_offsets": [0, 0]}}, "impossible shape"),
    "rank": ({"x": {**GOOD, "shape": [1] * 2000}}, "2000 dimensions"),
    "size": ({"x": {**GOOD, "shape": [2, 3]}}, "takes 24 bytes, the header gives it 16"),
    "offsets kind": ({"x": {**GOOD, "data_offsets": [0, 16.0]}}, "not two whole numbers"),
    "one offset": ({"x": {**GOOD, "data_offsets": [16]}}, "not two whole numbers"),
    "outside": ({"x": {**GOOD, "data_offsets": [16, 32]}}, "lies at bytes 16 to 32, outside the 16"),
    "before": ({"x": {**GOOD, "data_offsets": [-16, 0]}}, "outside"),
    "backwards": ({"x": {**GOOD, "data_offsets": [16, 0]}}, "outside"),
    "overlap": ({"x": GOOD, "y": GOOD}, "'x' and 'y' overlap"),
    "hole": ({"x": {**GOOD, "shape": [2], "data_offsets": [8, 16]}}, "its header accounts for"),
    "nothing": ({}, "its header accounts for"),
    "name": ({"a\u001b[2J": GOOD}, "unusable name"),
    "surrogate": ({"a\ud800": GOOD}, "unusable name"),
    "empty name": ({"": GOOD}, "unusable name"),
    "long name": ({"a" * 600: GOOD}, "unusable name"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_lying_header(tmp_path: Path, case: str) -> None:
    header, message = BAD_HEADERS[case]
    refused(tmp_path, json.dumps(header).encode(), message)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"x": ', "is not valid JSON"),
        (b'\xff{"x": 1}', "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (
            b'{"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "x": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
            "twice",
        ),
        (b'{"x": {"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', "NaN is no number"),
        (b'{"x": {"dtype":"F32","shape":[1e999],"data_offsets":[0,16]}}', "1e999 is no number"),
        (b'{"x": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}', "is not valid JSON"),
    ],
    ids=["cut", "bytes", "deep", "twice", "nan", "huge float", "huge integer"],
)
def test_a_header_that_is_no_json(tmp_path: Path, raw: bytes, message: str) -> None:
    refused(tmp_path, raw, message)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 17])
def test_an_absurd_header_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(14))
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut off"):
        open_checkpoint(path)


def test_a_huge_header_in_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 1 << 33))
        file.truncate(1 << 34)  # sparse
    with pytest.raises(CheckpointError, match=r"a header of 8589934592 bytes is too large"):
        open_checkpoint(path)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20, -1])
def test_a_truncated_file(tmp_path: Path, size: int) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        open_checkpoint(folder)


# Shards and config.


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(change(index)))

    return edit


def shard(number: int) -> str:
    return f"model-0000{number}-of-00003.safetensors"


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard missing": (lambda folder: (folder / shard(2)).unlink(), r"model-00002-of-00003.safetensors is missing"),
    "index missing": (lambda folder: (folder / "model.safetensors.index.json").unlink(), r"index.json is missing; fetch it"),
    "index list": (edit_index(lambda index: []), r"index.json is not a JSON object"),
    "no map": (edit_index(lambda index: {"metadata": {}}), r'has no "weight_map"'),
    "empty map": (edit_index(lambda index: {"weight_map": {}}), r'has no "weight_map"'),
    "map kind": (edit_index(lambda index: {"weight_map": ["x"]}), r'has no "weight_map"'),
    "file kind": (edit_index(lambda index: {"weight_map": {"x": 3}}), r"puts 'x' into 3, which is no file of this folder"),
    "outside": (edit_index(lambda index: {"weight_map": {"x": "../x.safetensors"}}), r"which is no file of this folder"),
    "absolute": (edit_index(lambda index: {"weight_map": {"x": "/etc/passwd"}}), r"which is no file of this folder"),
    "backslash": (edit_index(lambda index: {"weight_map": {"x": "..\\x"}}), r"which is no file of this folder"),
    "parent": (edit_index(lambda index: {"weight_map": {"x": ".."}}), r"which is no file of this folder"),
    "nul": (edit_index(lambda index: {"weight_map": {"x": "a\0b"}}), r"which is no file of this folder"),
    "wrong shard": (
        # The tensor is there, in shard 1, and the index says 3: one of the two is out of date.
        edit_index(lambda index: {"weight_map": {**index["weight_map"], "model.embed_tokens.weight": shard(3)}}),
        r"00003-of-00003.safetensors lacks tensor 'model.embed_tokens.weight'",
    ),
    "unlisted": (edit_index(lambda index: {"weight_map": {**index["weight_map"], "new": shard(1)}}), r"lacks tensor 'new'"),
    "twice": (
        lambda folder: (folder / shard(2)).write_bytes((folder / shard(1)).read_bytes()),
        r"is both in .*00001-of-00003.safetensors and in .*00002-of-00003",
    ),
    "config missing": (lambda folder: (folder / "config.json").unlink(), r"config.json is missing; put the model's config"),
    "config list": (lambda folder: (folder / "config.json").write_text("[1]"), r"config.json is not a JSON object"),
    "config cut": (lambda folder: (folder / "config.json").write_text('{"a":'), r"config.json is not valid JSON"),
    "config nan": (lambda folder: (folder / "config.json").write_text('{"rope_theta": NaN}'), r"NaN is no number"),
    "config infinity": (lambda folder: (folder / "config.json").write_text('{"a": -Infinity}'), r"-Infinity is no number"),
    "config huge": (lambda folder: (folder / "config.json").write_text('{"a": 1e400}'), r"1e400 is no number"),
    "config twice": (lambda folder: (folder / "config.json").write_text('{"a": 1, "a": 2}'), r"key 'a' stands there twice"),
    "config bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), r"config.json is not UTF-8"),
    "config deep": (lambda folder: (folder / "config.json").write_text('{"a":' * 100_000), r"nested too deeply"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder(tmp_path: Path, case: str) -> None:
    spoil, message = BROKEN[case]
    folder = write_safetensors(tmp_path / "model", MODEL, shards=3)
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


def test_a_file_outside_is_not_touched(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL, shards=3)
    outside = write_safetensors(tmp_path / "other", MODEL) / "model.safetensors"
    edit_index(lambda index: {"weight_map": dict.fromkeys(MODEL.shapes(), f"../other/{outside.name}")})(folder)
    with pytest.raises(CheckpointError, match="no file of this folder"):
        open_checkpoint(folder)


def test_shards_that_are_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    blobs = write_safetensors(tmp_path / "blobs", MODEL, shards=3)
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert len(open_checkpoint(tmp_path / "snapshot").names()) == len(MODEL.shapes())


def test_one_shard_is_no_model(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL, shards=3)
    with pytest.raises(CheckpointError, match=r"00002-of-00003.safetensors is one shard of 3; name the folder: "):
        open_checkpoint(folder / shard(2))


def test_the_index_may_be_named(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL, shards=3)
    assert len(open_checkpoint(folder / "model.safetensors.index.json").files()) == 3


def test_several_models_in_one_folder(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", MODEL)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert open_checkpoint(folder).files() == (folder / "a.safetensors",)
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints: a.safetensors, b.safetensors; name one"):
        open_checkpoint(folder)
    assert open_checkpoint(folder / "b.safetensors").files() == (folder / "b.safetensors",)


def folder_with(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text("{}")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def refused(folder: Path, header: bytes, message: str) -> None:
    (folder / "config.json").write_text("{}")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(folder)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 900
