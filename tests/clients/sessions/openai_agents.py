"""Hold the conversation with agents of openai-agents, by chat completions and by responses."""

import asyncio
import json
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import ADDRESS, DECLARED, MODEL, PEOPLE, REQUESTS, SYSTEM, hold, read_note, run
from openai import AsyncOpenAI
from pydantic import BaseModel


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)


def declared(function: dict[str, Any]) -> FunctionTool:
    """Return a tool of the conversation's declaration."""

    async def runs(_: Any, arguments: str) -> str:
        return run(function["name"], json.loads(arguments))

    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=runs,
        strict_json_schema=False,
    )


async def _conversation(model: Model, is_streamed: bool) -> list[str]:
    tools = [declared(function) for function in DECLARED] or [function_tool(read_note)]
    agent = Agent(name="Reader", instructions=SYSTEM, model=model, tools=[*tools])
    items, answers = [], []
    for request in REQUESTS:
        items.append({"role": "user", "content": request})
        if is_streamed:
            result = Runner.run_streamed(agent, items)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items)
        items = result.to_input_list()
        answers.append(result.final_output)
    return answers


def chat(is_streamed: bool) -> list[str]:
    """Return the answers by chat completions."""
    return asyncio.run(_conversation(OpenAIChatCompletionsModel(MODEL, client()), is_streamed))


def responses(is_streamed: bool) -> list[str]:
    """Return the answers by responses."""
    return asyncio.run(_conversation(OpenAIResponsesModel(MODEL, client()), is_streamed))


class Person(BaseModel):
    """A person."""

    name: str
    age: int


async def _people(model: Model) -> list[str]:
    agent = Agent(name="Reader", model=model, output_type=Person)
    items, answers = [], []
    for request in PEOPLE:
        result = await Runner.run(agent, [*items, {"role": "user", "content": request}])
        items = result.to_input_list()
        answers.append(f"{result.final_output.name}, {result.final_output.age}")
    return answers


def required(model: Model) -> list[str]:
    """Return the names and ages that a tool gets that must be called."""

    @function_tool(name_override="Person")
    def person(name: str, age: int) -> str:
        return f"{name}, {age}"

    agent = Agent(
        name="Reader",
        model=model,
        tools=[person],
        model_settings=ModelSettings(tool_choice="required"),
        tool_use_behavior="stop_on_first_tool",
    )
    return [Runner.run_sync(agent, request).final_output for request in PEOPLE]


set_tracing_disabled(True)
hold(
    {
        "chat": lambda: chat(False),
        "chat, streamed": lambda: chat(True),
        "responses": lambda: responses(False),
        "responses, streamed": lambda: responses(True),
        "people, chat": lambda: asyncio.run(_people(OpenAIChatCompletionsModel(MODEL, client()))),
        "people, a required tool": lambda: required(OpenAIChatCompletionsModel(MODEL, client())),
        "people, responses, a required tool": lambda: required(
            OpenAIResponsesModel(MODEL, client())
        ),
        "people, responses": lambda: asyncio.run(_people(OpenAIResponsesModel(MODEL, client()))),
    }
)
