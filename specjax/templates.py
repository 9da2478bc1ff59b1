"""Chat templates: the template of a tokenizer, its variables, and the text that it makes of a chat.

A chat template is a Jinja program that comes with a checkpoint. It runs only in the sandbox of
transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import msgspec

from specjax.errors import InputError, did_you_mean

Messages = Sequence[Mapping[str, Any]]
"""A chat: messages such as ``{"role": "user", "content": "…"}``, the oldest first.

A message may have further fields for the model's template, as in OpenAI's API: ``tool_calls``,
``tool_call_id``, ``reasoning_content``.
"""

Settings = Mapping[str, Any]
"""Variables for a chat template besides the messages, such as ``{"enable_thinking": False}``."""

Render = Callable[[Messages], str]
"""Returns the text of a chat."""

ChatEnd = Literal["answer", "messages", "last message"]
"""Where the text of a chat ends: where its answer begins, after its messages, or within the last
message, which the model then goes on writing."""

_OWN: Mapping[str, tuple[Any, ...]] = {
    "messages": (),
    "conversation": (),
    "conversations": (),
    "tools": (None, []),
    "documents": (None, []),
    "chat_template": (None, ""),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "tokenize": (),
    "sanitize_control_tokens": (),
    "padding": (False,),
    "truncation": (False,),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_dict": (),
    "return_assistant_tokens_mask": (),
    "tokenizer_kwargs": (None,),
}
"""Names that cannot be given as variables: arguments of transformers' functions, and variables that
every template has anyway.

With each name come the values that change nothing.
"""


def with_template(
    tokenizer: Any, file: str = "", settings: str | Settings = "", section: str = ""
) -> Any:
    """Return a copy of the tokenizer with another chat template or with template variables.

    Args:
        tokenizer: a tokenizer of transformers. It is not changed.
        file: ``chat_template``, a file with a Jinja template; empty keeps the tokenizer's own.
        settings: ``chat_template_kwargs``, variables as a mapping or as its JSON text; empty: none.
        section: a prefix of these two names in errors, such as ``data.``.

    Raises:
        InputError: the file is not a template, or the template does not read one of the variables.

    Examples:
        >>> from specjax.templates import renderer, with_template
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{% if thinks %} Think.{% endif %}"
        >>> render = renderer(with_template(tokenizer, settings='{"thinks": true}'))
        >>> render([{"role": "user", "content": "Why?"}])
        'Why? Think.'
        >>> with_template(tokenizer, settings={"quick": True})
        Traceback (most recent call last):
        specjax.errors.InputError: chat_template_kwargs: the chat template does not read 'quick'...
    """
    if not file and not settings:
        return tokenizer
    changed = copy(tokenizer)
    if file:
        changed.chat_template = _read(file, f"{section}chat_template")
    name = f"{section}chat_template_kwargs"
    changed.chat_template_kwargs = _checked(changed, read_settings(settings, name), name)
    return changed


def read_settings(settings: str | Settings, name: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return the variables for a template from a mapping or JSON text, without those of no effect.

    Raises:
        InputError: the text is not a JSON object, or a name cannot be a variable of a template.

    Examples:
        >>> from specjax.templates import read_settings
        >>> read_settings('{"enable_thinking": false, "add_generation_prompt": true}')
        {'enable_thinking': False}
        >>> read_settings("think=no")
        Traceback (most recent call last):
        specjax.errors.InputError: chat_template_kwargs='think=no': must be a JSON object, ...
    """
    parsed: Any = settings
    if isinstance(settings, str):
        try:
            parsed = msgspec.json.decode(settings) if settings else {}
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            parsed = None
    if not isinstance(parsed, Mapping) or not all(isinstance(key, str) for key in parsed):
        raise InputError(
            f'{name}={_short(settings)}: must be a JSON object, such as \'{{"enable_thinking":'
            " false}'"
        )
    for key in _OWN.keys() & parsed.keys():
        if not any(
            type(parsed[key]) is type(neutral) and parsed[key] == neutral for neutral in _OWN[key]
        ):
            raise InputError(f"{name}: {key!r} is not a variable of a template; leave it out")
    return {key: value for key, value in parsed.items() if key not in _OWN}


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """Return the variables that the tokenizer passes to its template in every chat.

    Examples:
        >>> from specjax.templates import settings_of
        >>> settings_of(specjax.load("embedded").tokenizer)
        {}
    """
    return dict(getattr(tokenizer, "chat_template_kwargs", {}))


def shown_settings(settings: Settings) -> str:
    """Return variables of a chat template as JSON text, as options and configurations have them.

    Examples:
        >>> from specjax.templates import shown_settings
        >>> shown_settings({"enable_thinking": False})
        '{"enable_thinking": false}'
    """
    return json.dumps(dict(settings), sort_keys=True, ensure_ascii=False, default=str)


_A_ROUND = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "c"},
    {"role": "user", "content": "d"},
)


def have_same_effect(tokenizer: Any, settings: Settings, other_settings: Settings) -> bool:
    """Return True if a chat template makes the same of chats with either variables.

    A chat with a thought is rendered with both: as a prompt, and with its answer.

    Examples:
        >>> from specjax.templates import have_same_effect
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{{ mood or 'good' }}"
        >>> have_same_effect(tokenizer, {}, {"mood": "good"})
        True
        >>> have_same_effect(tokenizer, {}, {"mood": "bad"})
        False
    """
    if dict(settings) == dict(other_settings):
        return True
    plain = without_settings(tokenizer)

    def rendered(variables: Settings) -> tuple[str, str]:
        prompt = renderer(plain, variables)(_A_ROUND)
        return prompt, renderer(plain, variables, end="messages")(_A_ROUND[:2])

    try:
        return rendered(settings) == rendered(other_settings)
    except Exception:  # a template is code of the checkpoint and may raise any error
        return False


def check_is_chat(is_chat: bool, file: str, settings: str | Settings) -> None:
    """Refuse, with an InputError, a chat template or its variables where no prompt is a chat.

    Examples:
        >>> from specjax.templates import check_is_chat
        >>> check_is_chat(False, "qwen3.jinja", "")
        Traceback (most recent call last):
        specjax.errors.InputError: chat_template='qwen3.jinja': it applies to chats only; ...
    """
    for name, value in (("chat_template", file), ("chat_template_kwargs", settings)):
        if value and not is_chat:
            raise InputError(
                f"{name}={_short(value)}: it applies to chats only; give --chat, or in Python"
                " messages, or leave it out"
            )


def without_settings(tokenizer: Any) -> Any:
    """Return a copy of the tokenizer that passes no variables to its chat template.

    Examples:
        >>> from specjax.templates import settings_of, with_template, without_settings
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages }}{{ mood }}"
        >>> settings_of(without_settings(with_template(tokenizer, settings={"mood": "!"})))
        {}
    """
    changed = copy(tokenizer)
    changed.chat_template_kwargs = {}
    return changed


def names_read(tokenizer: Any) -> frozenset[str] | None:
    """Return the variables that a tokenizer's chat template reads and does not set itself.

    Returns None if there is no template, or if it cannot be parsed.

    Examples:
        >>> from specjax.templates import names_read
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> default = "{% if thinks is not defined %}{% set thinks = 1 %}{% endif %}"
        >>> tokenizer.chat_template = default + "{{ thinks }}{{ messages }}"
        >>> sorted(names_read(tokenizer))
        ['messages', 'thinks']
    """
    try:
        return _names(tokenizer.get_chat_template())
    except Exception:  # transformers and Jinja raise many kinds of errors for an invalid template
        return None


def renderer(
    tokenizer: Any,
    settings: Settings | None = None,
    end: ChatEnd = "answer",
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Render:
    """Return a function that renders a chat with a tokenizer's template.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        settings: variables for the template. They override those of the tokenizer.
        end: where the text ends.
        tools: declarations of tools, as in OpenAI's API. None leaves the variable out.

    Examples:
        >>> from specjax.templates import renderer
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
        >>> renderer(tokenizer, {"mood": "!"})([{"role": "user", "content": "Hello"}])
        'Hello!'
    """
    variables = settings_of(tokenizer) | dict(settings or {})
    if tools is not None:
        variables["tools"] = [dict(tool) for tool in tools]
    ending = {
        "add_generation_prompt": end == "answer",
        "continue_final_message": end == "last message",
    }

    def render(messages: Messages) -> str:
        if all(value is not None for message in messages for value in message.values()):
            chat = [dict(message) for message in messages]
            return tokenizer.apply_chat_template(chat, tokenize=False, **ending, **variables)
        # `apply_chat_template` would drop fields that are None.
        return _render(tokenizer, messages, **ending, **variables)[0]

    return render


def answer_spans(
    tokenizer: Any,
    messages: Messages,
    settings: Settings | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[tuple[int, int]]:
    """Return the parts of a chat's text that the template marks as the assistant's.

    These are what stands between ``{% generation %}`` and ``{% endgeneration %}``.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        messages: the chat, in a form that the template reads.
        settings: variables for the template. They override those of the tokenizer.
        tools: declarations of tools, as in OpenAI's API. None leaves the variable out.

    Returns:
        The begin and the end of each part, in characters of the text that `renderer` makes of the
        chat with ``end="messages"``.

    Examples:
        >>> from specjax.templates import answer_spans
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> marked = "{% generation %}{{ m.content }}{% endgeneration %}"
        >>> tokenizer.chat_template = "{% for m in messages %}> " + marked + "{% endfor %}"
        >>> answer_spans(tokenizer, [{"role": "assistant", "content": "Hello"}])
        [(2, 7)]
    """
    variables = settings_of(tokenizer) | dict(settings or {})
    if tools is not None:
        variables["tools"] = [dict(tool) for tool in tools]
    _, spans = _render(tokenizer, messages, return_assistant_tokens_mask=True, **variables)
    return spans


def _render(
    tokenizer: Any, messages: Messages, **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and the parts that are marked as the assistant's if requested."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, spans = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=tokenizer.get_chat_template(),
        **{**tokenizer.special_tokens_map, **options},
    )
    return rendered[0], [(int(begin), int(end)) for begin, end in spans[0]] if spans else []


_A_QUESTION = ({"role": "user", "content": "a"},)
_A_NAME = "specjaxmarktool"
_A_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _A_NAME,
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
        >>> from specjax.templates import takes_tools
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
        return _A_NAME in renderer(tokenizer, tools=[_A_TOOL])(_A_QUESTION)
    except Exception:  # a template is code of the checkpoint and may raise any error
        return False


_SWITCHES = ("enable_thinking", "thinking")


def thinking_switch(tokenizer: Any) -> str | None:
    """Return the variable of a chat template that switches the reasoning; None if there is none.

    A chat is rendered with the variable true and false, and the two texts must differ.

    Examples:
        >>> from specjax.templates import thinking_switch
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
            texts = {renderer(tokenizer, {name: value})(_A_QUESTION) for value in (True, False)}
        except Exception:
            continue
        if len(texts) == 2:
            return name
    return None


def _read(file: str, name: str) -> str:
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}={file!r}: cannot be read ({error}): name a Jinja file") from None
    if not template.strip():
        raise InputError(f"{name}={file!r}: the file is empty: name a Jinja file")
    try:
        _names(template)
    except Exception as error:  # an error of Jinja, or a RecursionError
        where = f", line {error.lineno}" if getattr(error, "lineno", None) else ""  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError(
            f"{name}={file!r}: not a valid Jinja template ({error}{where}): correct it"
        ) from None
    return template


def _names(template: str) -> frozenset[str]:
    from jinja2.meta import find_undeclared_variables

    # This function adds the Jinja extensions of chat templates.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return frozenset(
        find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))
    )


def _checked(tokenizer: Any, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the variables if the template reads all of them and can render a chat with them."""
    if not settings:
        return {}
    if not tokenizer.chat_template:
        raise InputError(
            f"{name}: this tokenizer has no chat template that could use them; name a file with one"
        )
    names_of_template = names_read(tokenizer)
    for key in settings:
        if names_of_template is not None and key not in names_of_template:
            remaining = sorted(
                names_of_template - {"messages", *_OWN, *tokenizer.special_tokens_map}
            )
            if remaining:
                hint = f", but {', '.join(remaining)}{did_you_mean(key, remaining)}"
            else:
                hint = "; leave it out"
            raise InputError(f"{name}: the chat template does not read {key!r}{hint}")
    chat = [{"role": "user", "content": "a"}]
    try:
        renderer(tokenizer)(chat)
    except Exception:  # the template refuses this chat with any variables
        return settings
    try:
        renderer(tokenizer, settings)(chat)
    except Exception as error:
        raise InputError(
            f"{name}={_short(settings)}: the chat template refuses it ({error})"
        ) from None
    return settings


def _short(value: Any) -> str:
    shown = repr(dict(value)) if isinstance(value, Mapping) else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"
