"""Durable calls: each model call and each tool call of a run happens once, and its record outlives the process.

    call("1.search", "tool", inputs, act) --first time--> act() --record in DBOS--> Result
                                          --after a restart--> the record, act is not called

Knows: DBOS's steps, the run's budget. Does not know: what the calls do.
A call that was under way when the process died is made again: it must be idempotent, which is its caller's business.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog
from dbos import DBOS
from pydantic import Field

from appliance.errors import ApplianceError
from appliance.jobs.jobfile import Budget
from appliance.strict import StrictModel

Kind = Literal["model", "tool", "code"]


class Parked(BaseException):
    """The daemon stops: the run is left as it is and goes on at the next start.

    No `Exception`, so that neither DBOS nor any of our own handlers takes it for the step's result.
    """


class BudgetSpent(Exception):
    """The run used up one of its budgets."""


class Result(StrictModel):
    """What a call gave, as it is recorded and shown in the trace."""

    kind: Kind
    inputs: dict[str, Any] = Field(default_factory=dict)
    output: Any = None
    error: str | None = None
    denied: bool = False
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    provider: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an act hands to the record: a JSON value, and its figures if a model gave it."""

    output: Any
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    provider: str = ""


@dataclass
class Record:
    """The calls of one run so far. Used by the run's own thread alone."""

    budget: Budget
    stopping: Callable[[], bool]
    results: list[Result] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(result.prompt_tokens + result.completion_tokens for result in self.results)

    @property
    def seconds(self) -> float:
        """Time of the model and tool calls. From the records, so that a restart counts the same."""
        return sum(result.seconds for result in self.results if result.kind != "code")

    @property
    def counted(self) -> int:
        """Model and tool calls."""
        return sum(result.kind != "code" for result in self.results)

    @property
    def left(self) -> float:
        """Seconds that the next call may take."""
        return max(self.budget.seconds - self.seconds, 0.0)

    def call(self, name: str, kind: Kind, inputs: dict[str, Any], act: Callable[[], Outcome]) -> Result:
        """Make a call, or read what it gave before a restart. What an act raises as `ApplianceError` is its recorded error.

        Raises:
            BudgetSpent: before the call, when the run may make no more.
            Parked: the daemon stops.
        """
        self.begin(kind)
        return self.keep(DBOS.run_step({"name": name}, perform, kind, inputs, act))

    async def call_async(self, name: str, kind: Kind, inputs: dict[str, Any], act: Callable[[], Awaitable[Outcome]]) -> Result:
        """`call` for an act on the agent loop's event loop, the one place here that has one."""
        self.begin(kind)
        return self.keep(await DBOS.run_step_async({"name": name}, perform_async, kind, inputs, act))

    def begin(self, kind: Kind) -> None:
        """What is asked before every call; see `call`."""
        if self.stopping():
            raise Parked
        if kind == "code":  # checking and writing what there is must always be possible
            return
        for name, used, most in (
            ("tokens", self.tokens, self.budget.tokens),
            ("seconds", round(self.seconds, 1), self.budget.seconds),
            ("steps", self.counted, self.budget.steps),
        ):
            if used >= most:
                raise BudgetSpent(f"the budget of {most:g} {name} is spent")

    def keep(self, recorded: dict[str, Any]) -> Result:
        """Count a recorded call."""
        result = Result.model_validate(recorded)
        self.results.append(result)
        return result


def perform(kind: Kind, inputs: dict[str, Any], act: Callable[[], Outcome]) -> dict[str, Any]:
    """Do `act`, timed, and give its `Result` as JSON."""
    began = time.monotonic()
    try:
        return _record(kind, inputs, began, act())
    except Exception as failure:
        return _record_failure(kind, inputs, began, failure)


async def perform_async(kind: Kind, inputs: dict[str, Any], act: Callable[[], Awaitable[Outcome]]) -> dict[str, Any]:
    """`perform` for an act that is awaited."""
    began = time.monotonic()
    try:
        return _record(kind, inputs, began, await act())
    except Exception as failure:
        return _record_failure(kind, inputs, began, failure)


def _record(kind: Kind, inputs: dict[str, Any], began: float, outcome: Outcome) -> dict[str, Any]:
    return Result(
        kind=kind,
        inputs=inputs,
        output=outcome.output,
        seconds=round(time.monotonic() - began, 4),
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        model=outcome.model,
        provider=outcome.provider,
    ).model_dump(mode="json")


def _record_failure(kind: Kind, inputs: dict[str, Any], began: float, failure: Exception) -> dict[str, Any]:
    """The record of a call that failed or was denied; what is no error of ours is a fault, and logged with its trace."""
    if isinstance(failure, ApplianceError):
        error, denied = str(failure), failure.code == "denied"
    else:
        structlog.get_logger().error("a step failed unexpectedly", exc_info=failure)
        error, denied = f"unexpected {type(failure).__name__}: {failure}", False
    seconds = round(time.monotonic() - began, 4)
    return Result(kind=kind, inputs=inputs, error=error, denied=denied, seconds=seconds).model_dump(mode="json")
