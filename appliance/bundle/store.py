"""Bundles on disk: open and verify one, write one so that it is whole or not there.

Knows: files, hashes, the order of writing. Does not know: what is inside a graph.

    <parent>/.<name>.partial/   <- everything is written here
        ... files ...
        manifest.json           <- last, after every file is on disk and hashed
    <parent>/<name>/            <- one rename
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance.bundle.manifest import FORMAT, FileEntry, Manifest, Variant
from appliance.errors import BundleError, NotFound, StorageError
from appliance.strict import read

MANIFEST = "manifest.json"
RECORD = "record.json"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system says when a place takes no more: these failures are the disk's or the permissions', not the program's."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and what its manifest says."""

    path: Path
    manifest: Manifest

    @property
    def hash(self) -> str:
        """sha256 of the manifest, which holds every other file's: one name for exactly these bytes."""
        return sha256(self.path / MANIFEST)

    def file(self, relative: str) -> Path:
        """Absolute path of a file that the manifest lists."""
        if relative not in self.manifest.files:
            raise BundleError(f"{self.path}: the manifest lists no file {relative!r}", "build the bundle again")
        return self.path / relative

    def variant(self, target: str) -> Variant:
        """The graphs for `target`."""
        try:
            return self.manifest.variants[target]
        except KeyError:
            have = ", ".join(sorted(self.manifest.variants))
            raise BundleError(
                f"{self.path}: no graphs for target {target!r}, only for {have}",
                f"build them: appliance build SOURCE --target {target}",
            ) from None


def is_bundle(path: Path) -> bool:
    """Whether `path` is a folder with a manifest."""
    return (path / MANIFEST).is_file()


def open_bundle(path: Path, *, verify: bool = True) -> Bundle:
    """Read the manifest and check that every file is there, of its size and, with `verify`, of its hash.

    Raises:
        NotFound: there is no folder or no manifest.
        BundleError: an unknown key or format, a missing, added, resized or altered file.
    """
    path = Path(path)
    if not is_bundle(path):
        raise NotFound(f"{path} is no bundle (it has no {MANIFEST})", "list the installed ones: appliance models")
    manifest = _read_manifest(path / MANIFEST)
    for relative, entry in manifest.files.items():
        _check_file(path, relative, entry, verify)
    for name, variant in manifest.variants.items():
        for graph in variant.graphs.values():
            if graph not in manifest.files:
                raise BundleError(f"{path}: variant {name!r} names {graph!r}, which the manifest does not list")
    return Bundle(path, manifest)


def _read_manifest(path: Path) -> Manifest:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as failure:
        raise BundleError(f"{path}: not valid JSON: {failure}", "build the bundle again") from None
    if not isinstance(data, dict):
        raise BundleError(f"{path}: not a JSON object", "build the bundle again")
    version = data.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise BundleError(f"{path}: format {version} is newer than this program reads ({FORMAT})", "upgrade the appliance")
    return read(Manifest, data, str(path), BundleError)


def _check_file(root: Path, relative: str, entry: FileEntry, verify: bool) -> None:
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise BundleError(f"{root}: the manifest names {relative!r}, which is outside the bundle", "do not use this bundle")
    path = root / relative
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise BundleError(f"{path} is missing", "build the bundle again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleError(f"{path} has {size} bytes, the manifest says {entry.bytes}", "build the bundle again")
    if verify:
        found = sha256(path)
        if found != entry.sha256:
            raise BundleError(
                f"{path} has sha256 {found[:12]}..., the manifest says {entry.sha256[:12]}...", "build the bundle again"
            )


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BundleWriter:
    """Writes into a hidden folder beside the destination; `finish` makes it visible in one rename."""

    def __init__(self, destination: Path):
        self.destination = destination
        self.folder = destination.parent / f".{destination.name}.partial"

    def path(self, relative: str) -> Path:
        """Where to write the file that will be `relative` in the bundle; its folder exists."""
        path = self.folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, manifest: Manifest) -> Bundle:
        """Hash every file, write the manifest last, rename. `manifest.files` is filled in here.

        An older bundle of the same name is replaced, and kept until the new one is whole.
        """
        files = {
            path.relative_to(self.folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=sha256(path))
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.name != MANIFEST
        }
        complete = read(Manifest, {**manifest.model_dump(), "files": files}, str(self.folder / MANIFEST), BundleError)
        for relative in files:
            _sync(self.folder / relative)
        target = self.folder / MANIFEST
        target.write_text(complete.model_dump_json(indent=1) + "\n", encoding="utf-8")
        _sync(target)
        self._swap_in()
        return Bundle(self.destination, complete)

    def _swap_in(self) -> None:
        """Make it visible. In place of an older bundle the two change names in one step, so that no moment has neither;
        the older one, now in the hidden folder, goes with it."""
        old = self.destination.parent / f".{self.destination.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if not self.destination.exists():
            os.rename(self.folder, self.destination)
        elif not _exchange(self.folder, self.destination):
            os.rename(self.destination, old)
            os.rename(self.folder, self.destination)
            shutil.rmtree(old, ignore_errors=True)
        _sync(self.destination.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step (renameat2(2), RENAME_EXCHANGE); False where the file system cannot."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def unwritable(destination: Path, failure: OSError) -> StorageError:
    return StorageError(f"cannot write {destination}: {failure.strerror}", "free space or choose another --output")


@contextlib.contextmanager
def writing(destination: Path) -> Iterator[BundleWriter]:
    """A writer whose leavings are removed when the block fails or is interrupted; a full disk says so in one line.

    Raises:
        BundleError: something else than a bundle stands at `destination`.
        StorageError: the disk is full or cannot be written.
    """
    if destination.exists() and not is_bundle(destination):
        raise BundleError(f"{destination} exists and is no bundle", "choose another --output or remove it")
    writer = BundleWriter(destination)
    shutil.rmtree(writer.folder, ignore_errors=True)
    try:
        try:
            writer.folder.mkdir(parents=True)
        except OSError as failure:  # whatever the reason, nothing can be made there
            raise unwritable(destination, failure) from failure
        yield writer
    except OSError as failure:
        if failure.errno in UNWRITABLE:
            raise unwritable(destination, failure) from failure
        raise
    finally:
        shutil.rmtree(writer.folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
