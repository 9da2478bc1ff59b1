"""The syntax in which a family writes its answers, for grammars of them.

A `specjax.chat.ResponseForm` says how answers are read, and accepts more than one way of writing. A
grammar needs one way: the one that the family's chat template shows the model.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

_NAME = "{name}"

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@dataclass(frozen=True)
class CallSyntax:
    """The syntax in which a family writes calls of tools.

    Attributes:
        begin: the text before the arguments of a call, in which ``{name}`` is the tool's name.
        end: the text behind them.
        first: the text before the first of several calls.
        between: the text between two calls; None: there is one call at most.
        last: the text behind the last call.
        trigger: the text with which ``first`` or ``begin`` starts, and after which nothing but a
            call comes in free text; empty: the begin of a call may also be text.
        arguments: "json"; or "xml" for a tag ``<parameter=KEY>`` around each argument, in which
            strings are written as they are, and other values as JSON; or "gemma" for its notation,
            see `specjax.chat.unquoted_arguments`.

    Examples:
        >>> from specjax.chat import CallSyntax
        >>> CallSyntax(begin='<call>{"name": "{name}", "arguments": ', end="}</call>").before("f")
        '<call>{"name": "f", "arguments": '
    """

    begin: str
    end: str
    first: str = ""
    between: str | None = None
    last: str = ""
    trigger: str = ""
    arguments: Literal["json", "xml", "gemma"] = "json"

    def before(self, name: str) -> str:
        """Return the text before the arguments of a call of a tool."""
        return self.begin.replace(_NAME, name)


@dataclass(frozen=True)
class ThoughtSyntax:
    """The texts around the thought that may come before an answer.

    Attributes:
        begin: the text that begins it.
        end: the text that ends it.
        behind: the text between its end and the answer.
        excludes: what a thought does not contain, because it would end it.
        with_space: whether spaces and line breaks may follow it.
        is_open: whether the prompt has begun it. If not, the model may do so.

    Examples:
        >>> from specjax.chat import ThoughtSyntax
        >>> ThoughtSyntax("<think>", "</think>", is_open=True).end
        '</think>'
    """

    begin: str
    end: str
    behind: str = ""
    excludes: tuple[str, ...] = ()
    with_space: bool = True
    is_open: bool = False


@dataclass(frozen=True)
class AnswerSyntax:
    """The syntax in which a family writes an answer.

    Attributes:
        calls: how it writes calls of tools; None: it is not known, or it has none.
        thought: how it writes a thought before the answer; None: it has none.
        content: the text before content, such as the begin of a channel.
        call_id_length: the number of letters and digits of a call's id, where the chat template
            takes no other ids; None: it takes any.

    Examples:
        >>> from specjax.chat import families
        >>> [f.syntax.content for f in families() if f.name == "gpt_oss"]
        ['<|channel|>final<|message|>']
    """

    calls: CallSyntax | None = None
    thought: ThoughtSyntax | None = None
    content: str = ""
    call_id_length: int | None = None

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "AnswerSyntax":
        """Read the syntax from the data of a family.

        Examples:
            >>> from specjax.chat import AnswerSyntax
            >>> AnswerSyntax.from_data({"thought": {"begin": "(", "end": ")"}}).thought.begin
            '('
        """
        calls, thought = data.get("calls"), data.get("thought")
        return cls(
            None if calls is None else CallSyntax(**calls),
            None
            if thought is None
            else ThoughtSyntax(**{**thought, "excludes": tuple(thought.get("excludes", ()))}),
            data.get("content", ""),
            data.get("call_id_length"),
        )

    def thought_after(self, begin: str, chat_template: Any) -> ThoughtSyntax | None:
        """Return the thought that may come next in an answer; None if none may.

        It may come if the prompt has begun it; or if the chat template has its tag, and the prompt
        has begun nothing of the answer. A template that switches the reasoning off ends a thought
        in the prompt.

        Args:
            begin: what the prompt has of the answer, see `ResponseForm.after_anchor`.
            chat_template: the model's chat template.

        Examples:
            >>> from specjax.chat import AnswerSyntax, ThoughtSyntax
            >>> syntax = AnswerSyntax(thought=ThoughtSyntax("<think>", "</think>"))
            >>> syntax.thought_after("<think>\\n", "... <think> ...").is_open
            True
            >>> syntax.thought_after("<think>\\n</think>\\n", "... <think> ...") is None
            True
        """
        if self.thought is None:
            return None
        opens, closes = self.thought.begin, self.thought.end
        if begin.rfind(opens) > begin.rfind(closes):
            return replace(self.thought, is_open=True)
        tag = _TAG.match(opens)
        is_known = (tag[0] if tag else opens) in json.dumps(chat_template, ensure_ascii=False)
        return self.thought if is_known and not begin.strip() else None
