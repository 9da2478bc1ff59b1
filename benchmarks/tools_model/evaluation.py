"""Measure how often a trained model calls the right tool, without a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import specjax
from benchmarks.tools_model.conversations import Conversation, Writer
from specjax import text
from specjax.chat import AnswerParser, ChatAnswer, response_form
from specjax.progress import waiting

SMALLEST, LARGEST = 10_000, 20_000
"""The sizes of lists of tools in characters of JSON."""
MOST_TOKENS = 160


@dataclass(frozen=True)
class Score:
    """Counts of answers.

    Attributes:
        conversations: the number of conversations, with one call each.
        tools: the number of answers that are one call of the right tool.
        calls: those whose arguments are right too.
        texts: the number of answers to the tool's result that are text without a call.
        results: those that repeat the result as they should.
    """

    conversations: int
    tools: int
    calls: int
    texts: int
    results: int

    def line(self) -> str:
        """Return the counts and shares as a line."""
        shares = (
            f"{name} {count} ({count / max(1, self.conversations):.1%})"
            for name, count in (
                ("right tool", self.tools),
                ("right call", self.calls),
                ("text after the result", self.texts),
                ("right text", self.results),
            )
        )
        return f"{self.conversations} conversations: {', '.join(shares)}"


def held_out(count: int, smallest: int = SMALLEST, largest: int = LARGEST) -> list[Conversation]:
    """Return held-out conversations with one call each, whose lists have growing sizes."""
    step = (largest - smallest) / max(1, count - 1)
    return [
        Writer(f"evaluation {index}", is_held_out=True).conversation(
            int(smallest + step * index), calls_first=True
        )
        for index in range(count)
    ]


def score(
    calls: Sequence[ChatAnswer], texts: Sequence[ChatAnswer], chats: Sequence[Conversation]
) -> Score:
    """Compare answers to requests, and answers to results, with those of the conversations."""
    counts = [0, 0, 0, 0]
    for call, answer, chat in zip(calls, texts, chats, strict=True):
        function = chat.messages[_call_of(chat)]["tool_calls"][0]["function"]
        is_right = [tool_call.name for tool_call in call.tool_calls] == [function["name"]]
        is_text = not answer.tool_calls and bool(answer.content)
        counts[0] += is_right
        counts[1] += is_right and call.tool_calls[0].values() == function["arguments"]
        counts[2] += is_text
        counts[3] += is_text and answer.content == chat.messages[-1]["content"]
    return Score(len(chats), *counts)


def _call_of(chat: Conversation) -> int:
    return [message["role"] for message in chat.messages].index("assistant")


def is_named(chat: Conversation) -> bool:
    """Return whether the request has the tool's name; if not, it describes the tool."""
    place = _call_of(chat)
    name = chat.messages[place]["tool_calls"][0]["function"]["name"]
    return name in chat.messages[place - 1]["content"]


def answer_chats(
    target: Any, tokenizer: Any, chats: Sequence[Conversation], ends: Sequence[int]
) -> list[ChatAnswer]:
    """Generate the greedy answer to the first messages of each conversation, without a grammar."""
    form = response_form(tokenizer)
    assert form is not None
    prompts = [
        text.encode_chat(tokenizer, chat.messages[:end], tools=chat.tools)
        for chat, end in zip(chats, ends, strict=True)
    ]
    tokens, lengths = text.pad(prompts)
    result = specjax.generate(target, None, tokens, lengths, max_new_tokens=MOST_TOKENS)
    answers = []
    for row, (prompt, chat) in enumerate(zip(prompts, chats, strict=True)):
        new = result.tokens[row, len(prompt) : int(result.lengths[row])].tolist()
        # Tags that are no special tokens stay in the text.
        answer = tokenizer.decode(new, skip_special_tokens=True)
        answers.append(AnswerParser(form, tools=chat.tools).parse(answer))
    return answers


def evaluate(
    target: Any, tokenizer: Any, chats: Sequence[Conversation], batch: int = 4
) -> dict[str, Score]:
    """Return the scores of all conversations, and of those whose request names or describes.

    Prompts of similar length share a batch. The result of the right call follows the request, so
    that both answers are measured in every conversation.
    """
    calls: list[ChatAnswer] = []
    texts: list[ChatAnswer] = []
    with waiting("answering conversations", len(chats)) as progress:
        for first in range(0, len(chats), batch):
            part = chats[first : first + batch]
            requests = [_call_of(chat) for chat in part]
            calls += answer_chats(target, tokenizer, part, requests)
            results = [len(chat.messages) - 1 for chat in part]
            texts += answer_chats(target, tokenizer, part, results)
            progress.update(done=len(calls))
    groups = {
        "all": [*range(len(chats))],
        "named": [index for index, chat in enumerate(chats) if is_named(chat)],
        "described": [index for index, chat in enumerate(chats) if not is_named(chat)],
    }
    return {
        name: score(
            [calls[index] for index in group],
            [texts[index] for index in group],
            [chats[index] for index in group],
        )
        for name, group in groups.items()
    }
