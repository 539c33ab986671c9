"""`appliance tui`: the appliance in a terminal.

Knows: the option and where a daemon is looked for. Does not know: screens.
"""

import os
import sys

import typer

EXAMPLE = "appliance tui --host 127.0.0.1:8420"


def tui(
    host: str = typer.Option(
        "",
        "--host",
        help="Where the daemon is: 127.0.0.1:8420, http://HOST:PORT or unix:/path/to.sock; otherwise the usual places.",
    ),
) -> int:
    """Chat, conversations and jobs in the terminal, as a client of the daemon."""
    from tui.address import default_addresses, parse_host

    try:
        addresses = (parse_host(host),) if host else default_addresses(os.environ)
    except ValueError as failure:
        raise typer.BadParameter(str(failure), param_hint="--host") from None
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the last
        raise typer.BadParameter("this needs a terminal; for scripts there is: appliance chat --json")
    # Textual and httpx take a third of a second to import; `appliance --help` pays for neither.
    from tui.app import ApplianceApp
    from tui.client import Client

    app = ApplianceApp(Client(addresses))
    app.run()
    return app.return_code or 0
