"""The one kind of error that a user can put right, and what its messages suggest."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class InputError(ValueError):
    """An argument, file or setting that cannot be used. The message names it, its value, and what to do."""


class LogitsError(RuntimeError):
    """The target's logits of some rows were NaN or +inf, or all -inf: no token can be drawn from them. Usually its weights are
    broken, or numbers became too large for their type.

    Attributes:
        rows: numbers of those rows in the batch.
        positions: of each, that of the token which could not be drawn, counted from the beginning of its text.
        result: what all rows have come to, where there are several: those without an error are complete, the others end before
            that position. None: the error is of one text alone, whose tokens are told elsewhere.

    Examples:
        >>> from specjax.errors import LogitsError
        >>> print(str(LogitsError([1], [12])).partition(" (")[0])
        row 1: the target's logits for position 12 are no numbers to draw from
    """

    def __init__(self, rows: Sequence[int], positions: Sequence[int], result: Any = None) -> None:
        self.rows, self.positions, self.result = tuple(rows), tuple(positions), result
        failures = ", ".join(
            f"row {row}: the target's logits for position {position}" for row, position in zip(rows, positions, strict=True)
        )
        super().__init__(
            f"{failures} are no numbers to draw from (NaN, +inf, or -inf for every token): check its weights, or load it with "
            'dtype="float32"'
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the name nearest to ``word``; nothing where none is near.

    Args:
        word: as it was written. Capitals and underscores count as small letters and hyphens.
        known: the names that there are.

    Examples:
        >>> from specjax.errors import did_you_mean
        >>> did_you_mean("promt_lookup", ("early-exit", "prompt-lookup"))
        '; did you mean prompt-lookup?'
        >>> did_you_mean("bush", ("early-exit", "prompt-lookup"))
        ''
    """
    by_spelling, spelling = {_spelling(name): name for name in known}, _spelling(word)
    begun = [name for name in by_spelling if len(spelling) > 2 and name.startswith(spelling)]
    nearest = begun or difflib.get_close_matches(spelling, by_spelling, n=1, cutoff=0.6)
    return f"; did you mean {by_spelling[nearest[0]]}?" if nearest else ""


def _spelling(name: str) -> str:
    return name.lower().replace("_", "-")


_ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "stop_token_ids": "eos_token_ids",
    "rng": "key",
}
"""Arguments as other libraries call them, and ours."""


def check_options(function: str, options: Mapping[str, Any], takes: Callable[..., Any], *others: str) -> None:
    """Refuse keyword arguments that a function does not have, before it passes them on.

    Args:
        function: its name, for the message.
        options: the keyword arguments.
        takes: the function that they are passed on to. Its arguments without a default, such as a prompt, are no options.
        others: names of further arguments, which the first function takes out.

    Raises:
        InputError: names the first argument that neither has, its value, and the nearest one that there is.

    Examples:
        >>> from specjax.errors import check_options
        >>> check_options("generate", {"max_tokens": 8}, specjax.pipeline.settings)
        Traceback (most recent call last):
        specjax.errors.InputError: max_tokens=8: generate has no argument of that name; did you mean max_new_tokens?
    """
    parameters = inspect.signature(takes).parameters.values()
    known = [*(each.name for each in parameters if each.default is not each.empty), *others]
    for name, value in options.items():
        if name in known:
            continue
        ours = _ELSEWHERE.get(name)
        hint = f"; did you mean {ours}?" if ours in known else did_you_mean(name, known)
        hint = hint or f"; its arguments are {', '.join(known)}"
        raise InputError(f"{name}={value!r}: {function} has no argument of that name{hint}")
