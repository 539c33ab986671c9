"""One job file: TOML to one frozen object.

Knows: every key that all jobs share, with its range. Does not know: the keys of a step's kind (`appliance.jobs.steps`), or time.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from appliance.errors import ConfigError
from appliance.jobs.schedule import check_cron, check_zone
from appliance.strict import StrictModel, read

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SUFFIX = ".toml"


def _says(check: Any) -> Any:
    """A check that raises `ConfigError`, as pydantic takes one."""

    def checked(value: str) -> str:
        try:
            check(value)
        except ConfigError as failure:
            raise ValueError(str(failure)) from None
        return value

    return AfterValidator(checked)


class Schedule(StrictModel):
    """When a job is due."""

    cron: Annotated[str, _says(check_cron)] = Field(description="Five fields: minute hour day-of-month month day-of-week.")
    zone: Annotated[str, _says(check_zone)] = Field(
        default="UTC", description="Time zone of the five fields, e.g. Europe/Berlin."
    )
    deadline_minutes: int = Field(default=360, ge=1, le=527040, description="A slot that could not begin by then is missed.")


class Grants(StrictModel):
    """What a job may use. Whatever is not named here is refused."""

    tools: tuple[str, ...] = Field(default=(), description="Tools by name; `appliance job check` lists them.")
    folders: tuple[str, ...] = Field(default=(), description="Folders the job may read; from ~ or beside the job file.")
    urls: tuple[str, ...] = Field(default=(), description="Addresses that `notify` may post to, in full.")


class Budget(StrictModel):
    """Where a run ends, whatever it has by then."""

    tokens: int = Field(default=50_000, ge=1, description="Tokens of all prompts and answers together.")
    seconds: float = Field(default=3600, gt=0, description="Time of all steps together.")
    steps: int = Field(default=500, ge=1, description="Model calls and tool calls together.")


class Output(StrictModel):
    """Where the report goes."""

    folder: str = Field(default="", description="Folder of the reports; empty = a folder of the job's name in paths.reports.")
    title: str = Field(default="", description="First line of the report; empty = the job's name.")


class JobFile(StrictModel):
    """A whole job file."""

    name: str = Field(description="Name of the job; the file is called NAME.toml.")
    description: str = Field(default="", description="What the job is for, for lists.")
    enabled: bool = Field(default=True, description="Off: never due, though `appliance job run` still runs it.")
    schedule: Schedule | None = Field(default=None, description="Without one, the job runs only when asked.")
    model: str = Field(default="", description="Model that answers; empty = the default one.")
    prompt: str = Field(default="", description="What an agent with the granted tools is to do. Instead of [[step]].")
    step: tuple[dict[str, Any], ...] = Field(default=(), description="Steps in order. Instead of `prompt`.")
    grants: Grants = Grants()
    budget: Budget = Budget()
    output: Output = Output()

    @model_validator(mode="after")
    def _one_way(self) -> "JobFile":
        if not NAME.fullmatch(self.name):
            raise ValueError(f'"name": {self.name!r} is no job name; use small letters, digits, ".", "_" and "-"')
        if bool(self.prompt.strip()) == bool(self.step):
            raise ValueError('a job has either a "prompt" or [[step]] tables; give one of them')
        return self


def read_jobfile(path: Path) -> JobFile:
    """Read a job file, apart from what its kinds of steps ask of their keys.

    Raises:
        ConfigError: it cannot be read, is not TOML, has an unknown key or a value out of range, or another name than its file.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path}: not valid TOML: {failure}", "mend that line") from None
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}", "check its name and permissions") from None
    job = read(JobFile, data, str(path), ConfigError)
    if job.name != path.name.removesuffix(SUFFIX):
        raise ConfigError(f'{path}: the name inside is "{job.name}"', f"call the file {job.name}{SUFFIX} or change the name")
    return job
