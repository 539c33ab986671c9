"""The job files of a folder.

Knows: which are whole, and what is wrong with the others. Does not know: runs.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ApplianceError, ConfigError, NotFound
from appliance.jobs.grants import Grants, effective
from appliance.jobs.jobfile import SUFFIX, JobFile, read_jobfile
from appliance.jobs.steps import read_step
from appliance.tools import known as known_tools


@dataclass(frozen=True)
class Job:
    """A whole job file with its effective grants."""

    file: JobFile
    path: Path
    grants: Grants
    warnings: tuple[str, ...]  # what will not work, though the file is right: a run tells it too


@dataclass(frozen=True)
class Jobs:
    """What a folder holds, by name; problems are sentences."""

    jobs: dict[str, Job]
    problems: tuple[str, ...]


class JobFolder:
    """Reads jobs from a folder, each time anew: files are edited while the daemon runs.

    Args:
        folder: where the job files lie.
        reports: where reports go by default.
    """

    def __init__(self, folder: Path, reports: Path):
        self._folder = folder
        self._reports = reports

    def read_all(self) -> Jobs:
        """Every job; a folder that is not there holds none."""
        jobs, problems = {}, []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")) if self._folder.is_dir() else ():
            try:
                job = self.read(path)
            except ApplianceError as failure:
                problems.append(str(failure))
            else:
                jobs[job.file.name] = job
        return Jobs(jobs, tuple(problems))

    def find(self, name: str) -> Job:
        """One job. `NotFound` with the nearest right name, `ConfigError` when its file is wrong."""
        path = self._folder / f"{name}{SUFFIX}"
        if path.is_file() and "/" not in name:
            return self.read(path)
        names = [one.name.removesuffix(SUFFIX) for one in self._folder.glob(f"*{SUFFIX}")] if self._folder.is_dir() else []
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise NotFound(
            f'there is no job "{name}"', f'did you mean "{near[0]}"?' if near else f"put {name}{SUFFIX} in {self._folder}"
        )

    def read(self, path: Path) -> Job:
        """One job file, wherever it lies."""
        file = read_jobfile(path)
        kinds = [read_step(table, f"{path}: step {at}")[0] for at, table in enumerate(file.step, 1)]
        allowed = effective(file, path.absolute().parent, self._reports)
        _check_tools(file, path)
        needed = sorted({tool for kind in kinds for tool in kind.tools} - set(allowed.tools))
        warnings = [f'step needs the tool "{tool}", which is not granted' for tool in needed]
        warnings += [f"the folder {folder} is not there" for folder in allowed.folders if not folder.is_dir()]
        return Job(file, path, allowed, tuple(warnings))


def _check_tools(file: JobFile, path: Path) -> None:
    tools = known_tools()
    for name in file.grants.tools:
        if name not in tools:
            near = difflib.get_close_matches(name, tools, n=1, cutoff=0.5)
            hint = f'did you mean "{near[0]}"?' if near else f"tools: {', '.join(tools)}"
            raise ConfigError(f'{path}: "grants.tools": there is no tool "{name}"', hint)
