"""`appliance serve`: run the daemon in the foreground.

Knows: options and how they change the settings. Does not know: how serving works (`appliance.daemon`).
"""

import os
from pathlib import Path

import typer

from appliance.config import Address, Config, load_config, parse_address

EXAMPLE = "appliance serve --port 8420"


def serve(
    model: str = typer.Option("", "--model", "-m", help="Model to load at start; otherwise models.default, or the first."),
    host: str = typer.Option("", "--host", help="Address to listen on instead of the configured ones."),
    port: int = typer.Option(-1, "--port", "-p", min=-1, max=65535, help="Port; 0 = any free one.", show_default=False),
    threads: int = typer.Option(
        -1, "--threads", min=-1, max=1024, help="Threads of one model; 0 = all physical cores.", show_default=False
    ),
    config: Path | None = typer.Option(None, "--config", help="Settings file instead of the usual one."),
) -> int:
    """Serve the installed models over HTTP, as OpenAI's API."""
    # The HTTP stack takes a third of a second to import; no other verb pays for it.
    from appliance.daemon import Daemon
    from appliance.engine.pool import ModelPool, open_onnx
    from appliance.jobs.service import JobService, JobSettings
    from appliance.library import open_library
    from appliance.logs import configure_logs
    from appliance.notify import read_notifier

    settings = override(load_config(config), model=model, host=host, port=port, threads=threads)
    configure_logs(settings.log)
    engine, models = settings.engine, settings.models
    open_engine = open_onnx(engine.target, engine.threads, settings.paths.targets)
    pool = ModelPool(settings.paths.models, open_engine, default=models.default, aliases=models.aliases)
    if model:
        pool.find(model)  # an unknown name is refused before anything is bound
    paths = settings.paths
    library = open_library(paths.state, pool)
    jobs = JobService(JobSettings(paths.jobs, paths.reports, paths.state), library)
    Daemon(settings, pool, read_notifier(os.environ), jobs, library).run()
    return 0


def override(config: Config, *, model: str = "", host: str = "", port: int = -1, threads: int = -1) -> Config:
    """`config` with what the command line says instead; "" and -1 = not said."""
    changes: dict[str, object] = {}
    if host or port >= 0:
        first = config.server.addresses[0] if config.server.addresses else Address("127.0.0.1", 0)
        address = Address(host.strip("[]") or first.host, port if port >= 0 else first.port)
        parse_address(str(address))
        changes["server"] = config.server.model_copy(update={"listen": (str(address),)})
    if model:
        changes["models"] = config.models.model_copy(update={"default": model, "preload": True})
    if threads >= 0:
        changes["engine"] = config.engine.model_copy(update={"threads": threads})
    return config.model_copy(update=changes)
