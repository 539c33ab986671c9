"""The folder of pulled checkpoints: one folder a model, with a record of where it came from and every file's hash.

Knows: the record, taking an offer in, listing. Does not know: any source.

    <folder>/.<name>.partial/files/  <- what arrives
    <folder>/.<name>.partial/work/   <- what a second try can go on from
    <folder>/<name>/                 <- files and pulled.json, in one rename
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from appliance.errors import ApplianceError, BadInput, CheckpointError, NotFound, Unavailable
from appliance.progress import bar
from appliance.pull.files import GENERATION, PIECE, is_weight, join_parts, require_space
from appliance.pull.offer import Offer
from appliance.strict import StrictModel, read

RECORD = "pulled.json"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")


class PulledFile(StrictModel):
    """Size and hash of one file."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Pulled(StrictModel):
    """`pulled.json`."""

    format: Literal[1]
    name: str
    asked: str = Field(description="The source as the person wrote it.")
    origin: str = Field(description="The source in full, with version or revision.")
    license: str
    license_at: str
    accepted: str = Field(description="When the licence was accepted; UTC, ISO 8601.")
    files: dict[str, PulledFile]


@dataclass(frozen=True)
class PulledCheckpoint:
    """A checkpoint in the folder."""

    path: Path
    record: Pulled

    @property
    def model_path(self) -> Path:
        """What `appliance build` is given: the GGUF file, or the folder of safetensors."""
        ggufs = sorted(name for name in self.record.files if name.endswith(".gguf"))
        return self.path / ggufs[0] if ggufs else self.path

    @property
    def source_path(self) -> Path:
        """What a build reads: `model_path`, or the folder when the model's sampling stands beside its only GGUF file.

        A GGUF named as a file stands for itself, and what lies beside it does not count.
        """
        weights = [name for name in self.record.files if is_weight(name)]
        return self.path if GENERATION in self.record.files and len(weights) == 1 else self.model_path

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.record.files.values())


def open_pulled(path: Path) -> PulledCheckpoint:
    """Read the record and check that every file is there with its size.

    Raises:
        NotFound: there is no record. CheckpointError: the record or a file is damaged.
    """
    record = path / RECORD
    if not record.is_file():
        raise NotFound(f"{path} is no pulled checkpoint (it has no {RECORD})", "list them: appliance models")
    try:
        data = json.loads(record.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise CheckpointError(f"{record}: not valid JSON: {failure}", "remove the folder and pull again") from None
    pulled = read(Pulled, data, str(record), CheckpointError)
    for name, file in pulled.files.items():
        here = path / name
        if not here.is_file() or here.stat().st_size != file.bytes:
            raise CheckpointError(f"{here} is missing or of another size", "remove the folder and pull again")
    return PulledCheckpoint(path, pulled)


def installed(folder: Path) -> list[PulledCheckpoint]:
    """Every whole checkpoint in the folder, by name."""
    found = []
    for record in sorted(folder.glob(f"*/{RECORD}")):
        if not record.parent.name.startswith("."):
            with contextlib.suppress(ApplianceError):
                found.append(open_pulled(record.parent))
    return found


def asked_before(folder: Path, asked: str, name: str | None, sha256: str | None = None) -> PulledCheckpoint | None:
    """The checkpoint that these very words got earlier: found without a network and without asking again.

    Raises:
        CheckpointError: its weight file has not the hash `sha256`.
    """
    fitting = [one for one in installed(folder) if one.record.asked == asked and name in (None, one.record.name)]
    if fitting:
        _check_hash(fitting[0].record.files, fitting[0].record.origin, sha256)
    return fitting[0] if fitting else None


def take(
    offer: Offer, folder: Path, *, asked: str, name: str | None, sha256: str | None, accept: Callable[[Offer], None]
) -> PulledCheckpoint:
    """Get an offer into `folder`; what is already there from the same origin is kept as it is and nobody is asked.

    Args:
        asked: the source as the person wrote it.
        name: folder to use instead of the offer's own name.
        sha256: hash that the one weight file must have.
        accept: shows the licence and asks; raises to stop.

    Raises:
        BadInput: the name is taken by something else. Unavailable: another pull is running.
        CheckpointError: a hash is wrong. StorageError: too little space.
    """
    name = name or offer.name
    if not _NAME.match(name):
        raise BadInput(f"{name!r} cannot be the name of a model", "use letters, digits, '.', '_' and '-': --name NAME")
    target = folder / name
    if target.exists():
        there = _already(target, offer)
        _check_hash(there.record.files, offer.origin, sha256)
        return there
    accept(offer)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        partial = folder / f".{name}.partial"
        files, work = partial / "files", partial / "work"
        files.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        if offer.size is not None:
            require_space(folder, offer.size - sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()))
        try:
            offer.fetch(files, work)
            join_parts(files)
            record = _record(offer, asked, name, files, sha256)
        except (BadInput, NotFound):
            # What is wrong stays wrong: a second try must not go on from it.
            shutil.rmtree(partial)
            raise
        (files / RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.rename(files, target)
        shutil.rmtree(partial, ignore_errors=True)
    return PulledCheckpoint(target, record)


def _already(target: Path, offer: Offer) -> PulledCheckpoint:
    try:
        there = open_pulled(target)
    except NotFound:
        raise BadInput(f"{target} exists and was not pulled", "choose another name: --name NAME") from None
    if there.record.origin != offer.origin:
        raise BadInput(f"{target} came from {there.record.origin}, not from {offer.origin}", "choose another name: --name NAME")
    if offer.exact and offer.size is not None and offer.size != there.bytes:
        raise BadInput(f"{target} came from {offer.origin}, which has changed since", "remove the folder or choose --name NAME")
    return there


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two pulls into one folder would write into each other's files."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"another pull into {folder} is running", "wait for it") from None
        yield


def _record(offer: Offer, asked: str, name: str, files: Path, sha256: str | None) -> Pulled:
    paths = [path for path in sorted(files.rglob("*")) if path.is_file()]
    entries = {}
    with bar("Hashing", sum(path.stat().st_size for path in paths), "bytes") as advance:
        for path in paths:
            entries[path.relative_to(files).as_posix()] = PulledFile(bytes=path.stat().st_size, sha256=_hash(path, advance))
    _check_hash(entries, offer.origin, sha256)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Pulled(
        format=1,
        name=name,
        asked=asked,
        origin=offer.origin,
        license=offer.license,
        license_at=offer.license_at,
        accepted=now,
        files=entries,
    )


def _check_hash(files: Mapping[str, PulledFile], origin: str, sha256: str | None) -> None:
    """Compare the one weight file's hash with the one that the person named, if there is one."""
    if sha256 is None:
        return
    weights = [key for key in files if is_weight(key)]
    if len(weights) != 1:
        raise BadInput(f"--sha256 is for one weight file, {origin} has {len(weights)}", "leave it out")
    found = files[weights[0]].sha256
    if found != sha256.lower():
        raise CheckpointError(f"{weights[0]} has sha256 {found}, wanted {sha256}", "do not use this file")


def _hash(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()
