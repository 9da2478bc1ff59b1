"""The objects of `/v1/models`, in OpenAI's form and in Anthropic's."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VERSION_HEADER = "anthropic-version"
"""The header that every request of Anthropic's clients has."""


@dataclass(frozen=True)
class ServedModel:
    """A name under which the server answers.

    Attributes:
        name: the name.
        root: the first name of the same model.
        created: when the server was started, in seconds since 1970.
        max_length: the largest number of tokens of a text, prompt and output.
        has_chat_template: whether the model answers chats.

    Examples:
        >>> from specjax.serving.http.model_objects import ServedModel
        >>> model = ServedModel("tiny", "tiny", 0, 4096, has_chat_template=True)
        >>> model.openai_object()["max_model_len"], model.anthropic_object()["created_at"]
        (4096, '1970-01-01T00:00:00Z')
    """

    name: str
    root: str
    created: int
    max_length: int
    has_chat_template: bool

    def openai_object(self) -> dict[str, Any]:
        """Return the model in OpenAI's form, with vLLM's ``root`` and ``max_model_len``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "specjax",
            "root": self.root,
            "max_model_len": self.max_length,
            "has_chat_template": self.has_chat_template,
        }

    def anthropic_object(self) -> dict[str, Any]:
        """Return the model in Anthropic's form."""
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created)),
            "lifecycle": "active",
            "max_input_tokens": self.max_length,
            "max_tokens": self.max_length,
        }


def is_of_anthropic(headers: Mapping[str, str]) -> bool:
    """Return whether a request for models comes from a client of Anthropic's interface.

    Examples:
        >>> from specjax.serving.http.model_objects import is_of_anthropic
        >>> is_of_anthropic({"anthropic-version": "2023-06-01"})
        True
    """
    return VERSION_HEADER in headers


def model_list(models: Sequence[ServedModel], *, for_anthropic: bool) -> dict[str, Any]:
    """Return the list of all models, as one page.

    Examples:
        >>> from specjax.serving.http.model_objects import ServedModel, model_list
        >>> models = [ServedModel(name, "a", 0, 4096, True) for name in ("a", "b")]
        >>> page = model_list(models, for_anthropic=True)
        >>> page["first_id"], page["last_id"], page["has_more"]
        ('a', 'b', False)
    """
    if not for_anthropic:
        return {"object": "list", "data": [model.openai_object() for model in models]}
    return {
        "data": [model.anthropic_object() for model in models],
        "first_id": models[0].name,
        "last_id": models[-1].name,
        "has_more": False,
    }
