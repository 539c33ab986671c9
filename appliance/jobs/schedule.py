"""Due times: cron in a time zone, and slots.

    cron "30 2 * * *" in Europe/Berlin --> due 2026-11-30 02:30+01:00 --> slot "2026-11-30T01:30Z"

Knows: the cron notation's library, time zones, how a slot is written. Does not know: jobs, ledgers, or what time it is now.
Where a clock is put forward, cronsim gives the next valid minute; where it is put back, each slot once.
"""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from appliance.errors import ConfigError, RequestError

FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")
HINT = "five fields, e.g. 30 2 * * 1-5"
ANY_TIME = datetime(2024, 1, 1, tzinfo=UTC)


def check_cron(cron: str) -> None:
    """`ConfigError` that names the field that is wrong."""
    if len(cron.split()) != len(FIELDS):  # the library takes a sixth for seconds, and all others move by one
        raise ConfigError(f'"{cron}" has {len(cron.split())} fields', HINT)
    try:
        CronSim(cron, ANY_TIME)
    except CronSimError as failure:
        raise ConfigError(_explain(cron, str(failure)), HINT) from None


def _explain(cron: str, reason: str) -> str:
    parts = cron.split()
    for part, field in zip(parts, FIELDS, strict=True):
        if reason == f"Bad {field}":
            return f'"{cron}": {part!r} is no {field}'
    return f'"{cron}": {reason}'


def check_zone(zone: str) -> None:
    """`ConfigError` when there is no such time zone."""
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f'"{zone}" is no time zone', "name one of the IANA database, e.g. Asia/Tokyo") from None


def format_slot(moment: datetime) -> str:
    """A moment as a slot: UTC, to the minute."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%MZ")


def parse_slot(text: str) -> datetime:
    """The moment of a slot; `RequestError` when it is none."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC)
    except ValueError:
        raise RequestError(f'"{text}" is no slot', "write it as 2026-11-30T01:30Z, in UTC", param="slot") from None


def upcoming(cron: str, zone: str, after: datetime) -> Iterator[datetime]:
    """Due times later than `after`, in UTC, without end; none when the cron can never come."""
    for moment in CronSim(cron, after.astimezone(ZoneInfo(zone))):
        yield moment.astimezone(UTC)


def due(cron: str, zone: str, after: datetime, until: datetime, most: int) -> list[datetime]:
    """Due times in (after, until], oldest first, in UTC; of more than `most`, the last ones."""
    backward = CronSim(cron, (until + timedelta(minutes=1)).astimezone(ZoneInfo(zone)), reverse=True)
    late = (moment.astimezone(UTC) for moment in backward)
    within = itertools.takewhile(lambda moment: moment > after, itertools.dropwhile(lambda moment: moment > until, late))
    # Backward over a doubled hour the same minute may come twice.
    return sorted(set(itertools.islice(within, most)))
