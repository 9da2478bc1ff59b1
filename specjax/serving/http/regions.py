"""The regions of one text of an answer: its content, its reasoning and its calls of tools.

Every interface writes its answers, whole and streamed, from these events. So a whole answer and the
sum of a stream are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from specjax.chat import (
    AnswerParser,
    Event,
    RegionClosed,
    RegionGrew,
    RegionKind,
    RegionOpened,
    ResponseForm,
    ToolCall,
)
from specjax.chat.call_ids import new_call_id
from specjax.chat.calls import Tools


@dataclass(frozen=True)
class IdentifiedCall:
    """A complete call of a tool, with the id by which its result is sent back.

    Attributes:
        index: the number of the call among those that the stream has reported, from 0.
        id: the id.
        call: the call.

    Examples:
        >>> from specjax.chat import ToolCall
        >>> from specjax.serving.http.regions import IdentifiedCall
        >>> IdentifiedCall(0, "call_1", ToolCall("f", "{}")).call.name
        'f'
    """

    index: int
    id: str
    call: ToolCall


@dataclass
class AnswerRegions:
    """The regions of one text, as events while it grows, and as a whole.

    Attributes:
        form: how the model writes its answers; None: it is unknown, and all text is content.
        prompt: the text of the prompt with its special tokens. It may have begun the answer.
        tools: the tools of the request.
        with_calls: whether the text may have calls. If not, what looks like one is content.
        whole_calls: whether a call is reported when it is complete, and not while it grows. So a
            call that turns out to be none leaves nothing behind in a stream.
        content_is_last: whether all that follows the begin of the content is content, as where a
            grammar describes the content.
        with_reasoning: whether the reasoning is reported. If not, it is dropped.
        with_content: whether content is reported. Where calls are required there is none, but a
            limit may cut the tag of a call, which then looks like content.
        id_length: the number of letters and digits of a call's id, see
            `specjax.chat.AnswerSyntax`; None: any.
        count_tokens: counts the tokens of a text, for `reasoning_tokens`; None: none are counted.
        calls: the complete calls so far.
        call_ids: the ids of all reported calls, also of those that were cut.
        finish_reason: why the text ended: "stop", "length" or "tool_calls"; None while it grows.

    Examples:
        >>> from specjax.chat import family_form
        >>> from specjax.serving.http.regions import AnswerRegions
        >>> regions = AnswerRegions(family_form("qwen3"), with_calls=True)
        >>> events = regions.push('<think>Hm.</think><tool_call>{"name": "f", "arg')
        >>> events += regions.push('uments": {}}</tool_call>') + regions.finish("stop")
        >>> regions.reasoning, [it.call.name for it in regions.calls], regions.finish_reason
        ('Hm.', ['f'], 'tool_calls')
    """

    form: ResponseForm | None
    prompt: str = ""
    tools: Tools = ()
    with_calls: bool = False
    whole_calls: bool = True
    content_is_last: bool = False
    with_reasoning: bool = True
    with_content: bool = True
    id_length: int | None = None
    count_tokens: Callable[[str], int] | None = None
    calls: list[IdentifiedCall] = field(default_factory=list, init=False)
    call_ids: list[str] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Start before the first character of the text."""
        self._parser: AnswerParser | None = None
        if self.form is not None:
            self._parser = AnswerParser(
                self.form,
                self.prompt,
                self.tools,
                self.with_calls,
                self.whole_calls,
                self.content_is_last,
            )
        self._is_open = False  # content is open, of a model whose form is unknown
        self._pieces: dict[RegionKind, list[str]] = {kind: [] for kind in RegionKind}
        self._name = ""
        self._dropped_reasoning: list[str] = []

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._pieces[RegionKind.CONTENT])

    @property
    def reasoning(self) -> str:
        """The reasoning so far; empty if it is not reported."""
        return "".join(self._pieces[RegionKind.REASONING])

    def reasoning_tokens(self, output_tokens: int) -> int:
        """Return the number of tokens of the reasoning, also where it is not reported.

        Its text is encoded once more, so the number is the same whole and streamed, and whatever
        was drafted. It may differ by a few from the tokens that the model wrote.

        Args:
            output_tokens: the number of tokens of the whole text, which is never exceeded.
        """
        text = self.reasoning or "".join(self._dropped_reasoning)
        if not text or self.count_tokens is None:
            return 0
        return min(self.count_tokens(text), output_tokens)

    def push(self, text: str) -> list[Event]:
        """Append text, and return the new events."""
        return self._take(
            self._as_content(text) if self._parser is None else self._parser.feed(text)
        )

    def finish(self, reason: str, is_cut: bool = False) -> list[Event]:
        """End the text, and return the last events.

        Args:
            reason: why the engine ended the text, a `specjax.serving.handle.FinishReason`.
            is_cut: whether a stop string ended it. A limit cuts it, too.
        """
        last: list[Event] = []
        if self._parser is not None:
            last = self._parser.finish(is_cut or reason != "stop")
        elif self._is_open:
            last = [RegionClosed(RegionKind.CONTENT)]
        events = self._take(last)
        has_ended = reason == "stop" and not is_cut
        self.finish_reason = "tool_calls" if has_ended and self.calls else reason
        return events

    def _as_content(self, text: str) -> list[Event]:
        if not text:
            return []
        opened: list[Event] = [] if self._is_open else [RegionOpened(RegionKind.CONTENT)]
        self._is_open = True
        return [*opened, RegionGrew(RegionKind.CONTENT, text)]

    def _take(self, events: list[Event]) -> list[Event]:
        """Add events to the whole answer, and return those that are reported."""
        if not self.with_reasoning:
            self._dropped_reasoning += [
                event.text
                for event in events
                if isinstance(event, RegionGrew) and event.kind is RegionKind.REASONING
            ]
            events = [event for event in events if event.kind is not RegionKind.REASONING]
        if not self.with_content:
            events = [event for event in events if event.kind is not RegionKind.CONTENT]
        for event in events:
            if event.kind is RegionKind.TOOL_CALL:
                self._take_call(event)
            elif isinstance(event, RegionGrew):
                self._pieces[event.kind].append(event.text)
        return events

    def _take_call(self, event: Event) -> None:
        pieces = self._pieces[RegionKind.TOOL_CALL]
        if isinstance(event, RegionOpened):
            self._name = event.name
            pieces.clear()
            self.call_ids.append(new_call_id(self.id_length))
        elif isinstance(event, RegionGrew):
            pieces.append(event.text)
        elif event.is_complete:
            call = ToolCall(self._name, "".join(pieces))
            self.calls.append(IdentifiedCall(len(self.call_ids) - 1, self.call_ids[-1], call))
