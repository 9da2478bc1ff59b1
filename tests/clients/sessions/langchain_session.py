"""Hold the conversation with langchain-openai: a chat model with a bound tool, and responses."""

from typing import Any

from common import ADDRESS, DECLARED, LONGEST, MODEL, PEOPLE, REQUESTS, SYSTEM, hold, read_note, run
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


def declared(function: dict[str, Any]) -> Any:
    """Return a tool of the conversation's declaration."""

    def runs(**arguments: Any) -> str:
        return run(function["name"], arguments)

    return StructuredTool.from_function(
        runs,
        name=function["name"],
        description=function["description"],
        args_schema=function["parameters"],
    )


TOOLS = {it.name: it for it in [declared(function) for function in DECLARED] or [tool(read_note)]}


def conversation(is_streamed: bool, **options: Any) -> list[str]:
    """Return the answers of a loop that invokes the tool."""
    chat = ChatOpenAI(
        model=MODEL, base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0, **options
    )
    bound = chat.bind_tools([*TOOLS.values()])
    messages: list[Any] = [SystemMessage(SYSTEM)]
    answers = []
    for request in REQUESTS:
        messages.append(HumanMessage(request))
        while True:
            if is_streamed:
                message, *more = bound.stream(messages)
                for chunk in more:
                    message += chunk
            else:
                message = bound.invoke(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [TOOLS[call["name"]].invoke(call) for call in message.tool_calls]
        answers.append(message.text)
    return answers


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def people(method: Any, **options: Any) -> list[str]:
    """Return the names and ages of answers of a type."""
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{ADDRESS}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=LONGEST,
        **options,
    )
    persons = [
        chat.with_structured_output(Person, method=method).invoke(request) for request in PEOPLE
    ]
    return [f"{person.name}, {person.age}" for person in persons]


hold(
    {
        "chat": lambda: conversation(False),
        "chat, streamed": lambda: conversation(True),
        "responses": lambda: conversation(False, use_responses_api=True),
        "responses, streamed": lambda: conversation(True, use_responses_api=True),
        "people, a JSON schema": lambda: people("json_schema"),
        "people, JSON": lambda: people("json_mode"),
        "people, a named tool": lambda: people("function_calling"),
        "people, responses, a named tool": lambda: people(
            "function_calling", use_responses_api=True
        ),
        "people, responses": lambda: people("json_schema", use_responses_api=True),
    }
)
