"""Hold the conversation with OpenAI's Python client, by chat completions and by responses."""

import json
from typing import Any

from common import ADDRESS, FUNCTIONS, MODEL, PEOPLE, REQUESTS, SYSTEM, hold, run
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


CLIENT = OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)


def chat(is_streamed: bool) -> list[str]:
    """Return the answers by chat completions."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    fields: Any = {"model": MODEL, "tools": tools}
    for request in REQUESTS:
        messages.append({"role": "user", "content": request})
        while True:
            if is_streamed:
                with CLIENT.chat.completions.stream(messages=messages, **fields) as stream:
                    completion = stream.get_final_completion()
            else:
                completion = CLIENT.chat.completions.create(messages=messages, **fields)
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content)
    return answers


def required(is_named: bool) -> list[str]:
    """Return the names and ages of answers that must be calls of a tool."""
    tool = pydantic_function_tool(Person)
    choice: Any = {"type": "function", "function": {"name": "Person"}} if is_named else "required"
    answers = []
    for request in PEOPLE:
        message = (
            CLIENT.chat.completions.parse(
                model=MODEL,
                messages=[{"role": "user", "content": request}],
                tools=[tool],
                tool_choice=choice,
                parallel_tool_calls=False,
            )
            .choices[0]
            .message
        )
        (call,) = message.tool_calls or []
        person = call.function.parsed_arguments
        answers.append(f"{person.name}, {person.age}")
    return answers


def required_by_responses() -> list[str]:
    """Return the names and ages of answers that must be calls of a tool, by responses."""
    tool: Any = {"type": "function", "name": "Person", "strict": True}
    tool["parameters"] = Person.model_json_schema() | {"additionalProperties": False}
    answers = []
    for request in PEOPLE:
        with CLIENT.responses.stream(
            model=MODEL, input=request, tools=[tool], tool_choice="required"
        ) as stream:
            (call,) = [
                item for item in stream.get_final_response().output if item.type == "function_call"
            ]
        person = Person.model_validate_json(call.arguments)
        answers.append(f"{person.name}, {person.age}")
    return answers


def responses(is_streamed: bool, is_stored: bool) -> list[str]:
    """Return the answers by responses, which the server or the client keeps."""
    items: list[Any] = []
    answers, previous = [], None
    fields: Any = {"model": MODEL, "instructions": SYSTEM, "store": is_stored}
    fields["tools"] = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    for request in REQUESTS:
        items.append({"role": "user", "content": request})
        while True:
            if previous:
                fields["previous_response_id"] = previous
            if is_streamed:
                with CLIENT.responses.stream(input=items, **fields) as stream:
                    for _ in stream:
                        pass
                    response = stream.get_final_response()
            else:
                response = CLIENT.responses.create(input=items, **fields)
            if is_stored:
                items, previous = [], response.id
            else:
                items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = run(call.name, json.loads(call.arguments))
                output = {"type": "function_call_output", "call_id": call.call_id}
                items.append(output | {"output": result})
        answers.append(response.output_text)
    return answers


def people_by_chat(is_streamed: bool) -> list[str]:
    """Return the names and ages of answers of a type, by chat completions."""
    messages: list[Any] = []
    answers = []
    for request in PEOPLE:
        messages.append({"role": "user", "content": request})
        fields: Any = {"model": MODEL, "messages": messages, "response_format": Person}
        if is_streamed:
            with CLIENT.chat.completions.stream(**fields) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = CLIENT.chat.completions.parse(**fields).choices[0].message
        messages.append(message)
        answers.append(f"{message.parsed.name}, {message.parsed.age}")
    return answers


def people_by_responses() -> list[str]:
    """Return the names and ages of answers of a type, by responses."""
    items: list[Any] = []
    answers = []
    for request in PEOPLE:
        items.append({"role": "user", "content": request})
        response = CLIENT.responses.parse(model=MODEL, input=items, text_format=Person)
        items += response.output
        person = response.output_parsed
        answers.append(f"{person.name}, {person.age}")
    return answers


hold(
    {
        "chat": lambda: chat(False),
        "chat, streamed": lambda: chat(True),
        "responses": lambda: responses(False, False),
        "responses, streamed": lambda: responses(True, False),
        "responses, stored": lambda: responses(False, True),
        "responses, stored, streamed": lambda: responses(True, True),
        "people, chat": lambda: people_by_chat(False),
        "people, chat, streamed": lambda: people_by_chat(True),
        "people, responses": people_by_responses,
        "people, a required tool": lambda: required(False),
        "people, a named tool": lambda: required(True),
        "people, responses, a required tool": required_by_responses,
    }
)
