"""The tools of one run, behind its grants.

Knows: which doors a grant opens, how a side effect is kept from happening twice. Does not know: what any tool does.
A tool that is not granted is refused, the refusal is recorded, and the run goes on.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from appliance.errors import NotFound, RequestError, Unavailable
from appliance.jobs.draft import Refusal
from appliance.jobs.files import run_stem, write_text
from appliance.jobs.record import Outcome, Result
from appliance.jobs.work import Work
from appliance.tools import Tool, known
from appliance.tools.desk import Desk

POST_SECONDS = 30.0
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


def find_tool(name: str) -> Tool:
    """A tool by name; `NotFound` with the nearest right name."""
    tools = known()
    if name in tools:
        return tools[name]
    near = difflib.get_close_matches(name, tools, n=1, cutoff=0.5)
    raise NotFound(f'there is no tool "{name}"', f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(tools)}")


def use(work: Work, step: str, name: str, arguments: dict[str, Any]) -> Result:
    """Call a tool as a recorded step named `step`; refusals and failures go into the draft."""
    inputs = {"tool": name, "arguments": arguments}
    return note(work, name, work.record.call(step, "tool", inputs, lambda: act(work, step, name, arguments)))


def act(work: Work, step: str, name: str, arguments: dict[str, Any]) -> Outcome:
    """The call itself, inside its recorded step."""
    tool = find_tool(name)
    work.grants.require_tool(name)
    return Outcome(tool.run(lay_desk(work, step), arguments))


def note(work: Work, name: str, result: Result) -> Result:
    """Put a refusal or failure into the draft."""
    if result.error is not None:
        work.draft.refusals.append(Refusal(tool=name, reason=result.error, denied=result.denied))
    return result


def lay_desk(work: Work, step: str) -> Desk:
    """The desk of one call."""
    grants, library = work.grants, work.library
    key = f"{work.run}/{step}"

    def search(query: str, limit: int) -> list[dict[str, Any]]:
        folders = [folder for folder in grants.folders if folder.is_dir()]
        hits = library.search(query, limit=limit, folders=folders) if folders else []
        return [{"path": str(hit.path), "anchor": hit.anchor, "text": hit.text} for hit in hits]

    def read(path: Path) -> str:
        return library.document(path).text

    def write(name: str, text: str) -> Path:
        if not _FILE_NAME.fullmatch(name):
            raise RequestError(f'"{name}" is no file name', "small letters, digits and dashes", param="name")
        return write_text(grants.output / f"{run_stem(work.job.name, work.slot)}-{name}.md", text)

    def post(url: str, body: dict[str, Any]) -> int:
        grants.require_url(url)
        return post_once(url, body, key)

    return Desk(grants.confine, search, read, write, post, grants.folders)


def post_once(url: str, body: dict[str, Any], key: str) -> int:
    """POST with an `Idempotency-Key` that names run and step: a receiver that honours it acts once, however often we ask."""
    try:
        with httpx.Client(trust_env=False, timeout=POST_SECONDS) as client:
            response = client.post(url, json=body, headers={"idempotency-key": key})
    except httpx.HTTPError as failure:
        raise Unavailable(f"{url} cannot be reached: {failure}", "look whether it runs") from None
    if response.status_code >= 400:
        raise Unavailable(f"{url} answered with HTTP {response.status_code}", "look at its log")
    return response.status_code


def schemas(names: Sequence[str]) -> list[Tool]:
    """The granted tools that there are."""
    tools = known()
    return [tools[name] for name in names if name in tools]
