"""Events of a chat answer that is parsed while it grows, and the answer that they make."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class RegionKind(StrEnum):
    """A part of an answer: its text, the model's reasoning, or a call of a tool.

    Examples:
        >>> from specjax.chat import RegionKind
        >>> RegionKind("tool_call") is RegionKind.TOOL_CALL
        True
    """

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True)
class RegionOpened:
    """The begin of a region.

    Attributes:
        kind: what the region is.
        name: the name of the tool; empty if the region is not a call.
        index: the number of the call, from 0, among all calls that are reported of the answer,
            also those that turn out to be incomplete; -1 if the region is not a call.

    Examples:
        >>> from specjax.chat import RegionKind, RegionOpened
        >>> RegionOpened(RegionKind.TOOL_CALL, "get_weather", 0).name
        'get_weather'
    """

    kind: RegionKind
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class RegionGrew:
    """More text of the open region. In a call, it is a piece of the arguments' JSON text.

    Attributes:
        kind: what the region is.
        text: the piece, which is not empty.

    Examples:
        >>> from specjax.chat import RegionGrew, RegionKind
        >>> RegionGrew(RegionKind.CONTENT, "Hello").text
        'Hello'
    """

    kind: RegionKind
    text: str


@dataclass(frozen=True)
class RegionClosed:
    """The end of a region.

    Attributes:
        kind: what the region is.
        reason: why a call is no call of the answer, although pieces of it have been reported:
            ``"cut"`` if the text ends inside of it at a limit or a stop string, and ``"invalid"``
            if it does not parse, and so its text follows as content. Empty for all other regions.

    Examples:
        >>> from specjax.chat import RegionClosed, RegionKind
        >>> RegionClosed(RegionKind.CONTENT).is_complete
        True
        >>> RegionClosed(RegionKind.TOOL_CALL, "cut").is_complete
        False
    """

    kind: RegionKind
    reason: Literal["", "cut", "invalid"] = ""

    @property
    def is_complete(self) -> bool:
        """True unless the region is a call that was cut or does not parse."""
        return not self.reason


Event = RegionOpened | RegionGrew | RegionClosed


@dataclass(frozen=True)
class ToolCall:
    """A complete call of a tool.

    Attributes:
        name: the name of the tool. It need not be the name of a tool that exists.
        arguments: the JSON text of an object. If the model writes JSON, it is the model's own text.

    Examples:
        >>> from specjax.chat import ToolCall
        >>> ToolCall("get_weather", '{"city": "Oslo"}').values()
        {'city': 'Oslo'}
    """

    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """Return the arguments as a dictionary."""
        return json.loads(self.arguments)


@dataclass(frozen=True)
class ChatAnswer:
    """A whole answer, made of the same events that a stream has.

    Attributes:
        content: the text for the user.
        reasoning: the model's reasoning, without the tags around it.
        tool_calls: the complete calls, in their order.

    Examples:
        >>> from specjax.chat import ChatAnswer, RegionClosed, RegionGrew, RegionKind, RegionOpened
        >>> kind = RegionKind.CONTENT
        >>> ChatAnswer.from_events([RegionOpened(kind), RegionGrew(kind, "Hi"), RegionClosed(kind)])
        ChatAnswer(content='Hi', reasoning='', tool_calls=())
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "ChatAnswer":
        """Return the answer that the events of a whole stream make."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        name, arguments = "", [""]
        for event in events:
            if event.kind is not RegionKind.TOOL_CALL:
                if isinstance(event, RegionGrew):
                    (content if event.kind is RegionKind.CONTENT else reasoning).append(event.text)
            elif isinstance(event, RegionOpened):
                name, arguments = event.name, []
            elif isinstance(event, RegionGrew):
                arguments.append(event.text)
            elif event.is_complete:
                calls.append(ToolCall(name, "".join(arguments)))
        return cls("".join(content), "".join(reasoning), tuple(calls))
