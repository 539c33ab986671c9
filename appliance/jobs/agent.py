"""The agent: a model that works with tools until it has an answer, by pydantic-ai, against our own endpoint.

Knows: the loop's two kinds of call, each of them a recorded step. Does not know: grants or tools (`appliance.jobs.toolbox`).
Tools run one after another, so that a restart meets the recorded calls in the same order. The model is told of the granted
tools only; a call of another one is answered with the refusal, and recorded.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import httpx2
import openai
from pydantic import TypeAdapter
from pydantic_ai import Agent, Tool
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, ModelResponsePart, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

from appliance.errors import ApplianceError
from appliance.jobs import toolbox
from appliance.jobs.endpoint import MORE_TIME, TIME_OVER
from appliance.jobs.record import Outcome, Parked, Record
from appliance.jobs.work import Work
from appliance.tools import known

OTHER = "no_such_tool"
"""Takes the calls of names that no tool has; the loop itself would end the run over them."""
PROVIDER_HEADER = "x-appliance-provider"
LOOK_SECONDS = 0.2  # between two looks at whether the daemon stops
_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)


def run_agent(work: Work, step: str, prompt: str, instructions: str, max_tokens: int) -> str:
    """The agent's last answer.

    Raises:
        ApplianceError: the model or the loop failed. BudgetSpent, Parked: see `Record.call`.
    """
    try:
        return asyncio.run(_run(work, step, prompt, instructions, max_tokens))
    except AgentRunError as failure:
        raise ApplianceError(f"the agent gave up: {failure}") from None
    except BaseException:
        if work.record.stopping():  # the loop may have wrapped what we raised
            raise Parked from None
        raise


async def _run(work: Work, step: str, prompt: str, instructions: str, max_tokens: int) -> str:
    endpoint = work.endpoint
    async with endpoint.async_client() as http:
        client = openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, http_client=http, max_retries=0)
        asked = OpenAIChatModel(work.job.model, provider=OpenAIProvider(openai_client=client))
        model = RecordedModel(asked, work.record, step, frozenset(work.grants.tools), _provider_of(http))
        agent = Agent(
            model,
            instructions=instructions,
            tools=[_tool(work, step, name) for name in (*known(), OTHER)],
            model_settings=ModelSettings(temperature=0, max_tokens=max_tokens),
        )
        result = await agent.run(prompt, usage_limits=UsageLimits(request_limit=None))
        return str(result.output)


class RecordedModel(WrapperModel):
    """A model each of whose answers is a recorded step.

    Args:
        asked: what answers.
        record: of the run.
        step: name of the agent's step.
        granted: the tools the model is told of.
        ran_on: gives what ran the newest answer.
    """

    def __init__(self, asked: OpenAIChatModel, record: Record, step: str, granted: frozenset[str], ran_on: Callable[[], str]):
        super().__init__(asked)
        self._record = record
        self._step = step
        self._granted = granted
        self._ran_on = ran_on
        self._turn = 0

    async def request(
        self, messages: list[ModelMessage], model_settings: ModelSettings | None, model_request_parameters: ModelRequestParameters
    ) -> ModelResponse:
        """One turn."""
        self._turn += 1
        tools = [tool for tool in model_request_parameters.function_tools if tool.name in self._granted]
        told = dataclasses.replace(model_request_parameters, function_tools=tools)
        end = time.monotonic() + self._record.left

        async def act() -> Outcome:
            answer = await self._within(super(RecordedModel, self).request(messages, model_settings, told), end)
            usage = answer.usage
            output = _RESPONSE.dump_python(answer, mode="json")
            return Outcome(output, usage.input_tokens, usage.output_tokens, answer.model_name or "", self._ran_on())

        inputs = {"messages": ModelMessagesTypeAdapter.dump_python(messages, mode="json"), "tools": [one.name for one in tools]}
        result = await self._record.call_async(f"{self._step}.model.{self._turn}", "model", inputs, act)
        if result.error is not None:
            raise ApplianceError(result.error)
        return _with_known_names(_RESPONSE.validate_python(result.output))

    async def _within(self, answer: Any, end: float) -> ModelResponse:
        """Await an answer, unless the daemon stops or the time is over."""
        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
                if self._record.stopping():
                    raise Parked
                if time.monotonic() > end and not task.done():
                    raise ApplianceError(TIME_OVER, MORE_TIME)
            response: ModelResponse = await task
            return response
        except (openai.OpenAIError, AgentRunError, httpx2.HTTPError) as failure:
            raise ApplianceError(f"the model could not be asked: {failure}") from None
        finally:
            task.cancel()


def _tool(work: Work, step: str, name: str) -> Tool[Any]:
    """A tool as the loop calls it; refusals are its answer, never an exception."""
    found = known().get(name)

    async def call(**arguments: Any) -> Any:
        asked = str(arguments.pop("tool", name)) if name == OTHER else name
        at = sum(result.inputs.get("tool") is not None for result in work.record.results)
        place = f"{step}.tool.{at}.{asked}"

        async def act() -> Outcome:
            return toolbox.act(work, place, asked, arguments)

        result = await work.record.call_async(place, "tool", {"tool": asked, "arguments": arguments}, act)
        toolbox.note(work, asked, result)
        return result.output if result.error is None else f"refused: {result.error}"

    schema = found.parameters if found else {"type": "object", "properties": {}}
    description = found.description if found else ""
    return Tool.from_schema(call, name, description, schema, sequential=True)


def _with_known_names(answer: ModelResponse) -> ModelResponse:
    """Calls of tools that do not exist go to `OTHER`, with the name they asked for."""
    names = known()

    def directed(part: ModelResponsePart) -> ModelResponsePart:
        if not isinstance(part, ToolCallPart) or part.tool_name in names:
            return part
        return ToolCallPart(OTHER, {"tool": part.tool_name, "arguments": part.args}, part.tool_call_id)

    return dataclasses.replace(answer, parts=[directed(part) for part in answer.parts])


def _provider_of(http: httpx2.AsyncClient) -> Callable[[], str]:
    """Keeps in mind what ran the newest answer of a connection."""
    seen = [""]

    async def look(response: httpx2.Response) -> None:
        seen[0] = response.headers.get(PROVIDER_HEADER, seen[0])

    http.event_hooks["response"].append(look)
    return lambda: seen[0]
