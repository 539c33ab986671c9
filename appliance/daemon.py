"""The daemon: one process that serves the installed models over HTTP.

Knows: sockets, signals, the order of start and stop. Does not know: routes, or what an engine does.

    bind every address -> load the default model on a thread -> serve until a signal -> let answers end -> unload
    told to the service manager: loading -> READY -> WATCHDOG while every decode loop moves -> STOPPING
"""

import contextlib
import errno
import os
import secrets
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import structlog
import uvicorn

from appliance.api.app import create_app
from appliance.api.settings import ApiSettings
from appliance.config import Address, Config
from appliance.engine.pool import ModelPool
from appliance.errors import ApplianceError, ConfigError, Unavailable
from appliance.jobs.endpoint import Endpoint
from appliance.jobs.service import JobService
from appliance.knowledge.index import Knowledge
from appliance.notify import Notifier, Watchdog
from appliance.store.conversations import Conversations

BACKLOG = 128
DATABASE = "appliance.db"
"""In the state folder: what the appliance keeps for its clients."""


class Daemon:
    """One run of the daemon.

    Args:
        config: its settings.
        pool: the models it serves; unloaded when the run ends.
        notifier: the service manager, if one started it.
        jobs: works through scheduled jobs while the run lasts; None = there are none.
        knowledge: the index it offers to its clients; None = none.
    """

    def __init__(
        self,
        config: Config,
        pool: ModelPool,
        notifier: Notifier = Notifier(),
        jobs: JobService | None = None,
        knowledge: Knowledge | None = None,
    ):
        self._config = config
        self._pool = pool
        self._notifier = notifier
        self._watchdog = Watchdog(notifier, self._ticks)
        self._settled: str | None = None if config.models.preload else "serving; models are loaded on first use"
        self._ready = False
        self._conversations = Conversations(config.paths.state / DATABASE)
        self._log = structlog.get_logger()
        self._jobs = jobs
        self._knowledge = knowledge
        self._job_key = secrets.token_urlsafe(32)
        self._server = _Server(self._uvicorn(), self._begin_stop)
        self.addresses: tuple[str, ...] = ()
        """Where it listens, once it does: URLs, and unix:PATH."""

    def stop(self) -> None:
        """Ask a run on another thread to end, as a stop signal would."""
        self._server.should_exit = True

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; a second signal does not wait for running answers.

        Raises:
            ConfigError: an address is taken, cannot be bound, or would be reachable from other machines; or another daemon
                works on the jobs of this state folder.
        """
        with contextlib.ExitStack() as cleanup:
            sockets = bind(self._config, cleanup)
            cleanup.callback(self._conversations.close)
            cleanup.callback(self._pool.close)
            self.addresses = tuple(describe(one) for one in sockets)
            for address in self.addresses:
                self._log.info("listening", address=address)
            if self._config.models.preload:
                self._notifier.send("STATUS=loading the default model")
                threading.Thread(target=self._preload, name="preload", daemon=True).start()
            if self._jobs is not None:
                cleanup.callback(self._jobs.stop)
                self._jobs.start(self._endpoint())
            self._server.run(sockets)
            self._log.info("stopping")
        self._log.info("stopped")

    def _endpoint(self) -> Endpoint:
        """Where jobs reach the models: over the socket, which only this user may open, if there is one."""
        socket_path = self._config.socket_path if self._config.server.socket else None
        url = "http://appliance" if socket_path else next(one for one in self.addresses if one.startswith("http"))
        return Endpoint(url, socket_path, self._job_key)

    def _begin_stop(self) -> None:
        self._notifier.send("STOPPING=1", "STATUS=stopping")
        if self._jobs is not None:
            self._jobs.park()

    def _uvicorn(self) -> uvicorn.Config:
        server = self._config.server
        settings = ApiSettings(
            max_body=int(server.max_body_mib * 2**20), preloaded=self._config.models.preload, job_key=self._job_key
        )
        return uvicorn.Config(
            create_app(self._pool, settings, self._conversations, self._jobs, self._knowledge),
            log_config=None,  # ours is configured by the composer
            log_level="warning",
            access_log=False,  # the request log says it, with an id
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=server.stop_seconds,
            callback_notify=self._tell,
            timeout_notify=0,  # at every chance, which is once a second
        )

    def _preload(self) -> None:
        try:
            model = self._pool.model()
        except ApplianceError as failure:
            self._log.error("no model loaded", reason=str(failure))
            self._settled = f"serving without a default model: {failure}"
        except Exception as failure:  # on a thread nobody joins: the log is where it is told; readyz says it failed
            self._log.error("the default model failed to load", exc_info=failure)
            self._settled = "serving without a default model: it failed to load, see the log"
        else:
            provider = model.engine.stats().provider
            self._log.info("model loaded", model=model.id, provider=provider)
            self._settled = f"serving {model.id} on {provider}"

    async def _tell(self) -> None:
        """Called by the event loop once a second: if it hangs, nothing is told, and the watchdog starves.

        Ready also after the default model failed to load: a restart would not mend that, other models can still answer,
        and `/readyz` and the status say what is wrong.
        """
        if self._settled is not None and not self._ready:
            self._ready = True
            self._notifier.send("READY=1", f"STATUS={self._settled}")
        self._watchdog.look()

    def _ticks(self) -> dict[str, int]:
        found = {}
        for model in self._pool.loaded():
            with contextlib.suppress(Unavailable):  # unloaded since
                found[model.id] = model.engine.stats().ticks
        return found


class _Server(uvicorn.Server):
    """uvicorn ends a run by raising the stop signal again, which kills the process before it has cleaned up.

    Args:
        stopping: called once when a run begins to end, before it waits for running answers.
    """

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]):
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT while the block runs; the handlers before are put back."""
        if threading.current_thread() is not threading.main_thread():  # a test runs it on a thread
            yield
            return
        before = {sign: signal.signal(sign, self._on_signal) for sign in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sign, handler in before.items():
                signal.signal(sign, handler)

    def _on_signal(self, sign: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def check_addresses(addresses: Sequence[Address]) -> None:
    """Refuse an address that other machines could reach: there are no keys that would tell them apart."""
    for address in addresses:
        if not address.loopback:
            raise ConfigError(
                f"{address} can be reached from other machines, and this appliance has no keys yet",
                "listen on 127.0.0.1 and forward a port over SSH",
            )


def bind(config: Config, cleanup: contextlib.ExitStack) -> list[socket.socket]:
    """Every socket of `config`, listening; closed, and the Unix one removed, by `cleanup`.

    Raises:
        ConfigError: one of them is taken, is not this machine's, or could be reached from another.
    """
    addresses = config.server.addresses
    check_addresses(addresses)
    sockets = [cleanup.enter_context(_bind_tcp(address)) for address in addresses]
    if config.server.socket:
        sockets.append(_bind_unix(config.socket_path, cleanup))
    if not sockets:
        raise ConfigError("there is nothing to listen on", "set server.listen or server.socket")
    return sockets


def _bind_tcp(address: Address) -> socket.socket:
    found = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen(BACKLOG)
    except OSError as failure:
        if found is not None:
            found.close()
        if failure.errno == errno.EADDRINUSE:
            what = f"{address} is taken by another program"
            raise ConfigError(what, "stop that one or choose another: appliance serve --port NUMBER") from None
        reason = failure.strerror or str(failure)
        raise ConfigError(f"cannot listen on {address}: {reason}", "check server.listen") from None
    return found


def _bind_unix(path: Path, cleanup: contextlib.ExitStack) -> socket.socket:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale(path)
        found = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        before = os.umask(0o177)  # the file is the owner's alone from its first moment
        try:
            found.bind(str(path))
        finally:
            os.umask(before)
        cleanup.callback(path.unlink, missing_ok=True)
        found.listen(BACKLOG)
    except OSError as failure:
        raise ConfigError(f"cannot listen on {path}: {failure.strerror}", "check paths.runtime") from None
    return found


def _remove_stale(path: Path) -> None:
    """Remove the socket of a daemon that was killed; never one that answers, and never another kind of file."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} is in the way and is no socket", "remove it or set another paths.runtime")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"another daemon answers on {path}", "stop that one or set another paths.runtime")


def describe(bound: socket.socket) -> str:
    """A listening socket as something to point a client at."""
    name = bound.getsockname()
    return f"unix:{name}" if isinstance(name, str) else f"http://{Address(name[0], name[1])}"
