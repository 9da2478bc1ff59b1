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
from specjax.templates import settings_of
from specjax.text import encode_chat, encode_conversation
from specjax.training.documents import Message

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
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.tokenizer: it has no chat template; give a file with one as data.chat_template"
        )
    encoded: list[Encoded] = []
    settings = settings_of(tokenizer)
    for number, messages in enumerate(conversations, 1):
        try:
            if responses_only:
                encoded.append(encode_conversation(tokenizer, messages))
            else:
                ids = encode_chat(tokenizer, messages, end="messages")
                encoded.append((ids, np.ones(len(ids), bool)))
        except InputError as error:
            arguments = f", given data.chat_template_kwargs={settings}," if settings else ""
            raise ConfigError(
                f"data.source: the chat template{arguments} refuses conversation {number} ({error})"
            ) from None
    if encoded and not any(mask.any() for _, mask in encoded):
        first_line = tokenizer.chat_template.strip().splitlines()[0][:80]
        raise ConfigError(
            "data.tokenizer: its chat template marks no token as the assistant's, so nothing would"
            f" be learnt. The template (it begins with {first_line!r}) must put what the assistant"
            " writes between {% generation %} and {% endgeneration %}: give such a file as"
            " data.chat_template, or set data.responses_only: false"
        )
    return encoded
