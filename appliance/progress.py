"""Progress bars on stderr, so that stdout stays clean for tables and JSON.

Knows: how long work is shown. Does not know: the work. The bars are drawn only on a terminal; elsewhere lines say what has
begun, every ten seconds how far it is and how long it may still take, and how long it took, because a log full of
half-drawn bars helps nobody.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

Advance = Callable[[int], None]
SAY_SECONDS = 10
"""Between two lines about the same work where there is no terminal."""


@contextlib.contextmanager
def bar(label: str, total: int | None, unit: Literal["bytes", "steps"] = "steps") -> Iterator[Advance]:
    """A bar for `total` units (None = unknown); the block calls what it is given with how many more are done."""
    if not sys.stderr.isatty():
        with _plain(label, total) as advance:
            yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # A column that wraps would break the one-line bar into pieces: what gives way on a narrow terminal is the label.
    whole = Column(no_wrap=True)
    label_column = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    amount = DownloadColumn(table_column=whole) if unit == "bytes" else MofNCompleteColumn(table_column=whole)
    columns = (label_column, BarColumn(20), amount, TimeRemainingColumn(table_column=whole))
    with Progress(*columns, console=Console(stderr=True), expand=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """One bar a stage: the block calls (stage, done, total); the next one begins when the stage or what it counts changes."""
    with contextlib.ExitStack() as stack:
        current: tuple[str, int] | None = None
        advance: Advance = lambda _: None  # noqa: E731 (replaced by the first bar)
        before = 0

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal current, advance, before
            if current != (stage, total) or done < before:
                stack.close()
                current, before = (stage, total), 0
                advance = stack.enter_context(bar(stage, total))
            advance(done - before)
            before = done

        yield progress


@contextlib.contextmanager
def _plain(label: str, total: int | None) -> Iterator[Advance]:
    start = told = time.monotonic()
    finished = 0
    print(f"{label} ...", file=sys.stderr, flush=True)

    def advance(done: int) -> None:
        nonlocal told, finished
        finished += done
        now = time.monotonic()
        if total and now - told >= SAY_SECONDS:
            told = now
            left = (now - start) * (total - finished) / finished if finished else 0
            share = f"{label}: {100 * finished // total} % after {now - start:.0f} s"
            print(f"{share}, about {left:.0f} s left" if finished else share, file=sys.stderr, flush=True)

    yield advance
    took = time.monotonic() - start
    if took >= 2:
        print(f"{label}: done in {took:.0f} s", file=sys.stderr, flush=True)
