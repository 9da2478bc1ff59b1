"""Generation from prompts: check the arguments on the host, read the prompts and run the loop.

`generate` and `stream` run the same program.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sharding
from specjax.arguments import is_whole
from specjax.decoding.constrained import FORCED, ConstrainedRows
from specjax.decoding.loop import decode
from specjax.decoding.options import (
    GenerationOptions,
    Grammars,
    Speculations,
    ThinkingBudgets,
    bucket,
    check_prompts,
)
from specjax.decoding.state import DecodeState, place_adjustments, prefill
from specjax.decoding.stats import Stats
from specjax.drafters.base import Drafter, NoDraft, check_is_pytree
from specjax.errors import InputError, LogitsError
from specjax.models.transformer import Target
from specjax.reprs import OneLine
from specjax.sampling import Rule, Sampling
from specjax.token_biases import TokenBiases


@struct.dataclass
class Result(OneLine):
    """The result of a generation, in numpy arrays.

    Attributes:
        tokens: ``[B, P + max_new_tokens]`` each row's prompt, then its output, then padding beyond
            ``lengths``.
        lengths: ``[B]`` prompt tokens plus emitted tokens. An end-of-sequence token counts as
            emitted.
        stats: the `Stats` of each row.
        grammar_completed: ``[B]`` bool, whether each row's text satisfies its grammar so far, so
            that it is whole; True for a row without one. None if no row has a grammar.

    Examples:
        >>> result = specjax.generate(target, None, prompts, max_new_tokens=8)
        >>> result.tokens.shape, result.lengths.tolist()
        ((2, 14), [14, 14])
        >>> result.stats.steps.tolist()  # plain decoding: a step for each token
        [8, 8]
        >>> repr(result).startswith("Result(tokens=int32[2, 14], lengths=[14, 14], stats=Stats(")
        True
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stats: Stats
    grammar_completed: np.ndarray | None = None


def generate(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any = 64,
    min_new_tokens: Any = 0,
    sampling: Sampling = Sampling(temperature=0.0),
    key: jax.Array | None = None,
    eos_token_ids: Sequence[Any] | None = None,
    rule: Rule | None = None,
    grammar: Grammars = None,
    biases: TokenBiases | Sequence[TokenBiases | None] | None = None,
    thinking_budget: ThinkingBudgets = None,
    speculation: Speculations = None,
) -> Result:
    """Generate from the target, with exactly the distribution of the target alone.

    The drafter affects the speed only.

    Args:
        target: the model to generate from.
        drafter: the drafter that proposes tokens; None for plain autoregressive decoding.
        tokens: ``[B, P]`` prompts as token ids, right-padded. Batches of equal P share compiled
            programs. Memory and time grow with P.
        lengths: ``[B]`` prompt lengths; None if all are P.
        max_new_tokens: the largest number of tokens to emit; one number, or one for each row.
        min_new_tokens: the number of tokens that are emitted before an end-of-sequence token may
            come; one number, or one for each row. Only 0 is possible if every token of the
            vocabulary ends the text.
        sampling: the sampling parameters; greedy by default.
        key: one random key, which is folded with each row's index, or ``[B]`` keys. A row's output
            depends on its own key and prompt alone. Give every text its own key. None for
            ``jax.random.key(0)``.
        eos_token_ids: the ids that end a row; they are emitted. One sequence of ids for all rows,
            or one sequence for each row. None for the target's own (`ModelConfig.eos_token_ids`);
            ``()`` for none.
        rule: how tokens are drawn and drafts verified, see `specjax.sampling.Rule`. Every rule is
            exact. None for the rule that suits the shape of the drafts,
            `specjax.decoding.options.default_rule`. "block" and "rejection" verify chains only.
        grammar: the grammar that every text must satisfy, compiled for the target's tokenizer
            (`specjax.grammars.GrammarCompiler`); or one for each row, with None for a row without a
            grammar. With a grammar the default of ``rule`` is "coupled".
        biases: the `specjax.token_biases.TokenBiases` of all rows, or one for each row, with None
            for a row without any: biases of tokens, allowed tokens and banned words.
        thinking_budget: the `specjax.ThinkingBudget` of all rows, or one for each row, with None
            for a row without one: the largest number of tokens of each thought, after which its end
            is forced. With a budget the default of ``rule`` is "coupled".
        speculation: how far rows speculate: "off" for no drafts, or the largest depth of a draft;
            one, or one for each row. The distribution of the texts does not depend on it. None for
            no limit.

    Raises:
        InputError: An argument is invalid. The message names it, its value and the remedy.
        LogitsError: The target's logits were NaN or +inf in some rows, which the message names. The
            error's ``result`` has the output of all rows; the other rows are complete.
        GrammarError: No token was legal in some rows, although their texts had to go on. It has a
            ``result``, too.

    Examples:
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
        >>> sampling = specjax.Sampling(temperature=0.8, top_p=0.95)
        >>> key = jax.random.key(1)
        >>> result = specjax.generate(
        ...     target, drafter, prompts, max_new_tokens=8, sampling=sampling, key=key
        ... )
        >>> specjax.generate(target, drafter, [[99]])
        Traceback (most recent call last):
        specjax.errors.InputError: tokens: id 99 is outside the vocabulary of 16 tokens; ...
    """
    options = GenerationOptions(
        max_new_tokens,
        sampling,
        key,
        eos_token_ids,
        rule,
        min_new_tokens,
        grammar,
        biases,
        thinking_budget,
        speculation,
    )
    run = _Batch(target, drafter, tokens, lengths, options)
    run.decode(np.iinfo(np.int32).max)
    return run.result(is_last=True)


def stream(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any = 64,
    min_new_tokens: Any = 0,
    sampling: Sampling = Sampling(temperature=0.0),
    key: jax.Array | None = None,
    eos_token_ids: Sequence[Any] | None = None,
    rule: Rule | None = None,
    grammar: Grammars = None,
    biases: TokenBiases | Sequence[TokenBiases | None] | None = None,
    thinking_budget: ThinkingBudgets = None,
    speculation: Speculations = None,
    steps: int = 4,
) -> Iterator[Result]:
    """Generate as `generate` does, and yield the result so far after every ``steps`` steps.

    The last one is the complete `Result`.

    Raises:
        InputError: As for `generate`, or ``steps`` is below 1. It is raised by the call itself,
            before the iteration begins.
        LogitsError: As for `generate`, after the last result.

    Examples:
        >>> for result in specjax.stream(target, None, prompts, max_new_tokens=8, steps=4):
        ...     print(result.lengths.tolist())
        [10, 10]
        [14, 14]
    """
    if not is_whole(steps) or steps < 1:
        raise InputError(f"steps={steps!r}: it must be a whole number, at least 1")
    options = GenerationOptions(
        max_new_tokens,
        sampling,
        key,
        eos_token_ids,
        rule,
        min_new_tokens,
        grammar,
        biases,
        thinking_budget,
        speculation,
    )
    run = _Batch(target, drafter, tokens, lengths, options)

    def results() -> Iterator[Result]:
        while True:
            run.decode(steps)
            is_last = run.is_done()
            yield run.result()
            if is_last:
                run.result(is_last=True)
                return

    return results()


class _Batch:
    """A batch that is being decoded, with or without grammars.

    The arguments are those of `start`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokens: Any,
        lengths: Any,
        options: GenerationOptions,
    ) -> None:
        self._target = target
        self._drafter, self._state = start(target, drafter, tokens, lengths, options)
        self._width = _width(tokens, options.max_new_tokens)
        matchers = None
        if options.is_constrained:
            rows, row_lengths = check_prompts(tokens, lengths, target.config.vocab_size)
            prompts = [row[:length] for row, length in zip(rows, row_lengths, strict=True)]
            checked = options.check(target.config, len(prompts))
            matchers = options.matchers(checked, prompts, target.config.vocab_size)
        self._constrained = None if matchers is None else ConstrainedRows(matchers)
        self._has_grammar = options.grammar is not None

    def decode(self, steps: int) -> None:
        """Run up to ``steps`` steps."""
        run = decode if self._constrained is None else self._constrained.decode
        self._state = run(self._target, self._drafter, self._state, steps)

    def is_done(self) -> bool:
        """Return whether all rows are done."""
        return bool(sharding.to_host(self._state.done, self._target.mesh).all())

    def result(self, is_last: bool = False) -> Result:
        """Return the result so far.

        Raises:
            LogitsError: ``is_last``, and a row has failed.
            GrammarError: ``is_last``, and a row could not satisfy its grammar.
        """
        result = _result(self._target, self._state, self._width)
        if self._constrained is not None and self._has_grammar:
            result = replace(result, grammar_completed=self._constrained.completed)
        if is_last:
            raise_if_failed(self._target, self._state, result)
            if self._constrained is not None and self._constrained.stuck:
                raise self._constrained.stuck_error(result)
        return result


def start(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    options: GenerationOptions = GenerationOptions(),
    *,
    capacity: int | None = None,
    mixed: bool = False,
) -> tuple[Drafter, DecodeState]:
    """Check the arguments on the host, then read the prompts.

    Args:
        target: as for `generate`.
        drafter: as for `generate`.
        tokens: as for `generate`.
        lengths: as for `generate`.
        options: the other arguments of `generate`. Grammars are for `ConstrainedRows`, which takes
            the state instead of `decode`.
        capacity: the largest number of tokens of a row, prompt and output. By default it is what
            prompts of this width need, rounded up to a `bucket`. Prompts are padded to a bucket
            too, so that few programs serve many widths.
        mixed: whether to compile for rows of all kinds of sampling, so that `insert` accepts any
            request. Otherwise the program serves rows like these alone.

    Returns:
        The drafter, which replaces None, and the state to `decode`. If every row states
        ``speculation="off"``, and the state is not ``mixed``, it is a `NoDraft`.

    Raises:
        InputError: As for `generate`.

    Examples:
        >>> from specjax import decoding
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> options = decoding.GenerationOptions(max_new_tokens=8)
        >>> drafter, state = decoding.start(target, drafter, prompts, options=options)
        >>> state.lengths.tolist(), state.max_lengths.tolist()
        ([6, 6], [14, 14])
    """
    target.check_whole()
    config = target.config
    tokens, lengths = check_prompts(tokens, lengths, config.vocab_size)
    batch, width = tokens.shape
    width = width if capacity is None else min(width, capacity)
    checked, keys = options.check(config, batch), options.row_keys(batch)
    # Refuse wrong grammars and budgets before anything runs.
    options.grammars_of_rows(batch, config.vocab_size)
    options.budgets_of_rows(batch, config.vocab_size)
    drafter = NoDraft() if drafter is None else drafter
    check_is_pytree(drafter)
    drafter.draft_shape.check(config.vocab_size)
    drafter.check(target)
    max_lengths = lengths + checked.max_new_tokens
    _check_positions(lengths, max_lengths, config.max_positions, "the target")
    _check_positions(lengths, max_lengths, most_positions(target, drafter), "the drafter")
    if capacity is None:
        # It depends on the shape of the prompts, not on their lengths, so that equal shapes share a
        # program.
        capacity = bucket(width + int(checked.max_new_tokens.max()))
    elif capacity < max_lengths.max():
        raise InputError(
            f"capacity={capacity}: a row may need {max_lengths.max()} tokens; give at least that"
        )
    padded = np.pad(tokens[:, :width], ((0, 0), (0, bucket(width) - width)))
    adjustments = options.adjustments(tokens, lengths, config.vocab_size)
    rule = options.rule_for(drafter.draft_shape)
    limits = options.draft_limits(batch, drafter.draft_shape)
    if limits is not None and not limits.any() and not mixed:
        # No row drafts: this is plain decoding. (A mixed state may take rows that draft.)
        drafter, limits = NoDraft(), None
    rows = options.sampling.rows(batch, rule)
    # Batches that are all greedy have their own program, and all others share one. That one
    # searches for the threshold of top-k, top-p and min-p only if a row uses them.
    if mixed:
        rows = replace(rows, greedy=False, truncated=True, rule=rule)
    else:
        rows = replace(rows, truncated=not rows.greedy)
    # Prefill draws no token, so one program serves every kind of sampling. The real fields are
    # restored below.
    state = prefill(
        target,
        drafter,
        jnp.asarray(padded),
        jnp.asarray(lengths),
        jnp.asarray(max_lengths.astype(np.int32)),
        keys,
        jnp.asarray(_padded(checked.stop_token_ids)),
        replace(rows, **_ANY_SAMPLING),
        jnp.asarray((lengths + checked.min_new_tokens).astype(np.int32)),
        None if limits is None else jnp.asarray(limits),
        capacity=capacity,
        depth=max(FORCED, drafter.draft_shape.depth) if options.is_constrained else None,
    )
    sampling_fields = {name: getattr(rows, name) for name in _ANY_SAMPLING}
    state = replace(state, sampling=replace(state.sampling, **sampling_fields))
    if adjustments is None:
        return drafter, state
    sampling = replace(state.sampling, adjustments=place_adjustments(adjustments, target))
    return drafter, replace(state, sampling=sampling)


_ANY_SAMPLING = {"greedy": False, "truncated": True, "rule": "independent"}
"""The static fields of `RowSampling` in prefill, where the kind of sampling does not matter."""


_STOP_TOKENS = 8
"""The number of stop tokens is padded to a multiple of this, so that requests share a program."""


def _padded(ids: np.ndarray) -> np.ndarray:
    """Pad stop tokens ``[B, E]`` with -1, which is no token, to a multiple of `_STOP_TOKENS`."""
    return np.pad(ids, ((0, 0), (0, -ids.shape[1] % _STOP_TOKENS)), constant_values=-1)


def most_positions(target: Target, drafter: Drafter) -> int:
    """Return the largest number of tokens of a text that both target and drafter support.

    Examples:
        >>> from specjax import decoding
        >>> decoding.most_positions(target, specjax.PromptLookup())
        2048
    """
    limit = drafter.max_positions
    return target.config.max_positions if limit is None else min(limit, target.config.max_positions)


def _check_positions(
    lengths: np.ndarray, max_lengths: np.ndarray, positions: int, model: str
) -> None:
    longest = int(np.argmax(max_lengths))
    if max_lengths[longest] > positions:
        raise InputError(
            f"prompt ({lengths[longest]} tokens) plus max_new_tokens make {max_lengths[longest]}"
            f" tokens, but {model} has {positions} positions; shorten the prompt or lower"
            " max_new_tokens"
        )


def _width(tokens: Any, max_new_tokens: Any) -> int:
    return np.asarray(tokens).shape[1] + int(np.max(max_new_tokens))


def _result(target: Target, state: DecodeState, width: int) -> Result:
    """Return the result so far, with tokens of the given ``width`` for every capacity."""
    tokens, lengths, stats = sharding.to_host(
        (state.tokens, state.lengths, state.stats), target.mesh
    )
    missing = max(0, width - tokens.shape[1])
    return Result(
        tokens=np.pad(tokens, ((0, 0), (0, missing)))[:, :width], lengths=lengths, stats=stats
    )


def raise_if_failed(target: Target, state: DecodeState, result: Any = None) -> None:
    """Raise LogitsError if a row of ``state`` failed: the target's logits were NaN or +inf.

    Args:
        target: the target. Every process that its mesh spans must call this function.
        state: the state.
        result: the result to attach to the error.
    """
    failed, lengths = sharding.to_host((state.failed, state.lengths), target.mesh)
    if failed.any():
        rows = np.flatnonzero(failed)
        raise LogitsError(rows.tolist(), lengths[rows].tolist(), result)
