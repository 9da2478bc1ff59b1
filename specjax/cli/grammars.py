"""The options of commands that constrain a text by a grammar."""

from collections.abc import Sequence
from pathlib import Path

from specjax.errors import InputError
from specjax.grammars import Choice, Grammar, JsonSchema, Regex


def read_grammar(json_schema: str, regex: str, choice: Sequence[str]) -> Grammar | None:
    """Return the grammar of the options; None if there is none.

    Args:
        json_schema: a file with a JSON schema; "" for none.
        regex: a regular expression; "" for none.
        choice: texts to choose from; empty for none.

    Raises:
        InputError: more than one option is given, or one cannot be used.

    Examples:
        >>> from specjax.cli.grammars import read_grammar
        >>> read_grammar("", "[0-9]+", ())
        Regex('{"grammars": [{"lark_grammar": "start: /[0-9]+/"}]}')
    """
    options = {"json_schema": json_schema, "regex": regex, "choice": choice}
    stated = [name for name, value in options.items() if value]
    if len(stated) > 1:
        raise InputError(f"{stated[1]}: {stated[0]} constrains the text already; give one of them")
    if json_schema:
        try:
            return JsonSchema(Path(json_schema).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"json_schema={json_schema!r}: cannot be read: {error}") from None
    if regex:
        return Regex(regex)
    return Choice(list(choice)) if choice else None
