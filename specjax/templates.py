"""Chat templates: which one a tokenizer has, what it is given beside the messages, and the text that it makes of a chat.

A template is a program in Jinja that comes with a checkpoint. It is run in transformers' sandbox, and nowhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from specjax.errors import InputError, did_you_mean

Messages = Sequence[Mapping[str, Any]]
"""A chat: ``{"role": "user", "content": "…"}`` and so on, the oldest message first. A message may have more for the model's
template to read, as OpenAI's interface has it: ``tool_calls``, ``tool_call_id``, ``reasoning_content``."""

Settings = Mapping[str, Any]
"""What a template is given beside the messages, such as ``{"enable_thinking": False}``."""

Render = Callable[[Messages], str]
"""The text of a chat up to where its answer begins."""

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
"""Names that are no settings: arguments of transformers' functions, or what a template is given in any case. Beside each the
values with which it changes nothing."""


def with_template(tokenizer: Any, file: str = "", settings: str | Settings = "", section: str = "") -> Any:
    """The same tokenizer with another chat template, and with what every rendering gives it beside the messages.

    Args:
        tokenizer: transformers' own. It is left as it is.
        file: with a Jinja template, ``chat_template``; empty: the tokenizer's own.
        settings: ``chat_template_kwargs``, a mapping or the JSON text of one; empty: none.
        section: what stands before these two names in errors, such as ``data.``.

    Raises:
        InputError: the file is no template, or the settings are none that the template reads.

    Examples:
        >>> from specjax.templates import renderer, with_template
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{% if thinks %} Think.{% endif %}"
        >>> renderer(with_template(tokenizer, settings='{"thinks": true}'))([{"role": "user", "content": "Why?"}])
        'Why? Think.'
        >>> with_template(tokenizer, settings={"quick": True})
        Traceback (most recent call last):
        specjax.errors.InputError: chat_template_kwargs: the chat template does not read 'quick', but thinks
    """
    if not file and not settings:
        return tokenizer
    made = copy(tokenizer)
    if file:
        made.chat_template = _read(file, f"{section}chat_template")
    name = f"{section}chat_template_kwargs"
    made.chat_template_kwargs = _checked(made, read_settings(settings, name), name)
    return made


def read_settings(settings: str | Settings, name: str = "chat_template_kwargs") -> dict[str, Any]:
    """What a template is given, from a mapping or from JSON text; without what changes nothing.

    Raises:
        InputError: it is no JSON object, or has a name that is not for a template.

    Examples:
        >>> from specjax.templates import read_settings
        >>> read_settings('{"enable_thinking": false, "add_generation_prompt": true}')
        {'enable_thinking': False}
        >>> read_settings("think=no")
        Traceback (most recent call last):
        specjax.errors.InputError: chat_template_kwargs='think=no': no JSON object; write '{"enable_thinking": false}'
    """
    found: Any = settings
    if isinstance(settings, str):
        try:
            found = msgspec.json.decode(settings) if settings else {}
        except (ValueError, RecursionError):  # msgspec's own are ValueErrors
            found = None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise InputError(f"{name}={_short(settings)}: no JSON object; write '{{\"enable_thinking\": false}}'")
    for key in _OWN.keys() & found.keys():
        if not any(type(found[key]) is type(neutral) and found[key] == neutral for neutral in _OWN[key]):
            raise InputError(f"{name}: {key!r} is no setting of a template; leave it out")
    return {key: value for key, value in found.items() if key not in _OWN}


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """What every rendering gives the tokenizer's template beside the messages.

    Examples:
        >>> from specjax.templates import settings_of
        >>> settings_of(specjax.load("embedded").tokenizer)
        {}
    """
    return dict(getattr(tokenizer, "chat_template_kwargs", {}))


def check_is_chat(is_chat: bool, file: str, settings: str) -> None:
    """Refuse, with an InputError, a chat template or settings of one where nothing is put into a template.

    Examples:
        >>> from specjax.templates import check_is_chat
        >>> check_is_chat(False, "qwen3.jinja", "")
        Traceback (most recent call last):
        specjax.errors.InputError: chat_template='qwen3.jinja': is read for chats alone; give --chat, or leave it out
    """
    for name, value in (("chat_template", file), ("chat_template_kwargs", settings)):
        if value and not is_chat:
            raise InputError(f"{name}={_short(value)}: is read for chats alone; give --chat, or leave it out")


def without_settings(tokenizer: Any) -> Any:
    """The same tokenizer, whose template is given nothing beside the messages.

    Examples:
        >>> from specjax.templates import settings_of, with_template, without_settings
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages }}{{ mood }}"
        >>> settings_of(without_settings(with_template(tokenizer, settings={"mood": "!"})))
        {}
    """
    made = copy(tokenizer)
    made.chat_template_kwargs = {}
    return made


def names_read(tokenizer: Any) -> frozenset[str] | None:
    """The names that a tokenizer's chat template reads and does not define. None: it has none, or one that cannot be read.

    Examples:
        >>> from specjax.templates import names_read
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{% if thinks is not defined %}{% set thinks = 1 %}{% endif %}{{ thinks }}{{ messages }}"
        >>> sorted(names_read(tokenizer))
        ['messages', 'thinks']
    """
    try:
        return _names(tokenizer.get_chat_template())
    except Exception:  # whatever transformers and Jinja raise at what is no template
        return None


def renderer(tokenizer: Any, settings: Settings | None = None) -> Render:
    """How a tokenizer's template writes a chat; ``settings`` go over those that it has in any case.

    Examples:
        >>> from specjax.templates import renderer
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
        >>> renderer(tokenizer, {"mood": "!"})([{"role": "user", "content": "Hello"}])
        'Hello!'
    """
    given = settings_of(tokenizer) | dict(settings or {})

    def render(messages: Messages) -> str:
        chat = [dict(each) for each in messages]
        if all(value is not None for each in messages for value in each.values()):
            return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **given)
        from transformers.utils.chat_template_utils import render_jinja_template  # the other one drops what is None

        made, _ = render_jinja_template(
            conversations=[chat],
            chat_template=tokenizer.get_chat_template(),
            add_generation_prompt=True,
            **{**tokenizer.special_tokens_map, **given},
        )
        return made[0]

    return render


def _read(file: str, name: str) -> str:
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}={file!r}: cannot be read ({error}): name a Jinja file") from None
    if not template.strip():
        raise InputError(f"{name}={file!r}: is empty: name a Jinja file")
    try:
        _names(template)
    except Exception as error:  # Jinja's, and Python's where it is nested too deeply
        where = f", line {error.lineno}" if getattr(error, "lineno", None) else ""  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError(f"{name}={file!r}: is no Jinja template ({error}{where}): put it right") from None
    return template


def _names(template: str) -> frozenset[str]:
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template  # with the extensions that templates use

    return frozenset(find_undeclared_variables(_compile_jinja_template(template).environment.parse(template)))


def _checked(tokenizer: Any, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """``settings`` that the template reads, and with which it does not stumble over a chat that it reads otherwise."""
    if not settings:
        return {}
    if not tokenizer.chat_template:
        raise InputError(f"{name}: this tokenizer has no chat template to be given them; name a file with one")
    known = names_read(tokenizer)
    for key in settings:
        if known is not None and key not in known:
            others = sorted(known - {"messages", *_OWN, *tokenizer.special_tokens_map})
            hint = f", but {', '.join(others)}{did_you_mean(key, others)}" if others else "; leave it out"
            raise InputError(f"{name}: the chat template does not read {key!r}{hint}")
    chat = [{"role": "user", "content": "a"}]
    try:
        renderer(tokenizer)(chat)
    except Exception:  # it refuses this chat in any case, or says so when one is to be written
        return settings
    try:
        renderer(tokenizer, settings)(chat)
    except Exception as error:
        raise InputError(f"{name}={_short(settings)}: the chat template refuses it ({error})") from None
    return settings


def _short(value: Any) -> str:
    shown = repr(dict(value)) if isinstance(value, Mapping) else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"
