"""Ask for objects of a type with instructor, whole and in part, in each of its modes."""

from collections.abc import Callable
from functools import partial

import instructor
from common import ADDRESS, MODEL, PEOPLE, hold
from openai import OpenAI
from pydantic import BaseModel

MODES = {
    "a named tool": instructor.Mode.TOOLS,
    "a strict tool": instructor.Mode.TOOLS_STRICT,
    "a JSON schema": instructor.Mode.JSON_SCHEMA,
    "JSON": instructor.Mode.JSON,
    "JSON in Markdown": instructor.Mode.MD_JSON,
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def conversation(mode: instructor.Mode, is_streamed: bool) -> list[str]:
    """Return the names and ages of the answers."""
    client = instructor.from_openai(OpenAI(base_url=f"{ADDRESS}/v1", api_key="none"), mode=mode)
    messages, answers = [], []
    for request in PEOPLE:
        messages.append({"role": "user", "content": request})
        fields = {"model": MODEL, "messages": [*messages], "max_retries": 0, "max_tokens": 512}
        if is_streamed:
            *_, person = client.chat.completions.create_partial(response_model=Person, **fields)
        else:
            person = client.chat.completions.create(response_model=Person, **fields)
        messages.append({"role": "assistant", "content": person.model_dump_json()})
        answers.append(f"{person.name}, {person.age}")
    return answers


conversations: dict[str, Callable[[], list[str]]] = {}
for title, mode in MODES.items():
    conversations[f"people, {title}"] = partial(conversation, mode, False)
    conversations[f"people, {title}, streamed"] = partial(conversation, mode, True)
hold(conversations)
