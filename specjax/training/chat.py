"""The encoding of conversations: their tokens, and a mask of the assistant's tokens.

The chat template of the model gives both. It must mark the assistant's part with
``{% generation %}``. Without that mark no token would be a label and a run would learn nothing, so
this raises an error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config import ConfigError
from specjax.templates import settings_of
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
            encoding = tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=responses_only,
                **settings,
            )
        # A template is code of the checkpoint, which may raise any error.
        except Exception as error:
            arguments = f", given data.chat_template_kwargs={settings}," if settings else ""
            raise ConfigError(
                f"data.source: the chat template{arguments} refuses conversation {number} ({error})"
            ) from None
        ids = list(encoding["input_ids"])
        if responses_only:
            mask = np.array(encoding["assistant_masks"], bool)
        else:
            mask = np.ones(len(ids), bool)
        encoded.append((ids, mask))
    if encoded and not any(mask.any() for _, mask in encoded):
        first_line = tokenizer.chat_template.strip().splitlines()[0][:80]
        raise ConfigError(
            "data.tokenizer: its chat template marks no token as the assistant's, so nothing would"
            f" be learnt. The template (it begins with {first_line!r}) must put what the assistant"
            " writes between {% generation %} and {% endgeneration %}: give such a file as"
            " data.chat_template, or set data.responses_only: false"
        )
    return encoded
