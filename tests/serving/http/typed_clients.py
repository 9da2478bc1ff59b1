"""Ask a server for typed answers, with instructor and with pydantic-ai.

`tests/serving/http/test_grammars.py` runs this script in an environment of these two packages:
their versions of other packages are not those of specjax. It prints the answers as one JSON object.
"""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Person(BaseModel):
    """A person with a nested list."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    kind: Literal["friend", "stranger"]
    scores: list[int] = Field(max_length=2)


def by_instructor(url: str, key: str) -> Person:
    """Return a person by instructor's mode of JSON schemas."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=url, api_key=key), mode=instructor.Mode.JSON_SCHEMA
    )
    return client.chat.completions.create(
        model="tiny",
        response_model=Person,
        messages=[{"role": "user", "content": "person = "}],
        max_retries=0,
        max_tokens=230,
        seed=3,
        temperature=0.8,
    )


def by_pydantic_ai(url: str, key: str) -> Person:
    """Return a person by an agent of pydantic-ai whose output is the model's own JSON."""
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key=key))
    agent = Agent(model, output_type=NativeOutput(Person), retries=0)
    settings = ModelSettings(max_tokens=230, temperature=0.8, seed=3)
    return agent.run_sync("person = ", model_settings=settings).output


if __name__ == "__main__":
    _, address, api_key = sys.argv
    people = [by_instructor(address, api_key), by_pydantic_ai(address, api_key)]
    print(json.dumps([person.model_dump() for person in people]))
