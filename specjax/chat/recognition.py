"""The families whose answers can be parsed, and how the family of a tokenizer is recognized."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from specjax.chat.call_syntax import AnswerSyntax, ThoughtSyntax
from specjax.chat.events import RegionKind
from specjax.chat.forms import ResponseForm
from specjax.errors import InputError, did_you_mean


@dataclass(frozen=True)
class ChatFamily:
    """A family of models whose answers have one form.

    Attributes:
        name: the name of its file in ``specjax/chat/response_templates``.
        title: the models, in words.
        signs: lists of texts. A chat template that has all texts of one of the lists is of this
            family, unless an earlier family fits.
        sources: where the form is described.
        form: how its answers are read.
        syntax: how it writes them, for grammars.

    Examples:
        >>> from specjax.chat import families
        >>> [family.title for family in families() if family.name == "gemma4"]
        ['Gemma 4']
    """

    name: str
    title: str
    signs: tuple[tuple[str, ...], ...]
    sources: tuple[str, ...]
    form: ResponseForm
    syntax: AnswerSyntax


@lru_cache(maxsize=1)
def families() -> tuple[ChatFamily, ...]:
    """Return all families, in the order in which a chat template is compared with them.

    Examples:
        >>> from specjax.chat import families
        >>> families()[0].name
        'qwen3_5'
    """
    directory = files("specjax.chat") / "response_templates"
    data = {
        file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"))
        for file in directory.iterdir()
        if file.name.endswith(".json")
    }
    ordered = sorted(data, key=lambda name: data[name]["rank"])
    return tuple(_family(name, data[name]) for name in ordered)


def _family(name: str, data: Mapping[str, Any]) -> ChatFamily:
    kinds = {field: RegionKind(kind) for field, kind in data.get("kinds", {}).items()}
    return ChatFamily(
        name,
        data["title"],
        tuple(map(tuple, data["signs"])),
        tuple(data["sources"]),
        ResponseForm.from_template(data["response_template"], kinds, f"{name}.json"),
        AnswerSyntax.from_data(data["syntax"]),
    )


def family_form(name: str) -> ResponseForm:
    """Return the form of a family's answers, by the name of the family.

    Raises:
        InputError: there is no such family.

    Examples:
        >>> from specjax.chat import AnswerParser, family_form
        >>> AnswerParser(family_form("mistral_list")).parse("Hello").content
        'Hello'
    """
    for family in families():
        if family.name == name:
            return family.form
    names = [family.name for family in families()]
    raise InputError(f"name={name!r}: no such family{did_you_mean(name, names)}")


def family_of(tokenizer: Any) -> ChatFamily | None:
    """Return the family that a tokenizer's chat template belongs to; None if there is none.

    The text of the template is compared with the signs of the families. It is not run.

    Examples:
        >>> from specjax.chat import family_of
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "<|im_start|> {{ tools }} <tool_call></tool_call>"
        >>> family_of(tokenizer).name
        'qwen3'
    """
    text = _template_text(tokenizer)
    for family in families():
        if any(all(sign in text for sign in signs) for signs in family.signs):
            return family
    return None


def _template_text(tokenizer: Any) -> str:
    """Return the chat template that chats with tools use, or all if there are several."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""


def response_form(tokenizer: Any) -> ResponseForm | None:
    """Return how a model writes its answers; None if that is not known.

    A ``response_template`` in the tokenizer's files comes first, then the family of its chat
    template.

    Raises:
        InputError: the ``response_template`` is not valid.

    Examples:
        >>> from specjax.chat import response_form
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> response_form(tokenizer) is None
        True
        >>> fields = {"thinking": {"open": "(", "close": ")"}, "content": {}}
        >>> tokenizer.response_template = {"start_anchor": "Model:", "fields": fields}
        >>> response_form(tokenizer).regions[0].kind.value
        'reasoning'
    """
    template = _own_template(tokenizer)
    if template is not None:
        return ResponseForm.from_template(template)
    family = family_of(tokenizer)
    return None if family is None else family.form


def answer_syntax(tokenizer: Any) -> AnswerSyntax:
    """Return how a model writes its answers, for grammars of them; empty if it is not known.

    A ``response_template`` in the tokenizer's files says how answers are read, and not how calls
    are written. So of such a model only a thought is known, if its tags are constant texts.

    Examples:
        >>> from specjax.chat import answer_syntax
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> answer_syntax(tokenizer).calls is None
        True
        >>> tokenizer.chat_template = "<|im_start|> {{ tools }} <tool_call></tool_call>"
        >>> answer_syntax(tokenizer).calls.trigger
        '<tool_call>'
    """
    template = _own_template(tokenizer)
    if template is not None:
        return AnswerSyntax(thought=_thought_of(template))
    family = family_of(tokenizer)
    return AnswerSyntax() if family is None else family.syntax


def _thought_of(template: Any) -> ThoughtSyntax | None:
    """Return the thought of a response template, if constant texts begin and end it."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    for name in ("reasoning_content", "reasoning", "thinking"):
        part = fields.get(name) if isinstance(fields, Mapping) else None
        if isinstance(part, Mapping):
            begin, end = part.get("open"), part.get("close")
            if isinstance(begin, str) and isinstance(end, str) and begin and end:
                return ThoughtSyntax(begin, end)
    return None


def _own_template(tokenizer: Any) -> Any:
    """Return the ``response_template`` of a tokenizer's files; None if there is none."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:  # an older transformers keeps what it does not know
        template = getattr(tokenizer, "init_kwargs", {}).get("response_template")
    return template
