"""Hold the conversation with pydantic-ai: chat completions, responses and messages."""

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from common import ADDRESS, MODEL, REQUESTS, SYSTEM, hold, read_note
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def _conversation(model: Any, is_streamed: bool) -> list[str]:
    agent = Agent(model, instructions=SYSTEM, tools=[read_note])
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


def by_openai(kind: Any, is_streamed: bool) -> list[str]:
    """Return the answers by a model of OpenAI's interfaces."""
    client = AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
    return asyncio.run(
        _conversation(kind(MODEL, provider=OpenAIProvider(openai_client=client)), is_streamed)
    )


def by_anthropic(is_streamed: bool) -> list[str]:
    """Return the answers by messages."""
    client = AsyncAnthropic(base_url=ADDRESS, api_key="none", max_retries=0)
    model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    return asyncio.run(_conversation(model, is_streamed))


hold(
    {
        "chat": lambda: by_openai(OpenAIChatModel, False),
        "chat, streamed": lambda: by_openai(OpenAIChatModel, True),
        "responses": lambda: by_openai(OpenAIResponsesModel, False),
        "responses, streamed": lambda: by_openai(OpenAIResponsesModel, True),
        "messages": lambda: by_anthropic(False),
        "messages, streamed": lambda: by_anthropic(True),
    }
)
