"""Huge pages: what is asked for, and that memory keeps what it holds."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from appliance.runtime import huge_pages

MEMORY = 8 * huge_pages.HUGE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kib(first: int) -> int:
    """AnonHugePages of the mapping that holds the address `first`, KiB (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head:
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= first < end
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize(
    ("spans", "others", "rest"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 4), (6, 7)], [(0, 2), (4, 6), (7, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(5, 6)], [(0, 5), (6, 9)], [(5, 6)]),
    ],
)
def test_only_new_memory_is_meant(spans: list[huge_pages.Span], others: list[huge_pages.Span], rest: object) -> None:
    assert huge_pages._without(spans, others) == rest


def test_memory_keeps_what_it_holds() -> None:
    old = mmap.mmap(-1, MEMORY, flags=PRIVATE)
    seed = int.from_bytes(os.urandom(4), "big")
    values = np.random.default_rng(seed).integers(0, 256, MEMORY, np.uint8)
    np.frombuffer(old, np.uint8)[:] = values
    with huge_pages.under_new_memory():
        new = mmap.mmap(-1, MEMORY, flags=PRIVATE)
        array = np.frombuffer(new, np.uint8)
        array[:] = values
    assert (array == values).all() and (np.frombuffer(old, np.uint8) == values).all(), f"seed {seed}"
    if ENABLED.exists() and "[never]" not in ENABLED.read_text():
        assert huge_kib(array.ctypes.data) > 0
