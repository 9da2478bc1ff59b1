"""Texts and regular expressions in the notation that llguidance reads."""

import json
import re

from specjax.errors import InputError


def quoted(text: str) -> str:
    r"""Return a constant text in Lark's notation.

    Examples:
        >>> from specjax.grammars.notation import quoted
        >>> print(quoted('a"b'))
        "a\"b"
    """
    return json.dumps(text).replace("\x7f", r"\u007f")


def regex_terminal(pattern: str) -> str:
    r"""Return a regular expression in Lark's notation: between slashes.

    Args:
        pattern: the expression. `check_regex` says what is refused.

    Examples:
        >>> from specjax.grammars.notation import regex_terminal
        >>> print(regex_terminal(r"a/b"))
        /a\/b/
    """
    if not pattern:
        return '""'
    check_regex(pattern)
    # A slash would end the pattern in Lark's notation, and so would a line break.
    replacements = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", r"\Z": r"\z"}
    escaped = re.sub(
        r"\\.|/|\n",
        lambda match: replacements.get(match[0], match[0]),
        pattern,
        flags=re.DOTALL,
    )
    return f"/{escaped}/"


def check_regex(pattern: str) -> None:
    r"""Raise InputError where Rust and other languages would read a pattern in different ways.

    Within a class in brackets, Rust takes another bracket for a class in the class, and ``&&``,
    ``--`` and ``~~`` for operators. In other languages these are characters. A backslash at the end
    is refused, too: it would escape the slash after it.

    Examples:
        >>> from specjax.grammars.notation import check_regex
        >>> check_regex(r"[\[a&]")
        >>> check_regex("[[:alpha:]]")
        Traceback (most recent call last):
        specjax.errors.InputError: pattern='[[:alpha:]]': '[' within a class has another meaning...
    """
    if re.search(r"(?<!\\)(\\\\)*\\\Z", pattern):
        raise InputError(
            f"pattern={pattern!r}: the backslash at its end escapes nothing; write two for one"
            " backslash, or leave it out"
        )
    in_class = False
    for match in re.finditer(r"\\.|\[\^?\]?|\]|&&|--|~~", pattern, flags=re.DOTALL):
        token = match[0]
        if token.startswith("\\"):
            continue
        if not in_class:
            in_class = token.startswith("[")
        elif token == "]":
            in_class = False
        else:
            raise InputError(
                f"pattern={pattern!r}: {token[:2].rstrip('^]')!r} within a class has another"
                " meaning in other languages; write a backslash before it if it is a character"
            )
