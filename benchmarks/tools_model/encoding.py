"""Tokens of conversations: the tokenizer with its chat template, prompts, and what is a label."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools_model.conversations import Conversation
from specjax import text
from specjax.assets import embedded

TEMPLATE = Path(__file__).parent / "template.jinja"
MARKS = ("<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>")
END = "<|im_end|>"
TOOL_MARKS = tuple(f"<|tool_{index}|>" for index in range(128))
"""Tokens before the tools of a list. They begin again after the last one."""
TURN_MARKS = tuple(f"<|turn_{index}|>" for index in range(12))
"""Tokens at the beginning of messages. A message and its answer have the same one.

They begin again after the last one.
"""


def make_tokenizer() -> Any:
    """Return the embedded target's tokenizer with a chat template, and its tags as tokens.

    Calls have the form of Qwen2.5's. As in its published tokenizer, the tags of calls are no
    special tokens: decoding keeps them. The template gives every tool of the list and every turn
    a token, by which the model's heads tell them apart.
    """
    from transformers import AddedToken

    tokenizer = text.load_tokenizer(embedded("target"))
    marks = (*MARKS, *TOOL_MARKS, *TURN_MARKS)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.eos_token = END
    tokenizer.model_max_length = 32_768
    return tokenizer


@dataclass(frozen=True)
class Answer:
    """An answer inside the tokens of a conversation.

    Attributes:
        start: the index of its first token.
        end: the index after its end token.
        names: the spans of the names of called tools, each as first index and the one after the
            last; empty for an answer in words. A span begins with the token after ``"name": "``.
    """

    start: int
    end: int
    names: tuple[tuple[int, int], ...]


def encode(tokenizer: Any, chat: Conversation) -> list[int]:
    """Return the tokens of a whole conversation, as a server encodes a chat with this history."""
    messages = chat.messages
    return text.encode_chat(tokenizer, messages, end="messages", tools=chat.tools)


def answers(tokenizer: Any, tokens: Sequence[int]) -> Iterator[Answer]:
    """Yield the answers in a conversation's tokens. One that is cut at the end is left out."""
    start_mark, end_mark, opening, closing = tokenizer.convert_tokens_to_ids([*MARKS, *TAGS])
    header = [start_mark, *text.encode_continuation(tokenizer, "assistant\n")]
    before = text.encode_continuation(tokenizer, '\n{"name": "')
    quote = text.encode_continuation(tokenizer, '",')
    tokens = list(tokens)
    starts = [
        index + len(header) + 1  # the mark of the turn
        for index, token in enumerate(tokens)
        if token == start_mark and tokens[index : index + len(header)] == header
    ]
    for start in starts:
        if end_mark not in tokens[start:]:
            return
        end = tokens.index(end_mark, start) + 1
        names = []
        for index in range(start, end):
            if tokens[index] == opening and closing in tokens[index:end]:
                first = index + 1 + len(before)
                last = next(i for i in range(first, end) if tokens[i : i + len(quote)] == quote)
                # The quote behind the name counts too: without it a name could be too long.
                names.append((first, last + len(quote)))
        yield Answer(start, end, tuple(names))


def label_places(tokenizer: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the indices of the tokens in answers, which the model learns to write.

    All else is random.
    """
    spans = [np.arange(span.start, span.end) for span in answers(tokenizer, tokens)]
    return np.concatenate(spans) if spans else np.zeros(0, int)
