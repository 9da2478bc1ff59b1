"""Measure how often a trained model calls the right tool, without a grammar.

`evaluate` generates answers as a server does. `predict` predicts every token of the right answers
in one pass over the conversation, which is many times as fast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.tools_model import network
from benchmarks.tools_model.conversations import Conversation, Writer
from benchmarks.tools_model.encoding import answers, encode, label_places
from specjax import text
from specjax.chat import AnswerParser, ChatAnswer, response_form
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.transformer import Target
from specjax.progress import waiting

SMALLEST, LARGEST = 10_000, 20_000
"""The sizes of lists of tools in characters of JSON."""
MOST_TOKENS = 160
MOST_LABELS = 1024
"""The most tokens of answers in a conversation that are predicted."""


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


@dataclass(frozen=True)
class Hits:
    """Counts of predicted answers.

    Attributes:
        calls: the number of calls.
        tools: those that are right up to the end of the tool's name.
        whole_calls: those that are right in every token.
        texts: the number of answers in words.
        whole_texts: those that are right in every token.
    """

    calls: int = 0
    tools: int = 0
    whole_calls: int = 0
    texts: int = 0
    whole_texts: int = 0

    def __add__(self, more: "Hits") -> "Hits":
        """Return the sums."""
        return Hits(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def line(self) -> str:
        """Return the counts and shares as a line."""
        calls, texts = max(1, self.calls), max(1, self.texts)
        return (
            f"{self.calls} calls: right tool {self.tools} ({self.tools / calls:.1%}), right call"
            f" {self.whole_calls} ({self.whole_calls / calls:.1%}); {self.texts} texts: right"
            f" {self.whole_texts} ({self.whole_texts / texts:.1%})"
        )


@partial(jax.jit, static_argnames=("config", "has_mlps"))
def _likeliest(
    params: Params, config: ModelConfig, tokens: jax.Array, places: jax.Array, has_mlps: bool
) -> jax.Array:
    states = network.before_readout(params, config, tokens[None], has_mlps)[0]
    states = network.read_out(params, config, states[places])
    return jnp.argmax(states @ params["lm_head"], axis=-1)


def right_tokens(target: Target, tokenizer: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return which tokens of the answers are the likeliest ones after those before, ``[T]``.

    All other tokens count as right.
    """
    places = label_places(tokenizer, tokens)[:MOST_LABELS]
    filled = np.pad(np.asarray(tokens, np.int32), (0, -len(tokens) % network.BLOCK))
    before = np.pad(places - 1, (0, MOST_LABELS - len(places)), constant_values=0)
    has_mlps = any(bool(layer["down"].any()) for layer in target.params["layers"][:-1])
    best = _likeliest(
        target.params, target.config, jnp.asarray(filled), jnp.asarray(before), has_mlps
    )
    is_right = np.ones(len(tokens), bool)
    is_right[places] = np.asarray(best)[: len(places)] == filled[places]
    return is_right


def predict(target: Target, tokenizer: Any, tokens: Sequence[int]) -> Hits:
    """Return what greedy decoding would answer right in a conversation, given as tokens.

    Every answer is predicted from the right text before it: an answer is right as a whole exactly
    if each of its tokens is the likeliest one.
    """
    is_right = right_tokens(target, tokenizer, tokens)
    hits = Hits()
    for answer in answers(tokenizer, tokens):
        is_whole = bool(is_right[answer.start : answer.end].all())
        if answer.names:
            is_tool = all(is_right[answer.start : end].all() for _, end in answer.names)
            hits += Hits(calls=1, tools=int(is_tool), whole_calls=int(is_whole))
        else:
            hits += Hits(texts=1, whole_texts=int(is_whole))
    return hits


def predict_chats(
    target: Target, tokenizer: Any, chats: Sequence[Conversation], stride: int = 20
) -> Iterator[list[Hits]]:
    """Yield the hits so far for each third of the conversations, whose lists grow.

    Every ``stride``-th conversation comes first, so that what has been counted covers all sizes.
    """
    thirds = [Hits()] * 3
    for first in range(min(stride, len(chats))):
        for index in range(first, len(chats), stride):
            third = index * 3 // len(chats)
            thirds[third] += predict(target, tokenizer, encode(tokenizer, chats[index]))
        yield [*thirds]


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
