"""What the service manager is told: ready, stopping, one line of status, and that the decode loops still turn.

Knows: the datagram of sd_notify(3), the two variables of sd_watchdog_enabled(3), when the watchdog is fed.
Does not know: systemd's units, engines, or what a tick is counted for.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

SEND_SECONDS = 1.0
"""How long a full queue of the service manager may hold up the one who tells it something."""


@dataclass(frozen=True, slots=True)
class Notifier:
    """The way to the service manager; without one every message is dropped.

    Attributes:
        address: path of its datagram socket, "@" first for an abstract one; empty = there is none.
        watchdog_seconds: it restarts this process when not fed for so long; 0 = it does not watch.
    """

    address: str = ""
    watchdog_seconds: float = 0.0

    def send(self, *assignments: str) -> None:
        """Send e.g. "READY=1", "STATUS=..." as one datagram. A failure is logged: it is no reason to stop serving."""
        if not self.address:
            return
        where = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        text = "\n".join(one.replace("\n", " ") for one in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(SEND_SECONDS)
                out.connect(where)
                out.sendall(text.encode())
        except OSError as failure:
            structlog.get_logger().warning("the service manager was not reached", address=self.address, reason=str(failure))


def read_notifier(environment: Mapping[str, str]) -> Notifier:
    """The service manager named by NOTIFY_SOCKET, and its watchdog if it watches this very process."""
    address = environment.get("NOTIFY_SOCKET", "")
    microseconds = environment.get("WATCHDOG_USEC", "")
    ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watched = ours and microseconds.isascii() and microseconds.isdigit()
    return Notifier(address, int(microseconds) / 1e6 if watched else 0.0)


class Watchdog:
    """Feeds the service manager's watchdog for as long as every loop moves.

    Args:
        notifier: whom to feed.
        ticks: name of each loop there is now -> how often it went round.
        clock: seconds, monotonic.
    """

    def __init__(self, notifier: Notifier, ticks: Callable[[], Mapping[str, int]], clock: Callable[[], float] = time.monotonic):
        self._notifier = notifier
        self._ticks = ticks
        self._clock = clock
        self._log = structlog.get_logger()
        self._seen: dict[str, int] = {}
        self._fed = clock()
        self._warned = False

    def look(self) -> None:
        """Feed, if every loop has moved since it was fed last; a loop seen for the first time counts as moved.

        To be called several times within the watchdog's period. A loop that has not moved for half of it is named in
        the log and the status, while there still is a process to do so.
        """
        if not self._notifier.watchdog_seconds:
            return
        now = dict(self._ticks())
        stuck = sorted(name for name, ticks in now.items() if self._seen.get(name) == ticks)
        if not stuck:
            self._notifier.send("WATCHDOG=1")
            self._seen, self._fed, self._warned = now, self._clock(), False
            return
        still = self._clock() - self._fed
        if still > self._notifier.watchdog_seconds / 2 and not self._warned:
            self._warned = True
            self._log.error("a decode loop is stuck", models=stuck, seconds=round(still))
            self._notifier.send(f"STATUS=stuck: {', '.join(stuck)}")
