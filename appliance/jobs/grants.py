"""What a job may touch.

Knows: granted tools, folders, addresses. Does not know: what tools do.
A path is judged by where it really leads: links and ".." are followed first, so neither can lead out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BadInput
from appliance.jobs.jobfile import JobFile
from appliance.paths import home_filled, real


class Denied(BadInput):
    """A job asked for something that its file does not grant."""

    code = "denied"


@dataclass(frozen=True)
class Grants:
    """Effective grants: absolute folders, links followed."""

    tools: tuple[str, ...]
    folders: tuple[Path, ...]
    urls: tuple[str, ...]
    output: Path

    def require_tool(self, name: str) -> None:
        """`Denied` unless the tool is granted."""
        if name not in self.tools:
            raise Denied(f'the tool "{name}" is not granted', f'add it to grants.tools: ["{name}"]')

    def confine(self, path: str) -> Path:
        """Where `path` really leads, if that is in a granted folder; relative ones are tried in each folder in turn."""
        return confine(path, self.folders)

    def require_url(self, url: str) -> None:
        """`Denied` unless exactly this address is granted."""
        if url not in self.urls:
            raise Denied(f"the address {url} is not granted", "add it to grants.urls")


def confine(path: str, folders: Sequence[Path]) -> Path:
    """See `Grants.confine`. `Denied` when it leads outside every folder."""
    wanted = home_filled(path)
    candidates = [wanted] if wanted.is_absolute() else [folder / wanted for folder in folders]
    inside = [one for one in map(real, candidates) if any(_below(one, folder) for folder in folders)]
    if not inside:
        raise Denied(f"{path} is in no granted folder", "add its folder to grants.folders")
    return next((one for one in inside if one.exists()), inside[0])


def _below(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def effective(job: JobFile, home: Path, reports: Path) -> Grants:
    """The grants of a job whose file lies in `home`; reports go below `reports` unless the file says otherwise."""
    folders = tuple(_resolve(folder, home) for folder in job.grants.folders)
    output = _resolve(job.output.folder, home) if job.output.folder else reports / job.name
    return Grants(job.grants.tools, folders, job.grants.urls, output)


def _resolve(folder: str, home: Path) -> Path:
    path = home_filled(folder)
    return real(path if path.is_absolute() else home / path)
