"""Hold the conversation with Anthropic's Python client: by hand, and by its own loop of tools."""

from typing import Any

from anthropic import Anthropic, beta_tool
from common import (
    ADDRESS,
    DECLARED,
    FUNCTIONS,
    MODEL,
    PEOPLE,
    REQUESTS,
    SYSTEM,
    hold,
    read_note,
    run,
)
from pydantic import BaseModel

CLIENT = Anthropic(base_url=ADDRESS, api_key="none", max_retries=0)
FIELDS: Any = {"model": MODEL, "max_tokens": 512, "system": SYSTEM}


def by_hand(is_streamed: bool) -> list[str]:
    """Return the answers of a loop that runs the tools."""
    tools: Any = [
        {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        }
        for function in FUNCTIONS
    ]
    messages: list[Any] = []
    answers = []
    for request in REQUESTS:
        messages.append({"role": "user", "content": request})
        while True:
            count = CLIENT.messages.count_tokens(
                model=MODEL, system=SYSTEM, messages=messages, tools=tools
            )
            assert count.input_tokens > 0
            if is_streamed:
                with CLIENT.messages.stream(messages=messages, tools=tools, **FIELDS) as stream:
                    message = stream.get_final_message()
            else:
                message = CLIENT.messages.create(messages=messages, tools=tools, **FIELDS)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": run(block.name, block.input),
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        answers.append(text_of(message))
    return answers


def by_runner(is_streamed: bool) -> list[str]:
    """Return the answers of the client's own loop."""
    tools = [declared(function) for function in DECLARED] or [beta_tool(read_note)]
    messages: list[Any] = []
    answers = []
    for request in REQUESTS:
        messages.append({"role": "user", "content": request})
        fields = FIELDS | {"stream": True} if is_streamed else FIELDS
        runner = CLIENT.beta.messages.tool_runner(messages=messages, tools=tools, **fields)
        message = runner.until_done()
        messages.append({"role": "assistant", "content": message.content})
        answers.append(text_of(message))
    return answers


def declared(function: dict[str, Any]) -> Any:
    """Return a tool of the conversation's declaration."""

    def runs(**arguments: Any) -> str:
        return run(function["name"], arguments)

    return beta_tool(
        runs,
        name=function["name"],
        description=function["description"],
        input_schema=function["parameters"],
    )


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def people(is_streamed: bool) -> list[str]:
    """Return the names and ages of answers of a type."""
    messages: list[Any] = []
    answers = []
    for request in PEOPLE:
        messages.append({"role": "user", "content": request})
        fields: Any = {"model": MODEL, "max_tokens": 512, "output_format": Person}
        if is_streamed:
            with CLIENT.messages.stream(messages=messages, **fields) as stream:
                message = stream.get_final_message()
        else:
            message = CLIENT.messages.parse(messages=messages, **fields)
        messages.append({"role": "assistant", "content": message.content})
        person = message.parsed_output
        answers.append(f"{person.name}, {person.age}")
    return answers


def required(choice: Any) -> list[str]:
    """Return the names and ages of answers that must be calls of a tool."""
    tool: Any = {"name": "Person", "input_schema": Person.model_json_schema()}
    answers = []
    for request in PEOPLE:
        with CLIENT.messages.stream(
            model=MODEL,
            max_tokens=512,
            messages=[{"role": "user", "content": request}],
            tools=[tool],
            tool_choice=choice,
        ) as stream:
            message = stream.get_final_message()
        (call,) = [block for block in message.content if block.type == "tool_use"]
        person = Person.model_validate(call.input)
        answers.append(f"{person.name}, {person.age}")
    return answers


def text_of(message: Any) -> str:
    """Return the text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


hold(
    {
        "messages": lambda: by_hand(False),
        "messages, streamed": lambda: by_hand(True),
        "tool runner": lambda: by_runner(False),
        "tool runner, streamed": lambda: by_runner(True),
        "people": lambda: people(False),
        "people, streamed": lambda: people(True),
        "people, a required tool": lambda: required({"type": "any"}),
        "people, a named tool": lambda: required({"type": "tool", "name": "Person"}),
    }
)
