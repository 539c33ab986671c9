"""The ledger: what became of every slot. One table in DBOS's database.

    queued -> running -> done | failed          skipped, missed: never run

Knows: rows and the rule that a final state stays. Does not know: DBOS, jobs, the clock's reasons.
Rows are upserted on `job@slot`, so telling the same thing twice changes nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import sqlalchemy as sa

State = Literal["queued", "running", "done", "failed", "skipped", "missed"]
FINAL = ("done", "failed", "skipped", "missed")

_metadata = sa.MetaData()
_ledger = sa.Table(
    "appliance_ledger",
    _metadata,
    sa.Column("run", sa.Text, primary_key=True),  # job@slot
    sa.Column("job", sa.Text, nullable=False, index=True),
    sa.Column("slot", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False, default=""),
    sa.Column("trigger", sa.Text, nullable=False, default=""),
    sa.Column("started", sa.Text, nullable=False, default=""),
    sa.Column("finished", sa.Text, nullable=False, default=""),
    sa.Column("seconds", sa.Float, nullable=False, default=0.0),
    sa.Column("prompt_tokens", sa.Integer, nullable=False, default=0),
    sa.Column("completion_tokens", sa.Integer, nullable=False, default=0),
    sa.Column("model", sa.Text, nullable=False, default=""),
    sa.Column("provider", sa.Text, nullable=False, default=""),
    sa.Column("report", sa.Text, nullable=False, default=""),
)
_clock = sa.Table(
    "appliance_clock",
    _metadata,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("decided", sa.Text, nullable=False),  # every slot up to this moment has its row
)


@dataclass(frozen=True)
class Entry:
    """One slot. Times are ISO 8601 in UTC, "" = not yet; seconds of model and tool calls."""

    run: str
    job: str
    slot: str
    state: str
    reason: str = ""
    trigger: str = ""
    started: str = ""
    finished: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    provider: str = ""
    report: str = ""


class Ledger:
    """The table, over an engine that the composer made. Thread-safe.

    Args:
        engine: DBOS's database.
    """

    def __init__(self, engine: sa.Engine):
        self._engine = engine
        _metadata.create_all(engine)

    def add(self, entry: Entry) -> bool:
        """Put a slot in, unless it is there; whether it was put in."""
        insert = sa.text(_INSERT)
        with self._engine.begin() as connection:
            return connection.execute(insert, asdict(entry)).rowcount == 1

    def change(self, run: str, **values: Any) -> None:
        """Change a slot that is not final yet; nothing happens to one that is."""
        where = (_ledger.c.run == run) & _ledger.c.state.not_in(FINAL)
        with self._engine.begin() as connection:
            connection.execute(sa.update(_ledger).where(where).values(**values))

    def get(self, run: str) -> Entry | None:
        """One slot."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_ledger).where(_ledger.c.run == run)).mappings().first()
        return None if row is None else _entry(row)

    def entries(self, job: str | None = None, limit: int = 200) -> list[Entry]:
        """Slots, the newest first."""
        query = sa.select(_ledger).order_by(_ledger.c.slot.desc(), _ledger.c.job).limit(limit)
        if job is not None:
            query = query.where(_ledger.c.job == job)
        with self._engine.connect() as connection:
            return [_entry(row) for row in connection.execute(query).mappings()]

    def open(self) -> list[Entry]:
        """Slots without an end."""
        query = sa.select(_ledger).where(_ledger.c.state.not_in(FINAL)).order_by(_ledger.c.slot)
        with self._engine.connect() as connection:
            return [_entry(row) for row in connection.execute(query).mappings()]

    def decided(self, job: str) -> str | None:
        """Up to which moment the clock has decided on a job's slots; None = never looked at it."""
        with self._engine.connect() as connection:
            return connection.execute(sa.select(_clock.c.decided).where(_clock.c.job == job)).scalar()

    def decide(self, job: str, moment: str) -> None:
        """Every slot of the job up to `moment` has its row."""
        upsert = sa.text(
            "INSERT INTO appliance_clock (job, decided) VALUES (:job, :decided) "
            "ON CONFLICT (job) DO UPDATE SET decided = excluded.decided WHERE appliance_clock.decided < excluded.decided"
        )
        with self._engine.begin() as connection:
            connection.execute(upsert, {"job": job, "decided": moment})


_COLUMNS = [column.name for column in _ledger.columns]
# One spelling for SQLite and PostgreSQL.
_INSERT = (
    f"INSERT INTO appliance_ledger ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + name for name in _COLUMNS)}) "
    "ON CONFLICT (run) DO NOTHING"
)


def _entry(row: Mapping[Any, Any]) -> Entry:
    return Entry(**{name: row[name] for name in _COLUMNS})
