"""The child process that reads documents: `python -m appliance.knowledge.reader_process LIMITS`.

Knows: one request a line in, one answer a line out, its own limits. Does not know: why a file is read.
Whatever a hostile file does to a reader (endless loop, all memory, a crash inside a library) ends here.

    {"path": "/a/b.pdf", "kind": "pdf"}  ->  {"sha256": ..., "text": ..., "sections": [[anchor, start, end], ...], "anchors": ...}
                                         ->  {"sha256": ..., "condition": ..., "reason": ..., "lasting": ...}
"""

import hashlib
import json
import os
import resource
import signal
import stat
import sys
from dataclasses import asdict, dataclass
from typing import Any

from appliance.knowledge import readers
from appliance.knowledge.document import DocumentError, Extract


@dataclass(frozen=True)
class Limits:
    """What one document may take. `seconds`: wall time; `memory`: bytes of address space of the whole child."""

    file_bytes: int = 64 * 2**20
    characters: int = 20_000_000
    seconds: int = 60
    memory: int = 2 * 2**30


def main(arguments: list[str]) -> int:
    """Answer requests until the input ends."""
    limits = Limits(**json.loads(arguments[0]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end among the answers
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for line in sys.stdin:
        request = json.loads(line)
        # The alarm's default action ends the process inside any library, and without a parent that could do it.
        signal.alarm(limits.seconds)
        answer = json.dumps(answer_to(request["path"], request["kind"], limits))
        signal.alarm(0)
        answers.write(answer + "\n")
        answers.flush()
    return 0


def answer_to(path: str, kind: str, limits: Limits) -> dict[str, Any]:
    """Read one file; never raises for what is in it."""
    sha256 = ""
    try:
        data = load(path, limits)
        sha256 = hashlib.sha256(data).hexdigest()
        extract = extract_of(data, kind, limits)
    except DocumentError as failure:
        return {"sha256": sha256, "condition": failure.condition, "reason": str(failure), "lasting": failure.lasting}
    except MemoryError:
        reason = f"its reader needs over {limits.memory // 2**20} MiB of memory"
        return {"sha256": sha256, "condition": "unreadable", "reason": reason, "lasting": False}
    except Exception as failure:  # a reader's library failed in a way of its own: the file has a status, the run goes on
        reason = f"its reader failed ({type(failure).__name__}: {' '.join(str(failure).split())[:200]})"
        return {"sha256": sha256, "condition": "unreadable", "reason": reason, "lasting": True}
    return {"sha256": sha256, **asdict(extract)}


def load(path: str, limits: Limits) -> bytes:
    """The file's bytes. Symbolic links, pipes, devices and what is too large are refused before a byte is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise DocumentError("unsupported", "it is no regular file")
            if about.st_size > limits.file_bytes:
                size, most = about.st_size / 2**20, limits.file_bytes / 2**20
                raise DocumentError("unreadable", f"it has {size:.1f} MiB, the limit is {most:g} MiB")
            return file.read(limits.file_bytes + 1)[: limits.file_bytes]
    except OSError as failure:
        raise DocumentError("unreadable", f"it cannot be opened: {failure.strerror}", lasting=False) from None


def extract_of(data: bytes, kind: str, limits: Limits) -> Extract:
    """What the reader of `kind` makes of it."""
    if not data:
        raise DocumentError("empty", "it has no content")
    extract: Extract = readers.find(kind).read(data)
    if not extract.text.strip() or not extract.sections:
        raise DocumentError("empty", "it has no text")
    if len(extract.text) > limits.characters:
        what = f"it has {len(extract.text)} characters of text, the limit is {limits.characters}"
        raise DocumentError("unreadable", what)
    # Half of a surrogate pair cannot be stored; it comes from damaged PDFs.
    return Extract(extract.text.encode("utf-8", "replace").decode(), extract.sections, extract.anchors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
