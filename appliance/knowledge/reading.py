"""Reading files in a child process that can hang, crash or swell without harm.

Knows: how the child is started, asked, and ended when it is late. Does not know: formats (`readers`), the index.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.errors import NotFound
from appliance.knowledge import readers
from appliance.knowledge.document import Document, DocumentError, Section
from appliance.knowledge.reader_process import Limits

GRACE = 5.0
"""Seconds beyond a document's limit before the parent ends a child that did not end itself."""


PROGRAM = ("-I", "-m", "appliance.knowledge.reader_process")
"""The child. -I: neither the current folder nor the environment decides which code is run."""


class Reader:
    """A reading child, started on the first file and again after it died. Use it from one thread; close it."""

    def __init__(self, limits: Limits = Limits()):
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self.sha256 = ""
        """Of the file that was read last, "" when that could not be opened."""

    def read(self, path: Path) -> Document:
        """Read one file.

        Raises:
            DocumentError: it cannot be read, with the condition and the reason.
        """
        kind = readers.kind_of(path.name)
        answer = self._ask({"path": os.fspath(path), "kind": kind})
        self.sha256 = answer["sha256"]
        if "condition" in answer:
            raise DocumentError(answer["condition"], answer["reason"], lasting=answer["lasting"])
        sections = tuple(Section(**one) for one in answer["sections"])
        return Document(path, kind, answer["sha256"], answer["text"], sections, answer["anchors"])

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        self.sha256 = ""
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        line = _line(child.stdout.fileno(), time.monotonic() + self._limits.seconds + GRACE)
        if line is None:
            raise self._late()
        if not line.endswith(b"\n"):
            child.communicate()
            code, self._child = child.returncode, None
            if code == -signal.SIGALRM:
                raise self._late()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise DocumentError("unreadable", f"its reader crashed ({how})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _late(self) -> DocumentError:
        self.close()
        return DocumentError("unreadable", f"reading it took over {self._limits.seconds} s", lasting=False)

    def _start(self) -> subprocess.Popen[bytes]:
        call = [sys.executable, *PROGRAM, json.dumps(asdict(self._limits))]
        pipe = subprocess.PIPE
        return subprocess.Popen(call, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def open_reader(limits: Limits = Limits()) -> Iterator[Reader]:
    """A reader for the length of the block."""
    reader = Reader(limits)
    try:
        yield reader
    finally:
        reader.close()


def read_document(path: Path, limits: Limits = Limits()) -> Document:
    """Read one file from disk, now. `NotFound` when there is none, `DocumentError` when it cannot be read."""
    if not path.is_file():
        raise NotFound(f"{path} does not exist", "check the path")
    with open_reader(limits) as reader:
        return reader.read(path)


def locate(path: Path, anchor: str, limits: Limits = Limits()) -> str:
    """The text at an anchor of the file as it is on disk now, so that a quotation can be checked against its source.

    Raises:
        NotFound: there is no such file, or no such place in it. DocumentError: it cannot be read.
    """
    return read_document(path, limits).at(anchor)


def _line(descriptor: int, deadline: float) -> bytes | None:
    """One line; without its end when the writer is gone; None when the deadline passed first."""
    pieces = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        piece = os.read(descriptor, 1 << 20)
        pieces.append(piece)
        if not piece or piece.endswith(b"\n"):
            return b"".join(pieces)
