"""Hold held-out conversations with a server, through the packages openai and anthropic.

    python -m specjax serve --target runs/tools_model/model --port 8000
    python -m benchmarks.tools_model.sessions --address http://127.0.0.1:8000

Each conversation has several turns. A call of the model is compared with the right one, and gets
the right one's result. A conversation ends early at the first answer that is wrong.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tyro
from anthropic import Anthropic
from openai import OpenAI

from benchmarks.tools_model.conversations import Conversation, Writer

MOST_TOKENS = 160


@dataclass(frozen=True)
class SessionsConfig:
    """Hold conversations with a server.

    Attributes:
        address: the server's address.
        model: the name of the model; empty: the first that the server has.
        conversations: the number of conversations for each interface.
        turns: the number of requests in each.
        characters: the size of the list of tools, as JSON.
    """

    address: str = "http://127.0.0.1:8000"
    model: str = ""
    conversations: int = 4
    turns: int = 3
    characters: int = 10_000


@dataclass
class Answer:
    """An answer of the model.

    Attributes:
        text: its text.
        calls: the names and arguments of called tools.
    """

    text: str
    calls: list[tuple[str, dict[str, Any]]]


class ChatSession:
    """A session by chat completions."""

    def __init__(self, config: SessionsConfig, chat: Conversation) -> None:
        """Begin with no messages."""
        self.client = OpenAI(base_url=f"{config.address}/v1", api_key="none", timeout=600)
        self.model, self.tools = config.model, chat.tools
        self.messages: list[Any] = []

    def ask(self, request: str) -> Answer:
        """Send a request."""
        return self._send({"role": "user", "content": request})

    def give(self, result: str) -> Answer:
        """Send the result of the newest call."""
        identifier = self.messages[-1].tool_calls[0].id
        return self._send({"role": "tool", "tool_call_id": identifier, "content": result})

    def _send(self, message: dict[str, Any]) -> Answer:
        self.messages.append(message)
        tools: Any = self.tools
        answer = (
            self.client.chat.completions.create(
                model=self.model,
                messages=self.messages,
                tools=tools,
                max_tokens=MOST_TOKENS,
                temperature=0,
            )
            .choices[0]
            .message
        )
        self.messages.append(answer)
        tool_calls: list[Any] = [*(answer.tool_calls or ())]
        functions = [call.function for call in tool_calls]
        calls = [(function.name, json.loads(function.arguments)) for function in functions]
        return Answer(answer.content or "", calls)


class MessagesSession:
    """A session by Anthropic's messages."""

    def __init__(self, config: SessionsConfig, chat: Conversation) -> None:
        """Begin with no messages."""
        self.client = Anthropic(base_url=config.address, api_key="none", timeout=600)
        self.model = config.model
        functions = [tool["function"] for tool in chat.tools]
        self.tools: list[Any] = [
            {
                "name": function["name"],
                "description": function["description"],
                "input_schema": function["parameters"],
            }
            for function in functions
        ]
        self.messages: list[Any] = []

    def ask(self, request: str) -> Answer:
        """Send a request."""
        return self._send(request)

    def give(self, result: str) -> Answer:
        """Send the result of the newest call."""
        identifier = self.messages[-1]["content"][-1].id
        return self._send([{"type": "tool_result", "tool_use_id": identifier, "content": result}])

    def _send(self, content: Any) -> Answer:
        self.messages.append({"role": "user", "content": content})
        create: Any = self.client.messages.create
        answer = create(
            model=self.model,
            messages=self.messages,
            tools=self.tools,
            max_tokens=MOST_TOKENS,
            extra_body={"temperature": 0},  # newer versions of the package have no such argument
        )
        self.messages.append({"role": "assistant", "content": answer.content})
        calls = [
            (part.name, dict(part.input)) for part in answer.content if part.type == "tool_use"
        ]  # type: ignore[call-overload]
        return Answer("".join(part.text for part in answer.content if part.type == "text"), calls)


def hold(session: ChatSession | MessagesSession, chat: Conversation) -> tuple[int, int, str]:
    """Hold a conversation; return the numbers of right answers and answers, and what was wrong."""
    right = 0
    steps = list(zip(chat.messages[::2], chat.messages[1::2], strict=True))
    for count, (message, expected) in enumerate(steps, 1):
        send = session.ask if message["role"] == "user" else session.give
        answer = send(message["content"])
        functions = [call["function"] for call in expected.get("tool_calls", ())]
        calls = [(function["name"], function["arguments"]) for function in functions]
        if answer.calls != calls or (not calls and answer.text != expected["content"]):
            return right, count, f"{message['content']!r} got {answer}"
        right += 1
    return right, len(steps), ""


def main(config: SessionsConfig) -> None:
    """Hold all conversations and print what was right."""
    if not config.model:
        client = OpenAI(base_url=f"{config.address}/v1", api_key="x")
        config = replace(config, model=client.models.list().data[0].id)
    kinds: tuple[Callable[..., Any], ...] = (ChatSession, MessagesSession)
    for kind in kinds:
        for index in range(config.conversations):
            writer = Writer(f"session {index}", is_held_out=True)
            chat = writer.conversation(config.characters, turns=config.turns, calls_first=True)
            right, count, fault = hold(kind(config, chat), chat)
            print(f"{kind.__name__} {index}: {right} of {count} answers right {fault}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(SessionsConfig))
