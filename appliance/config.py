"""`appliance.toml`: the one place of settings, read into one frozen object.

Knows: every key with its default, where the file and the folders lie (XDG), how an address is written.
Does not know: what any part does with its settings. The environment is asked for the file's path and the XDG folders only.
"""

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from appliance.errors import ConfigError
from appliance.paths import home_filled
from appliance.strict import StrictModel, read

CONFIG_VARIABLE = "APPLIANCE_CONFIG"
FILE = "appliance.toml"
SYSTEM_FILE = Path("/etc/appliance") / FILE
PORT = 8420
SOCKET_NAME_LIMIT = 107  # bytes, sun_path of Linux without its final zero


def _absolute(path: Path) -> Path:
    path = home_filled(path)
    if not path.is_absolute():
        raise ValueError(f"{path} is a relative path; write it in full or from ~")
    return path


Folder = Annotated[Path, AfterValidator(_absolute)]


@dataclass(frozen=True)
class Address:
    """One TCP address to listen on. Port 0 = whichever is free."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read "127.0.0.1:8420", "[::1]:8420" or "localhost:8420"; `ConfigError` when it is none of these."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host) != bracketed:
        raise ConfigError(f'"{text}" is no address', 'write it as "127.0.0.1:8420" or "[::1]:8420"')
    return Address(host, int(port))


def _addresses(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        try:
            parse_address(text)
        except ConfigError as failure:
            raise ValueError(str(failure)) from None
    return texts


class Paths(StrictModel):
    """Folders. The defaults follow the XDG base directory specification."""

    models: Folder = Field(description="Installed bundles, one folder each. Default: $XDG_DATA_HOME/appliance/models.")
    cache: Folder = Field(description="Downloads that can be fetched again. Default: $XDG_CACHE_HOME/appliance.")
    state: Folder = Field(description="What this box measured and keeps for itself. Default: $XDG_STATE_HOME/appliance.")
    runtime: Folder = Field(
        description="The Unix socket. Default: $XDG_RUNTIME_DIR/appliance, or `run` in the state folder where there is none."
    )
    targets: Folder = Field(description="Vendors' own target files. Default: `targets.d` beside the configuration file.")
    jobs: Folder = Field(description="Job files, one a job. Default: `jobs.d` beside the configuration file.")
    reports: Folder = Field(description="What jobs wrote. Default: $XDG_DATA_HOME/appliance/reports.")


class Server(StrictModel):
    """The HTTP endpoint."""

    listen: Annotated[tuple[str, ...], AfterValidator(_addresses)] = Field(
        default=(f"127.0.0.1:{PORT}",), description="TCP addresses, host:port each. Only loopback ones until there are keys."
    )
    socket: bool = Field(default=True, description="Listen on `appliance.sock` in the runtime folder too; only its owner may.")
    max_body_mib: float = Field(default=32, gt=0, le=4096, description="Largest request body, MiB.")
    stop_seconds: int = Field(default=10, ge=0, le=600, description="How long running answers may go on after a stop signal.")

    @property
    def addresses(self) -> tuple[Address, ...]:
        """`listen`, parsed."""
        return tuple(parse_address(text) for text in self.listen)


class Models(StrictModel):
    """Which models answer."""

    default: str = Field(default="", description="Model loaded at start and meant when none is named; empty = the first by name.")
    preload: bool = Field(default=True, description="Load the default model at start; otherwise on its first request.")
    aliases: dict[str, str] = Field(default_factory=dict, description='Other names, e.g. {"gpt-4o-mini" = "SmolLM2-135M"}.')


class EngineSettings(StrictModel):
    """How models run."""

    target: str = Field(default="cpu", description="Which of a bundle's graphs to run; `appliance doctor` lists what there is.")
    threads: int = Field(default=0, ge=0, le=1024, description="Threads of one model; 0 = one for each physical core.")


class Log(StrictModel):
    """What the daemon writes to its standard output."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severity that is written.")
    format: Literal["auto", "text", "json"] = Field(
        default="auto", description="auto: text on a terminal, one JSON object a line otherwise."
    )


class Config(StrictModel):
    """Everything that can be set. Immutable: a change is a new file and a restart."""

    paths: Paths
    server: Server = Server()
    models: Models = Models()
    engine: EngineSettings = EngineSettings()
    log: Log = Log()

    @property
    def socket_path(self) -> Path:
        """Where the Unix socket is, if `server.socket` is on."""
        return self.paths.runtime / "appliance.sock"


def load_config(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """Read the settings; without any file, the defaults.

    Looked for, first found wins: `path`; $APPLIANCE_CONFIG; $XDG_CONFIG_HOME/appliance/appliance.toml;
    /etc/appliance/appliance.toml. A file named by the first two must be there.

    Raises:
        ConfigError: the file is missing, is not TOML, has an unknown key or a value out of range.
    """
    environment = os.environ if environment is None else environment
    file = _find(path, environment)
    data = _decode(file) if file else {}
    folders = data.get("paths", {})
    home = file.absolute().parent if file else _xdg(environment, "XDG_CONFIG_HOME", ".config")
    where = str(file) if file else "the default settings"
    if isinstance(folders, dict):
        data = {**data, "paths": {**_default_paths(environment, home), **folders}}
    config = read(Config, data, where, ConfigError)
    if config.server.socket and len(os.fsencode(config.socket_path)) > SOCKET_NAME_LIMIT:
        raise ConfigError(
            f"{where}: the socket's path {config.socket_path} is over {SOCKET_NAME_LIMIT} bytes",
            "choose a shorter paths.runtime or set server.socket = false",
        )
    return config


def _find(path: Path | None, environment: Mapping[str, str]) -> Path | None:
    named = path or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            why = "named on the command line" if path else f"named by {CONFIG_VARIABLE}"
            wrong = "is no file" if named.exists() else "does not exist"
            raise ConfigError(f"{named}, {why}, {wrong}", f"name a settings file such as {FILE}, or create it")
        return named
    usual = (_xdg(environment, "XDG_CONFIG_HOME", ".config") / FILE, SYSTEM_FILE)
    return next((file for file in usual if file.is_file()), None)


def _decode(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path}: not valid TOML: {failure}", "mend that line") from None
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}", "check its permissions") from None


def _xdg(environment: Mapping[str, str], variable: str, fallback: str) -> Path:
    """The `appliance` folder below an XDG base; relative values are ignored, as the specification asks."""
    value = Path(environment.get(variable, ""))
    base = value if value.is_absolute() else Path(environment.get("HOME") or Path.home()) / fallback
    return base / "appliance"


def _default_paths(environment: Mapping[str, str], config_folder: Path) -> dict[str, Path]:
    state = _xdg(environment, "XDG_STATE_HOME", ".local/state")
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    return {
        "models": _xdg(environment, "XDG_DATA_HOME", ".local/share") / "models",
        "cache": _xdg(environment, "XDG_CACHE_HOME", ".cache"),
        "state": state,
        "runtime": runtime / "appliance" if runtime.is_absolute() else state / "run",
        "targets": config_folder / "targets.d",
        "jobs": config_folder / "jobs.d",
        "reports": _xdg(environment, "XDG_DATA_HOME", ".local/share") / "reports",
    }
