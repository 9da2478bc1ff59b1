"""The distribution from which tokens are sampled, in a single definition.

The target and every drafter transform their logits here. Losslessness is a statement about *this*
distribution.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.adjustments import Adjustments, adjusted
from specjax.arguments import is_whole, one_or_each
from specjax.errors import InputError
from specjax.shape_checks import shape_checked

Rule = Literal["coupled", "independent", "block", "rejection"]
"""How rows sample tokens and verify drafts. All rules are exact.

``coupled``: target and drafter use the same random numbers. These belong to the row's key and the
token's position (`position_keys`). So the text does not depend on the drafter, and a drafted token
is accepted where both models would sample the same token.

``independent``: each token is sampled with new random numbers, and a draft is verified by the rule
for its shape: a chain of sampled tokens by block verification, sampled siblings by recursive
rejection, chosen tokens by matching.

``block`` and ``rejection`` support only chains, and trees are refused. ``block`` is the rule that
``independent`` uses for chains. ``rejection`` is the older rule, which never accepts more tokens in
expectation. If the tokens of a chain were chosen and not sampled (as prompt lookup does), q is
certain, and both are equal to matching.

Examples:
    >>> sampling, key = specjax.Sampling(), jax.random.key(7)
    >>> alone, drafted = (
    ...     specjax.generate(
    ...         target,
    ...         drafter,
    ...         prompts,
    ...         max_new_tokens=8,
    ...         sampling=sampling,
    ...         key=key,
    ...         rule="coupled",
    ...     )
    ...     for drafter in (None, specjax.PromptLookup(draft=2))
    ... )
    >>> np.array_equal(alone.tokens, drafted.tokens)  # drawn, and yet the same text
    True
"""

RULE_NAMES: tuple[str, ...] = get_args(Rule)

_BLOCKS = 256
"""The maximum number of blocks in which a vocabulary is searched.

A search first finds the block of a token and then the token in it.
"""


def check_rule(rule: Any) -> None:
    """Refuse, with an InputError, a rule that is not one of `RULE_NAMES`.

    Examples:
        >>> from specjax.sampling import check_rule
        >>> check_rule("coupling")
        Traceback (most recent call last):
        specjax.errors.InputError: rule='coupling': must be one of coupled, independent, ...
    """
    if not isinstance(rule, str) or rule not in RULE_NAMES:
        raise InputError(f"rule={rule!r}: must be one of {', '.join(RULE_NAMES)}")


@struct.dataclass
class RowSampling:
    """The sampling parameters of each row of a batch, as arrays. `Sampling.rows` makes it.

    Attributes:
        temperature: ``[B]``; 0 is argmax.
        top_k: ``[B]`` int32; 0 is no limit.
        top_p: ``[B]``.
        min_p: ``[B]``.
        presence_penalty: ``[B]``; 0 is none. The three penalties have no effect if ``adjustments``
            is None.
        frequency_penalty: ``[B]``; 0 is none.
        repetition_penalty: ``[B]``; 1 is none.
        greedy: static; True if all rows are greedy. Then no distribution is ever computed.
        truncated: static; True if any row has a top_k, top_p or min_p. Otherwise no threshold is
            computed.
        rule: static; the rule of all rows.
        stop_token_ids: ``[B, E]`` int32 ids of tokens that end a text, padded with -1; None if
            ``tokens_before_stop`` is None.
        tokens_before_stop: ``[B]`` int32, the number of next tokens that must not be one of
            ``stop_token_ids``; None if no row has such a minimum.
        adjustments: what was generated in each row, and the biases of its tokens; None if no row
            has penalties, biases or banned words. Then none of it is computed.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    greedy: bool = struct.field(pytree_node=False)
    truncated: bool = struct.field(pytree_node=False)
    rule: Rule = struct.field(pytree_node=False, default="independent")
    stop_token_ids: jax.Array | None = None
    tokens_before_stop: jax.Array | None = None
    adjustments: Adjustments | None = None

    @property
    def coupled(self) -> bool:
        """True if tokens are sampled with the random numbers of their positions.

        Greedy rows sample nothing.
        """
        return self.rule == "coupled" and not self.greedy


@dataclass(frozen=True)
class _Recipe:
    """The array type and the valid range of a sampling parameter on the device.

    Attributes:
        dtype: the data type of its array.
        is_valid: returns for an array of numbers which of them are in range.
        range: the range in words, for errors.
        most: larger numbers mean the same, and are stored as this one.
    """

    dtype: Any
    is_valid: Callable[[np.ndarray], np.ndarray]
    range: str
    most: float = math.inf


_RECIPES = {
    "temperature": _Recipe(
        np.float32, lambda x: (x >= 0) & np.isfinite(x), "at least 0; 0 is greedy"
    ),
    "top_k": _Recipe(
        np.int32,
        lambda x: (x >= 0) & (x == np.floor(x)),
        "a whole number, 0 for no limit",
        most=2**31 - 1,
    ),
    "top_p": _Recipe(np.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]; 1 is no limit"),
    "min_p": _Recipe(np.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]; 0 is no limit"),
    "presence_penalty": _Recipe(
        np.float32, lambda x: np.abs(x) <= 2, "from -2 to 2; 0 is no penalty"
    ),
    "frequency_penalty": _Recipe(
        np.float32, lambda x: np.abs(x) <= 2, "from -2 to 2; 0 is no penalty"
    ),
    "repetition_penalty": _Recipe(
        np.float32, lambda x: (x >= 0.01) & (x <= 10), "from 0.01 to 10; 1 is no penalty"
    ),
}
"""The recipe of each field of `Sampling`. `RowSampling` has a field of the same name."""

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""The penalties, with the numbers that stand for none."""

SAMPLING_NAMES = tuple(_RECIPES)
"""The names of the parameters that define the distribution."""


@dataclass(frozen=True)
class Sampling:
    """The distribution of tokens. Each parameter is one number, or one number per row of a batch.

    `specjax.SamplingParams` adds the other parameters of a request. On the device, the parameters
    of all rows are a `RowSampling`. A new parameter needs a field here, a recipe in this module, a
    field of `RowSampling`, its place in the distribution, and a field of HTTP requests if clients
    may set it.

    The logits are divided by ``temperature`` (0: argmax). Then they are restricted to the ``top_k``
    most probable tokens (0: no limit), then to the smallest set of most probable tokens whose mass
    reaches ``top_p``, then to tokens at least ``min_p`` times as probable as the most probable one.
    Tokens that tie with the last token kept are also kept.

    Before the temperature come the penalties for tokens that the text contains already:
    ``repetition_penalty`` (1: none), ``frequency_penalty`` and ``presence_penalty`` (0: none).
    `specjax.adjustments.adjusted` defines them. They apply to greedy rows too.

    Examples:
        >>> specjax.Sampling(temperature=0.7, top_p=0.9)
        Sampling(temperature=0.7, top_p=0.9)
        >>> rows = specjax.Sampling(temperature=(0.0, 1.0)).rows(2)  # the first row is greedy
        >>> rows.temperature.tolist()
        [0.0, 1.0]
        >>> specjax.Sampling(top_p=1.5).rows(2)
        Traceback (most recent call last):
        specjax.errors.InputError: top_p=1.5: must be in (0, 1]; 1 is no limit
        >>> specjax.Sampling(top_k="3")
        Traceback (most recent call last):
        specjax.errors.InputError: top_k='3': must be a number, or one number for each row
    """

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0
    repetition_penalty: Any = 1.0

    def __post_init__(self) -> None:
        """Refuse values that are not numbers. `rows` checks the ranges and the number of rows."""
        for name in SAMPLING_NAMES:
            one_or_each(name, getattr(self, name))

    def __repr__(self) -> str:
        """Return the class, the temperature and the parameters that differ from the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        changed = {
            name: value
            for name, (value, default) in values.items()
            if name == "temperature" or not np.array_equal(value, default)  # pyright: ignore[reportArgumentType]
        }
        shown = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({shown})"

    @property
    def has_penalties(self) -> bool:
        """True if any row has a penalty."""
        return any(
            np.any(np.asarray(getattr(self, name)) != none) for name, none in PENALTIES.items()
        )

    def with_explicit(self, **stated: Any) -> "Sampling":
        """Return these defaults, overridden by the parameters that a call states.

        All callers merge defaults and explicit parameters with this method. If the resulting
        temperature is 0 in every row, the parameters of truncation have no effect. Their defaults
        are then dropped, and only those that the call states stay. Penalties stay.

        Args:
            stated: the fields of `Sampling` that the call states, by name. None means the default.

        Raises:
            InputError: a parameter is neither a number nor one number per row.

        Examples:
            >>> defaults = specjax.Sampling(temperature=0.6, top_k=20, top_p=0.95)
            >>> defaults.with_explicit(temperature=0.7, top_p=1.0)
            Sampling(temperature=0.7, top_k=20)
            >>> defaults.with_explicit(temperature=0)
            Sampling(temperature=0)
        """
        stated = {name: value for name, value in stated.items() if value is not None}
        merged = Sampling(**{name: getattr(self, name) for name in SAMPLING_NAMES} | stated)
        if np.any(np.asarray(merged.temperature) != 0):
            return merged
        untruncated = {name: getattr(merged, name) for name in ("temperature", *PENALTIES)}
        return replace(Sampling(**untruncated), **stated)

    def rows(self, batch: int, rule: Rule = "independent") -> RowSampling:
        """Return the arrays of ``batch`` rows, whose drafts are verified by ``rule``.

        Raises:
            InputError: a parameter is out of range or has a different number of rows, or there is
                no such rule.
        """
        check_rule(rule)
        numbers = self.by_row(batch)
        is_drawn = bool(np.any(numbers["temperature"] > 0))
        arrays: dict[str, Any] = {name: jnp.asarray(values) for name, values in numbers.items()}
        return RowSampling(
            **arrays,
            greedy=not is_drawn,
            truncated=bool(
                np.any(numbers["top_k"] > 0)
                or np.any(numbers["top_p"] < 1)
                or np.any(numbers["min_p"] > 0)
            ),
            rule=(
                rule if is_drawn else "independent"
            ),  # greedy rows draw nothing, so all rules share a program
        )

    def rows_of_any_kind(self, batch: int) -> RowSampling:
        """Return the arrays of ``batch`` rows for a program that serves every kind of request.

        Rows may be sampled or greedy, truncated or not. Their rule is coupled sampling, so that a
        text depends only on its key and its prompt.

        Raises:
            InputError: see `rows`.

        Examples:
            >>> rows = specjax.sampling.GREEDY.rows_of_any_kind(2)
            >>> rows.greedy, rows.truncated, rows.rule
            (False, True, 'coupled')
        """
        return replace(self.rows(batch), greedy=False, truncated=True, rule="coupled")

    def by_row(self, batch: int) -> dict[str, np.ndarray]:
        """Return the numbers ``[batch]`` of each parameter by name, on the host.

        They have the types and ranges of the device.

        Raises:
            InputError: a parameter is out of range, or has a different number of rows.

        Examples:
            >>> specjax.Sampling(temperature=(0.0, 1.0)).by_row(2)["temperature"]
            array([0., 1.], dtype=float32)
        """
        numbers = {name: self._row(name, batch) for name in SAMPLING_NAMES}
        # Devices flush numbers below float32's smallest normal number to 0, and may divide by
        # multiplying with the reciprocal. So temperatures are clipped to where they and their
        # reciprocals are normal numbers. More extreme ones would not change the distribution.
        smallest, temperature = float(np.finfo(np.float32).tiny), numbers["temperature"]
        numbers["temperature"] = np.where(
            temperature > 0, np.clip(temperature, smallest, 1 / smallest), 0.0
        )
        return {name: values.astype(_RECIPES[name].dtype) for name, values in numbers.items()}

    def of_row(self) -> dict[str, np.ndarray]:
        """Return the parameters of a single row by name, each a scalar as in `by_row`.

        Raises:
            InputError: a parameter is out of range, or has several numbers.

        Examples:
            >>> specjax.Sampling(temperature=0.5).of_row()["temperature"]
            np.float32(0.5)
        """
        return {name: numbers[0] for name, numbers in self.by_row(1).items()}

    def _row(self, name: str, batch: int) -> np.ndarray:
        """Check a parameter, and return its numbers ``[batch]`` as float64."""
        recipe, value = _RECIPES[name], one_or_each(name, getattr(self, name)).astype(np.float64)
        if value.ndim == 1 and len(value) != batch:
            raise InputError(
                f"{name} has shape {value.shape}: give one number, or one for each of the {batch}"
                " rows"
            )
        value = np.broadcast_to(value, (batch,))
        is_valid = recipe.is_valid(value)
        if not np.all(is_valid):
            raise InputError(f"{name}={value[~is_valid][0]:g}: must be {recipe.range}")
        return np.minimum(value, recipe.most)


GREEDY = Sampling(temperature=0.0)
"""Greedy decoding: always the most likely token."""


@struct.dataclass
class Distributions:
    """The distributions of tokens at each node, as logits and a few numbers.

    Each probability is computed where it is read. An array of all probabilities would be as large
    as the logits, and recomputing is faster than writing and reading it. `distributions` makes
    this. For a single node per row, `probabilities` is as good.

    Attributes:
        values: ``[B, …, V]`` float32, log p up to a scale and a constant.
        top: ``[B, …]`` the largest of these values.
        temperature: ``[B, …]`` the scale: ``(values - top) / temperature`` is log p plus a
            constant.
        total: ``[B, …]`` the sum of the exponentials of that.
        best: ``[B, …]`` int32 the most likely token, the lowest id among ties.
        is_certain: ``[B, …]`` bool, whether ``best`` has probability 1, as in greedy rows.

    Examples:
        >>> from specjax.sampling import distributions
        >>> one_row_of_two_nodes = jnp.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
        >>> p = distributions(jnp.log(one_row_of_two_nodes), specjax.Sampling().rows(1))
        >>> np.round(np.asarray(p.of(jnp.array([[1, 2]]))), 3)  # of one token at each node
        array([[0.3, 0.8]], dtype=float32)
        >>> np.round(np.asarray(p.at(jnp.array([1]))), 3)  # of all tokens at one node
        array([[0.1, 0.1, 0.8]], dtype=float32)
    """

    values: jax.Array
    top: jax.Array
    temperature: jax.Array
    total: jax.Array
    best: jax.Array
    is_certain: jax.Array

    def of(self, tokens: jax.Array) -> jax.Array:
        """Return ``[B, …]`` the probability of one token, ``tokens [B, …]``, at every node."""
        values = jnp.take_along_axis(self.values, tokens[..., None], axis=-1)[..., 0]
        probabilities = jnp.exp((values - self.top) / self.temperature) / self.total
        return jnp.where(
            self.is_certain, (tokens == self.best).astype(probabilities.dtype), probabilities
        )

    def at(self, node: jax.Array) -> jax.Array:
        """Return ``[B, V]`` p at each row's ``node [B]``, for distributions ``[B, N, V]``."""
        return jax.tree.map(lambda leaf: at_nodes(leaf, node), self).all()

    def all(self) -> jax.Array:
        """Return ``[B, …, V]`` all probabilities."""
        is_best = jnp.arange(self.values.shape[-1], dtype=jnp.int32) == self.best[..., None]
        return jnp.where(self.is_certain[..., None], is_best.astype(jnp.float32), self._drawn())

    def excess(self, ratio: jax.Array, q: jax.Array) -> jax.Array:
        """Return ``[B, …]`` the sum of max(0, ratio * p - q) over the vocabulary.

        ``ratio`` is ``[B, …]`` and ``q`` is ``[B, …, V]``.
        """
        # No `where` inside the sum: XLA's CPU backend would store its result. The barrier keeps XLA
        # from sharing these exponentials with `total`, which would also store them.
        top, temperature = jax.lax.optimization_barrier((self.top, self.temperature))
        p = replace(self, top=top, temperature=temperature)._drawn()
        difference = ratio[..., None] * p - q
        # This is max(0, difference), exactly. For the constant XLA's CPU backend would store an
        # array of zeros.
        excess = jnp.sum(0.5 * (difference + jnp.abs(difference)), axis=-1)
        q_of_best = jnp.take_along_axis(q, self.best[..., None], axis=-1)[..., 0]
        return jnp.where(self.is_certain, jnp.maximum(0.0, ratio - q_of_best), excess)

    def _drawn(self) -> jax.Array:
        """Return the probabilities ``[B, …, V]`` of rows that are not greedy."""
        scaled = (self.values - self.top[..., None]) / self.temperature[..., None]
        return jnp.exp(scaled) / self.total[..., None]


def distributions(
    logits: jax.Array, sampling: RowSampling, legal: jax.Array | None = None
) -> Distributions:
    """Return the distributions of tokens for the target's or a drafter's ``logits [B, …, V]``.

    For ``legal`` see `perturbed`.

    Examples:
        >>> from specjax.sampling import distributions
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> p = distributions(logits, specjax.Sampling(temperature=(0.0,)).rows(1))
        >>> p.best.tolist(), p.is_certain.tolist()  # a greedy row
        ([1], [True])
    """
    logits = logits.astype(jnp.float32)
    is_greedy = jnp.broadcast_to(
        _by_row(sampling.temperature == 0, logits[..., 0]), logits.shape[:-1]
    )
    # Truncation stores the remaining logits as a new array, and so does a grammar.
    if sampling.truncated or legal is not None:
        values = _warped(logits, sampling, legal=legal)
        top = jnp.zeros(is_greedy.shape, jnp.float32)
        temperature = jnp.ones(is_greedy.shape, jnp.float32)
    else:
        values, top = logits, _top(logits)
        temperature = jnp.where(is_greedy, 1.0, _by_row(sampling.temperature, top))
    total = jnp.sum(jnp.exp((values - top[..., None]) / temperature[..., None]), axis=-1)
    return Distributions(
        values=values,
        top=top,
        temperature=temperature,
        total=total,
        best=argmax(only_legal(logits, legal)),
        is_certain=is_greedy,
    )


@shape_checked
def probabilities(
    logits: Float[Array, "B *nodes V"], sampling: RowSampling, legal: Any = None
) -> Float[Array, "B *nodes V"]:
    """Return the probabilities of tokens for each row, float32.

    A greedy row is one-hot at its argmax (the lowest id among ties). For ``legal`` see `perturbed`.

    Examples:
        >>> from specjax.sampling import probabilities
        >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> p = probabilities(logits, specjax.Sampling(top_k=2).rows(1))
        >>> np.round(np.asarray(p), 3)
        array([[0.625, 0.375, 0.   ]], dtype=float32)
    """
    if sampling.greedy:
        return jax.nn.one_hot(
            argmax(only_legal(logits.astype(jnp.float32), legal)),
            logits.shape[-1],
            dtype=jnp.float32,
        )
    return distributions(logits, sampling, legal).all()


def perturbed(
    logits: jax.Array,
    sampling: RowSampling,
    noise: jax.Array,
    beyond: float = -np.inf,
    legal: jax.Array | None = None,
) -> jax.Array:
    """Return ``[B, …, V]`` log p plus a constant plus Gumbel noise.

    The token with the largest value is an exact sample from p, and the k largest are a sample of k
    tokens without replacement (the Gumbel trick). Greedy rows get no noise: their sample is their
    argmax.

    Args:
        logits: ``[B, …, V]``.
        sampling: the rows' parameters.
        noise: ``[B, …, V]``, the `position_noise` of the position that the token is for.
        beyond: is added to tokens outside the truncation. A finite number keeps their order, after
            all other tokens.
        legal: ``[B, …, V]`` bool, the tokens that the row's grammar allows next; None without a
            grammar. See `specjax.grammars` for the distribution of constrained rows.
    """
    greedy = _by_row(sampling.temperature == 0, logits)
    return _warped(logits, sampling, beyond, legal) + jnp.where(greedy, 0.0, noise)


def _warped(
    logits: jax.Array,
    sampling: RowSampling,
    beyond: float = -np.inf,
    legal: jax.Array | None = None,
) -> jax.Array:
    """Return log p plus a constant, for rows that are not greedy.

    ``beyond`` and ``legal`` are those of `perturbed`.
    """
    logits = logits.astype(jnp.float32)
    if legal is not None:
        return _constrained(logits, sampling, legal)
    scaled = _scaled(logits, sampling)
    if not sampling.truncated:
        return scaled
    return jnp.where(_is_kept(scaled, sampling), scaled, scaled + beyond)


def _constrained(logits: jax.Array, sampling: RowSampling, legal: jax.Array) -> jax.Array:
    """Return log p plus a constant for constrained rows: the law of `specjax.grammars`.

    Where truncation keeps a legal token, p is restricted to the legal ones among the kept tokens.
    Elsewhere p is restricted to all legal tokens, and truncated afterwards.
    """
    if not sampling.truncated:
        # The largest legal logit is moved to 0. With the largest of all, two legal logits far below
        # it would become equal, and the argmax would differ from that of the logits.
        return _scaled(only_legal(logits, legal), sampling)
    kept_and_legal = _is_kept(_scaled(logits, sampling), sampling) & legal
    keeps_any = jnp.any(kept_and_legal, axis=-1, keepdims=True)
    allowed = jnp.where(keeps_any, kept_and_legal, legal)
    scaled = _scaled(only_legal(logits, allowed), sampling)

    def truncated_again(scaled: jax.Array) -> jax.Array:
        return jnp.where(keeps_any | _is_kept(scaled, sampling), scaled, -jnp.inf)

    # Truncation rarely keeps no legal token, and a second search costs as much as the first.
    return jax.lax.cond(jnp.all(keeps_any), lambda scaled: scaled, truncated_again, scaled)


def only_legal(logits: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Set the logits ``[…, V]`` of tokens that are not ``legal […, V]`` to -inf.

    With None they are returned as they are.

    Examples:
        >>> from specjax.sampling import only_legal
        >>> only_legal(jnp.array([1.0, 3.0, 2.0]), jnp.array([True, False, True]))
        Array([  1., -inf,   2.], dtype=float32)
    """
    return logits if legal is None else jnp.where(legal, logits, -jnp.inf)


def unpack_legal(words: jax.Array, vocab: int) -> jax.Array:
    """Return ``[…, V]`` bool, the bits of ``words […, ceil(V / 32)]`` uint32, lowest bit first.

    Examples:
        >>> from specjax.sampling import unpack_legal
        >>> unpack_legal(jnp.array([0b1101], jnp.uint32), vocab=5).tolist()
        [True, False, True, True, False]
    """
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab].astype(bool)


def _scaled(logits: jax.Array, sampling: RowSampling) -> jax.Array:
    """Divide float32 ``logits [B, …, V]`` by the rows' temperatures, except for greedy rows."""
    temperature = _by_row(sampling.temperature, logits)
    # The largest logit is moved to 0, so that a small temperature cannot make it infinite.
    return (logits - _top(logits)[..., None]) / jnp.where(temperature == 0, 1.0, temperature)


def _is_kept(scaled: jax.Array, sampling: RowSampling) -> jax.Array:
    """Return ``[B, …, V]`` bool, which tokens survive top-k, top-p and min-p.

    Greedy rows keep all tokens.
    """
    # Except on CPUs, reading the logits costs more than comparing them. So there are fewer passes,
    # and each tries more thresholds.
    by_device = partial(
        jax.lax.platform_dependent,
        cpu=partial(_threshold, bits=1),
        default=partial(_threshold, bits=4),
    )
    # In a server any row may be truncated, but usually none is.
    is_truncated = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    nothing = jnp.full((*scaled.shape[:-1], 1), -jnp.inf, scaled.dtype)
    threshold = jax.lax.cond(is_truncated, by_device, lambda *_: nothing, scaled, sampling)
    return (scaled >= threshold) | _by_row(sampling.temperature == 0, scaled)


def before_temperature(
    logits: jax.Array,
    sampling: RowSampling,
    depth: Any,
    *,
    path: jax.Array | None = None,
    ids: jax.Array | None = None,
    legal: jax.Array | None = None,
) -> jax.Array:
    """Return the logits that are divided by the temperature, for target and drafter alike.

    Penalties, biases and banned words change them, then stop tokens that may not come yet are
    removed. If no row has any of these, the logits are returned as they are.

    Args:
        logits: ``[B, …, V]`` the logits of tokens below nodes of ``depth``.
        sampling: the rows' parameters.
        depth: as in `without_stop_tokens`.
        path: the tokens from below the root to each node, as in `specjax.adjustments.adjusted`. A
            drafter that knows none, or not all, drafts a little worse.
        ids: as in `without_stop_tokens`.
        legal: as in `without_stop_tokens`.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.adjustments import Adjustments
        >>> from specjax.sampling import before_temperature
        >>> rows = specjax.Sampling(presence_penalty=1.5).rows(1)
        >>> seen = Adjustments.of_texts([[0, 1]], prompt_lengths=[1], vocab_size=3)
        >>> rows = replace(rows, adjustments=seen)
        >>> before_temperature(jnp.zeros((1, 3)), rows, depth=0).tolist()
        [[0.0, -1.5, 0.0]]
    """
    if sampling.adjustments is not None:
        logits = adjusted(
            logits,
            sampling.adjustments,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            path,
            ids,
        )
    return without_stop_tokens(logits, sampling, depth, ids, legal)


def without_stop_tokens(
    logits: jax.Array,
    sampling: RowSampling,
    depth: Any,
    ids: jax.Array | None = None,
    legal: jax.Array | None = None,
) -> jax.Array:
    """Set the logits ``[B, …, V]`` of stop tokens to -inf where min_new_tokens is not reached.

    Args:
        logits: the logits of tokens below nodes of ``depth``.
        sampling: the rows' parameters. If no row has such a minimum, nothing is computed.
        depth: the depth of the nodes, the root's being 0: a scalar, or an array for the axes
            between, ``[…]`` or ``[B, …]``.
        ids: ``[V]``, or ``[B, V]`` per row, the target's ids of the tokens, if the logits are for a
            different vocabulary.
        legal: ``[B, …, V]`` bool, the tokens that the row's grammar allows. Where it allows stop
            tokens alone, the text is over, and they stay.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.sampling import without_stop_tokens
        >>> sampling = replace(
        ...     specjax.Sampling().rows(1),
        ...     stop_token_ids=jnp.array([[2]]),  # token 2 ends a text
        ...     tokens_before_stop=jnp.array([1]),
        ... )
        >>> without_stop_tokens(jnp.zeros((1, 2, 3)), sampling, depth=jnp.array([0, 1]))[0]
        Array([[  0.,   0., -inf],
               [  0.,   0.,   0.]], dtype=float32)
    """
    stop_token_ids = sampling.stop_token_ids
    if stop_token_ids is None or sampling.tokens_before_stop is None:
        return logits
    shape = logits.shape[:-1]
    is_early = jnp.broadcast_to(
        jnp.asarray(depth) < sampling.tokens_before_stop.reshape(-1, *(1,) * (len(shape) - 1)),
        shape,
    )

    def mask(logits: jax.Array) -> jax.Array:
        target_ids = jnp.atleast_2d(
            jnp.arange(logits.shape[-1], dtype=jnp.int32) if ids is None else ids
        )
        is_end = jnp.any(target_ids[..., None] == stop_token_ids[:, None], axis=-1)
        is_end = _between(is_end, logits)
        is_removed = is_early[..., None] & is_end
        if legal is not None:
            is_removed &= jnp.any(legal & ~is_end, axis=-1, keepdims=True)
        return jnp.where(is_removed, -jnp.inf, logits)

    def mask_if_asked(logits: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.any(is_early), mask, lambda logits: logits, logits)

    # Any row may set min_new_tokens, but usually none does. A GPU would wait for its host to choose
    # the branch, in every step and at every depth of a draft. There the mask costs little compared
    # with reading the logits, so it is always applied.
    return jax.lax.platform_dependent(logits, cuda=mask, rocm=mask, default=mask_if_asked)


def at_nodes(values: jax.Array, node: jax.Array) -> jax.Array:
    """Return ``values [B, N, …]`` at each row's ``node [B]``.

    With ``values[arange(B), node]`` XLA would not know that rows are independent, and the devices
    of a mesh would exchange them.
    """
    return jnp.take_along_axis(values, node.reshape(-1, *(1,) * (values.ndim - 1)), axis=1)[:, 0]


def _between(values: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape ``values [B, V]`` to ``[B, 1, …, 1, V]``, with as many axes as ``like``."""
    return values.reshape(values.shape[0], *(1,) * (like.ndim - 2), values.shape[-1])


def _by_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape ``values [B]`` to ``[B, 1, …, 1]``, with as many axes as ``like``."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def make_key(seed: int) -> jax.Array:
    """Return the random key of a seed. No two seeds have the same key.

    `jax.random.key` uses at most 32 bits of a seed if JAX has no 64-bit numbers. This function uses
    all 63 bits, and the key does not depend on that setting.

    Raises:
        InputError: the seed is not an integer, or is out of range.

    Examples:
        >>> from specjax.sampling import make_key
        >>> make_key(3) == jax.random.key(3)
        Array(True, dtype=bool)
        >>> make_key(-1)
        Traceback (most recent call last):
        specjax.errors.InputError: seed=-1: must be a whole number, at least 0 and below 2**63
    """
    check_seed(seed)
    if seed < 2**32:
        return jax.random.key(int(seed))
    return jax.random.wrap_key_data(
        jnp.array(divmod(int(seed), 2**32), jnp.uint32), impl="threefry2x32"
    )


def check_seed(seed: Any) -> None:
    """Refuse, with an InputError, a seed that `make_key` does not accept.

    Examples:
        >>> from specjax.sampling import check_seed
        >>> check_seed(1.5)
        Traceback (most recent call last):
        specjax.errors.InputError: seed=1.5: must be a whole number, at least 0 and below 2**63
    """
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise InputError(f"seed={seed!r}: must be a whole number, at least 0 and below 2**63")


def named_key(root: jax.Array, name: str) -> jax.Array:
    """Return the random key of a name, such as the hash of a document's content.

    Args:
        root: the root key. It is not consumed. The keys of different names are independent.
        name: a hexadecimal number, of which the first 16 digits count.

    Examples:
        >>> from specjax.sampling import make_key, named_key
        >>> root = make_key(0)
        >>> keys = [named_key(root, name) for name in ("00000000ffffffff", "ffffffff00000000")]
        >>> keys[0] == keys[1]
        Array(False, dtype=bool)
    """
    for word in (name[:8], name[8:16]):
        root = jax.random.fold_in(root, int(word, 16))
    return root


def position_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Return keys ``[n, B]`` for the tokens at ``positions [n, B]`` of rows with ``keys [B]``.

    The keys depend on nothing else, and the row keys are not consumed. A position always has the
    same key: use it only for the token at that position, and only once.
    """
    return jax.vmap(jax.vmap(jax.random.fold_in))(
        jnp.broadcast_to(keys, positions.shape), positions
    )


def position_noise(keys: jax.Array, vocab: int) -> jax.Array:
    """Return Gumbel noise ``[*keys, V]``, V numbers for each key of `position_keys`."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="high"))(
        keys.reshape(-1)
    )
    return noise.reshape(*keys.shape, vocab)


def noise_of_rows(keys: jax.Array, vocab: int, sampling: RowSampling) -> jax.Array:
    """Return ``[B, V]`` the `position_noise` of ``keys [B]``, for `perturbed`.

    If all rows are greedy, it is zeros, and nothing is sampled.
    """
    is_drawn = jnp.any(sampling.temperature > 0)
    return jax.lax.cond(
        is_drawn,
        partial(position_noise, vocab=vocab),
        lambda _: jnp.zeros((keys.size, vocab)),
        keys,
    )


def argmax(logits: jax.Array) -> jax.Array:
    """Return ``[...]`` the id of the largest of ``logits [..., V]``, the lowest among ties.

    XLA's own argmax reduces pairs, which takes many times as long on CPUs.
    """
    return jax.lax.platform_dependent(logits, cpu=_argmax_by_blocks, default=_argmax_by_passes)


def _argmax_by_blocks(logits: jax.Array) -> jax.Array:
    """Find the maximum of each block of tokens, then the position in the first block that has it.

    This is one pass that writes nothing. `_argmax_by_passes` would write candidate ids to memory on
    a CPU. But a TPU might have to change the layout of the logits for the blocks, and devices that
    share a vocabulary would exchange a block.
    """
    tops = _block_tops(logits, _count_of_blocks(logits.shape[-1]))
    top = jnp.max(tops, axis=-1, keepdims=True)
    block = _first(tops == top)
    blocks = logits.reshape(*tops.shape, -1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * blocks.shape[-1] + _first(inside == top)


def _argmax_by_passes(logits: jax.Array) -> jax.Array:
    """Find the maximum, then its position: two plain reductions, which accelerators fuse."""
    return _first(logits == _top(logits)[..., None])


def _first(holds: jax.Array) -> jax.Array:
    """Return ``[...]`` int32, the first index where ``holds [..., n]``, or the last index."""
    last = holds.shape[-1] - 1
    return jnp.min(jnp.where(holds, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def can_be_drawn(logits: jax.Array) -> jax.Array:
    """Return ``[...]`` bool, whether ``logits [..., V]`` define a distribution.

    They do if none is NaN or +inf and at least one is above -inf. These reductions are the same
    with which `argmax` and every distribution begin, and the compiler computes them only once.

    Examples:
        >>> from specjax.sampling import can_be_drawn
        >>> inf, nan = np.inf, np.nan
        >>> can_be_drawn(jnp.array([[0, -inf], [0, nan], [-inf, inf], [-inf, -inf]])).tolist()
        [True, False, False, False]
    """
    return jnp.isfinite(_top(logits.astype(jnp.float32)))


def _top(logits: jax.Array) -> jax.Array:
    """Return ``[...]`` the largest of ``logits [..., V]``; +inf if one of them is NaN."""

    def by_blocks(logits: jax.Array) -> jax.Array:  # as in `argmax`, so that both share one pass
        return jnp.max(_block_tops(logits, _count_of_blocks(logits.shape[-1])), axis=-1)

    def by_choice(logits: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)

    if not jnp.issubdtype(logits.dtype, jnp.inexact):
        return jnp.max(logits, axis=-1)
    return jax.lax.platform_dependent(logits, cpu=by_blocks, default=by_choice)


def _block_tops(logits: jax.Array, count: int) -> jax.Array:
    """Return ``[..., count]`` the maximum of each block of ``logits [..., V]``.

    If any logit is NaN, all blocks are +inf. XLA's CPU backend ignores NaN in a maximum when it
    computes several side by side, and a selection before the reduction would be written to memory.
    So NaN is detected by a sum of absolute values, which is NaN only if an element is.
    """
    tops = jnp.max(logits.reshape(*logits.shape[:-1], count, -1), axis=-1)
    if not jnp.issubdtype(logits.dtype, jnp.inexact):
        return tops
    has_nan = jnp.isnan(jnp.sum(jnp.abs(logits.astype(jnp.float32)), axis=-1, keepdims=True))
    return jnp.where(has_nan, jnp.inf, tops)


def _count_of_blocks(vocab: int) -> int:
    """Return the number of equal blocks for a search, as in `draw` a power of two if possible."""
    count = math.gcd(vocab, _BLOCKS)
    if count >= 16:
        return count
    return max(blocks for blocks in range(1, _BLOCKS + 1) if vocab % blocks == 0)


def likeliest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the ``count`` largest of ``values [..., V]`` and their ids, in descending order.

    Ties are in the order of ids, as in `jax.lax.top_k`. The values are reshaped to a single axis of
    rows. Only then does XLA let devices that share a vocabulary search their own parts and exchange
    only the best of each.
    """
    best, ids = jax.lax.top_k(values.reshape(-1, values.shape[-1]), count)
    shape = (*values.shape[:-1], count)
    return best.reshape(shape), ids.reshape(shape)


def _threshold(scaled: jax.Array, sampling: RowSampling, bits: int) -> jax.Array:
    """Return ``[B, …, 1]`` the smallest scaled logit that survives top-k, then top-p, then min-p.

    ``bits`` is the argument of `_largest`.
    """
    vocab = scaled.shape[-1]
    shape = (*scaled.shape[:-1], 1)
    row, numbers = partial(_by_row, like=scaled), scaled[..., None, :]

    def kth_largest() -> jax.Array:
        count = jnp.where(row(sampling.top_k) == 0, vocab, jnp.minimum(row(sampling.top_k), vocab))
        return _largest(lambda t: jnp.sum(numbers >= t[..., None], axis=-1) >= count, shape, bits)

    # Usually no row has a top_k.
    kth = jax.lax.cond(
        jnp.any(sampling.top_k > 0), kth_largest, lambda: jnp.full(shape, -jnp.inf, scaled.dtype)
    )
    best = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.where(scaled >= kth, jnp.exp(scaled - best), 0.0)
    needed = row(sampling.top_p) * jnp.sum(mass, axis=-1, keepdims=True)
    masses = mass[..., None, :]
    nucleus = _largest(
        lambda t: jnp.sum(jnp.where(numbers >= t[..., None], masses, 0.0), axis=-1) >= needed,
        shape,
        bits,
    )
    nucleus = jnp.where(row(sampling.top_p) >= 1, -jnp.inf, nucleus)
    floor = best + jnp.log(row(sampling.min_p))  # min_p of 0 gives -inf, no floor
    # Rounding must not remove the most probable token: a top_p that is flushed to 0 needs no mass.
    return jnp.minimum(jnp.maximum(jnp.maximum(kth, nucleus), floor), best)


def _largest(
    holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], bits: int
) -> jax.Array:
    """Return the largest float32 for which a monotone predicate holds; one search per element.

    The result is found digit by digit in the 32 bits of a float. The 32 passes over the vocabulary
    take a twentieth of the time of a sort.

    Args:
        holds: the predicate for numbers ``[…, m]``. It is true up to the result and false above.
        shape: ``(…, 1)``, the shape of the result.
        bits: the number of bits of a digit. A pass tries all values of a digit at once: 4 bits give
            8 passes that try 15 numbers each, 1 bit gives 32 passes that try one.
    """
    low, high = _to_ordinal(jnp.float32(-jnp.inf)), _to_ordinal(jnp.float32(jnp.inf))
    digits = jnp.arange(1, 2**bits, dtype=jnp.uint32)

    def add_digit(index: jax.Array, prefix: jax.Array) -> jax.Array:
        shift = (32 - bits * (index + 1)).astype(jnp.uint32)
        candidates = jnp.clip(prefix + (digits << shift), low, high)
        return prefix + (
            jnp.sum(holds(_to_float(candidates)), axis=-1, keepdims=True).astype(jnp.uint32)
            << shift
        )

    largest = jax.lax.fori_loop(0, 32 // bits, add_digit, jnp.zeros(shape, jnp.uint32))
    return _to_float(jnp.clip(largest, low, high))


def _to_ordinal(x: jax.Array) -> jax.Array:
    """Convert float32 to uint32 numbers of the same order.

    The sign bit is flipped; for negative numbers, all bits are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _to_float(ordinal: jax.Array) -> jax.Array:
    """Invert `_to_ordinal`."""
    bits = jnp.where(ordinal >> 31, ordinal & jnp.uint32((1 << 31) - 1), ~ordinal)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@shape_checked
def draw(p: Float[Array, "B V"], keys: Any) -> Int[Array, " B"]:
    """Sample one token per row from unnormalized probabilities; consumes the row keys ``[B]``.

    A token of probability 0 is never sampled. The distribution function is inverted first over
    blocks of tokens and then in one block. This needs two random numbers per row, while the Gumbel
    trick needs one per token. A single number for both steps would resolve no probability below
    2^-23.
    """
    # A power of two, like the number of devices that share a vocabulary. If that number divides the
    # number of blocks, no block is split between devices.
    count = math.gcd(p.shape[-1], _BLOCKS)
    if count < 16 and p.shape[-1] > _BLOCKS:  # the padding leaves some blocks at the end empty
        count = _BLOCKS
    blocks = jnp.pad(p, ((0, 0), (0, -p.shape[-1] % count))).reshape(p.shape[0], count, -1)
    masses = jnp.sum(blocks, axis=-1)
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(keys)
    block = _invert(masses, u[:, 0])
    return block * blocks.shape[-1] + _invert(
        jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], u[:, 1]
    )


def _invert(mass: jax.Array, u: jax.Array) -> jax.Array:
    """Return ``[B]`` where the running sum of ``mass [B, n]`` passes its share ``u [B]``."""
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    upto = jnp.cumsum(mass, axis=-1)
    point = u * jnp.sum(mass, axis=-1)
    # Rounding may move the point past the end, and the running sum is not exactly monotone. So only
    # tokens with mass are allowed.
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1, keepdims=True)
    return jnp.min(jnp.where((upto > point[:, None]) & (mass > 0), index, last), axis=-1)


def split_keys(keys: jax.Array, count: int) -> jax.Array:
    """Return ``[count, B]`` new keys from row keys ``[B]``, and consume those.

    A row's new keys do not depend on other rows.
    """
    return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(keys), 0, 1)
