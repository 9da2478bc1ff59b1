"""The grammar of a request: OpenAI's ``response_format``, and vLLM's parameters.

A request states a grammar at most once. Whatever would change the text and is not supported is
refused by name.
"""

from collections.abc import Mapping
from typing import Any

from specjax.errors import InputError
from specjax.grammars import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
)
from specjax.serving.http.errors import RequestError, invalid

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older parameters, with the names that ``structured_outputs`` has for them."""

PARAMETERS = ("response_format", "structured_outputs", *_GUIDED)
"""The parameters that state a grammar."""

_NEUTRAL_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False, True),
    "disable_fallback": (False, True),  # there is one backend
    "disable_additional_properties": (False,),
    "whitespace_pattern": ("",),
}
"""The options of ``structured_outputs``, with the values that are supported."""


def read_grammar(stated: Mapping[str, Any], *, is_supported: bool) -> tuple[str, Grammar | None]:
    """Return the grammar of a request, and the parameter that states it.

    Args:
        stated: the values of `PARAMETERS` in the request; None for those that are missing.
        is_supported: whether the server takes grammars.

    Returns:
        The parameter's name and the grammar; ``""`` and None if the request states no grammar.

    Raises:
        RequestError: the grammar is invalid or not supported, or there are several.

    Examples:
        >>> from specjax.serving.http.grammars import read_grammar
        >>> read_grammar({"guided_choice": ["yes", "no"]}, is_supported=True)
        ('guided_choice', Choice(...yes...))
        >>> read_grammar({"response_format": {"type": "text"}}, is_supported=True)
        ('', None)
    """
    grammars: dict[str, Grammar] = {}
    for name in PARAMETERS:
        value = stated.get(name)
        if value is None:
            continue
        try:
            grammar = _read(name, value)
        except InputError as error:
            raise invalid(name, f"{name}: {error}") from None
        if grammar is not None:
            grammars[name] = grammar
    if len(grammars) > 1:
        first, second, *_ = grammars
        raise invalid(second, f"{second}: the request has {first} too; give one of them")
    if not grammars:
        return "", None
    ((name, grammar),) = grammars.items()
    if not is_supported:
        message = f"{name}: this server takes no grammars (--grammars off); leave it out"
        raise invalid(name, message, code="unsupported_parameter")
    return name, grammar


def _read(name: str, value: Any) -> Grammar | None:
    """Return the grammar that a parameter states; None: it states none."""
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return _of_structured_outputs(value)
    return _of_constraint(name, _GUIDED[name], value) if value not in ("", []) else None


def _of_response_format(value: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of OpenAI's ``response_format``.

    A text always satisfies the schema, whether ``strict`` is true or not.
    """
    kind = value.get("type")
    fields = {"text": (), "json_object": (), "json_schema": ("json_schema",)}.get(str(kind))
    unknown = [key for key in value if fields is not None and key not in ("type", *fields)]
    if unknown:
        raise _not_supported(
            "response_format", f"{unknown[0][:40]!r} beside type={kind!r}", "the type alone"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonObject()
    if kind == "json_schema":
        named = value.get("json_schema")
        if not isinstance(named, Mapping) or "schema" not in named:
            raise invalid(
                "response_format",
                "response_format.json_schema.schema: it is missing; give the JSON schema",
            )
        return JsonSchema(_a_schema("response_format.json_schema.schema", named["schema"]))
    if kind == "structural_tag":
        return StructuralTag(value)
    raise _not_supported(
        "response_format",
        f"type={kind!r}",
        "'text', 'json_object', 'json_schema' or 'structural_tag'",
    )


def _of_structured_outputs(value: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of vLLM's ``structured_outputs``."""
    name = "structured_outputs"
    constraints = {}
    for key, part in value.items():
        if part is None:
            continue
        if key in _NEUTRAL_OPTIONS:
            if not any(part is same or part == same == "" for same in _NEUTRAL_OPTIONS[key]):
                raise _not_supported(name, f"{key}={part!r}", "nothing for it")
        elif key in _KINDS:
            constraints[key] = part
        elif not key.startswith("_"):  # vLLM's own fields
            raise _not_supported(name, f"{key!r}", ", ".join(_KINDS))
    if len(constraints) > 1:
        raise invalid(name, f"{name}: it has {' and '.join(constraints)}; give one of them")
    is_compact = bool(value.get("disable_any_whitespace"))
    for key, part in constraints.items():
        return _of_constraint(name, key, part, whitespace=not is_compact)
    return None


def _of_constraint(name: str, kind: str, value: Any, *, whitespace: bool = True) -> Grammar | None:
    """Return the grammar of one of `_KINDS`."""
    if kind == "json":
        return JsonSchema(_a_schema(name, value), whitespace=whitespace)
    if kind == "json_object":
        if not isinstance(value, bool):
            raise invalid(name, f"{name}: json_object={value!r}: give true or false")
        return JsonObject(whitespace=whitespace) if value else None
    makers = {
        "regex": Regex,
        "choice": Choice,
        "grammar": Lark,
        "structural_tag": StructuralTag,
    }
    return makers[kind](value)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _a_schema(name: str, value: Any) -> Any:
    """Return a JSON schema, an object, a bool or JSON text, after a check of its type."""
    if isinstance(value, str | bool | Mapping):
        return value
    raise invalid(name.partition(".")[0], f"{name}: a JSON schema is an object, true or false")


def _not_supported(name: str, what: str, remedy: str) -> RequestError:
    return invalid(
        name, f"{name}: {what} is not supported; give {remedy}", code="unsupported_parameter"
    )
