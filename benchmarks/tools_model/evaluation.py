"""How often a trained model calls the right tool, without a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import specjax
from benchmarks.tools_model.conversations import Conversation, Writer
from specjax import text
from specjax.chat import AnswerParser, ToolCall, response_form
from specjax.progress import waiting

SMALLEST, LARGEST = 10_000, 20_000
"""The sizes of lists of tools in characters of JSON."""


@dataclass(frozen=True)
class Score:
    """Counts of calls.

    Attributes:
        conversations: the number of conversations, with one call each.
        tools: the number of answers that are one call of the right tool.
        calls: those whose arguments are right too.
    """

    conversations: int
    tools: int
    calls: int

    def line(self) -> str:
        """Return the counts and shares as a line."""
        return (
            f"right tool in {self.tools} of {self.conversations}"
            f" ({self.tools / self.conversations:.1%}), right call in {self.calls}"
            f" ({self.calls / self.conversations:.1%})"
        )


def held_out(count: int) -> list[Conversation]:
    """Return held-out conversations with one call each, and lists of tools of 10 to 20 KB."""
    step = (LARGEST - SMALLEST) / max(1, count - 1)
    return [
        Writer(f"evaluation {index}", is_held_out=True).conversation(
            int(SMALLEST + step * index), calls_first=True
        )
        for index in range(count)
    ]


def score(answers: Sequence[Sequence[ToolCall]], chats: Sequence[Conversation]) -> Score:
    """Compare the calls of answers with those of the conversations."""
    tools = calls = 0
    for answer, chat in zip(answers, chats, strict=True):
        message = next(message for message in chat.messages if message["role"] == "assistant")
        function = message["tool_calls"][0]["function"]
        if [call.name for call in answer] == [function["name"]]:
            tools += 1
            calls += answer[0].values() == function["arguments"]
    return Score(len(chats), tools, calls)


def evaluate(target: Any, tokenizer: Any, count: int, batch: int = 4) -> Score:
    """Generate greedy answers without a grammar, and score them.

    Prompts of similar length share a batch.
    """
    form = response_form(tokenizer)
    assert form is not None
    chats, answers = held_out(count), []
    with waiting("answering conversations", count) as progress:
        for first in range(0, count, batch):
            part = chats[first : first + batch]
            prompts = []
            for chat in part:
                asked = [message["role"] for message in chat.messages].index("assistant")
                prompts.append(text.encode_chat(tokenizer, chat.messages[:asked], tools=chat.tools))
            tokens, lengths = text.pad(prompts)
            result = specjax.generate(target, None, tokens, lengths, max_new_tokens=160)
            for row, prompt in enumerate(prompts):
                new = result.tokens[row, len(prompt) : int(result.lengths[row])].tolist()
                parser = AnswerParser(form, tools=part[row].tools)
                # Tags that are no special tokens stay in the text.
                answers.append(
                    parser.parse(tokenizer.decode(new, skip_special_tokens=True)).tool_calls
                )
            progress.update(done=len(answers))
    return score(answers, chats)
