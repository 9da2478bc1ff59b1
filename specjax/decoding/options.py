"""What is asked of a generation: its options, checked on the host before anything is compiled."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arguments import is_whole, one_or_each
from specjax.decoding.verification import RULES
from specjax.drafts.shapes import DraftShape, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.sampling import Rule, Sampling, check_rule


@dataclass(frozen=True)
class GenerationOptions:
    """Everything about a generation but the models and the prompts. `specjax.generate` takes the same by name.

    Attributes:
        max_new_tokens: most tokens to emit; one number, or one a row.
        sampling: how to draw; the default is greedy.
        key: one random key, from which each row's is folded by its index, or ``[B]`` keys. A row's output depends on its own
            key and prompt alone. None: ``jax.random.key(0)``.
        eos_token_ids: ids that end a row; they are emitted. One sequence of ids for all rows, or one sequence a row. None:
            the target's own (`ModelConfig.eos_token_ids`); ``()``: none.
        rule: how tokens are drawn and drafts verified, see `specjax.sampling.Rule`; every one is exact. None is `default_rule`.
            "block" and "rejection" are for chains alone.
        min_new_tokens: as many tokens are emitted before an end-of-sequence token may come: until then the target's
            distribution, and the drafter's, is that of the other tokens. One number, or one a row. Where all tokens end the
            text there are no others, and only 0 is taken.

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

    def __post_init__(self) -> None:
        """Refuse values of the wrong type. What depends on the target and the number of rows is checked by `check`."""
        one_or_each("max_new_tokens", self.max_new_tokens)
        one_or_each("min_new_tokens", self.min_new_tokens)
        if type(self.sampling) is not Sampling:  # the other parameters of a request would be left out
            raise InputError(f"sampling={self.sampling!r}: give settings, such as specjax.Sampling(temperature=0.7)")
        if self.key is not None:
            as_key(self.key)
        if self.eos_token_ids is not None:
            _rows_of_ids(self.eos_token_ids)
        if self.rule is not None:
            check_rule(self.rule)

    def check(self, config: ModelConfig, batch: int) -> "CheckedOptions":
        """These options for ``batch`` rows of a target so configured. Raises InputError, which names what is wrong."""
        most = self._counts("max_new_tokens", batch, 1, 2**31 - 1, "at least 1 and below 2**31, one number or")
        in_range = f"from 0 to max_new_tokens={self.max_new_tokens}, one number, or"
        least, stop_token_ids = self._counts("min_new_tokens", batch, 0, most, in_range), self._stop_token_ids(config, batch)
        if any(len(set(row) - {-1}) == config.vocab_size for row in stop_token_ids[least > 0].tolist()):
            raise InputError(
                f"min_new_tokens={self.min_new_tokens}: all {config.vocab_size} tokens of the vocabulary end the text, so that "
                "none may come first: name fewer eos_token_ids, or give min_new_tokens=0"
            )
        return CheckedOptions(max_new_tokens=most, min_new_tokens=least, stop_token_ids=stop_token_ids)

    def rule_for(self, draft: DraftShape) -> Rule:
        """The rule for drafts of this shape. Raises InputError where ``rule`` cannot verify them."""
        rule = self.rule or default_rule(draft)
        if not RULES[rule].takes_trees and draft.nodes > draft.depth + 1:
            raise InputError(
                f'rule={self.rule!r}: verifies chains, but the draft is a {draft}; give rule="independent" (each draft by the '
                'rule that fits it), or rule="coupled"'
            )
        return rule

    def _counts(self, name: str, batch: int, minimum: int, maximum: Any, must: str) -> np.ndarray:
        """Return the field ``name``, one number or one a row, as ``[batch]``. Raises InputError where one is out of range."""
        value = getattr(self, name)
        counts = one_or_each(name, value)
        if (
            counts.dtype.kind not in "iu"
            or counts.shape not in ((), (batch,))
            or np.any((counts < minimum) | (counts > maximum))
        ):
            raise InputError(f"{name}={value}: must be {must} one for each of the {batch} rows")
        return np.broadcast_to(counts, (batch,)).astype(np.int64)

    def _stop_token_ids(self, config: ModelConfig, batch: int) -> np.ndarray:
        ids = config.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids
        by_row = _rows_of_ids(ids)
        rows = by_row if len(ids) and _is_sequence(ids[0]) else by_row * batch
        if len(rows) != batch:
            raise InputError(f"eos_token_ids: {len(rows)} sequences; give one, or one for each of the {batch} rows")
        for row in rows:
            if bad := [i for i in row if not 0 <= i < config.vocab_size]:
                raise InputError(f"eos_token_ids={bad}: outside the vocabulary of {config.vocab_size} tokens")
        width = max(1, *map(len, rows))  # 1: with and without stop tokens the same program serves
        return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32).reshape(batch, width)

    def row_keys(self, batch: int) -> jax.Array:
        """Return the random keys ``[B]`` of ``batch`` rows.

        Raises:
            InputError: there are keys, and not one for each row.

        Examples:
            >>> from specjax.decoding import GenerationOptions
            >>> GenerationOptions(key=jax.random.key(3)).row_keys(2).shape
            (2,)
        """
        key = as_key(self.key)
        if key.ndim == 0:
            return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))
        if key.shape != (batch,):
            raise InputError(f"key has shape {key.shape}: give one key, or one for each of the {batch} rows")
        return key


def _rows_of_ids(ids: Any) -> list[list[int]]:
    """The ids that end each row: one list where ``ids`` is one sequence for all rows, otherwise a list a row.

    Raises:
        InputError: it is no sequence of whole numbers, nor one of such sequences.
    """
    if not _is_sequence(ids):
        raise InputError(f"eos_token_ids={ids!r}: give a sequence of ids, such as (2,)")
    are_rows = [_is_sequence(entry) for entry in ids]
    if any(are_rows) and not all(are_rows):
        raise InputError(f"eos_token_ids={ids}: give ids, or one sequence of ids a row, not both")
    rows = [[each.item() if isinstance(each, jax.Array) else each for each in row] for row in (ids if any(are_rows) else [ids])]
    for row in rows:
        if wrong := [each for each in row if not is_whole(each)]:
            raise InputError(f"eos_token_ids={wrong!r}: ids are whole numbers, from the target's tokenizer")
    return [list(map(int, row)) for row in rows]


def check_ids(ids: Any) -> list[int]:
    """Return the ids that end one text, as Python's own numbers.

    Raises:
        InputError: it is no sequence of whole numbers.

    Examples:
        >>> from specjax.decoding.options import check_ids
        >>> check_ids((2, 7))
        [2, 7]
    """
    rows = _rows_of_ids(ids)
    if len(rows) != 1:
        raise InputError(f"eos_token_ids={ids}: give the ids of one text, such as (2,)")
    return rows[0]


def _is_sequence(value: Any) -> bool:
    is_text = isinstance(value, str | bytes)
    return (isinstance(value, Sequence) and not is_text) or (isinstance(value, np.ndarray | jax.Array) and value.ndim > 0)


def default_rule(draft: DraftShape) -> Rule:
    """The rule by which drafts of this shape are accepted most often.

    Trees whose children are chosen gain from coupled sampling. Chains lose, for block verification looks beyond what it
    accepts. Drawn siblings come out even. docs/results/trees.md has the figures of ``benchmarks.acceptance``.

    Examples:
        >>> from specjax.decoding.options import default_rule
        >>> default_rule(specjax.DynamicTree()), default_rule(specjax.Chain(4))
        ('coupled', 'independent')
    """
    return "coupled" if isinstance(draft, StaticTree | DynamicTree) else "independent"


@dataclass(frozen=True)
class CheckedOptions:
    """What `GenerationOptions.check` makes of the options of B rows.

    Attributes:
        max_new_tokens: ``[B]`` int64 largest number of new tokens.
        min_new_tokens: ``[B]`` int64 new tokens before which a row does not end.
        stop_token_ids: ``[B, E]`` int32 ids that end each row, filled up with -1, which is no token.
    """

    max_new_tokens: np.ndarray
    min_new_tokens: np.ndarray
    stop_token_ids: np.ndarray


def as_key(key: Any) -> jax.Array:
    """A random key, or an array of them, of JAX's default kind. None is ``jax.random.key(0)``.

    Raises:
        InputError: it is no key.
    """
    if key is None:
        return jax.random.key(0)
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key and isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape[-1:] == (2,):  # the old style
        key, is_key = jax.random.wrap_key_data(key, impl="threefry2x32"), True
    if not is_key:
        raise InputError(f"key={key!r}: give a random key, such as jax.random.key(0)")
    return _as_threefry(key)


def _as_threefry(key: jax.Array) -> jax.Array:
    """``key`` itself, or one of JAX's default kind made from it.

    Keys of the kind "rbg" draw other numbers under ``vmap`` than alone, so that a row would depend on its neighbours.
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
    """The prompts ``[B, P]`` and their lengths ``[B]``. Raises InputError, which names what is wrong with them."""
    try:
        tokens = np.asarray(tokens)
    except ValueError:
        raise InputError(
            "tokens: rows of different lengths; right-pad them (specjax.text.pad gives tokens and lengths)"
        ) from None
    if tokens.size == 0:
        raise InputError("tokens: empty prompt; every row needs at least 1 token (begin with the bos token)")
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise InputError(f"tokens: must be whole numbers [batch, prompt], not {tokens.dtype} {list(tokens.shape)}")
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else one_or_each("lengths", lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise InputError(f"lengths: must be {batch} whole numbers, one a row, not {lengths.dtype} {list(lengths.shape)}")
    if lengths.min() < 1:
        raise InputError(f"lengths={lengths.min()}: empty prompt; every row needs at least 1 token")
    if lengths.max() > width:
        raise InputError(f"lengths={lengths.max()}: longer than the prompts' width {width}")
    inside = np.arange(width)[None] < lengths[:, None]
    bad = tokens[inside & ((tokens < 0) | (tokens >= vocab_size))]
    if bad.size:
        raise InputError(f"tokens: id {bad[0]} is outside the vocabulary of {vocab_size} tokens; is it the target's tokenizer?")
    return np.where(inside, tokens, 0).astype(np.int32), lengths.astype(np.int32)


_SMALLEST_BUCKET = 16


def bucket(size: int) -> int:
    """``size`` rounded up to a power of two or to one and a half times one: 16, 24, 32, 48, 64, 96, …

    Programs are compiled for sizes. With few sizes, prompts of many lengths share a few programs.
    """
    power = _SMALLEST_BUCKET
    while power < size:
        if size <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power
