"""Recognizes Python pickles, so that they are refused by name and never opened as anything else.

Knows: names and first bytes. Does not know: how to unpickle, on purpose: a pickle is a program that runs when it is read.
Source: pickle's PROTO opcode (0x80, then the protocol 2..5); torch.save writes a zip with `<name>/data.pkl` inside.
"""

from pathlib import Path

SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
MEND = "a pickle can run code when it is read; convert it to safetensors on a machine you can spare, or fetch a safetensors copy"


def is_pickle(path: Path) -> bool:
    """Whether a file's first bytes are a pickle's, whatever its name."""
    with open(path, "rb") as file:
        head = file.read(16)
    if head.startswith(b"PK\x03\x04"):
        return True  # no checkpoint read here is a zip
    # A safetensors file begins with its header's length: 0x80 0x02 is also a header of 640 bytes, and then "{" follows.
    looks_like_safetensors = head[3:8] == bytes(5) and head[8:9] == b"{"
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5 and not looks_like_safetensors


def pickle_in(path: Path) -> Path | None:
    """The pickle that `path` is, or holds where it is a folder; None when there is none."""
    if path.is_dir():
        named = (found for found in sorted(path.iterdir()) if found.suffix.lower() in SUFFIXES and found.is_file())
        return next(named, None)
    return path if path.suffix.lower() in SUFFIXES or is_pickle(path) else None
