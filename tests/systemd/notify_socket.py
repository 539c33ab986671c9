"""The service manager's side of sd_notify(3): a datagram socket that writes down what it is told, and when."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Manager:
    """Everything heard so far as (monotonic time, "NAME=value")."""

    address: str
    socket: socket.socket
    heard: list[tuple[float, str]] = field(default_factory=list)

    def listen(self, seconds: float, until: Callable[[str], bool] = lambda one: False) -> str | None:
        """Listen that long, or until `until` holds of an assignment, which is returned."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                text = self.socket.recv(4096).decode()
            except TimeoutError:
                break
            new = text.split("\n")
            self.heard += [(time.monotonic(), one) for one in new]
            found = next((one for one in new if until(one)), None)
            if found is not None:
                return found
        return None

    def times(self, assignment: str) -> list[float]:
        return [when for when, one in self.heard if one == assignment]


@contextlib.contextmanager
def manager(folder: Path) -> Iterator[Manager]:
    """A service manager whose socket lies in `folder`."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(path))
        yield Manager(str(path), bound)
