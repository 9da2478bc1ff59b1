"""The options of a generation, checked on the host before anything is compiled."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adjustments import Adjustments
from specjax.arguments import is_whole, one_or_each
from specjax.decoding.verification import RULES
from specjax.drafts.shapes import DraftShape, DynamicTree, StaticTree, UnionTree
from specjax.drafts.speculation import DraftLimit, Stated
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, Grammar, Matcher, ThinkingBudget
from specjax.models.config import ModelConfig
from specjax.sampling import Rule, Sampling, check_rule
from specjax.token_biases import TokenBiases

Grammars = CompiledGrammar | Grammar | Sequence[CompiledGrammar | Grammar | None] | None
"""The grammar of all rows, or one for each row with None for a row without a grammar."""

ThinkingBudgets = ThinkingBudget | Sequence[ThinkingBudget | None] | None
"""The thinking budget of all rows, or one for each row with None for a row without one."""

Speculations = Stated | Sequence[Stated]
"""How far all rows speculate, or each row with None for a row without a limit."""


@dataclass(frozen=True)
class GenerationOptions:
    """The options of a generation. `specjax.generate` takes the same by name.

    Attributes:
        max_new_tokens: the largest number of tokens to emit; one number, or one for each row.
        sampling: the sampling parameters; greedy by default.
        key: one random key, which is folded with each row's index, or ``[B]`` keys. A row's output
            depends on its own key and prompt alone. None for ``jax.random.key(0)``.
        eos_token_ids: the ids that end a row; they are emitted. One sequence of ids for all rows,
            or one sequence for each row. None for the target's own (`ModelConfig.eos_token_ids`);
            ``()`` for none.
        rule: how tokens are drawn and drafts verified, see `specjax.sampling.Rule`. Every rule is
            exact. None for `default_rule`. "block" and "rejection" verify chains only.
        min_new_tokens: the number of tokens that are emitted before an end-of-sequence token may
            come. Until then end-of-sequence tokens have probability 0 for target and drafter. One
            number, or one for each row. Only 0 is possible if every token of the vocabulary ends
            the text.
        grammar: the grammar that every text must satisfy, compiled for the target's tokenizer
            (`specjax.grammars.GrammarCompiler`); or one for each row, with None for a row without a
            grammar. With a grammar the default of ``rule`` is "coupled". A
            `specjax.pipeline.TextGenerator` compiles grammars itself.
        biases: the `specjax.token_biases.TokenBiases` of all rows, or one for each row, with None
            for a row without any.
        thinking_budget: the `specjax.ThinkingBudget` of all rows, or one for each row, with None
            for a row without one. With a budget the default of ``rule`` is "coupled".
        speculation: how far rows speculate, see `specjax.drafts.speculation.DraftLimit.of`: "off"
            for no drafts, or the largest depth of a draft; one, or one for each row. None for no
            limit.

    Examples:
        >>> from specjax.decoding import GenerationOptions
        >>> options = GenerationOptions(max_new_tokens=(4, 8), eos_token_ids=(2,))
        >>> options.check(target.config, batch=2).max_new_tokens.tolist()
        [4, 8]
        >>> GenerationOptions(max_new_tokens="4")
        Traceback (most recent call last):
        specjax.errors.InputError: max_new_tokens='4': must be a number, or one number for each row
    """

    max_new_tokens: Any = 64
    sampling: Sampling = Sampling(temperature=0.0)
    key: jax.Array | None = None
    eos_token_ids: Sequence[Any] | None = None
    rule: Rule | None = None
    min_new_tokens: Any = 0
    grammar: Grammars = None
    biases: TokenBiases | Sequence[TokenBiases | None] | None = None
    thinking_budget: ThinkingBudgets = None
    speculation: Speculations = None

    def __post_init__(self) -> None:
        """Raise InputError for values of the wrong type.

        `check` checks what depends on the target and the number of rows.
        """
        one_or_each("max_new_tokens", self.max_new_tokens)
        one_or_each("min_new_tokens", self.min_new_tokens)
        # Not isinstance: the other parameters of SamplingParams, a subclass, would be ignored.
        if type(self.sampling) is not Sampling:
            raise InputError(
                f"sampling={self.sampling!r}: give a specjax.Sampling, such as"
                " specjax.Sampling(temperature=0.7)"
            )
        if self.key is not None:
            as_key(self.key)
        if self.eos_token_ids is not None:
            _rows_of_ids(self.eos_token_ids)
        if self.rule is not None:
            check_rule(self.rule)

    def check(self, config: ModelConfig, batch: int) -> "CheckedOptions":
        """Return the checked options of ``batch`` rows.

        Raises:
            InputError: An option does not fit the target's configuration or the number of rows.
        """
        most = self._counts(
            "max_new_tokens", batch, 1, 2**31 - 1, "at least 1 and below 2**31, one number or"
        )
        in_range = f"from 0 to max_new_tokens={self.max_new_tokens}, one number, or"
        least = self._counts("min_new_tokens", batch, 0, most, in_range)
        stop_token_ids = self._stop_token_ids(config, batch)
        if any(
            len(set(row) - {-1}) == config.vocab_size for row in stop_token_ids[least > 0].tolist()
        ):
            raise InputError(
                f"min_new_tokens={self.min_new_tokens}: all {config.vocab_size} tokens of the"
                " vocabulary end the text, so no token may come first; name fewer eos_token_ids,"
                " or give min_new_tokens=0"
            )
        return CheckedOptions(
            max_new_tokens=most, min_new_tokens=least, stop_token_ids=stop_token_ids
        )

    def rule_for(self, draft: DraftShape) -> Rule:
        """Return the rule for drafts of this shape.

        Raises:
            InputError: The option ``rule`` cannot verify drafts of this shape.
        """
        rule = self.rule or ("coupled" if self.is_constrained else default_rule(draft))
        if not RULES[rule].takes_trees and not draft.is_chain:
            raise InputError(
                f"rule={self.rule!r}: verifies chains, but the draft is a {draft}; give"
                ' rule="independent" (which suits every draft), or rule="coupled"'
            )
        return rule

    @property
    def is_constrained(self) -> bool:
        """True if there is a grammar or a thinking budget."""
        return self.grammar is not None or self.thinking_budget is not None

    def check_has_no_grammar(self, function: str) -> None:
        """Refuse grammars and thinking budgets, for a ``function`` that decodes free text.

        Raises:
            InputError: There is a grammar or a thinking budget.

        Examples:
            >>> from specjax.decoding import GenerationOptions
            >>> GenerationOptions(grammar=specjax.Regex("a")).check_has_no_grammar("trial_speedup")
            Traceback (most recent call last):
            specjax.errors.InputError: options: trial_speedup decodes free text; leave out grammar
        """
        if self.grammar is not None:
            raise InputError(f"options: {function} decodes free text; leave out grammar")
        if self.thinking_budget is not None:
            raise InputError(f"options: {function} decodes free text; leave out thinking_budget")

    def matchers(
        self, checked: "CheckedOptions", prompts: Sequence[Sequence[int]], vocab_size: int
    ) -> list[Matcher | None] | None:
        """Return a new matcher for each row, None for a row that is free; None if all are.

        A row is constrained by a grammar, by a thinking budget, or by both.

        Args:
            checked: the checked options of the rows.
            prompts: the token ids of each row's prompt.
            vocab_size: the number of tokens of the target.

        Raises:
            InputError: The grammars or budgets do not fit the rows or the vocabulary.
        """
        batch = len(checked.stop_token_ids)
        grammars = self.grammars_of_rows(batch, vocab_size) or [None] * batch
        budgets = self.budgets_of_rows(batch, vocab_size) or [None] * batch
        if not self.is_constrained:
            return None
        matchers: list[Matcher | None] = []
        for row, ids in enumerate(checked.stop_token_ids.tolist()):
            grammar, budget, stops = grammars[row], budgets[row], tuple(i for i in ids if i >= 0)
            matcher = None if grammar is None else grammar.matcher(stops)
            if budget is not None:
                matcher = budget.matcher(prompts[row], vocab_size, stops, matcher)
            matchers.append(matcher)
        return matchers

    def budgets_of_rows(self, batch: int, vocab_size: int) -> list[ThinkingBudget | None] | None:
        """Return the thinking budget of each of ``batch`` rows; None if there are none.

        Raises:
            InputError: The budgets do not fit the rows, their biases or the vocabulary, or are
                something else.

        Examples:
            >>> from specjax.decoding import GenerationOptions
            >>> options = GenerationOptions(thinking_budget=[None, None])
            >>> options.budgets_of_rows(batch=2, vocab_size=16)
            [None, None]
        """
        if self.thinking_budget is None:
            return None
        budgets = _of_rows("thinking_budget", self.thinking_budget, batch, "budgets")
        for budget in budgets:
            if budget is not None and not isinstance(budget, ThinkingBudget):
                raise InputError(
                    f"thinking_budget={budget!r}: give specjax.ThinkingBudget(tokens, thought), or"
                    " one for each row"
                )
        for budget, biases in zip(budgets, self._biases_of_rows(batch), strict=True):
            if budget is not None:
                budget.check(vocab_size)
                budget.check_can_end(biases.bias(vocab_size), biases.words)
        return budgets

    def grammars_of_rows(self, batch: int, vocab_size: int) -> list[CompiledGrammar | None] | None:
        """Return the grammar of each of ``batch`` rows; None if there are no grammars.

        Raises:
            InputError: The grammars do not fit the rows, or a vocabulary of this size.

        Examples:
            >>> from specjax.decoding import GenerationOptions
            >>> GenerationOptions(grammar=[None, None]).grammars_of_rows(batch=2, vocab_size=16)
            [None, None]
        """
        if self.grammar is None:
            return None
        grammars = _of_rows("grammar", self.grammar, batch, "grammars")
        return [
            None if grammar is None else _check_grammar(grammar, vocab_size) for grammar in grammars
        ]

    def draft_limits(self, batch: int, draft: DraftShape) -> np.ndarray | None:
        """Return the largest depth of each row's drafts, ``[batch]``; None if no row has a limit.

        Raises:
            InputError: A speculation cannot be used with this draft, or they do not fit the rows.

        Examples:
            >>> from specjax.decoding import GenerationOptions
            >>> options = GenerationOptions(speculation=["off", 2])
            >>> options.draft_limits(batch=2, draft=specjax.Chain(4)).tolist()
            [0, 2]
        """
        stated = self.speculation
        if stated is None:
            return None
        if isinstance(stated, np.ndarray | jax.Array):
            stated = np.asarray(stated).tolist()
        rows = _of_rows("speculation", stated, batch)
        return np.array([DraftLimit.of(row, [draft]).depth for row in rows], np.int32)

    def adjustments(
        self, tokens: np.ndarray, lengths: np.ndarray, vocab_size: int
    ) -> Adjustments | None:
        """Return the adjustments of rows before their first token, or None if no row has any.

        Args:
            tokens: ``[B, P]`` the prompts.
            lengths: ``[B]`` the prompts' lengths.
            vocab_size: the number of tokens of the target.

        Raises:
            InputError: The biases do not fit the rows or the vocabulary.
        """
        biases = self._biases_of_rows(len(lengths))
        if all(row.is_neutral for row in biases) and not self.sampling.has_penalties:
            return None
        prompts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
        return Adjustments.of_texts(
            prompts,
            lengths.tolist(),
            vocab_size,
            np.stack([row.bias(vocab_size) for row in biases]),
            [row.words for row in biases],
        )

    def _biases_of_rows(self, batch: int) -> list[TokenBiases]:
        """Return the biases of each of ``batch`` rows.

        Raises:
            InputError: The biases do not fit the rows, or are something else.
        """
        if self.biases is None or isinstance(self.biases, TokenBiases):
            biases = [self.biases or TokenBiases()] * batch
        else:
            biases = [row or TokenBiases() for row in self.biases]
        if not all(isinstance(row, TokenBiases) for row in biases):
            raise InputError(
                f"biases={self.biases!r}: give specjax.token_biases.TokenBiases.of(...), or one for"
                " each row"
            )
        if len(biases) != batch:
            raise InputError(
                f"biases: {len(biases)} of them; give one, or one for each of the {batch} rows"
            )
        return biases

    def _counts(self, name: str, batch: int, minimum: int, maximum: Any, must: str) -> np.ndarray:
        """Return the field ``name``, one number or one for each row, as ``[batch]``.

        Raises:
            InputError: A number is out of range, or there are too few or too many.
        """
        value = getattr(self, name)
        counts = one_or_each(name, value)
        if (
            counts.dtype.kind not in "iu"
            or counts.shape not in ((), (batch,))
            or np.any((counts < minimum) | (counts > maximum))
        ):
            raise InputError(f"{name}={value}: it must be {must} one for each of the {batch} rows")
        return np.broadcast_to(counts, (batch,)).astype(np.int64)

    def _stop_token_ids(self, config: ModelConfig, batch: int) -> np.ndarray:
        ids = config.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids
        by_row = _rows_of_ids(ids)
        rows = by_row if len(ids) and _is_sequence(ids[0]) else by_row * batch
        if len(rows) != batch:
            raise InputError(
                f"eos_token_ids: {len(rows)} sequences; give one, or one for each of the {batch}"
                " rows"
            )
        for row in rows:
            if bad := [i for i in row if not 0 <= i < config.vocab_size]:
                raise InputError(
                    f"eos_token_ids={bad}: outside the vocabulary of {config.vocab_size} tokens"
                )
        # At least 1, so that rows without stop tokens share a compiled program with others.
        width = max(1, *map(len, rows))
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return np.array(padded, np.int32).reshape(batch, width)

    def row_keys(self, batch: int) -> jax.Array:
        """Return the random keys ``[B]`` of ``batch`` rows.

        Raises:
            InputError: There are several keys, but not one for each row.

        Examples:
            >>> from specjax.decoding import GenerationOptions
            >>> GenerationOptions(key=jax.random.key(3)).row_keys(2).shape
            (2,)
        """
        key = as_key(self.key)
        if key.ndim == 0:
            return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))
        if key.shape != (batch,):
            raise InputError(
                f"key has shape {key.shape}: give one key, or one for each of the {batch} rows"
            )
        return key


def _check_grammar(grammar: Any, vocab_size: int) -> CompiledGrammar:
    """Return a grammar, after a check that it is compiled for this number of tokens.

    Raises:
        InputError: It is not compiled, or for another number.
    """
    if not isinstance(grammar, CompiledGrammar):
        raise InputError(
            f"grammar={grammar!r}: compile it for the target's tokenizer with"
            " specjax.grammars.GrammarCompiler"
        )
    if grammar.vocab_size != vocab_size:
        raise InputError(
            f"grammar: it is compiled for {grammar.vocab_size} tokens, and the target has"
            f" {vocab_size}; give GrammarCompiler the target's vocab_size"
        )
    return grammar


def _rows_of_ids(ids: Any) -> list[list[int]]:
    """Return the ids that end each row: one list if ``ids`` is one sequence, else one for each row.

    Raises:
        InputError: The value is neither a sequence of whole numbers nor a sequence of such
            sequences.
    """
    if not _is_sequence(ids):
        raise InputError(f"eos_token_ids={ids!r}: give a sequence of ids, such as (2,)")
    are_rows = [_is_sequence(entry) for entry in ids]
    if any(are_rows) and not all(are_rows):
        raise InputError(
            f"eos_token_ids={ids}: give ids, or one sequence of ids for each row, not both"
        )
    rows = [
        [i.item() if isinstance(i, jax.Array) else i for i in row]
        for row in (ids if any(are_rows) else [ids])
    ]
    for row in rows:
        if wrong := [i for i in row if not is_whole(i)]:
            raise InputError(
                f"eos_token_ids={wrong!r}: ids are whole numbers, from the target's tokenizer"
            )
    return [list(map(int, row)) for row in rows]


def check_ids(ids: Any) -> list[int]:
    """Return the ids that end one text, as Python integers.

    Raises:
        InputError: The value is not a sequence of whole numbers.

    Examples:
        >>> from specjax.decoding.options import check_ids
        >>> check_ids((2, 7))
        [2, 7]
    """
    rows = _rows_of_ids(ids)
    if len(rows) != 1:
        raise InputError(f"eos_token_ids={ids}: give the ids of one text, such as (2,)")
    return rows[0]


def _of_rows(name: str, stated: Any, batch: int, noun: str = "of them") -> list[Any]:
    """Return what an option states for each of ``batch`` rows: one for all, or a list.

    Raises:
        InputError: The list has another length. The message calls its elements by ``noun``.
    """
    rows: list[Any] = list(stated) if isinstance(stated, list | tuple) else [stated] * batch
    if len(rows) != batch:
        raise InputError(
            f"{name}: {len(rows)} {noun}; give one, or one for each of the {batch} rows"
        )
    return rows


def _is_sequence(value: Any) -> bool:
    is_text = isinstance(value, str | bytes)
    return (isinstance(value, Sequence) and not is_text) or (
        isinstance(value, np.ndarray | jax.Array) and value.ndim > 0
    )


def default_rule(draft: DraftShape) -> Rule:
    """Return the rule that accepts the most drafted tokens for drafts of this shape.

    Coupled sampling accepts more tokens of trees whose children are chosen. It accepts fewer tokens
    of chains than block verification, which judges the tokens of a chain jointly. For drawn
    siblings the rules are equally good. docs/results/trees.md has the figures of
    ``benchmarks.acceptance``.

    Examples:
        >>> from specjax.decoding.options import default_rule
        >>> default_rule(specjax.DynamicTree()), default_rule(specjax.Chain(4))
        ('coupled', 'independent')
    """
    return "coupled" if isinstance(draft, StaticTree | DynamicTree | UnionTree) else "independent"


@dataclass(frozen=True)
class CheckedOptions:
    """The result of `GenerationOptions.check` for B rows.

    Attributes:
        max_new_tokens: ``[B]`` int64 the largest number of new tokens.
        min_new_tokens: ``[B]`` int64 the number of new tokens before which a row does not end.
        stop_token_ids: ``[B, E]`` int32 ids that end each row, padded with -1, which is no token.
    """

    max_new_tokens: np.ndarray
    min_new_tokens: np.ndarray
    stop_token_ids: np.ndarray


def as_key(key: Any) -> jax.Array:
    """Return a random key, or an array of keys, of JAX's default kind.

    None gives ``jax.random.key(0)``.

    Raises:
        InputError: The value is not a random key.
    """
    if key is None:
        return jax.random.key(0)
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    # jax.random.PRNGKey, the older form of keys, returns plain numbers.
    if (
        not is_key
        and isinstance(key, jax.Array)
        and key.dtype == jnp.uint32
        and key.shape[-1:] == (2,)
    ):
        key, is_key = jax.random.wrap_key_data(key, impl="threefry2x32"), True
    if not is_key:
        raise InputError(f"key={key!r}: give a random key, such as jax.random.key(0)")
    return _as_threefry(key)


def _as_threefry(key: jax.Array) -> jax.Array:
    """Return ``key``, converted to JAX's default kind if it is of another kind.

    Keys of the kind "rbg" draw other numbers under ``vmap`` than alone, so that a row would depend
    on the other rows.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    words = jax.random.key_data(key)
    start = jax.random.wrap_key_data(words[..., :2], impl="threefry2x32")

    def fold(key: jax.Array, words: jax.Array) -> jax.Array:
        for word in words:
            key = jax.random.fold_in(key, word)
        return key

    return fold(start, words[2:]) if key.ndim == 0 else jax.vmap(fold)(start, words[:, 2:])


def check_prompts(tokens: Any, lengths: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts ``[B, P]`` and their lengths ``[B]``.

    Raises:
        InputError: The prompts or lengths are invalid. The message names what is wrong.
    """
    try:
        tokens = np.asarray(tokens)
    except ValueError:
        raise InputError(
            "tokens: the rows have different lengths; right-pad them (specjax.text.pad returns"
            " tokens and lengths)"
        ) from None
    if tokens.size == 0:
        raise InputError(
            "tokens: empty prompt; every row needs at least 1 token (begin with the bos token)"
        )
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"tokens: they must be whole numbers [batch, prompt], not {tokens.dtype}"
            f" {list(tokens.shape)}"
        )
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else one_or_each("lengths", lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise InputError(
            f"lengths: give {batch} whole numbers, one for each row, not {lengths.dtype}"
            f" {list(lengths.shape)}"
        )
    if lengths.min() < 1:
        raise InputError(f"lengths={lengths.min()}: empty prompt; every row needs at least 1 token")
    if lengths.max() > width:
        raise InputError(f"lengths={lengths.max()}: it exceeds the width of the prompts, {width}")
    inside = np.arange(width)[None] < lengths[:, None]
    bad = tokens[inside & ((tokens < 0) | (tokens >= vocab_size))]
    if bad.size:
        raise InputError(
            f"tokens: id {bad[0]} is outside the vocabulary of {vocab_size} tokens; is it the"
            " target's tokenizer?"
        )
    return np.where(inside, tokens, 0).astype(np.int32), lengths.astype(np.int32)


_SMALLEST_BUCKET = 16


def bucket(size: int) -> int:
    """Round ``size`` up to 16, 24, 32, 48, 64, 96, …: a power of two, or one and a half times one.

    Functions are compiled for sizes. With few sizes, prompts of many lengths share a few programs.
    """
    power = _SMALLEST_BUCKET
    while power < size:
        if size <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power
