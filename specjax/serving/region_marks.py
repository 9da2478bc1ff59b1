"""The tokens by which an engine tells the regions of a model's answers."""

import re
from collections.abc import Sequence
from typing import Any

from specjax.chat import AnswerSyntax, answer_syntax
from specjax.errors import InputError
from specjax.serving.row_kinds import REGIONS, RegionMark, RegionMarks
from specjax.text import encode_continuation
from specjax.thoughts import answer_tokens, mark_tokens, opening_after_result, thought_tokens

_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


def region_marks(tokenizer: Any, thought_texts: Sequence[str] | None = None) -> RegionMarks:
    """Return the marks of the answers of a tokenizer's model, as far as they are known.

    Thoughts are told as for a thinking budget. The text that begins an answer in a prompt, after a
    question or after a tool's result, ends whatever was written before. Calls of tools are told by
    the tags in which the model's family writes them. A call without a tag, such as Llama 3's,
    counts as "answer". Where no tag ends a call, as with Mistral, what follows it up to the end of
    the text counts as a part of it.

    Args:
        tokenizer: a tokenizer of transformers; None: there is none, and no mark is known.
        thought_texts: the two texts that begin and end a thought; None: the tokenizer states them.

    Examples:
        >>> import specjax
        >>> from specjax.serving.region_marks import region_marks
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> region_marks(tokenizer).marks  # it has no chat template
        ()
        >>> [mark.begins for mark in region_marks(tokenizer, ("<think>", "</think>")).marks]
        ['thinking', 'answer']
    """
    if tokenizer is None:
        return RegionMarks()
    try:
        thought = thought_tokens(tokenizer, thought_texts)
    except InputError:  # there are no thoughts, or their tokens cannot be told
        thought = None
    syntax = answer_syntax(tokenizer)
    begin, end = _call_tags(syntax)
    answer = answer_tokens(tokenizer) if thought is None else thought.answer_ids
    begin_thought = "" if thought is None else tokenizer.decode(list(thought.begin_ids))
    marks = [
        # A new answer ends whatever an earlier answer in the prompt has begun.
        RegionMark(answer, REGIONS, "answer"),
        RegionMark(_after_result(tokenizer, begin_thought, answer), REGIONS, "answer"),
        RegionMark(mark_tokens(tokenizer, syntax.content), REGIONS, "answer"),
        RegionMark(mark_tokens(tokenizer, begin), ("answer",), "tool_call"),
        RegionMark(mark_tokens(tokenizer, end), ("tool_call",), "answer"),
    ]
    if thought is not None:
        marks.append(RegionMark(thought.begin_ids, ("answer",), "thinking"))
        marks.append(RegionMark(thought.end_ids, ("thinking",), "answer"))
    return RegionMarks(tuple(mark for mark in dict.fromkeys(marks) if mark.ids))


def _after_result(tokenizer: Any, begin_thought: str, answer: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of the last tag before an answer to a tool's result.

    With Mistral, nothing else begins such an answer. What stands before the tag may name the call.
    () if there is no tag, or if the answer begins with ``answer``, like others.
    """
    opening = opening_after_result(tokenizer, begin_thought)
    if answer and tuple(encode_continuation(tokenizer, opening))[-len(answer) :] == answer:
        return ()
    tags = _TAG.findall(opening)
    return mark_tokens(tokenizer, tags[-1]) if tags else ()


def _call_tags(syntax: AnswerSyntax) -> tuple[str, str]:
    """Return the texts that begin and end the calls of an answer; "" where no tag does."""
    calls = syntax.calls
    if calls is None:
        return "", ""
    before_name, *_ = calls.before("\n").split()  # the name may share a token with its neighbours
    begin = calls.trigger or (before_name if _TAG.match(before_name) else "")
    ends = _TAG.findall(calls.end + calls.last)
    return begin, ends[-1] if begin and ends else ""
