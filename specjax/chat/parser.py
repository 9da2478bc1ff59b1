"""The parser of an answer: text that grows becomes regions that open, grow and close."""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from specjax.chat.calls import JsonCallForm, JsonCalls, ParsedCallForm, RegionBody, Tools
from specjax.chat.events import (
    ChatAnswer,
    Event,
    RegionClosed,
    RegionGrew,
    RegionKind,
    RegionOpened,
)
from specjax.chat.forms import MAX_SEARCH_SECONDS, RegionForm, ResponseForm
from specjax.chat.json_reader import SURROGATE

_SPACE = " \t\r\n"
_FIRST_TAG = re.compile(r"[ \t\r\n]*(?:<[^<>\s]{2,40}>|\[/?[A-Z_]{2,40}\]|to=functions\b)")
"""The first part of a tag that has several, such as ``<|channel|>`` before a channel's name.

gpt-oss may write the name of a tool before the first special token.
"""

_MOST_SPACE = 64
"""The number of white-space characters that may stand between the JSON of a call and its tag."""

_KEPT_CHARACTERS = 256
"""The number of characters before the newest ones that stay, for expressions that look back."""


_BLOCK = 1024
"""The number of characters that are searched at once. Each tag costs a search of a whole block."""

_FREE_SECONDS = 0.01
"""The processor time of a search that does not count as slow."""

_FREE_SECONDS_PER_CHARACTER = 2e-6
"""The processor time, for a character of a call, that does not count as slow."""


class AnswerParser:
    """A parser of one answer of a chat. It returns events while the text grows.

    The events do not depend on where the text is cut into pieces. Together they hold all characters
    of the answer except the tags and the white space next to them. A call that does not parse
    becomes content, with its tags. An answer without tags is one region of content, character by
    character.

    Examples:
        >>> from specjax.chat import ChatAnswer, AnswerParser, family_form
        >>> parser = AnswerParser(family_form("qwen3"))
        >>> events = parser.feed('<tool_call>\\n{"name": "get_weather", "argu')
        >>> events
        []
        >>> events += parser.feed('ments": {"city": "Oslo"}}\\n</tool_call>') + parser.finish()
        >>> ChatAnswer.from_events(events).tool_calls
        (ToolCall(name='get_weather', arguments='{"city": "Oslo"}'),)
    """

    def __init__(
        self,
        form: ResponseForm,
        prompt: str = "",
        tools: Tools = (),
        with_calls: bool = True,
        whole_calls: bool = False,
        content_is_last: bool = False,
    ) -> None:
        """Start before the first character of an answer.

        Args:
            form: how the model's family writes answers.
            prompt: the text of the prompt with its special tokens. It may have begun the answer,
                for example with the tag that opens the reasoning.
            tools: the tools of the request. Some families write arguments without types, which are
                then those of the tool's schema.
            with_calls: False if the request has no tools: what looks like a call is content.
            whole_calls: True if a call is reported only when it is complete, its arguments in one
                piece. Then nothing has to be taken back: a call that does not parse is content
                and no more, and one that is cut is not reported at all.
            content_is_last: True if all that follows the begin of the content is content, tags
                included, as where a grammar describes the content.

        Raises:
            InputError: the installed transformers is too old to read the family's calls.
        """
        self._form, self._tools, self._whole_calls = form, tools, whole_calls
        self._content_is_last = content_is_last
        self._regions = tuple(
            region
            for region in form.regions
            if with_calls or region.kind is not RegionKind.TOOL_CALL
        )
        for region in self._regions:
            if isinstance(region.calls, ParsedCallForm):
                region.calls.check()
        outside = () if form.outside is None else (form.outside,)
        self._outside_tags = _Tags.of(self._regions, outside)
        # By the identity of the region, whose hash would take long.
        self._closing_tags = {id(it): _Tags.of((), (it,)) for it in self._regions}
        self._buffer, self._position = "", 0
        self._empty_tag = -1  # where a tag of no length has opened a region
        self._region: RegionForm | None = None  # the region with tags that is open
        self._tag = ""
        self._json: JsonCalls | None = None
        self._is_behind_json = False  # the JSON value of a call has ended, and its tag may follow
        self._body: RegionBody | None = None
        self._is_rescuing = False  # text outside of all regions follows a call that did not parse
        self._writer = _TextWriter()
        self._queued: list[Event] = []
        self._call_count = 0
        self._slow_seconds = 0.0  # the processor time of slow searches
        self._has_given_up = False  # what follows is content, without a search for tags
        self._is_finished = False
        self._read_prompt(form.after_anchor(prompt))

    def _read_prompt(self, start: str) -> None:
        if not start:
            return
        events = self._advance(start, is_last=False)
        self._writer.forget()
        if self._json is not None and self._json.is_open and not self._whole_calls:
            # The prompt began a call. It is the answer's, all of it.
            opened = max(
                index for index, event in enumerate(events) if isinstance(event, RegionOpened)
            )
            self._queued = events[opened:]

    def feed(self, text: str) -> list[Event]:
        """Append text to the answer, and return the new events.

        Lone surrogates, which no encoder of JSON takes, become U+FFFD.

        Raises:
            RuntimeError: the parser has finished.
        """
        if self._is_finished:
            raise RuntimeError("AnswerParser.feed: the answer has finished; make a new parser")
        queued, self._queued = self._queued, []
        if not text.isascii():
            text = SURROGATE.sub("\ufffd", text)
        return self._numbered(queued + self._advance(text, is_last=False))

    def finish(self, is_cut: bool = False) -> list[Event]:
        """End the answer, and return the last events.

        Args:
            is_cut: whether the text ended at a limit or a stop string. A call that it cuts is
                dropped, and so is the begin of a tag with a name. If the model itself ended the
                text there, they become content, as any call that does not parse.

        Raises:
            RuntimeError: the parser has finished.
        """
        if self._is_finished:
            raise RuntimeError("AnswerParser.finish: the answer has finished; make a new parser")
        self._is_finished = True
        queued, self._queued = self._queued, []
        events = queued
        if is_cut and self._region is None and _FIRST_TAG.match(self._buffer, self._position):
            self._position = len(self._buffer)  # text is held, so it is the begin of a tag
            self._writer.pause(events)
            self._writer.pass_tag()
        events += self._advance("", is_last=True)
        with suppress(TimeoutError):  # the call has been reported, or is content
            self._end_call(is_cut, events)
        self._writer.finish(events)
        return self._numbered(events)

    def parse(self, text: str, is_cut: bool = False) -> ChatAnswer:
        """Return a whole answer from its text; see `finish` for ``is_cut``.

        Raises:
            RuntimeError: the parser has finished.
        """
        return ChatAnswer.from_events(self.feed(text) + self.finish(is_cut))

    def _numbered(self, events: list[Event]) -> list[Event]:
        """Return events with the numbers of the calls that open."""
        for place, event in enumerate(events):
            if isinstance(event, RegionOpened) and event.kind is RegionKind.TOOL_CALL:
                events[place] = replace(event, index=self._call_count)
                self._call_count += 1
        return events

    def _advance(self, text: str, is_last: bool) -> list[Event]:
        events: list[Event] = []
        for begin in range(0, max(1, len(text)), _BLOCK):
            if self._position > 16 * _KEPT_CHARACTERS:
                self._buffer = self._buffer[self._position - _KEPT_CHARACTERS :]
                self._empty_tag -= self._position - _KEPT_CHARACTERS
                self._position = _KEPT_CHARACTERS
            self._buffer += text[begin : begin + _BLOCK]
            try:
                while self._step(events, is_last):
                    pass
            except TimeoutError:
                self._give_up(events)
        return events

    def _spend(self, start: float, length: int = 0) -> None:
        """Count the processor time since a start, and raise TimeoutError if it is too much."""
        seconds = time.thread_time() - start
        if seconds > _FREE_SECONDS + length * _FREE_SECONDS_PER_CHARACTER:
            self._slow_seconds += seconds
            if self._slow_seconds > MAX_SEARCH_SECONDS:
                raise TimeoutError

    def _give_up(self, events: list[Event]) -> None:
        """Turn all that follows into content."""
        if self._body is not None:
            self._give_back(events, "".join(self._body.pieces))
        elif self._region is not None and self._region.calls is None:
            self._writer.close(events)
        self._region = self._json = self._body = None
        self._is_behind_json, self._has_given_up = False, True
        self._write(self._buffer[self._position :], events)
        self._position = len(self._buffer)

    def _step(self, events: list[Event], is_last: bool) -> bool:
        """Process a part of the text; False if more text is needed."""
        if self._has_given_up:
            self._write(self._buffer[self._position :], events)
            self._position = len(self._buffer)
            return False
        if self._is_behind_json:
            return self._close_json(is_last)
        if self._json is not None:
            return self._read_json(events)
        tags = self._outside_tags
        if self._region is not None:
            tags = self._closing_tags[id(self._region)]
        may_be_last = self._content_is_last and self._region is None
        is_plain = tags.first is not None and tags.first.isdisjoint(self._buffer[self._position :])
        if is_plain and not may_be_last:
            self._write_to(len(self._buffer), events)
            return False
        first, hold, begin = None, len(self._buffer), time.thread_time()
        for order, (region, is_open) in enumerate(tags.watched):
            delimiter = region.opens if is_open else region.closes
            assert delimiter is not None
            # A tag of no length opens its region once.
            first_place = self._position + (is_open and self._position == self._empty_tag)
            match, start = delimiter.search(self._buffer, first_place, is_last)
            hold = min(hold, start)
            if match is not None:
                key = (match.start(), match.start() - match.end(), not is_open, order)
                if first is None or key < first[0]:
                    first = (key, region, is_open, match)
        self._spend(begin)
        is_certain = first is not None and first[0][0] < hold
        if may_be_last:
            before = first[0][0] if first is not None and is_certain else hold
            if self._buffer[self._position : before].strip(_SPACE) and self._form.outside:
                self._give_up(events)
                return False
        if first is not None and is_certain:
            return self._pass(*first[1:], events)
        self._write_to(len(self._buffer) if is_last else hold, events)
        return False

    def _write_to(self, end: int, events: list[Event]) -> None:
        """Process text without tags, up to an offset."""
        if end > self._position:
            self._write(self._buffer[self._position : end], events)
            self._position = end

    def _pass(self, region: RegionForm, is_open: bool, match: Any, events: list[Event]) -> bool:
        """Process the text before a tag, and the tag."""
        if match.start() > self._position:
            self._write(self._buffer[self._position : match.start()], events)
        # A match of no length that closes the text outside of all tags would come again for ever.
        is_progress = match.end() > self._position or self._region is not None or is_open
        self._position = match.end()
        if is_open and match.start() == match.end():
            self._empty_tag = match.end()
        captures = {name: text for name, text in match.groupdict().items() if text is not None}
        if is_open:
            self._region, self._tag = region, match[0]
            self._is_rescuing = False
            if isinstance(region.calls, JsonCallForm):
                self._json = JsonCalls(region.calls, captures.get("name"), self._whole_calls)
            elif region.calls is not None:
                self._body = RegionBody(captures)
            else:
                self._writer.open(region.kind, events)
                if self._content_is_last and region.kind is RegionKind.CONTENT:
                    self._region = None
                    self._give_up(events)
        elif self._region is None:
            self._is_rescuing = False  # a tag that closes the text outside is dropped
        elif self._body is not None:
            self._body.captures.update(captures)
            self._read_body(match[0], events)
        else:
            self._writer.close(events)
            self._region = None
        return is_progress

    def _write(self, text: str, events: list[Event]) -> None:
        """Add text to the open region, or to the text outside."""
        if self._has_given_up:
            if text:
                self._writer.write(RegionKind.CONTENT, text, True, events)
        elif self._body is not None:
            self._body.pieces.append(text)
        elif self._region is not None:
            self._writer.write(self._region.kind, text, self._region.is_stripped, events)
        elif self._form.outside is not None:
            outside = self._form.outside
            self._writer.write(outside.kind, text, outside.is_stripped, events)
        elif self._is_rescuing:
            self._writer.write(RegionKind.CONTENT, text, True, events)

    # --- calls ------------------------------------------------------------------------------------

    def _read_json(self, events: list[Event]) -> bool:
        """Read the JSON of a call as far as it goes; False if more text is needed."""
        assert self._json is not None
        text = self._buffer[self._position :]
        if not text:
            return False
        new, count = self._json.push(text)
        self._position += count
        if new:
            self._writer.pause(events)
            events += new
        if self._json.has_calls:
            self._writer.pass_tag()
        if self._json.is_broken:
            self._give_back(events)
        elif self._json.is_complete:
            self._json, self._is_behind_json = None, True
        else:
            return False
        return True

    def _close_json(self, is_last: bool) -> bool:
        """Skip the tag behind the JSON of a call, if it is there; False if more text is needed."""
        assert self._region is not None
        closes = self._region.closes
        if closes is not None:
            start = self._position
            last = min(len(self._buffer), start + _MOST_SPACE)
            while start < last and self._buffer[start] in _SPACE:
                start += 1
            for position in (self._position, start):
                # At the end of the text, a part of the tag is as good as the whole.
                match, is_pending = closes.match(self._buffer, position, False)
                if is_pending and is_last:
                    self._position = len(self._buffer)
                    break
                if match is not None:
                    self._position = match.end()
                    break
                if is_pending:
                    return False
            else:
                if start == len(self._buffer) < self._position + _MOST_SPACE and not is_last:
                    return False
        self._region, self._is_behind_json = None, False
        return True

    def _read_body(self, closing: str, events: list[Event]) -> None:
        """Read the calls of a region that has closed."""
        assert self._region is not None and self._body is not None
        assert isinstance(self._region.calls, ParsedCallForm)
        text, start = "".join(self._body.pieces), time.thread_time()
        try:
            calls = self._region.calls.read(text, self._body.captures, self._tools)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, TimeoutError):
            self._give_back(events, text + closing)
            self._spend(start, len(text))
            return
        self._writer.pause(events)
        for name, arguments in calls:
            events.append(RegionOpened(RegionKind.TOOL_CALL, name))
            events.append(RegionGrew(RegionKind.TOOL_CALL, arguments))
            events.append(RegionClosed(RegionKind.TOOL_CALL))
        self._writer.pass_tag()
        self._region = self._body = None
        self._spend(start, len(text))

    def _give_back(self, events: list[Event], text: str = "") -> None:
        """Turn a call that does not parse into content."""
        if self._json is not None:
            self._json.drop("invalid", events)
            text = self._json.rest()
        tag = "" if self._json is not None and self._json.has_calls else self._tag
        self._region = self._json = self._body = None
        self._is_rescuing = True
        self._writer.give_back(tag + text, events)

    def _end_call(self, is_cut: bool, events: list[Event]) -> None:
        """End a call that is open where the text ends."""
        if self._json is not None:
            if not is_cut or not (self._tag or self._json.is_open):
                self._give_back(events)
                return
            self._json.drop("cut", events)
        elif self._body is None:
            return
        elif not is_cut:
            self._read_body("", events)
            return
        self._writer.pause(events)
        self._writer.pass_tag()


@dataclass(frozen=True)
class _Tags:
    """The tags that may come next.

    Attributes:
        watched: the region of each tag, and whether the tag opens it.
        first: the characters with which they begin; None: any.
    """

    watched: tuple[tuple[RegionForm, bool], ...]
    first: frozenset[str] | None

    @classmethod
    def of(cls, opened: Sequence[RegionForm], closed: Sequence[RegionForm]) -> "_Tags":
        """Return the tags that open some regions, and those that close some."""
        watched = [(region, True) for region in opened]
        watched += [(region, False) for region in closed if region.closes is not None]
        tags = [region.opens if is_open else region.closes for region, is_open in watched]
        firsts = [None if tag is None else tag.first for tag in tags]
        stated = [first for first in firsts if first is not None]
        first = frozenset[str]().union(*stated) if len(stated) == len(firsts) else None
        return cls(tuple(watched), first)


class _TextWriter:
    """A writer of the events of content and reasoning.

    White space next to a tag belongs to the tag, so white space is held until it is known what
    follows: between two pieces of content it is content.
    """

    def __init__(self) -> None:
        self._open: RegionKind | None = None
        # White space behind the content and the reasoning so far, in pieces.
        self._space: dict[RegionKind, list[str]] = {
            RegionKind.CONTENT: [],
            RegionKind.REASONING: [],
        }
        self._has_content = self._has_reasoning = False
        self._is_behind_tag = False

    def forget(self) -> None:
        """Forget the text of the prompt, but not that it ends behind a tag."""
        self._open = None
        for pieces in self._space.values():
            pieces.clear()
        self._has_content = self._has_reasoning = False

    def open(self, kind: RegionKind, events: list[Event]) -> None:
        """Prepare a region with tags. It is reported when it has text."""
        if kind is not RegionKind.CONTENT:
            self.pause(events)
        self._is_behind_tag = True
        self._space[RegionKind.REASONING].clear()

    def pause(self, events: list[Event]) -> None:
        """Close the region that is reported as open, before another one."""
        if self._open is not None:
            events.append(RegionClosed(self._open))
        self._open = None

    def pass_tag(self) -> None:
        """Note that the white space that comes next belongs to a tag."""
        self._is_behind_tag = True

    def give_back(self, text: str, events: list[Event]) -> None:
        """Add the text of a call that does not parse to the content, with all its white space."""
        if not self._has_content and self._is_behind_tag:
            self._space[RegionKind.CONTENT].clear()
        if text:
            self.write(RegionKind.CONTENT, text, False, events)

    def close(self, events: list[Event]) -> None:
        """Close a region with tags."""
        if self._open is not RegionKind.CONTENT:
            self.pause(events)
        self._is_behind_tag = True
        self._space[RegionKind.REASONING].clear()

    def write(self, kind: RegionKind, text: str, is_stripped: bool, events: list[Event]) -> None:
        """Add text to the content or to the reasoning."""
        space = self._space[kind]
        if is_stripped and not text.strip(_SPACE):
            space.append(text)
            return
        text = "".join([*space, text])
        body = text.rstrip(_SPACE) if is_stripped else text
        space[:] = [text[len(body) :]]
        is_reasoning = kind is RegionKind.REASONING
        is_first = self._open is not kind if is_reasoning else not self._has_content
        if is_first and self._is_behind_tag and is_stripped:
            body = _without_blank(body)
        if is_first and is_reasoning and self._has_reasoning:
            body = "\n" + body
        self._has_reasoning |= is_reasoning
        self._has_content |= not is_reasoning
        self._grow(kind, body, events)

    def _grow(self, kind: RegionKind, text: str, events: list[Event]) -> None:
        if self._open is not kind:
            if self._open is not None:
                events.append(RegionClosed(self._open))
            events.append(RegionOpened(kind))
            self._open = kind
        events.append(RegionGrew(kind, text))

    def finish(self, events: list[Event]) -> None:
        """Return the white space at the end of an answer, if no tag is next to it."""
        space = "".join(self._space[RegionKind.CONTENT])
        is_at_end = self._open is RegionKind.CONTENT or not self._is_behind_tag
        if space and is_at_end:
            self._grow(RegionKind.CONTENT, space, events)
        if self._open is not None:
            events.append(RegionClosed(self._open))
        self._open = None


def _without_blank(text: str) -> str:
    """Return a text without its blank lines at the start, or without the spaces before it."""
    body = text.lstrip(_SPACE)
    blank = text[: len(text) - len(body)]
    return text[blank.rindex("\n") + 1 :] if "\n" in blank else body
