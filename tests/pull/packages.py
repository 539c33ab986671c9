"""Small wheels and checkpoints for the tests of `appliance.pull`."""

import base64
import hashlib
import json
import struct
import zipfile
from pathlib import Path


def gguf_bytes(license: str | None = "mit", padding: int = 1000) -> bytes:
    """The beginning of a GGUF file, by the format's specification: header, then key-value pairs."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    pairs.append(text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("chat") + text("small"))
    pairs.append(text("general.sizes") + struct.pack("<IIQ", 9, 5, 3) + bytes(12))
    pairs.append(text("general.count") + struct.pack("<II", 4, 7))
    if license is not None:
        pairs.append(text("general.license") + struct.pack("<I", 8) + text(license))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs) + bytes(range(250)) * (padding // 250)


def write_wheel(
    folder: Path, name: str, files: dict[str, bytes], *, version: str = "1.0", lie: str | None = None, license: str = "MIT"
) -> Path:
    """A wheel by the packaging specification; `lie` names a file whose RECORD hash is wrong."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: {license}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, content in files.items():
        digest = hashlib.sha256(content + (b"x" if path == lie else b"")).digest()
        rows.append(f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(content)}")
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return wheel


def zip_bytes(folder: Path, files: dict[str, bytes]) -> bytes:
    """A zip archive's bytes."""
    path = folder / "inner.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    content = path.read_bytes()
    path.unlink()
    return content


def write_folder(folder: Path) -> Path:
    """A checkpoint folder as hubs have them, with things that must not be taken."""
    folder.mkdir(parents=True)
    files = {
        "model.safetensors": struct.pack("<Q", 2) + b"{}" + bytes(999),
        "config.json": json.dumps({"model_type": "llama"}).encode(),
        "tokenizer.json": b"{}",
        "README.md": b"---\nlicense: apache-2.0\ntags: [x]\n---\n# Model\n",
        "pytorch_model.bin": b"pickle",
        "training_args.bin": b"pickle",
        "run.sh": b"rm -rf /",
        "sub/modeling.py": b"import os",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
