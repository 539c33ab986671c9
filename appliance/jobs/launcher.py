"""The one place that starts DBOS.

    flock STATE/jobs.lock -> STATE/appliance-id -> engine over STATE/dbos.db -> DBOS.launch()

Knows: the lock, the appliance's id, DBOS's settings. Does not know: jobs.
DBOS goes on with every pending workflow of its executor id when it launches: two processes that launch with one id would both
do the work. So there is one, and the lock is held as long as it lives; the kernel drops it however the process ends.
"""

import fcntl
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from dbos import DBOS, DBOSConfig, Queue

from appliance.errors import ConfigError, StorageError
from appliance.jobs.files import write_text
from appliance.jobs.serializer import JsonSerializer

WORKFLOW_VERSION = "2"
"""Changed on purpose, when runs that are under way could not go on with the new code: when the order, the names or the results of
recorded steps change. Runs of another version are not touched by DBOS; `stale` names them so that they end in the ledger."""
QUEUE = "jobs"
WORKFLOW = "job"
POLL_SECONDS = 0.2

Workflow = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Launched:
    """A launched DBOS."""

    engine: sa.Engine
    start: Callable[[str, dict[str, Any]], None]  # run id, workflow input; the second start of an id does nothing
    stale: tuple[str, ...]  # ids of unfinished runs that another version began


class Launcher:
    """Holds the lock and the launched DBOS of one appliance.

    Args:
        state: the appliance's state folder.
    """

    def __init__(self, state: Path):
        self._state = state
        self._lock: IO[bytes] | None = None
        self._engine: sa.Engine | None = None

    def open(self) -> sa.Engine:
        """Take the lock and open the database.

        Raises:
            ConfigError: another process of this appliance holds the lock.
            StorageError: the state folder cannot be written.
        """
        try:
            self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self._state / "jobs.lock").open("wb")
        except OSError as failure:
            raise StorageError(f"cannot write {self._state}: {failure.strerror}", "check paths.state") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"another daemon works on the jobs in {self._state}", "stop that one or set another paths.state"
            ) from None
        self._lock = lock
        self._engine = open_database(self._state / "dbos.db")
        return self._engine

    def launch(self, workflow: Workflow) -> Launched:
        """Start DBOS, which goes on with what a killed process left, and hand out the way to start runs."""
        assert self._engine is not None, "launched before it was opened"
        _quiet()
        config: DBOSConfig = {
            "name": "appliance",
            "system_database_url": str(self._engine.url),
            "system_database_engine": self._engine,
            "executor_id": appliance_id(self._state),
            "application_version": WORKFLOW_VERSION,
            "serializer": JsonSerializer(),
            "enable_otlp": False,
            "log_level": "WARNING",
            "use_listen_notify": False,
        }
        DBOS(config=config)
        registered = DBOS.workflow(name=WORKFLOW)(workflow)
        DBOS.launch()
        queue: Queue = DBOS.register_queue(QUEUE, global_concurrency=1, polling_interval_sec=POLL_SECONDS)
        pending = DBOS.list_workflows(status=["PENDING", "ENQUEUED"], name=WORKFLOW, load_input=False, load_output=False)
        stale = tuple(one.workflow_id for one in pending if one.app_version not in (None, WORKFLOW_VERSION))

        def start(run: str, given: dict[str, Any]) -> None:
            from dbos import SetWorkflowID

            with SetWorkflowID(run):
                queue.enqueue(registered, given)

        return Launched(self._engine, start, stale)

    def close(self) -> None:
        """Stop DBOS and let go of the lock. Runs under way are left for the next start."""
        DBOS.destroy(destroy_registry=True)
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def appliance_id(state: Path) -> str:
    """The appliance's id for ever, made at the first call."""
    path = state / "appliance-id"
    if not path.exists():
        write_text(path, f"{uuid.uuid4()}\n")
    return path.read_text(encoding="utf-8").strip()


def open_database(path: Path) -> sa.Engine:
    """DBOS's SQLite file, with writers in turn and a write-ahead log, so that reading never waits for a run."""
    engine = sa.create_engine(f"sqlite:///{path}")

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        for pragma in ("busy_timeout=30000", "foreign_keys=ON", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _quiet() -> None:
    """DBOS would write lines of its own format to the terminal; ours go through the log that the composer set up."""
    logger = logging.getLogger("dbos")
    if not logger.handlers:
        logger.addHandler(_Forward())
        logger.propagate = False


class _Forward(logging.Handler):
    """Hands DBOS's warnings to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        import structlog

        structlog.get_logger().log(record.levelno, "dbos", message=record.getMessage())
