"""The options of commands that constrain a text by a grammar."""

from collections.abc import Sequence
from pathlib import Path

from specjax.errors import InputError
from specjax.grammars import After, Choice, Grammar, GrammarCompiler, JsonSchema, Regex


def read_grammar(
    json_schema: str, regex: str, choice: Sequence[str], after: str = ""
) -> Grammar | None:
    """Return the grammar of the options; None if there is none.

    It is compiled once for a vocabulary of single bytes, so that a grammar with a part that is not
    supported is refused before a model is loaded.

    Args:
        json_schema: a file with a JSON schema; "" for none.
        regex: a regular expression; "" for none.
        choice: texts to choose from; empty for none.
        after: a text or an added token after which the grammar begins; "" for at once.

    Raises:
        InputError: more than one option is given, or one cannot be used. The message names it.

    Examples:
        >>> from specjax.cli.grammars import read_grammar
        >>> read_grammar("", "[0-9]+", ())
        Regex('{"grammars": [{"lark_grammar": "start: /[0-9]+/"}]}')
    """
    options = {"json_schema": json_schema, "regex": regex, "choice": choice}
    stated = [name for name, value in options.items() if value]
    if len(stated) > 1:
        raise InputError(f"{stated[1]}: {stated[0]} constrains the text already; give one of them")
    if not stated:
        if after:
            raise InputError(
                f"grammar_after={after!r}: there is no grammar; give json_schema, regex or choice"
            )
        return None
    if json_schema:
        try:
            grammar = JsonSchema(Path(json_schema).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"json_schema={json_schema!r}: cannot be read: {error}") from None
        except InputError as error:
            raise InputError(f"json_schema={json_schema!r}: {error}") from None
    else:
        grammar = Regex(regex) if regex else Choice(list(choice))
    # The byte 255 is not a part of any UTF-8 text, so its token can be the one that ends a text.
    compiler = GrammarCompiler.of_tokens([bytes([byte]) for byte in range(255)] + [b""], end_id=255)
    try:
        compiler.compile(grammar)
    except InputError as error:
        raise InputError(f"{stated[0]}={options[stated[0]]!r}: {error}") from None
    return After(after, grammar) if after else grammar
