"""Conversations to tokens, and which of them the assistant wrote.

The model's own chat template says both. A template marks what the assistant writes with ``{% generation %}``; one that does not
gives a mask without a single token, and a run that trained on it would learn nothing: it is refused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config import ConfigError
from specjax.templates import settings_of
from specjax.training.documents import Message

Encoded = tuple[Sequence[int] | np.ndarray, np.ndarray]
"""Token ids, and ``[tokens]`` bool, which of them are to be learnt."""


def encode(tokenizer: Any, conversations: Sequence[Sequence[Message]], responses_only: bool) -> list[Encoded]:
    """The tokens of each conversation, in the tokenizer's chat template, and which of them count.

    Args:
        tokenizer: transformers' own.
        conversations: lists of messages.
        responses_only: only what the assistant wrote counts, not the whole conversation.

    Raises:
        ConfigError: there is no template, it refuses a conversation, or it marks nothing as the assistant's.
    """
    if not tokenizer.chat_template:
        raise ConfigError("data.tokenizer: has no chat template; name a file with one as data.chat_template")
    encoded: list[Encoded] = []
    given = settings_of(tokenizer)
    for number, messages in enumerate(conversations, 1):
        try:
            found = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=responses_only, **given
            )
        except Exception as error:  # a template is code of the checkpoint, and raises whatever it stumbles over
            beside = f", given data.chat_template_kwargs={given}," if given else ""
            raise ConfigError(f"data.source: the chat template{beside} refuses conversation {number} ({error})") from None
        ids = list(found["input_ids"])
        mask = np.array(found["assistant_masks"], bool) if responses_only else np.ones(len(ids), bool)
        encoded.append((ids, mask))
    if encoded and not any(mask.any() for _, mask in encoded):
        first_line = tokenizer.chat_template.strip().splitlines()[0][:80]
        raise ConfigError(
            "data.tokenizer: its chat template marks no token as the assistant's, so nothing would be learnt. The template "
            f"(it begins with {first_line!r}) must put what the assistant writes between {{% generation %}} and "
            "{% endgeneration %}: give such a file as data.chat_template, or set data.responses_only: false"
        )
    return encoded
