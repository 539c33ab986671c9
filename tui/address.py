"""Where a daemon may be: what `--host` says, or the places it listens on by default.

Knows: URLs, socket paths, the XDG folders. Does not know: HTTP, or whether anything listens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PORT = 8420


@dataclass(frozen=True)
class Address:
    """One place to reach a daemon: a base URL, over TCP or through a Unix socket."""

    url: str
    socket: Path | None = None

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


def parse_host(text: str) -> Address:
    """Read `http://127.0.0.1:8420`, `127.0.0.1:8420`, `127.0.0.1` or `unix:/path/to.sock`; `ValueError` for other text."""
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:").removeprefix("//")).expanduser()
        if not path.is_absolute():
            raise ValueError(f'"{text}" names no socket: write unix: and a whole path')
        return Address("http://appliance", path)
    scheme, separator, rest = text.rpartition("://")
    rest = rest.rstrip("/")
    if (separator and scheme not in ("http", "https")) or not rest or "/" in rest or any(letter.isspace() for letter in rest):
        raise ValueError(f'"{text}" is no address: write 127.0.0.1:{PORT}, http://HOST:PORT or unix:/path/to.sock')
    tail = rest.rpartition("]")[2] if rest.startswith("[") else rest
    if tail.count(":") > 1:
        raise ValueError(f'"{text}" is no address: an IPv6 address stands in brackets, [::1]:{PORT}')
    if ":" not in tail and not separator:
        rest = f"{rest}:{PORT}"
    elif ":" in tail and not tail.rpartition(":")[2].isdecimal():
        raise ValueError(f'"{text}" is no address: after the colon stands the port, a number')
    return Address(f"{scheme or 'http'}://{rest}")


def default_addresses(environment: Mapping[str, str]) -> tuple[Address, ...]:
    """Where a daemon without settings listens, the socket first.

    $XDG_RUNTIME_DIR/appliance/appliance.sock, or the same below the state folder where there is no runtime folder; then
    port 8420 of this machine. Relative XDG values are ignored, as the XDG base directory specification asks.
    """
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute():
        folder = runtime / "appliance"
    else:
        state = Path(environment.get("XDG_STATE_HOME", ""))
        base = state if state.is_absolute() else Path(environment.get("HOME") or Path.home()) / ".local" / "state"
        folder = base / "appliance" / "run"
    return Address("http://appliance", folder / "appliance.sock"), Address(f"http://127.0.0.1:{PORT}")
