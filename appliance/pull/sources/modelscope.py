"""A model on ModelScope.

Knows: three paths of its HTTP API (a model's card, its file list, one file). Does not know: downloading (`download`).
Source: the paths and fields that ModelScope's own client uses: /api/v1/models/{id}, .../repo/files, .../repo?FilePath=.
"""

import json
from pathlib import Path
from typing import Any

from appliance.errors import NotFound, Unavailable
from appliance.progress import bar
from appliance.pull.files import choose, is_weight, safe_name
from appliance.pull.license import UNKNOWN
from appliance.pull.offer import Offer, Wishes
from appliance.pull.reference import parse_reference

ORDER = 20
FORM = "ms:OWNER/NAME[@REVISION] (ModelScope)"
PREFIXES = ("ms:", "modelscope:")
HUB = "https://modelscope.cn"


def matches(text: str) -> bool:
    return text.startswith(PREFIXES)


def look(text: str, wishes: Wishes) -> Offer:
    from appliance.pull.download import client, download

    model, revision = parse_reference(text, FORM)
    revision = revision or "master"
    hub = (wishes.endpoint or HUB).rstrip("/")
    base = f"{hub}/api/v1/models/{model}"
    card = _ask(base, {"Revision": revision})
    listing = _ask(f"{base}/repo/files", {"Revision": revision, "Recursive": "true"}).get("Files") or []
    files = {str(entry["Path"]): entry for entry in listing if entry.get("Type") != "tree"}
    taken = choose(sorted(files), wishes.include, f"ms:{model}")
    unhashed = next((name for name in taken if is_weight(name) and not files[name].get("Sha256")), None)
    if unhashed:
        raise Unavailable(f"ms:{model}: the hub states no sha256 for {unhashed}", "get the model from another source")
    size = sum(int(files[name]["Size"]) for name in taken)

    def fetch(folder: Path, work: Path) -> None:
        with client() as http, bar(f"Downloading {model}", size, "bytes") as advance:
            for name in taken:
                entry = files[name]
                # The revision of the file, not of the branch: the branch may move between two files.
                query = {"Revision": entry.get("Revision") or revision, "FilePath": name}
                url = str(http.build_request("GET", f"{base}/repo", params=query).url)
                target = folder / safe_name(name, f"ms:{model}")
                download(http, url, target, size=int(entry["Size"]), sha256=entry.get("Sha256") or None, advance=advance)

    license = str(card.get("License") or UNKNOWN).lower()
    name = model.split("/")[1]
    return Offer(
        name=name,
        origin=f"ms:{model}@{revision}",
        license=license,
        license_at=f"{hub}/models/{model}",
        size=size,
        fetch=fetch,
    )


def _ask(url: str, query: dict[str, str]) -> dict[str, Any]:
    """The `Data` of an answer."""
    import httpx

    from appliance.pull.download import client, raise_for_status

    try:
        with client() as http:
            answer = http.get(url, params=query)
    except httpx.TransportError as failure:
        host = httpx.URL(url).host
        raise Unavailable(f"{host} cannot be reached: {failure}", "check the network, or --endpoint URL for a mirror") from None
    raise_for_status(answer)
    try:
        data = answer.json()["Data"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise Unavailable(f"{url} gives no answer of ModelScope's form", "check --endpoint") from None
    if not isinstance(data, dict):
        raise NotFound(f"{url} names no model", "check the name and the revision")
    return data
