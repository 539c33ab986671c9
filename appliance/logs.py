"""Structured logs of a long-running process.

Knows: structlog and how the libraries' own records are folded in. Does not know: what is logged.
"""

import logging
import sys

import structlog

from appliance.config import Log


def configure_logs(log: Log) -> None:
    """Send every log line of this process, ours and the libraries', to standard output in one form.

    Called once, by the process's composer; a library never calls it.
    """
    text = log.format == "text" or (log.format == "auto" and sys.stdout.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if text:
        shown: list[structlog.types.Processor] = [
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        ]
    else:
        # Without the values of local variables: they hold prompts, and prompts are never logged.
        bare = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        shown = [structlog.processors.ExceptionRenderer(bare), structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *shown],
        wrapper_class=structlog.make_filtering_bound_logger(log.level),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[strip, *shown]))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each of the jobs' own requests, which are logged already
