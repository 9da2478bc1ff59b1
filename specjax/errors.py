"""Errors that a user can correct, and the suggestions in their messages."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class InputError(ValueError):
    """An argument, file or setting that cannot be used; the message has name, value and remedy."""


def check_minimum(
    minimum: int,
    values: Any,
    names: Iterable[str],
    prefix: str = "",
    error: type[InputError] = InputError,
) -> None:
    """Refuse the first of the named attributes of ``values`` that is below the minimum.

    Args:
        minimum: the smallest value that is allowed.
        values: a configuration.
        names: the names of the attributes.
        prefix: what stands before a name in the error message, such as "method.".
        error: the kind of the error.

    Raises:
        InputError: an attribute is below the minimum. The message has its name and its value.

    Examples:
        >>> from specjax.errors import check_minimum
        >>> from specjax.drafts.shapes import Chain
        >>> check_minimum(6, Chain(5), ["depth"])
        Traceback (most recent call last):
        specjax.errors.InputError: depth=5: must be at least 6
    """
    for name in names:
        if (value := getattr(values, name)) < minimum:
            raise error(f"{prefix}{name}={value}: must be at least {minimum}")


class LogitsError(RuntimeError):
    """Invalid logits of the target, from which no token can be sampled.

    The logits of some rows were NaN or +inf, or -inf for every token. Usually the target's weights
    are broken, or numbers overflowed their data type.

    Attributes:
        rows: the indices of those rows in the batch.
        positions: for each of those rows, the position in its text of the token that could not be
            sampled.
        result: the result of a whole batch. Rows without an error are complete; the others end
            before that position. None if the error concerns a single text, whose tokens are
            reported elsewhere.

    Examples:
        >>> from specjax.errors import LogitsError
        >>> print(str(LogitsError([1], [12])).partition(" (")[0])
        row 1: the target's logits for position 12 are invalid
    """

    def __init__(self, rows: Sequence[int], positions: Sequence[int], result: Any = None) -> None:
        self.rows, self.positions, self.result = tuple(rows), tuple(positions), result
        where = ", ".join(
            f"row {row}: the target's logits for position {position}"
            for row, position in zip(rows, positions, strict=True)
        )
        super().__init__(
            f"{where} are invalid (NaN, +inf, or -inf for every token): check the target's"
            ' weights, or load it with dtype="float32"; if tokens are banned (logit_bias,'
            " allowed_token_ids, bad_words, min_new_tokens), ban fewer"
        )


class NonFiniteError(RuntimeError):
    """NaN or infinity in a training: in a loss, in the gradients, or in the weights.

    Attributes:
        step: the number of the step.

    Examples:
        >>> from specjax.errors import NonFiniteError
        >>> print(str(NonFiniteError(7, "loss nan", "runs/model")).partition(";")[0])
        step 7: the training has a number that is not finite (loss nan)
    """

    def __init__(self, step: int, what: str, output: str) -> None:
        self.step = step
        super().__init__(
            f"step {step}: the training has a number that is not finite ({what}); nothing of this"
            f" step is in output={output!r}. The same command would come to the same numbers: start"
            " a new run with a lower optimizer.learning_rate or another seed. If a checkpoint was"
            f" saved, the new run may begin with its student (init_from={output + '/latest'!r})"
        )


class GrammarError(InputError):
    """Texts that cannot satisfy their grammars, because no token is legal although they must go on.

    The grammar needs a token that ends the text, or one that the tokenizer does not have.

    Attributes:
        rows: the indices of those rows in the batch.
        result: the result of the whole batch. The other rows are complete. None if the error
            concerns a single text.

    Examples:
        >>> from specjax.errors import GrammarError
        >>> print(str(GrammarError([1])).partition(": the next")[0])
        grammar: row 1 cannot go on
    """

    def __init__(self, rows: Sequence[int], result: Any = None) -> None:
        self.rows, self.result = tuple(rows), result
        where = ", ".join(f"row {row}" for row in self.rows)
        super().__init__(
            f"grammar: {where} cannot go on: the next token must be a stop token, or one that the"
            " tokenizer does not have; change eos_token_ids or the grammar"
        )


class ThinkingBudgetError(GrammarError):
    """Texts whose thinking budget forces a token that their grammars do not allow.

    Attributes:
        rows: the indices of those rows in the batch.
        result: as for `GrammarError`.

    Examples:
        >>> from specjax.errors import ThinkingBudgetError
        >>> print(ThinkingBudgetError([1], token=8))
        thinking_budget: row 1 cannot go on: token 8, which ends the thought, is not legal in ...
    """

    def __init__(self, rows: Sequence[int], token: int, result: Any = None) -> None:
        super().__init__(rows, result)
        where = ", ".join(f"row {row}" for row in self.rows)
        self.args = (
            f"thinking_budget: {where} cannot go on: token {token}, which ends the thought, is not"
            " legal in the grammar; let the grammar begin after the thought (specjax.After), or"
            " leave out one of the two",
        )


class GrammarLimitError(InputError):
    """A text whose grammar has become too complex, so that each mask takes long.

    Examples:
        >>> from specjax.errors import GrammarLimitError
        >>> print(GrammarLimitError("too many items"))
        grammar: the text cannot go on, as its masks take too long (too many items); make the ...
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"grammar: the text cannot go on, as its masks take too long ({reason}); make the"
            " grammar simpler and less ambiguous"
        )


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" with the name closest to ``word``; "" if no name is close.

    Args:
        word: the word as the user wrote it. Upper case and underscores are ignored.
        names: the valid names.

    Examples:
        >>> from specjax.errors import did_you_mean
        >>> did_you_mean("promt_lookup", ("early-exit", "prompt-lookup"))
        '; did you mean prompt-lookup?'
        >>> did_you_mean("bush", ("early-exit", "prompt-lookup"))
        ''
    """
    by_spelling, spelling = {_spelling(name): name for name in names}, _spelling(word)
    prefixed = [name for name in by_spelling if len(spelling) > 2 and name.startswith(spelling)]
    nearest = prefixed or difflib.get_close_matches(spelling, by_spelling, n=1, cutoff=0.6)
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
"""Names of arguments in other libraries, and the names here."""


def check_options(
    function: str, options: Mapping[str, Any], takes: Callable[..., Any], *extra: str
) -> None:
    """Refuse unknown keyword arguments before a function passes them on.

    Args:
        function: the function's name, for the error message.
        options: the keyword arguments.
        takes: the function that receives them. Its arguments without a default, such as a prompt,
            are not options.
        extra: further names that the first function handles itself.

    Raises:
        InputError: an argument is unknown. The message has its name, its value, and the closest
            valid name.

    Examples:
        >>> from specjax.errors import check_options
        >>> check_options("generate", {"max_tokens": 8}, specjax.pipeline.settings)
        Traceback (most recent call last):
        specjax.errors.InputError: max_tokens=8: generate has no argument of that name; did you ...
    """
    parameters = inspect.signature(takes).parameters.values()
    names = [
        *(parameter.name for parameter in parameters if parameter.default is not parameter.empty),
        *extra,
    ]
    for name, value in options.items():
        if name in names:
            continue
        ours = _ELSEWHERE.get(name)
        hint = f"; did you mean {ours}?" if ours in names else did_you_mean(name, names)
        hint = hint or f"; its arguments are {', '.join(names)}"
        raise InputError(f"{name}={value!r}: {function} has no argument of that name{hint}")
