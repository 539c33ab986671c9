"""Huge pages for what every decode step reads whole: weights and the KV cache.

A step walks through all weights once, far more memory than the processor's address cache covers with 4 KiB pages. With
2 MiB pages a step of SmolLM2 on a 2-core server took 4.5 instead of 6.0 ms (docs/LOG.md). Distributions leave huge pages
to programs that ask (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled); onnxruntime does not, so this asks for it.

Knows: madvise(2) and /proc/self/maps. Does not know: what the memory holds. Where the kernel cannot, nothing happens.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

HUGE = 2 << 20
"""Bytes of a huge page on x86-64, and on arm64 with 4 KiB pages."""
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1: copy into huge pages now, instead of waiting for the kernel's own thread

Span = tuple[int, int]


def advise(memory: mmap.mmap) -> None:
    """Ask for huge pages under memory that is not written yet."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)


@contextlib.contextmanager
def under_new_memory() -> Iterator[None]:
    """Move to huge pages whatever anonymous memory came to be within the block and is still there at its end."""
    before = _anonymous()
    yield
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in _without(_anonymous(), before):
        first, last = -(-first // HUGE) * HUGE, last // HUGE * HUGE
        # Refused (an older kernel, no huge page free, a mapping that went away meanwhile): it stays as it is.
        if last > first and libc.madvise(first, last - first, _MADV_HUGEPAGE) == 0:
            libc.madvise(first, last - first, _MADV_COLLAPSE)


def _anonymous() -> list[Span]:
    """Private writable memory of this process that no file is behind, in order; empty where there is no /proc."""
    maps = Path("/proc/self/maps")
    found = []
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else []:
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            first, last = span.split("-")
            found.append((int(first, 16), int(last, 16)))
    return found


def _without(spans: list[Span], others: list[Span]) -> list[Span]:
    """What of `spans` lies in none of `others`; both are in order and do not overlap within themselves."""
    found = []
    for first, last in spans:
        for begin, end in others:
            if end <= first or begin >= last:
                continue
            if begin > first:
                found.append((first, begin))
            first = min(end, last)
        if first < last:
            found.append((first, last))
    return found
