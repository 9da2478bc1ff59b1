"""Hold the conversation with litellm, by chat completions and by messages."""

import json
from typing import Any

import litellm
from common import ADDRESS, FUNCTIONS, LONGEST, MODEL, PEOPLE, REQUESTS, SYSTEM, hold, run
from pydantic import BaseModel

TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def conversation(provider: str, base: str, is_streamed: bool) -> list[str]:
    """Return the answers of a provider's interface."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for request in REQUESTS:
        messages.append({"role": "user", "content": request})
        while True:
            answer = litellm.completion(
                model=f"{provider}/{MODEL}",
                api_base=base,
                api_key="none",
                messages=messages,
                tools=TOOLS,
                stream=is_streamed,
                num_retries=0,
            )
            if is_streamed:
                answer = litellm.stream_chunk_builder([*answer], messages=messages)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content)
    return answers


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def people() -> list[str]:
    """Return the names and ages of answers of a type."""
    answers = []
    for request in PEOPLE:
        answer = litellm.completion(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"{ADDRESS}/v1",
            messages=[{"role": "user", "content": request}],
            response_format=Person,
            max_tokens=LONGEST,
        )
        person = Person.model_validate_json(answer.choices[0].message.content)
        answers.append(f"{person.name}, {person.age}")
    return answers


def required(provider: str, base: str) -> list[str]:
    """Return the names and ages of answers that must be calls of a tool."""
    tool = {"name": "Person", "parameters": Person.model_json_schema()}
    answers = []
    for request in PEOPLE:
        answer = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=base,
            api_key="none",
            messages=[{"role": "user", "content": request}],
            tools=[{"type": "function", "function": tool}],
            tool_choice="required",
            max_tokens=LONGEST,
        )
        (call,) = answer.choices[0].message.tool_calls
        person = Person.model_validate_json(call.function.arguments)
        answers.append(f"{person.name}, {person.age}")
    return answers


hold(
    {
        "chat": lambda: conversation("openai", f"{ADDRESS}/v1", False),
        "chat, streamed": lambda: conversation("openai", f"{ADDRESS}/v1", True),
        "hosted_vllm": lambda: conversation("hosted_vllm", f"{ADDRESS}/v1", True),
        "messages": lambda: conversation("anthropic", ADDRESS, False),
        "messages, streamed": lambda: conversation("anthropic", ADDRESS, True),
        "people": people,
        "people, a required tool": lambda: required("openai", f"{ADDRESS}/v1"),
        "people, messages, a required tool": lambda: required("anthropic", ADDRESS),
    }
)
