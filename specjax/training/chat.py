"""The encoding of conversations: their tokens, and a mask of the assistant's tokens.

A conversation has the ids that the same chat has in generation, because both are encoded by
`specjax.text`. The chat template must mark the assistant's part with ``{% generation %}``. Without
that mark no token would be a label and a run would learn nothing, so this raises an error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config import ConfigError
from specjax.errors import InputError
from specjax.progress import say
from specjax.templates import settings_of
from specjax.text import encode_chat, encode_conversation, writes_calls, writes_reasoning
from specjax.training.records import Document, Message
from specjax.training.unusable import RecordTally, UnusableRecordError

Encoded = tuple[Sequence[int] | np.ndarray, np.ndarray]
"""Token ids, and ``[tokens]`` bool which of them count as labels."""


def encode(
    tokenizer: Any, conversations: Sequence[Sequence[Message]], responses_only: bool
) -> list[Encoded]:
    """Encode conversations with the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer of transformers.
        conversations: lists of messages.
        responses_only: whether only the assistant's tokens count as labels. Otherwise all tokens
            count.

    Raises:
        ConfigError: The tokenizer has no chat template, the template refuses a conversation, or it
            marks no token as the assistant's.
    """
    _check_template(tokenizer)
    encoded: list[Encoded] = []
    for number, messages in enumerate(conversations, 1):
        document = Document(f"conversation {number}", messages=tuple(messages))
        try:
            encoded.append(encode_document(tokenizer, document, responses_only))
        except UnusableRecordError as error:
            raise ConfigError(f"data.source: {error}") from None
    check_marks(tokenizer, encoded)
    return encoded


def encode_documents(
    tokenizer: Any, documents: Sequence[Document], responses_only: bool, tally: RecordTally
) -> list[Encoded | None]:
    """Encode conversations with the tokenizer's chat template; None for those that are left out.

    Args:
        tokenizer: a tokenizer of transformers.
        documents: conversations.
        responses_only: as for `encode`.
        tally: counts the conversations that the template refuses.

    Raises:
        ConfigError: The tokenizer has no chat template, or the tally allows no refused one.
    """
    _check_template(tokenizer)
    encoded: list[Encoded | None] = []
    for document in documents:
        try:
            encoded.append(encode_document(tokenizer, document, responses_only))
        except UnusableRecordError as error:
            tally.leave_out(error)
            encoded.append(None)
    return encoded


def encode_document(tokenizer: Any, document: Document, responses_only: bool) -> Encoded:
    """Encode one conversation with the tokenizer's chat template.

    Raises:
        UnusableRecordError: The template refuses the conversation, or leaves a part of it out.
    """
    chat = document.messages or ()
    messages = [
        {key: value for key, value in message.items() if key != "weight"} for message in chat
    ]
    not_counted = [index for index, message in enumerate(chat) if message.get("weight") == 0]
    if any(message.get("tool_calls") for message in messages) and not writes_calls(tokenizer):
        raise UnusableRecordError(document.place, "the chat template writes no tool calls")
    try:
        if responses_only:
            return encode_conversation(
                tokenizer, messages, tools=document.tools, not_counted=not_counted
            )
        ids = encode_chat(tokenizer, messages, end="messages", tools=document.tools)
        return ids, np.ones(len(ids), bool)
    except InputError as error:
        settings = settings_of(tokenizer)
        arguments = f", given data.chat_template_kwargs={settings}," if settings else ""
        raise UnusableRecordError(
            document.place, f"the chat template{arguments} refuses it ({error})"
        ) from None


def report_reasoning(tokenizer: Any, count: int, documents: int, source: str) -> None:
    """Print how many conversations have reasoning, if the template does not write it.

    Args:
        tokenizer: a tokenizer of transformers.
        count: the number of conversations with reasoning.
        documents: the number of all conversations.
        source: the argument and its value, for the message.
    """
    if count and not writes_reasoning(tokenizer):
        say(
            f"{source}: {count:,} of {documents:,} conversations have reasoning, which the"
            " chat template leaves out; only their answers are learnt"
        )


def _check_template(tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.tokenizer: it has no chat template; give a file with one as data.chat_template"
        )


def check_marks(tokenizer: Any, encoded: Sequence[Encoded]) -> None:
    """Raise ConfigError if no token of any conversation counts as a label."""
    if encoded and not any(mask.any() for _, mask in encoded):
        first_line = tokenizer.chat_template.strip().splitlines()[0][:80]
        raise ConfigError(
            "data.tokenizer: its chat template marks no token as the assistant's, so nothing would"
            f" be learnt. The template (it begins with {first_line!r}) must put what the assistant"
            " writes between {% generation %} and {% endgeneration %}: give such a file as"
            " data.chat_template, or set data.responses_only: false"
        )
