"""Sidecars by name, and what a checkpoint says its licence is."""

from pathlib import Path

import pytest

from export.checkpoint import open_checkpoint
from export.checkpoint.sidecars import license_of
from tests.checkpoints import Llama, write_gguf, write_safetensors

APACHE = "\n                                 Apache License\n                           Version 2.0, January 2004\n"


def test_sidecars(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model", Llama(), tokenizer=True)
    (folder / "tokenizer.model").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    for checkpoint in (open_checkpoint(folder), open_checkpoint(folder / "model.safetensors")):
        assert checkpoint.sidecar("tokenizer.json") == folder / "tokenizer.json"
        for absent in (
            "generation_config.json",
            "tokenizer.model",
            "../secret.json",
            str(tmp_path / "secret.json"),
            "",
            ".",
            "..",
        ):
            assert checkpoint.sidecar(absent) is None


def test_a_gguf_named_as_a_file_stands_for_itself(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", Llama())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "LICENSE").write_text(APACHE)
    alone, folder = open_checkpoint(path), open_checkpoint(tmp_path)
    assert (alone.sidecar("tokenizer.json"), alone.license) == (None, "unknown")
    assert (folder.sidecar("tokenizer.json"), folder.license) == (tmp_path / "tokenizer.json", "Apache License")


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: mit\n---\n# Model", "mit"),
        ("---\r\nlanguage: en\r\nlicense: 'apache-2.0'\r\n---\r\n", "apache-2.0"),
        ('\ufeff---\nlicense: "llama3.2" # see below\n---', "llama3.2"),
        ("---\nlicense:\n- cc-by-4.0\n- mit\n---\n", "cc-by-4.0"),
        ("---\nlicense: [mit]\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: tongyi-qianwen\n---\n", "tongyi-qianwen"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nlicense_link: http://x\nbase_license: x\n---\n", "unknown"),
        ("license: mit\n", "unknown"),
        ("# Model\n---\nlicense: mit\n---\n", "unknown"),
        ("---\nlicense: mit\n", "unknown"),
        ("---\nlicense:\n---\n", "unknown"),
        ("---\nlicense: \x1b[31mmit\x07\n---\n", "[31mmit"),
        ("---\nlicense: " + "x" * 500 + "\n---\n", "x" * 100),
        ("", "unknown"),
    ],
)
def test_front_matter(tmp_path: Path, readme: str, expected: str) -> None:
    (tmp_path / "README.md").write_bytes(readme.encode())
    assert license_of(tmp_path) == expected


def test_order_of_sources(tmp_path: Path) -> None:
    assert license_of(None) == license_of(tmp_path) == "unknown"
    (tmp_path / "LICENSE").write_text(APACHE)
    assert license_of(tmp_path) == "Apache License"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert license_of(tmp_path) == "mit"
    assert license_of(tmp_path, "gemma") == "gemma"
    assert license_of(tmp_path, "") == license_of(tmp_path, 3) == "mit"
    assert license_of(None, " two\nlines ") == "two lines"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.md").write_bytes(b"\xff\xfe\n# MIT License\n")
    assert "\n" not in license_of(tmp_path)
    (tmp_path / "LICENSE").write_text("# MIT License\n")
    assert license_of(tmp_path) == "MIT License"
