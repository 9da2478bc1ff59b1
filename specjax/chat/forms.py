"""The form of a family's answers: how regions open and close, and how calls are read.

A form is read from a response template, the declarative format of transformers
(https://huggingface.co/docs/transformers/chat_response_parsing). It is data: nothing of it is run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from specjax.chat.calls import CallForm, read_call_form
from specjax.chat.events import RegionKind
from specjax.errors import InputError

_KINDS = {
    "content": RegionKind.CONTENT,
    "reasoning": RegionKind.REASONING,
    "reasoning_content": RegionKind.REASONING,
    "thinking": RegionKind.REASONING,
    "tool_calls": RegionKind.TOOL_CALL,
}
"""The fields of an answer that chat templates read. The text of any further field is content."""


MAX_TAG = 1024
"""The number of characters of the longest tag. Text that may become a tag is held up to there."""

MAX_SEARCH_SECONDS = 0.25
"""The processor time that one search for a tag may take. A template's expression may be slow."""


_ENDS = regex.compile(r"(?P<end>\\[bBmMZz]|\$)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", regex.DOTALL)
"""What an expression may say of the end of a word or text, and the parts where it means no end."""

_FIRST = regex.compile(r"(?:<|\\\[)(?![*+?{])")
"""The first character of most tags, where an expression begins with it."""

_LOOK = r"(?:(?=[\s\S])|)"


@dataclass(frozen=True)
class Delimiter:
    """A tag that opens or closes a region.

    Attributes:
        pattern: the expression that it matches.
        probe: the same expression with an end that never matches. A partial match of it says that
            the expression looks at text behind the end, so more text may change what it matches.
            A partial match of ``pattern`` is given only where it matches nowhere.
        first: the characters with which it may begin; None: they are not known.
    """

    pattern: Any
    probe: Any
    first: frozenset[str] | None = None

    @classmethod
    def from_pattern(cls, pattern: str, flags: int = 0) -> "Delimiter":
        """Compile an expression.

        Raises:
            regex.error: it is not valid.
        """
        # An end of a word or of the text makes no match partial. A look at the next character does.
        looking = _ENDS.sub(lambda match: _LOOK if match["end"] else match[0], pattern)
        first = _FIRST.match(pattern)
        has_choice = "|" in regex.sub(r"\\.", "", pattern)
        return cls(
            regex.compile(pattern, flags),
            regex.compile(f"(?:{looking})(?!)", flags),
            None if first is None or has_choice else frozenset(first[0][-1]),
        )

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> "Delimiter":
        """Make the tag that is one of several texts. The longest that matches is taken."""
        ordered = sorted(texts, key=len, reverse=True)
        tag = cls.from_pattern("|".join(map(regex.escape, ordered)))
        return replace(tag, first=frozenset(text[0] for text in texts))

    def search(self, text: str, start: int, is_last: bool) -> tuple[Any, int]:
        """Search a text that may still grow.

        Returns:
            The first match, or None; and where text begins that may become a match, or the
            length of the text. With ``is_last``, the text does not grow.

        Raises:
            TimeoutError: the expression takes too long.
        """
        match = self._first(text, start)
        if is_last:
            return match, len(text)
        pending = self.probe.search(
            text, max(start, len(text) - MAX_TAG + 1), partial=True, timeout=MAX_SEARCH_SECONDS
        )
        hold = len(text) if pending is None else pending.start()
        if match is None:
            return None, hold
        if hold <= match.start():
            return None, hold
        return match, len(text)

    def match(self, text: str, start: int, is_last: bool) -> tuple[Any, bool]:
        """Return the match at an offset, or None, and whether the text may become a match.

        Raises:
            TimeoutError: the expression takes too long.
        """
        match = self.pattern.match(text, start, start + MAX_TAG, timeout=MAX_SEARCH_SECONDS)
        if is_last or len(text) >= start + MAX_TAG:
            return match, False
        pending = self.probe.match(text, start, partial=True, timeout=MAX_SEARCH_SECONDS)
        return (match, False) if pending is None else (None, True)

    def _first(self, text: str, start: int) -> Any:
        """Return the first match that is not too long."""
        while True:
            match = self.pattern.search(text, start, timeout=MAX_SEARCH_SECONDS)
            if match is None or len(text) <= match.start() + MAX_TAG:
                return match
            place = match.start()
            match = self.pattern.match(text, place, place + MAX_TAG, timeout=MAX_SEARCH_SECONDS)
            if match is not None:
                return match
            start = place + 1


@dataclass(frozen=True)
class RegionForm:
    """One kind of region in the answers of a family.

    Attributes:
        kind: what the region is.
        opens: the tag that opens it; None for the text outside of all tags.
        closes: the tag that closes it; None if the text's end does, or the end of its JSON value.
        is_stripped: whether white space next to the tags belongs to the tags.
        calls: how its calls are read; None if it is text.
    """

    kind: RegionKind
    opens: Delimiter | None
    closes: Delimiter | None
    is_stripped: bool = True
    calls: CallForm | None = None


@dataclass(frozen=True)
class ResponseForm:
    """The form in which a family writes its answers.

    Attributes:
        regions: the regions with tags.
        outside: the text outside of all tags; None if it belongs to no region and is dropped.
        anchor: what begins an answer in a prompt. What follows the last one in the prompt is the
            begin of the answer, such as the tag that opens the reasoning.

    Examples:
        >>> from specjax.chat import AnswerParser, ResponseForm
        >>> thoughts = {"open": "<think>", "close": "</think>"}
        >>> fields = {"thinking": thoughts, "content": {}}
        >>> form = ResponseForm.from_template({"start_anchor": "Model:", "fields": fields})
        >>> AnswerParser(form).parse("<think>2 + 2</think>4")
        ChatAnswer(content='4', reasoning='2 + 2', tool_calls=())
    """

    regions: tuple[RegionForm, ...]
    outside: RegionForm | None
    anchor: Delimiter

    @classmethod
    def from_template(
        cls,
        template: Mapping[str, Any],
        kinds: Mapping[str, RegionKind] | None = None,
        name: str = "response_template",
    ) -> "ResponseForm":
        """Read a response template.

        Args:
            template: the template, version 1 of transformers' format.
            kinds: the kinds of fields besides content, reasoning and tool calls.
            name: what the template is called in errors.

        Raises:
            InputError: the template is not valid.
        """
        try:
            return _read(template, {**_KINDS, **(kinds or {})})
        except (ValueError, TypeError, AttributeError, regex.error) as error:
            raise InputError(
                f"{name}: not a valid response template ({error}); correct it, or remove it"
            ) from None

    def marks(self, tokens: Iterable[str]) -> frozenset[str]:
        """Return the special tokens that occur in the tags, and so must stay in an answer's text.

        Examples:
            >>> from specjax.chat import ResponseForm
            >>> fields = {"thinking": {"open": "[THINK]", "close": "[/THINK]"}, "content": {}}
            >>> form = ResponseForm.from_template({"start_anchor": "[/INST]", "fields": fields})
            >>> sorted(form.marks(["[INST]", "[THINK]", "</s>"]))
            ['[THINK]']
        """
        delimiters = [
            delimiter.pattern.pattern
            for region in (*self.regions, self.outside)
            if region is not None
            for delimiter in (region.opens, region.closes)
            if delimiter is not None
        ]
        return frozenset(
            token
            for token in tokens
            if token
            and any(
                token in pattern or regex.escape(token, special_only=True) in pattern
                for pattern in delimiters
            )
        )

    def after_anchor(self, prompt: str) -> str:
        """Return what follows the last begin of an answer in a prompt; empty if there is none."""
        end = len(prompt)
        try:
            for match in self.anchor.pattern.finditer(prompt, timeout=MAX_SEARCH_SECONDS):
                end = match.end()
        except TimeoutError:
            return ""
        return prompt[end:]


def _read(template: Any, kinds: Mapping[str, RegionKind]) -> ResponseForm:
    _check_keys(template, _TEMPLATE_KEYS, "the template")
    if template.get("version", 1) != 1:
        raise ValueError(f"version={template['version']!r}: must be 1")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError("fields: must be an object with at least one field")
    anchor = _delimiter(template, "start_anchor", "start_anchor_pattern")
    if anchor is None:
        raise ValueError("start_anchor: is missing")
    regions = [
        _region(name, field, kinds.get(name, RegionKind.CONTENT)) for name, field in fields.items()
    ]
    outside = [region for region in regions if region.opens is None]
    if len(outside) > 1:
        raise ValueError("fields: only one may have neither open nor open_pattern")
    if outside and outside[0].kind is RegionKind.TOOL_CALL:
        raise ValueError("fields.tool_calls: needs open or open_pattern")
    return ResponseForm(
        tuple(region for region in regions if region.opens is not None),
        outside[0] if outside else None,
        anchor,
    )


_TEMPLATE_KEYS = frozenset(
    {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
)
_FIELD_KEYS = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    }
)


def _check_keys(value: Any, keys: frozenset[str], name: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: must be an object")
    if unknown := sorted(map(str, value.keys() - keys)):
        raise ValueError(f"{name}: has the unknown key {unknown[0]!r}")


def _region(name: str, field: Any, kind: RegionKind) -> RegionForm:
    _check_keys(field, _FIELD_KEYS, f"fields.{name}")
    opens = _delimiter(field, "open", "open_pattern")
    closes = _delimiter(field, "close", "close_pattern")
    is_stripped = bool(field.get("content_args", {}).get("strip", True))
    calls = None
    if kind is RegionKind.TOOL_CALL:
        calls = read_call_form(field, () if opens is None else opens.pattern.groupindex)
    return RegionForm(kind, opens, closes, is_stripped, calls)


def _delimiter(value: Mapping[str, Any], literal: str, pattern: str) -> Delimiter | None:
    if literal in value and pattern in value:
        raise ValueError(f"{literal}: cannot be given together with {pattern}")
    if pattern in value:
        return Delimiter.from_pattern(value[pattern], regex.DOTALL)
    if literal not in value:
        return None
    texts = [value[literal]] if isinstance(value[literal], str) else list(value[literal])
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{literal}: must be a text, or a list of texts, none of them empty")
    return Delimiter.from_texts(texts)
