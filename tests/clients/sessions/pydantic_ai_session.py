"""Hold the conversation with pydantic-ai: chat completions, responses and messages."""

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from common import ADDRESS, DECLARED, LONGEST, MODEL, PEOPLE, REQUESTS, SYSTEM, hold, read_note, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def declared(function: dict[str, Any]) -> Any:
    """Return a tool of the conversation's declaration."""

    def runs(**arguments: Any) -> str:
        return run(function["name"], arguments)

    return Tool.from_schema(runs, function["name"], function["description"], function["parameters"])


async def _conversation(model: Any, is_streamed: bool) -> list[str]:
    tools = [declared(function) for function in DECLARED] or [read_note]
    agent = Agent(model, instructions=SYSTEM, tools=tools)
    history: Any = []
    answers = []
    for request in REQUESTS:
        if is_streamed:
            async with agent.run_stream(request, message_history=history) as result:
                answers.append(await result.get_output())
        else:
            result = await agent.run(request, message_history=history)
            answers.append(result.output)
        history = result.all_messages()
    return answers


class Person(BaseModel):
    """A person."""

    name: str
    age: int


async def _people(model: Any, output: Any) -> list[str]:
    agent = Agent(model, output_type=output, model_settings={"max_tokens": LONGEST})
    history: Any = []
    answers = []
    for request in PEOPLE:
        result = await agent.run(request, message_history=history)
        history = result.all_messages()
        answers.append(f"{result.output.name}, {result.output.age}")
    return answers


def by_openai(kind: Any, is_streamed: bool) -> list[str]:
    """Return the answers by a model of OpenAI's interfaces."""
    return asyncio.run(_conversation(openai_model(kind), is_streamed))


def openai_model(kind: Any) -> Any:
    """Return a model of one of OpenAI's interfaces."""
    client = AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
    return kind(MODEL, provider=OpenAIProvider(openai_client=client))


def people(kind: Any, output: Any) -> list[str]:
    """Return the names and ages of answers of a type."""
    return asyncio.run(_people(openai_model(kind), output))


def by_anthropic(is_streamed: bool) -> list[str]:
    """Return the answers by messages."""
    return asyncio.run(_conversation(anthropic_model(), is_streamed))


def anthropic_model() -> AnthropicModel:
    """Return a model of Anthropic's interface."""
    client = AsyncAnthropic(base_url=ADDRESS, api_key="none", max_retries=0)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


def people_by_messages() -> list[str]:
    """Return the names and ages of answers that must be calls of a tool, by messages."""
    return asyncio.run(_people(anthropic_model(), ToolOutput(Person, name="Person")))


hold(
    {
        "chat": lambda: by_openai(OpenAIChatModel, False),
        "chat, streamed": lambda: by_openai(OpenAIChatModel, True),
        "responses": lambda: by_openai(OpenAIResponsesModel, False),
        "responses, streamed": lambda: by_openai(OpenAIResponsesModel, True),
        "messages": lambda: by_anthropic(False),
        "messages, streamed": lambda: by_anthropic(True),
        "people, chat": lambda: people(OpenAIChatModel, NativeOutput(Person)),
        "people, chat, a required tool": lambda: people(
            OpenAIChatModel, ToolOutput(Person, name="Person")
        ),
        "people, responses, a required tool": lambda: people(
            OpenAIResponsesModel, ToolOutput(Person, name="Person")
        ),
        "people, messages, a required tool": people_by_messages,
        "people, chat, prompted": lambda: people(OpenAIChatModel, PromptedOutput(Person)),
        "people, responses": lambda: people(OpenAIResponsesModel, NativeOutput(Person)),
    }
)
