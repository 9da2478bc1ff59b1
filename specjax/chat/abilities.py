"""What a model's chat template can do: take tools, and switch the reasoning on or off."""

from collections.abc import Mapping
from typing import Any

from specjax.templates import names_read, renderer

_QUESTION = ({"role": "user", "content": "a"},)
_TOOL_NAME = "specjaxmarktool"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "a",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "a"}},
            "required": ["a"],
        },
    },
}


def takes_tools(tokenizer: Any) -> bool:
    """Return True if a model's chat template writes tools into the prompt.

    A chat is rendered with a tool, and the name of the tool must be in its text.

    Examples:
        >>> from specjax.chat import takes_tools
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> takes_tools(tokenizer)
        False
        >>> tokenizer.chat_template = "{{ tools | tojson }} {{ messages[0].content }}"
        >>> takes_tools(tokenizer)
        True
    """
    if not getattr(tokenizer, "chat_template", None):
        return False
    try:
        return _TOOL_NAME in renderer(tokenizer, tools=[_TOOL])(_QUESTION)
    except Exception:  # a template is code of the checkpoint and may raise any error
        return False


_SWITCHES = ("enable_thinking", "thinking")


def thinking_switch(tokenizer: Any) -> str | None:
    """Return the variable of a chat template that switches the reasoning; None if there is none.

    A chat is rendered with the variable true and false, and the two texts must differ.

    Examples:
        >>> from specjax.chat import thinking_switch
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{% if thinking %}<think>{% endif %}"
        >>> thinking_switch(tokenizer)
        'thinking'
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    names = names_read(tokenizer)
    for name in _SWITCHES:
        if names is not None and name not in names:
            continue
        try:
            texts = {renderer(tokenizer, {name: value})(_QUESTION) for value in (True, False)}
        except Exception:
            continue
        if len(texts) == 2:
            return name
    return None
