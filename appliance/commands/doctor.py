"""`appliance doctor`: what is right and wrong here, and what mends it.

Knows: how rows are shown. Does not know: how anything is found out (`appliance.diagnosis`).
"""

import dataclasses
import json
from typing import Annotated

import typer

EXAMPLE = "appliance doctor"
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> int:
    """Check this machine and this installation; every trouble comes with its mend.

    The exit code is 1 when something fails, 0 when there are warnings at most.
    """
    from appliance.diagnosis import examine

    rows = examine()
    failed = any(row.state == "fail" for row in rows)
    if as_json:
        print(json.dumps({"ok": not failed, "rows": [dataclasses.asdict(row) for row in rows]}))
        return int(failed)
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for row in rows:
        console.print(Text(f"{row.state:<6}", COLOURS[row.state]), f"{row.name:<13}", Text(row.found), sep="")
        if row.fix:
            console.print(Text(f"      {'':<13}-> {row.fix}"))
    return int(failed)
