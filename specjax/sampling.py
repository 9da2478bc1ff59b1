"""The one definition of the distribution that tokens are drawn from.

The target and every drafter warp their logits here. Losslessness is a statement about *this* distribution.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.arguments import is_whole, one_or_each
from specjax.errors import InputError
from specjax.shape_checks import shape_checked

Rule = Literal["coupled", "independent", "block", "rejection"]
"""How rows draw their tokens and verify drafts; every one is exact.

``coupled``: target and drafter draw with the same random numbers, which belong to the row's key and the token's position
(`position_keys`), so that the text does not depend on the drafter, and a draft is right where the two models would draw the
same. ``independent``: each token is drawn with numbers of its own, and a draft is verified by the rule that fits it: a chain of
drawn tokens by block verification, drawn siblings by recursive rejection, chosen tokens by matching.

``block`` and ``rejection`` are for chains alone, and refused for trees. ``block`` is what ``independent`` does for a chain;
``rejection`` is the older rule, by which never more tokens are accepted in expectation. Where a chain's tokens were chosen
(prompt lookup's copies) q is certain, and both come to matching.

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
"""Into so many blocks a vocabulary is divided where a token is searched: first for its block, then inside it."""


def check_rule(rule: Any) -> None:
    """Refuse, with an InputError, what is none of the `RULE_NAMES`.

    Examples:
        >>> from specjax.sampling import check_rule
        >>> check_rule("coupling")
        Traceback (most recent call last):
        specjax.errors.InputError: rule='coupling': must be one of coupled, independent, block, rejection
    """
    if not isinstance(rule, str) or rule not in RULE_NAMES:
        raise InputError(f"rule={rule!r}: must be one of {', '.join(RULE_NAMES)}")


@struct.dataclass
class RowSampling:
    """The sampling parameters of each row of a batch, as arrays. Made by `Sampling.rows`.

    Attributes:
        temperature: ``[B]``; 0 is argmax.
        top_k: ``[B]`` int32; 0 is no limit.
        top_p: ``[B]``.
        min_p: ``[B]``.
        greedy: known before tracing that every row is greedy: no distribution is ever formed.
        truncated: known before tracing that some row has a top_k, top_p or min_p: without one, no threshold is looked for.
        rule: known before tracing, of all rows.
        stop_token_ids: ``[B, E]`` int32 ids that end a text, -1 is none; None where ``tokens_before_stop`` is None.
        tokens_before_stop: ``[B]`` int32, the next tokens that must be none of ``stop_token_ids``; None: no row asks for that.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    greedy: bool = struct.field(pytree_node=False)
    truncated: bool = struct.field(pytree_node=False)
    rule: Rule = struct.field(pytree_node=False, default="independent")
    stop_token_ids: jax.Array | None = None
    tokens_before_stop: jax.Array | None = None

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with the random numbers of their positions. Greedy rows draw nothing."""
        return self.rule == "coupled" and not self.greedy


@dataclass(frozen=True)
class _Recipe:
    """How the device holds one sampling parameter.

    Attributes:
        dtype: the type of its array.
        is_valid: tells of an array of numbers which are in range.
        range: the range in words, for errors.
        most: larger numbers mean the same, and are stored as this one.
    """

    dtype: Any
    is_valid: Callable[[np.ndarray], np.ndarray]
    range: str
    most: float = math.inf


_RECIPES = {
    "temperature": _Recipe(np.float32, lambda x: (x >= 0) & np.isfinite(x), "at least 0; 0 is greedy"),
    "top_k": _Recipe(np.int32, lambda x: (x >= 0) & (x == np.floor(x)), "a whole number, 0 for no limit", most=2**31 - 1),
    "top_p": _Recipe(np.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]; 1 is no limit"),
    "min_p": _Recipe(np.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]; 0 is no limit"),
}
"""The recipe of each field of `Sampling`, which has the same name in `RowSampling`."""

SAMPLING_NAMES = tuple(_RECIPES)
"""The parameters that make the distribution."""


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from: each parameter is one number, or one number for each row of a batch.

    `specjax.SamplingParams` adds what else one request asks for. On the device, the parameters of all rows are a `RowSampling`.
    A new parameter is a field here with a recipe in this module, a field of `RowSampling`, and its place in the distribution;
    and a field of HTTP's requests, where clients may ask for it.

    The logits are divided by ``temperature`` (0: argmax), then restricted to the ``top_k`` most probable tokens (0: no
    limit), then to the smallest set of most probable tokens whose mass reaches ``top_p``, then to tokens at least ``min_p``
    times as probable as the most probable. Tokens that tie with the last one kept are kept.

    Examples:
        >>> specjax.Sampling(temperature=0.7, top_p=0.9)
        Sampling(temperature=0.7, top_k=0, top_p=0.9, min_p=0.0)
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

    def __post_init__(self) -> None:
        """Refuse what is no number. Whether numbers are in range, and as many as there are rows, is checked by `rows`."""
        for name in SAMPLING_NAMES:
            one_or_each(name, getattr(self, name))

    def with_explicit(self, **stated: Any) -> "Sampling":
        """Return the parameters of a call for which these are the defaults: what the call states wins, one by one.

        All callers merge defaults and explicit parameters here. Where the temperature comes to 0 in every row, nothing is cut
        off: defaults of the other parameters are then left out, and only what the call states stays.

        Args:
            stated: the fields of `Sampling` that the call states, by name; None stands for the default.

        Raises:
            InputError: a parameter is no number, nor one for each row.

        Examples:
            >>> defaults = specjax.Sampling(temperature=0.6, top_k=20, top_p=0.95)
            >>> defaults.with_explicit(temperature=0.7, top_p=1.0)
            Sampling(temperature=0.7, top_k=20, top_p=1.0, min_p=0.0)
            >>> defaults.with_explicit(temperature=0)
            Sampling(temperature=0, top_k=0, top_p=1.0, min_p=0.0)
        """
        stated = {name: value for name, value in stated.items() if value is not None}
        merged = Sampling(**{name: getattr(self, name) for name in SAMPLING_NAMES} | stated)
        if np.any(np.asarray(merged.temperature) != 0):
            return merged
        return replace(Sampling(temperature=merged.temperature), **stated)

    def rows(self, batch: int, rule: Rule = "independent") -> RowSampling:
        """Return the arrays of ``batch`` rows, whose drafts are verified by ``rule``.

        Raises:
            InputError: a parameter is out of its range, or has another number of rows; or there is no such rule.
        """
        check_rule(rule)
        numbers = self.by_row(batch)
        is_drawn = bool(np.any(numbers["temperature"] > 0))
        return RowSampling(
            **{name: jnp.asarray(values) for name, values in numbers.items()},
            greedy=not is_drawn,
            truncated=bool(np.any(numbers["top_k"] > 0) or np.any(numbers["top_p"] < 1) or np.any(numbers["min_p"] > 0)),
            rule=rule if is_drawn else "independent",  # greedy rows draw nothing: one program for all
        )

    def rows_of_any_kind(self, batch: int) -> RowSampling:
        """Return the arrays of ``batch`` rows for a program that serves every request: drawn or greedy, truncated or not.

        Rows are verified by coupled sampling, so that a text depends on its key and its prompt alone.

        Raises:
            InputError: as `rows`.

        Examples:
            >>> rows = specjax.sampling.GREEDY.rows_of_any_kind(2)
            >>> rows.greedy, rows.truncated, rows.rule
            (False, True, 'coupled')
        """
        return replace(self.rows(batch), greedy=False, truncated=True, rule="coupled")

    def by_row(self, batch: int) -> dict[str, np.ndarray]:
        """Return each parameter's numbers ``[batch]`` by its name, in the types and ranges that the device uses, on the host.

        Raises:
            InputError: a parameter is out of its range, or has another number of rows.

        Examples:
            >>> specjax.Sampling(temperature=(0.0, 1.0)).by_row(2)["temperature"]
            array([0., 1.], dtype=float32)
        """
        numbers = {name: self._row(name, batch) for name in SAMPLING_NAMES}
        # Devices take numbers below float32's smallest normal one for 0, and may divide by multiplying with the reciprocal:
        # a temperature is moved to where it and its reciprocal are normal numbers. Beyond that nothing changes any more.
        smallest, temperature = float(np.finfo(np.float32).tiny), numbers["temperature"]
        numbers["temperature"] = np.where(temperature > 0, np.clip(temperature, smallest, 1 / smallest), 0.0)
        return {name: values.astype(_RECIPES[name].dtype) for name, values in numbers.items()}

    def of_row(self) -> dict[str, np.ndarray]:
        """Return the parameters of one row by their names, each a scalar on the host, as `by_row` has them.

        Raises:
            InputError: a parameter is out of its range, or has several numbers.

        Examples:
            >>> specjax.Sampling(temperature=0.5).of_row()["temperature"]
            np.float32(0.5)
        """
        return {name: numbers[0] for name, numbers in self.by_row(1).items()}

    def _row(self, name: str, batch: int) -> np.ndarray:
        """Return the numbers of one parameter ``[batch]`` as float64, checked."""
        recipe, value = _RECIPES[name], one_or_each(name, getattr(self, name)).astype(np.float64)
        if value.ndim == 1 and len(value) != batch:
            raise InputError(f"{name} has shape {value.shape}: give one number, or one for each of the {batch} rows")
        value = np.broadcast_to(value, (batch,))
        is_valid = recipe.is_valid(value)
        if not np.all(is_valid):
            raise InputError(f"{name}={value[~is_valid][0]:g}: must be {recipe.range}")
        return np.minimum(value, recipe.most)


GREEDY = Sampling(temperature=0.0)
"""The likeliest token every time."""


@struct.dataclass
class Distributions:
    """The distributions that each row's tokens are drawn from, as logits and a few numbers: every p is formed where it is read.

    Storing all probabilities would need an array as large as the logits. Recomputing them is faster than writing and reading
    that array. Made by `distributions`; of one node a row, `probabilities` is as good.

    Attributes:
        values: ``[B, …, V]`` float32 log p, but for a scale and a constant.
        top: ``[B, …]`` the largest of them.
        temperature: ``[B, …]`` the scale: ``(values - top) / temperature`` is log p plus a constant.
        total: ``[B, …]`` the sum of the exponentials of that.
        best: ``[B, …]`` int32 the likeliest token, the lowest among ties.
        is_certain: ``[B, …]`` bool, whether p is 1 for ``best``, as it is of greedy rows.

    Examples:
        >>> from specjax.sampling import distributions
        >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]]))  # one row of two nodes
        >>> p = distributions(logits, specjax.Sampling().rows(1))
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
        """``[B, …]`` the probability of one token, ``tokens [B, …]``, at every node."""
        values = jnp.take_along_axis(self.values, tokens[..., None], axis=-1)[..., 0]
        drawn = jnp.exp((values - self.top) / self.temperature) / self.total
        return jnp.where(self.is_certain, (tokens == self.best).astype(drawn.dtype), drawn)

    def at(self, node: jax.Array) -> jax.Array:
        """``[B, V]`` p at each row's ``node [B]``, of distributions ``[B, N, V]``."""
        return jax.tree.map(lambda leaf: at_nodes(leaf, node), self).all()

    def all(self) -> jax.Array:
        """``[B, …, V]`` all of them."""
        is_best = jnp.arange(self.values.shape[-1], dtype=jnp.int32) == self.best[..., None]
        return jnp.where(self.is_certain[..., None], is_best.astype(jnp.float32), self._drawn())

    def excess(self, ratio: jax.Array, q: jax.Array) -> jax.Array:
        """``[B, …]`` the sum of max(0, ratio * p - q) over the vocabulary, with ``ratio [B, …]`` and ``q [B, …, V]``."""
        # There is no `where` inside the sum: XLA's CPU backend would store its result. The barrier keeps XLA from sharing these
        # exponentials with ``total``, which would store them, too.
        top, temperature = jax.lax.optimization_barrier((self.top, self.temperature))
        drawn = replace(self, top=top, temperature=temperature)._drawn()
        drawn = jnp.sum(jnp.maximum(0.0, ratio[..., None] * drawn - q), axis=-1)
        q_of_best = jnp.take_along_axis(q, self.best[..., None], axis=-1)[..., 0]
        return jnp.where(self.is_certain, jnp.maximum(0.0, ratio - q_of_best), drawn)

    def _drawn(self) -> jax.Array:
        scaled = (self.values - self.top[..., None]) / self.temperature[..., None]
        return jnp.exp(scaled) / self.total[..., None]


def distributions(logits: jax.Array, sampling: RowSampling) -> Distributions:
    """What each row's tokens are drawn from where the target, or a drafter, has ``logits [B, …, V]``.

    Examples:
        >>> from specjax.sampling import distributions
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> p = distributions(logits, specjax.Sampling(temperature=(0.0,)).rows(1))
        >>> p.best.tolist(), p.is_certain.tolist()  # a greedy row
        ([1], [True])
    """
    logits = logits.astype(jnp.float32)
    is_greedy = jnp.broadcast_to(_by_row(sampling.temperature == 0, logits[..., 0]), logits.shape[:-1])
    if sampling.truncated:  # what is left of the logits is an array of its own
        values = _warped(logits, sampling)
        top, temperature = jnp.zeros(is_greedy.shape, jnp.float32), jnp.ones(is_greedy.shape, jnp.float32)
    else:
        values, top = logits, _top(logits)
        temperature = jnp.where(is_greedy, 1.0, _by_row(sampling.temperature, top))
    total = jnp.sum(jnp.exp((values - top[..., None]) / temperature[..., None]), axis=-1)
    return Distributions(
        values=values, top=top, temperature=temperature, total=total, best=argmax(logits), is_certain=is_greedy
    )


@shape_checked
def probabilities(logits: Float[Array, "B *nodes V"], sampling: RowSampling) -> Float[Array, "B *nodes V"]:
    """The distribution that each row's tokens are drawn from, float32.

    A greedy row's is one-hot at its argmax (the lowest id among ties).

    Examples:
        >>> from specjax.sampling import probabilities
        >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> p = probabilities(logits, specjax.Sampling(top_k=2).rows(1))
        >>> np.round(np.asarray(p), 3)
        array([[0.625, 0.375, 0.   ]], dtype=float32)
    """
    if sampling.greedy:
        return jax.nn.one_hot(argmax(logits.astype(jnp.float32)), logits.shape[-1], dtype=jnp.float32)
    return distributions(logits, sampling).all()


def perturbed(logits: jax.Array, sampling: RowSampling, noise: jax.Array, beyond: float = -np.inf) -> jax.Array:
    """``[B, …, V]`` log p plus a constant plus ``noise [B, …, V]``, which is that of `position_noise`.

    Where it is largest lies an exact draw from p, and the k largest are a draw of k without replacement (the Gumbel trick). A
    greedy row's noise is left out: its draw is its argmax.

    Args:
        logits: ``[B, …, V]``.
        sampling: the rows' settings.
        noise: of the position that the token is for.
        beyond: added to tokens that truncation takes away. A finite number puts them behind the others, in order.
    """
    greedy = _by_row(sampling.temperature == 0, logits)
    return _warped(logits, sampling, beyond) + jnp.where(greedy, 0.0, noise)


def _warped(logits: jax.Array, sampling: RowSampling, beyond: float = -np.inf) -> jax.Array:
    """log p plus a constant, of the p that a row which is not greedy draws from; ``beyond`` as in `perturbed`."""
    logits = logits.astype(jnp.float32)
    temperature = _by_row(sampling.temperature, logits)
    # The largest is moved to 0, so that a small temperature cannot carry it to infinity.
    scaled = (logits - _top(logits)[..., None]) / jnp.where(temperature == 0, 1.0, temperature)
    if not sampling.truncated:
        return scaled
    # Where a pass costs more than what is worked out in it, fewer passes that try more numbers at once.
    by_device = partial(jax.lax.platform_dependent, cpu=partial(_threshold, bits=1), default=partial(_threshold, bits=4))
    # In a server any row may ask for it, and most often none does.
    asked = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    nothing = jnp.full((*scaled.shape[:-1], 1), -jnp.inf, scaled.dtype)
    threshold = jax.lax.cond(asked, by_device, lambda *_: nothing, scaled, sampling)
    return jnp.where((scaled >= threshold) | (temperature == 0), scaled, scaled + beyond)


def without_stop_tokens(logits: jax.Array, sampling: RowSampling, depth: Any, ids: jax.Array | None = None) -> jax.Array:
    """The logits ``[B, …, V]`` with -inf for tokens that end a text, where it is too early for one.

    It comes before all else that makes a distribution of logits, for target and drafter alike.

    Args:
        logits: of tokens below nodes of ``depth``.
        sampling: the rows' settings. Where none asks for it, nothing is computed.
        depth: of the nodes, 0 being the root: a scalar, or for each of the axes between, ``[…]`` or ``[B, …]``.
        ids: ``[V]``, or ``[B, V]`` of each row, the target's ids of the tokens, where the logits are of another vocabulary.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.sampling import without_stop_tokens
        >>> stop_token_ids, tokens_before_stop = jnp.array([[2]]), jnp.array([1])  # token 2 ends a text
        >>> sampling = replace(specjax.Sampling().rows(1), stop_token_ids=stop_token_ids, tokens_before_stop=tokens_before_stop)
        >>> without_stop_tokens(jnp.zeros((1, 2, 3)), sampling, depth=jnp.array([0, 1]))[0]
        Array([[  0.,   0., -inf],
               [  0.,   0.,   0.]], dtype=float32)
    """
    stop_token_ids = sampling.stop_token_ids
    if stop_token_ids is None or sampling.tokens_before_stop is None:
        return logits
    shape = logits.shape[:-1]
    is_early = jnp.broadcast_to(jnp.asarray(depth) < sampling.tokens_before_stop.reshape(-1, *(1,) * (len(shape) - 1)), shape)

    def mask(logits: jax.Array) -> jax.Array:
        known = jnp.atleast_2d(jnp.arange(logits.shape[-1], dtype=jnp.int32) if ids is None else ids)
        is_end = jnp.any(known[..., None] == stop_token_ids[:, None], axis=-1)
        return jnp.where(is_early[..., None] & _between(is_end, logits), -jnp.inf, logits)

    def mask_if_asked(logits: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.any(is_early), mask, lambda logits: logits, logits)

    # Any row may ask for it, and most often none does. A GPU would wait for its host to choose a branch, in every step and at
    # every depth of a draft; there the mask is a few comparisons beside the reading of the logits.
    return jax.lax.platform_dependent(logits, cuda=mask, rocm=mask, default=mask_if_asked)


def at_nodes(values: jax.Array, node: jax.Array) -> jax.Array:
    """``values [B, N, …]`` at each row's ``node [B]``.

    Said as ``values[arange(B), node]`` it would not be seen that rows do not mix, and a mesh would exchange them.
    """
    return jnp.take_along_axis(values, node.reshape(-1, *(1,) * (values.ndim - 1)), axis=1)[:, 0]


def _between(values: jax.Array, like: jax.Array) -> jax.Array:
    """``values [B, V]`` as ``[B, 1, …, 1, V]``, with as many axes as ``like``."""
    return values.reshape(values.shape[0], *(1,) * (like.ndim - 2), values.shape[-1])


def _by_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """``values [B]`` as ``[B, 1, …, 1]``, with as many axes as ``like``."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def make_key(seed: int) -> jax.Array:
    """The random key of a seed; no two seeds share one.

    `jax.random.key` reads no more than 32 bits of a seed where JAX has no 64-bit numbers. Here all 63 count, and the key is
    the same with them and without.

    Raises:
        InputError: it is no whole number, or out of range.

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
    return jax.random.wrap_key_data(jnp.array(divmod(int(seed), 2**32), jnp.uint32), impl="threefry2x32")


def check_seed(seed: Any) -> None:
    """Refuse, with an InputError, what `make_key` makes no key of.

    Examples:
        >>> from specjax.sampling import check_seed
        >>> check_seed(1.5)
        Traceback (most recent call last):
        specjax.errors.InputError: seed=1.5: must be a whole number, at least 0 and below 2**63
    """
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise InputError(f"seed={seed!r}: must be a whole number, at least 0 and below 2**63")


def named_key(root: jax.Array, name: str) -> jax.Array:
    """The random key of what is called ``name``, such as a document by the hash of its content: the same wherever it lies.

    Args:
        root: is not consumed. Keys of other names are independent of this one.
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
    """``[n, B]`` keys of the tokens at ``positions [n, B]`` of rows with ``keys [B]``, which are not consumed.

    They depend on nothing else. A position has one key for good: use it for the token that comes to stand there, and once.
    """
    return jax.vmap(jax.vmap(jax.random.fold_in))(jnp.broadcast_to(keys, positions.shape), positions)


def position_noise(keys: jax.Array, vocab: int) -> jax.Array:
    """``[*keys, V]`` Gumbel numbers, V for each of the ``keys`` that `position_keys` gave."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="high"))(keys.reshape(-1))
    return noise.reshape(*keys.shape, vocab)


def noise_of_rows(keys: jax.Array, vocab: int, sampling: RowSampling) -> jax.Array:
    """``[B, V]`` the `position_noise` of ``keys [B]``, for `perturbed`. Where all rows are greedy nothing is drawn: zeros."""
    is_drawn = jnp.any(sampling.temperature > 0)
    return jax.lax.cond(is_drawn, partial(position_noise, vocab=vocab), lambda _: jnp.zeros((keys.size, vocab)), keys)


def argmax(logits: jax.Array) -> jax.Array:
    """``[...]`` the id of the largest of ``logits [..., V]``, the lowest among ties.

    XLA's CPU backend takes many times as long for its own argmax, which reduces pairs.
    """
    return jax.lax.platform_dependent(logits, cpu=_argmax_by_blocks, default=_argmax_by_passes)


def _argmax_by_blocks(logits: jax.Array) -> jax.Array:
    """The largest of every block of tokens is found first, and then where it lies in the first block that has it.

    One pass that writes nothing: a CPU would write the ids that `_argmax_by_passes` chooses among. A TPU might have to lay the
    logits out anew for the blocks, and devices that share a vocabulary would exchange one.
    """
    tops = _block_tops(logits, _count_of_blocks(logits.shape[-1]))
    top = jnp.max(tops, axis=-1, keepdims=True)
    block = _first(tops == top)
    blocks = logits.reshape(*tops.shape, -1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * blocks.shape[-1] + _first(inside == top)


def _argmax_by_passes(logits: jax.Array) -> jax.Array:
    """The largest is found first, and then where it lies: two plain reductions, which accelerators fuse with what they need."""
    return _first(logits == _top(logits)[..., None])


def _first(holds: jax.Array) -> jax.Array:
    """``[...]`` int32, the first index at which ``holds [..., n]``; the last one where it holds nowhere."""
    last = holds.shape[-1] - 1
    return jnp.min(jnp.where(holds, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def can_be_drawn(logits: jax.Array) -> jax.Array:
    """``[...]`` bool, whether ``logits [..., V]`` stand for a distribution: none is NaN or +inf, and some are above -inf.

    The same reductions that `argmax` and every distribution begin with: where these are computed, too, the compiler makes them
    once.

    Examples:
        >>> from specjax.sampling import can_be_drawn
        >>> inf, nan = np.inf, np.nan
        >>> can_be_drawn(jnp.array([[0, -inf], [0, nan], [-inf, inf], [-inf, -inf]])).tolist()
        [True, False, False, False]
    """
    return jnp.isfinite(_top(logits.astype(jnp.float32)))


def _top(logits: jax.Array) -> jax.Array:
    """``[...]`` the largest of ``logits [..., V]``; +inf where one is NaN."""

    def by_blocks(logits: jax.Array) -> jax.Array:  # as `argmax` does, so that the two share the pass
        return jnp.max(_block_tops(logits, _count_of_blocks(logits.shape[-1])), axis=-1)

    def by_choice(logits: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)

    if not jnp.issubdtype(logits.dtype, jnp.inexact):
        return jnp.max(logits, axis=-1)
    return jax.lax.platform_dependent(logits, cpu=by_blocks, default=by_choice)


def _block_tops(logits: jax.Array, count: int) -> jax.Array:
    """``[..., count]`` the largest of each block of ``logits [..., V]``; +inf in every block where one of all is NaN.

    XLA's CPU backend leaves NaN out of a maximum where it computes several side by side, and writes to memory what is chosen
    before it is reduced. So NaN is found by summing absolute values: that sum is NaN only if an element is.
    """
    tops = jnp.max(logits.reshape(*logits.shape[:-1], count, -1), axis=-1)
    if not jnp.issubdtype(logits.dtype, jnp.inexact):
        return tops
    has_nan = jnp.isnan(jnp.sum(jnp.abs(logits.astype(jnp.float32)), axis=-1, keepdims=True))
    return jnp.where(has_nan, jnp.inf, tops)


def _count_of_blocks(vocab: int) -> int:
    """How many blocks of equal size a search goes through: as in `draw` a power of two, if there are enough of them."""
    count = math.gcd(vocab, _BLOCKS)
    return count if count >= 16 else max(blocks for blocks in range(1, _BLOCKS + 1) if vocab % blocks == 0)


def likeliest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` largest of ``values [..., V]`` and their ids, descending, of equals the lower ids first: `jax.lax.top_k`.

    With one axis of rows: only so does XLA let devices that share a vocabulary search their own parts, and exchange no more
    than the best of each.
    """
    best, ids = jax.lax.top_k(values.reshape(-1, values.shape[-1]), count)
    shape = (*values.shape[:-1], count)
    return best.reshape(shape), ids.reshape(shape)


def _threshold(scaled: jax.Array, sampling: RowSampling, bits: int) -> jax.Array:
    """The smallest scaled logit that survives top-k, then top-p, then min-p: ``[B, …, 1]``; ``bits`` as in `_largest`."""
    vocab = scaled.shape[-1]
    shape = (*scaled.shape[:-1], 1)
    row, each = partial(_by_row, like=scaled), scaled[..., None, :]

    def kth_largest() -> jax.Array:
        count = jnp.where(row(sampling.top_k) == 0, vocab, jnp.minimum(row(sampling.top_k), vocab))
        return _largest(lambda t: jnp.sum(each >= t[..., None], axis=-1) >= count, shape, bits)

    # Most often no row asks for it.
    kth = jax.lax.cond(jnp.any(sampling.top_k > 0), kth_largest, lambda: jnp.full(shape, -jnp.inf, scaled.dtype))
    best = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.where(scaled >= kth, jnp.exp(scaled - best), 0.0)
    needed = row(sampling.top_p) * jnp.sum(mass, axis=-1, keepdims=True)
    kept = mass[..., None, :]
    nucleus = _largest(lambda t: jnp.sum(jnp.where(each >= t[..., None], kept, 0.0), axis=-1) >= needed, shape, bits)
    nucleus = jnp.where(row(sampling.top_p) >= 1, -jnp.inf, nucleus)
    floor = best + jnp.log(row(sampling.min_p))  # log 0 = -inf: no floor
    # The most probable token survives whatever rounding does: a top_p that the device takes for 0 asks for no mass at all.
    return jnp.minimum(jnp.maximum(jnp.maximum(kth, nucleus), floor), best)


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], bits: int) -> jax.Array:
    """The largest float32 for which ``holds``, which is true up to there and false above; one search for each of ``shape``.

    Digit by digit of the 32 bits of a float: 32 passes over the vocabulary take a twentieth of the time of sorting it.

    Args:
        holds: of numbers ``[…, m]`` whether it holds for each.
        shape: ``(…, 1)``.
        bits: of a digit. A pass tries all its values at once: 8 passes that try 15 numbers each, or 32 that try one.
    """
    low, high = _to_ordinal(jnp.float32(-jnp.inf)), _to_ordinal(jnp.float32(jnp.inf))
    digits = jnp.arange(1, 2**bits, dtype=jnp.uint32)

    def add_digit(i: jax.Array, found: jax.Array) -> jax.Array:
        place = (32 - bits * (i + 1)).astype(jnp.uint32)
        tried = jnp.clip(found + (digits << place), low, high)
        return found + (jnp.sum(holds(_to_float(tried)), axis=-1, keepdims=True).astype(jnp.uint32) << place)

    found = jax.lax.fori_loop(0, 32 // bits, add_digit, jnp.zeros(shape, jnp.uint32))
    return _to_float(jnp.clip(found, low, high))


def _to_ordinal(x: jax.Array) -> jax.Array:
    """uint32 numbers in the order of the float32 ``x``: the sign bit flipped, of negative numbers all bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _to_float(ordinal: jax.Array) -> jax.Array:
    """The inverse of `_to_ordinal`."""
    bits = jnp.where(ordinal >> 31, ordinal & jnp.uint32((1 << 31) - 1), ~ordinal)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@shape_checked
def draw(p: Float[Array, "B V"], keys: Any) -> Int[Array, " B"]:
    """One token a row from unnormalised probabilities; consumes the row keys ``[B]``. A token of probability 0 never comes.

    Inversion of the distribution function, first over blocks of tokens and then inside one: two random numbers a row instead of
    the one a token that the Gumbel trick takes. One number for both would resolve no probability below 2^-23.
    """
    # A power of two, as is the number of devices that share a vocabulary: where these divide the blocks, each lies on one.
    count = math.gcd(p.shape[-1], _BLOCKS)
    if count < 16 and p.shape[-1] > _BLOCKS:  # some blocks at the end are empty
        count = _BLOCKS
    blocks = jnp.pad(p, ((0, 0), (0, -p.shape[-1] % count))).reshape(p.shape[0], count, -1)
    masses = jnp.sum(blocks, axis=-1)
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(keys)
    block = _invert(masses, u[:, 0])
    return block * blocks.shape[-1] + _invert(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], u[:, 1])


def _invert(mass: jax.Array, u: jax.Array) -> jax.Array:
    """``[B]`` where the running sum of ``mass [B, n]`` passes the share ``u [B]`` of all of it."""
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    upto = jnp.cumsum(mass, axis=-1)
    point = u * jnp.sum(mass, axis=-1)
    # Rounding may carry the point past the end, and leaves the running sum not quite monotone: insist on mass.
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1, keepdims=True)
    return jnp.min(jnp.where((upto > point[:, None]) & (mass > 0), index, last), axis=-1)


def split_keys(keys: jax.Array, count: int) -> jax.Array:
    """``[count, B]`` new keys from row keys ``[B]``; consumes them. A row's keys do not depend on its neighbours."""
    return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(keys), 0, 1)
