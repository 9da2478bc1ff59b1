"""An engine that answers a chat, for the tests of `/v1/responses` and `/v1/messages`."""

import asyncio
import json
import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import httpx2
import pydantic

from specjax.assets import embedded
from specjax.serving.http.app import make_app
from specjax.serving.http.service import Service
from specjax.text import load_tokenizer
from tests.chat.published_templates import template
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.mutations import mutated_body
from tests.serving.http.test_app import ask, service_of

THOUGHT = "<think>\nHm, the caf\xe9.\n</think>\n\n"
ARGUMENTS = '{"city": "Zo\xeb", "n": 14}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXTS = {
    "text": "Hello there.",
    "nothing": "",
    "thought": f"{THOUGHT}It is late.",
    "call": f"{THOUGHT}I look.\n{CALL}",
    "calls": f"{CALL}\n{CALL}",
    "cut": f'{THOUGHT}I look.\n<tool_call>\n{{"name": "get_weather", "argu',
    "broken": '<tool_call>{"name": 5}</tool_call>',
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat_engine(text: str, **options: Any) -> MadeUpEngine:
    """Return an engine that answers with a text, of a model of the family Qwen3."""
    engine = MadeUpEngine(text, **options)
    engine.ends, engine.capacity = True, 4096
    engine.tokenizer = load_tokenizer(embedded("target"))
    engine.tokenizer.chat_template = template("qwen3")
    return engine


def chat_service(text: str, **options: Any) -> Service:
    """Return the service of such an engine."""
    return service_of(chat_engine(text), **options)


def post(service: Any, path: str, body: Any, **options: Any) -> httpx2.Response:
    """Send a body, and return the answer."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "tiny"} | body)
    return ask(service, path, content=content, **options)


def post_all(service: Service, path: str, bodies: Iterable[bytes]) -> list[httpx2.Response]:
    """Send bodies one after the other, and return the answers."""

    async def send() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(make_app(service), raise_app_exceptions=False)
        headers = {"Content-Type": "application/json"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client:
            return [await client.post(path, content=body) for body in bodies]

    return asyncio.run(send())


def check_mutations(body: dict[str, Any], path: str, count: int, error_names: set[str]) -> None:
    """Check that each mutation of a body is answered, or refused with an error object."""
    service, rng = chat_service("Hello"), random.Random(5)
    statuses: dict[int, int] = {}
    bodies = (mutated_body(rng, body) for _ in range(count))
    for answer in post_all(service, path, bodies):
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if answer.status_code != 200:
            assert answer.status_code in (400, 404), answer.text
            assert set(answer.json()) == error_names
    print(statuses)
    assert min(statuses.get(200, 0), statuses.get(400, 0)) > count / 20


def stream(answer: httpx2.Response) -> list[dict[str, Any]]:
    """Return the events of a stream. Each one must have its object's type as its name."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def as_type(kind: Any, value: Any) -> Any:
    """Return a value as a type of a client's package, which must have exactly this form."""
    parsed = _adapter(kind).validate_python(value, strict=True)
    again = parsed.to_dict(mode="json")
    assert not extras(parsed), extras(parsed)
    assert again == {**again, **json.loads(json.dumps(value))}
    return parsed


@cache
def _adapter(kind: Any) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(kind)


def extras(value: Any, place: str = "") -> list[str]:
    """Return the places of fields that a client's types do not know."""
    unknown = []
    if isinstance(value, pydantic.BaseModel):
        unknown += [f"{place}.{name}" for name in (value.model_extra or {})]
        for name in type(value).model_fields:
            unknown += extras(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for inner in value:
            unknown += extras(inner, place)
    return unknown
