"""Tests whether texts sampled with a drafter have the target's distribution, for any vocabulary.

With a tiny vocabulary, all continuations can be enumerated and counted
(`specjax.evaluation.conformance`). With 150,000 tokens they cannot. So each sampled token is
compared with p, the target's distribution at its position given the text before it.

Sort all tokens in some order. A sampled token x has an interval of length p(x), which begins at the
total probability of the tokens before x. Draw a uniform number u from it. If x was sampled from p,
then u is uniform over [0, 1], whatever p is, and the numbers of successive tokens are independent
(Rosenblatt 1952; Brockwell 2007 for discrete distributions). So the numbers of all positions and
prompts can be counted together. The order may depend on the text before the token. It decides which
deviations the test detects best. There are three tests of the texts and one of the drafts:

- ``joint``: the order is by descending p. Triples of successive numbers must be uniform in a cube.
- ``by preference``: the order is by descending q/p, where q is the drafter's distribution at that
  position. A rule that accepts too much prefers what q prefers, at every position.
- ``towards the drafter``: a score test for a rule that accepts drafted tokens too often or too
  rarely. It is the most powerful test for small errors of that kind.
- ``drafts against q``: whether the drafter samples from the q that it returns. After each prompt,
  many first tokens are drafted and counted. It is left out if no rule reads q.

To get p and q, the finished texts are read again token by token, with plain decoding's own passes,
and the drafter drafts at every position without verification. The drafts from which the text was
generated are of no use: under block verification, the token itself decides whether it still belongs
to the step that drafted it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from scipy import special

from specjax import decoding, sharding
from specjax.decoding.generation import raise_if_failed
from specjax.decoding.options import GenerationOptions
from specjax.drafters.base import Committed, Drafter
from specjax.drafts import tree
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, SampledTree
from specjax.evaluation.conformance import SETTINGS, g_test
from specjax.models.transformer import Target
from specjax.progress import track
from specjax.sampling import RowSampling, Rule, Sampling, probabilities

FALSE_ALARM = 1e-5
"""The probability over all random keys that a correct target and drafter fail."""

NEW_TOKENS = 32
"""The number of sampled tokens of each text."""

_SHARE = 0.05
"""The score test is the most powerful one for a rule that accepts this share too much.

It is nearly the most powerful one for other shares.
"""

_BINS = 20
_DRAFTS = 16  # drafts per text for the test against q
# Every fourth batch uses all settings: truncation takes a CPU as long as all the rest.
_MIXED_EVERY = 4
_ROWS = 256  # the maximum number of rows of a batch; more are not faster on a CPU
# The maximum size of an array, which limits the rows of a batch for large vocabularies.
_NUMBERS = 2**27
# The smallest variance of the score. Below it, only a doubling would be detected, and the
# approximations are invalid.
_LEAST_VARIANCE = 100.0


@dataclass(frozen=True)
class Distribution:
    """The results of the tests of sampled texts.

    Attributes:
        p_value: the probability that a correct target and drafter look as bad or worse: the
            smallest of the ``p_values`` times their number, at most 1. It is 0 if a token was
            sampled that truncation excludes.
        p_values: the p-value of each test, see `specjax.evaluation.drawn_texts`.
        draws: the number of sampled tokens.
        texts: the number of texts.
        outside: the number of sampled tokens that top-k, top-p or min-p exclude, by more than
            rounding explains.
        detectable: a rule that prefers drafted tokens by this share fails 95 times of 100. None if
            the drafter drafted too little for the test.
        rule: the verification rule.
    """

    p_value: float
    p_values: dict[str, float]
    draws: int
    texts: int
    outside: int
    detectable: float | None
    rule: Rule

    @property
    def passes(self) -> bool:
        """True if the texts fit the target's distribution.

        It is False with probability `FALSE_ALARM` for a correct target and drafter.
        """
        return self.p_value >= FALSE_ALARM


def draw_and_test(
    target: Target,
    drafter: Drafter,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    settings: Sequence[Sampling] = SETTINGS,
    rule: Rule | None = None,
    draws: int,
    key: jax.Array,
    rounding: float = 0.0,
) -> Distribution:
    """Sample texts with the drafter, and test whether they have the target's distribution.

    Args:
        target: the target.
        drafter: the drafter to test.
        tokens: ``[P, W]`` right-padded prompts. Each is continued many times, with a key per text.
        lengths: ``[P]`` the length of each prompt.
        settings: the sampling parameters, each for all prompts. Most batches use the first; every
            fourth batch uses all of them, in different rows.
        rule: the verification rule; None for the default of the drafter's shape.
        draws: the number of tokens to sample; some more may be sampled.
        key: the random key, which is consumed.
        rounding: the bound on the change of the difference between two logits by rounding.
    """
    rule = GenerationOptions(rule=rule).rule_for(drafter.draft_shape)
    mixed = _rows_of(target, drafter, tokens, lengths, settings, rule)
    first = _rows_of(target, drafter, tokens, lengths, settings[:1], rule)
    repeats, batches = _plan(target, drafter, len(mixed.lengths), draws)
    readings: list[_Read] = []
    drafts = _Drafts()
    keys = list(jax.random.split(key, batches))
    for batch, batch_key in enumerate(track(keys, "drawing texts and reading them again")):
        if batch % _MIXED_EVERY == 0:
            readings.append(
                _batch(target, drafter, mixed, repeats, rule, batch_key, rounding, drafts)
            )
        else:
            readings.append(
                _batch(
                    target,
                    drafter,
                    first,
                    repeats * len(settings),
                    rule,
                    batch_key,
                    rounding,
                    drafts,
                )
            )
    return _judge(
        readings, drafts, rule, np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    )


def _plan(target: Target, drafter: Drafter, rows: int, draws: int) -> tuple[int, int]:
    """Return how often each row is repeated in a batch, and the number of batches."""
    repeats = -(-draws // (rows * NEW_TOKENS))
    max_repeats = max(
        1, min(_NUMBERS // (drafter.draft_shape.nodes * target.config.vocab_size), _ROWS) // rows
    )
    batches = -(-repeats // max_repeats)
    return -(-repeats // batches), batches


@dataclass(frozen=True)
class _Rows:
    """One row for each pair of a prompt and a setting. The prompts are prefilled once.

    Attributes:
        lengths: the lengths of the prompts.
        coolest: the lowest temperature.
        drawing: the state after the prompts, for sampling texts.
        reading: the state after the prompts, for reading the texts again with `_reader`'s drafter.
    """

    lengths: np.ndarray
    coolest: float
    drawing: decoding.DecodeState
    reading: decoding.DecodeState


def _rows_of(
    target: Target,
    drafter: Drafter,
    tokens: np.ndarray,
    lengths: np.ndarray,
    settings: Sequence[Sampling],
    rule: Rule,
) -> _Rows:
    names = Sampling.__dataclass_fields__
    fields = {
        name: np.repeat([getattr(setting, name) for setting in settings], len(tokens))
        for name in names
    }
    tokens, lengths = np.tile(tokens, (len(settings), 1)), np.tile(lengths, len(settings))

    def start(drafter: Drafter, rule: Rule) -> decoding.DecodeState:
        # No token ends a text: the number of tokens that count must not depend on their values.
        options = GenerationOptions(NEW_TOKENS, Sampling(**fields), eos_token_ids=(), rule=rule)
        return decoding.start(target, drafter, tokens, lengths, options)[1]

    coolest = float(np.min(fields["temperature"]))
    return _Rows(
        lengths,
        coolest,
        drawing=start(drafter, rule),
        reading=start(_reader(drafter), "independent"),
    )


class _Drafts:
    """The counts of first drafted tokens after the prompts, and the q of the drafter, by row."""

    def __init__(self) -> None:
        self._counts: dict[int, np.ndarray] = {}
        self._q: dict[int, np.ndarray] = {}

    def add(self, tokens: np.ndarray, q: np.ndarray) -> None:
        """Add drafted tokens ``[rows, n]`` with the drafter's ``q [rows, V]``."""
        for row, (row_tokens, row_q) in enumerate(zip(tokens, q, strict=True)):
            self._q.setdefault(row, row_q.astype(np.float64))
            counts = self._counts.get(row, np.zeros(len(row_q)))
            self._counts[row] = counts + np.bincount(row_tokens, minlength=len(row_q))

    def p_value(self) -> float | None:
        """Return the p-value of all rows together, by Fisher's method.

        It is None if no draft had a q, or if no row has two tokens that are drafted often.
        """
        values = [g_test(self._counts[row], row_q) for row, row_q in self._q.items()]
        values = [value for value in values if value < 1]  # a test with a single cell gives 1
        if not values:
            return None
        if min(values) > 0:
            return float(special.chdtrc(2 * len(values), -2 * np.sum(np.log(values))))
        return 0.0


def _batch(
    target: Target,
    drafter: Drafter,
    rows: _Rows,
    repeats: int,
    rule: Rule,
    key: jax.Array,
    rounding: float,
    drafts: _Drafts,
) -> "_Read":
    """Sample the text of each row several times, read the texts again, and add to ``drafts``."""
    count = len(rows.lengths) * repeats
    draw_key, read_key, draft_key = jax.random.split(key, 3)
    state = _repeat(rows.drawing, jax.random.split(draw_key, count), repeats)
    result = decoding.decode(target, drafter, state, NEW_TOKENS)
    raise_if_failed(target, result)
    positions = np.repeat(rows.lengths, repeats)[:, None] + np.arange(NEW_TOKENS)
    texts = np.take_along_axis(sharding.to_host(result.tokens, target.mesh), positions, axis=1)
    reader = _reader(drafter)
    state = _repeat(rows.reading, jax.random.split(read_key, count), repeats)
    if rule != "coupled":
        keys = (
            jax.random.split(one_key, count) for one_key in jax.random.split(draft_key, _DRAFTS)
        )
        tokens, qs = zip(
            *(_first_drafts(target, reader, state, row_keys, repeats) for row_keys in keys),
            strict=True,
        )
        if qs[0] is not None:  # all of them are equal: q does not depend on the key
            drafts.add(*sharding.to_host((jnp.concatenate(tokens, axis=1), qs[0]), target.mesh))
    looser = np.exp(rounding / rows.coolest)
    reading = sharding.to_host(
        _read(target, reader, state, jnp.asarray(texts.T), rounding, looser), target.mesh
    )
    return jax.tree.map(np.transpose, reading)


def _reader(drafter: Drafter) -> Drafter:
    """Return the drafter for reading texts again.

    A drafter that samples gets a chain of 1, because only its q after the root is used.
    """
    draws = isinstance(drafter.draft_shape, Chain | SampledTree)
    return replace(drafter, draft=Chain(1)) if draws else drafter  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnames="repeats")
def _repeat(state: decoding.DecodeState, keys: jax.Array, repeats: int) -> decoding.DecodeState:
    return replace(jax.tree.map(lambda leaf: jnp.repeat(leaf, repeats, axis=0), state), keys=keys)


@partial(jax.jit, static_argnames="repeats")
def _first_drafts(
    target: Target, drafter: Drafter, state: decoding.DecodeState, keys: jax.Array, repeats: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return the first drafted token of each root ``[rows, repeats]``, and q ``[rows, V]``."""
    draft, _ = decoding.propose_step(target, drafter, replace(state, keys=keys))
    first = jnp.asarray(tree.first_children(draft.parents))[..., 0]
    tokens = jnp.take_along_axis(
        draft.tokens, jnp.broadcast_to(first, keys.shape)[:, None], axis=1
    )[:, 0]
    return tokens.reshape(-1, repeats), None if draft.q is None else draft.q[::repeats, 0]


# --- reading the texts again, on the device -------------------------------------------------------


@struct.dataclass
class _Read:
    """The intervals of R texts of T tokens in the target's distribution, and their scores.

    Attributes:
        below: ``[R, T]`` the target's probability of all tokens that are likelier.
        own: ``[R, T]`` the target's probability of the token itself and of equally likely ones.
        preferred: ``[R, T]`` the target's probability of all tokens that the drafter prefers.
        alike: ``[R, T]`` the target's probability of the token and of equally preferred ones.
        score: ``[R, T]`` the derivative of the token's log-probability with respect to the share by
            which drafted tokens are preferred.
        variance: ``[R, T]`` the variance of the score under the target; its mean is 0.
        third: ``[R, T]`` the mean of the cube of the score under the target.
        outside: ``[R, T]`` bool whether truncation excludes the token.
    """

    below: jax.Array
    own: jax.Array
    preferred: jax.Array
    alike: jax.Array
    score: jax.Array
    variance: jax.Array
    third: jax.Array
    outside: jax.Array


@jax.jit
def _read(
    target: Target,
    drafter: Drafter,
    state: decoding.DecodeState,
    texts: jax.Array,
    rounding: jax.Array | float,
    looser: jax.Array | float,
) -> _Read:
    """Read texts again with the target and the drafter.

    Args:
        target: the target.
        drafter: the drafter from `_reader`.
        state: the state after the prompts.
        texts: ``[T, R]`` the sampled tokens.
        rounding: see `draw_and_test`.
        looser: the factor by which rounding may enlarge the probability that top-p keeps.

    Returns:
        The `_Read`, all of its arrays ``[T, R]``.
    """

    def read_token(
        state: decoding.DecodeState, token: jax.Array
    ) -> tuple[decoding.DecodeState, _Read]:
        draft, after, logits = _forced_step(target, drafter, state, token)
        p = probabilities(logits, state.sampling)
        loose = replace(state.sampling, top_p=jnp.minimum(1.0, state.sampling.top_p * looser))
        raised = logits + rounding * jax.nn.one_hot(token, logits.shape[-1])
        if loose.truncated:
            outside = _at(probabilities(raised, loose), token) == 0
        else:
            outside = jnp.zeros(token.shape, bool)
        return after, _place(draft, p, logits, state.sampling, token, outside)

    return jax.lax.scan(read_token, state, texts)[1]


def _forced_step(
    target: Target, drafter: Drafter, state: decoding.DecodeState, token: jax.Array
) -> tuple[Draft, decoding.DecodeState, jax.Array]:
    """Do a step like `specjax.decoding.step` that accepts no drafted token and emits ``token [R]``.

    Returns:
        The draft, the next state, and the target's logits ``[R, V]`` after the root, which are
        those of plain decoding.
    """
    draft, state = decoding.propose_step(target, drafter, state)
    root, room = state.roots[:, None], draft.depth + 1
    output, entries = target.score(root, state.cache, taps=drafter.taps(target.config))
    count = jnp.ones_like(state.lengths)
    cache = state.cache.append(entries, count, after=output.hidden)

    def padded(leaf: jax.Array, axis: int = 1) -> jax.Array:
        return jnp.pad(leaf, [(0, room - 1 if i == axis else 0) for i in range(leaf.ndim)])

    committed = Committed(
        tokens=padded(root),
        following=padded(token[:, None]),
        output=jax.tree.map(padded, output.states),
        entries=jax.tree.map(partial(padded, axis=2), entries),
        count=count,
        cache=cache,
    )
    verdict = Verdict(path=jnp.zeros((len(count), room), jnp.int32), count=count, token=token)
    positions = jnp.minimum(state.lengths, state.tokens.shape[1] - 1)
    next_state = replace(
        state,
        tokens=state.tokens.at[jnp.arange(len(count)), positions].set(token),
        lengths=state.lengths + 1,
        keys=jax.vmap(partial(jax.random.fold_in, data=0))(state.keys),
        cache=cache,
        drafter=drafter.update(target, state.drafter, draft, verdict, committed),
    )
    return draft, next_state, output.logits[:, 0]


def _place(
    draft: Draft,
    p: jax.Array,
    logits: jax.Array,
    sampling: RowSampling,
    token: jax.Array,
    outside: jax.Array,
) -> _Read:
    """Return the `_Read` of one position, ``[R]`` each.

    ``p`` and ``logits [R, V]`` are the target's.
    """
    if draft.q is not None:
        preference = _log(draft.q[:, 0]) - _log(_untruncated(p, logits, sampling))
        change = _change_if_accepted_too_much(p, draft.q[:, 0])
    else:
        order = _order_of_children(draft, p.shape[-1])
        preference, change = -order, _change_if_chosen_too_much(p, jnp.isfinite(order))
    ratio = change / jnp.where(p > 0, p, 1.0)
    return _Read(
        *_masses(p, p, token),
        *_masses(p, preference, token),
        score=_at(ratio, token),
        variance=jnp.sum(change * ratio, axis=-1),
        third=jnp.sum(change * ratio**2, axis=-1),
        outside=outside,
    )


def _masses(p: jax.Array, order: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the total p of all tokens with a greater ``order [R, V]``, and with the same."""
    rank = _at(order, token)[:, None]
    return jnp.sum(jnp.where(order > rank, p, 0.0), axis=-1), jnp.sum(
        jnp.where(order == rank, p, 0.0), axis=-1
    )


def _change_if_accepted_too_much(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the change ``[R, V]`` of p if sampled tokens are accepted too often by `_SHARE`.

    It is divided by `_SHARE`. A token gains that share of its p, at most q - p. All other tokens
    lose a part of the probability that they get after a rejection.
    """
    gain = jnp.minimum(jnp.maximum(q - p, 0.0), _SHARE * p)
    missing = jnp.maximum(p - q, 0.0)
    total = jnp.sum(missing, axis=-1, keepdims=True)
    return (
        gain - missing * jnp.sum(gain, axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    ) / _SHARE


def _change_if_chosen_too_much(p: jax.Array, drafted: jax.Array) -> jax.Array:
    """Return the change ``[R, V]`` of p if drafted tokens, which were not sampled, are preferred.

    Drafted tokens gain in proportion to p, all others lose in proportion to p. Positions where the
    others are nearly impossible are left out, because a single token would decide the score.
    """
    mass = jnp.sum(jnp.where(drafted, p, 0.0), axis=-1, keepdims=True)
    is_used = (mass > 0.01) & (mass < 1 - _SHARE)
    return jnp.where(
        is_used, p * jnp.where(drafted, 1.0, -mass / jnp.where(is_used, 1 - mass, 1.0)), 0.0
    )


def _order_of_children(draft: Draft, vocab: int) -> jax.Array:
    """Return for each token ``[R, V]`` the root's child that has it; infinity if there is none."""
    rows, nodes = draft.tokens.shape
    is_child = jnp.broadcast_to(jnp.asarray(draft.parents), (rows, nodes))[:, 1:] == 0
    index = jnp.where(is_child & draft.drafted, jnp.arange(1.0, nodes), jnp.inf)
    return (
        jnp.full((rows, vocab), jnp.inf)
        .at[jnp.arange(rows)[:, None], draft.tokens[:, 1:]]
        .min(index)
    )


def _untruncated(p: jax.Array, logits: jax.Array, sampling: RowSampling) -> jax.Array:
    """Return p, and for each token that truncation excludes, the p that it would have otherwise."""
    if not sampling.truncated:
        return p
    whole = jax.nn.softmax(logits / sampling.temperature[:, None], axis=-1)
    best = jnp.max(whole, axis=-1, keepdims=True)
    return jnp.where(p > 0, p, whole * jnp.max(p, axis=-1, keepdims=True) / best)


def _log(values: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(values, 1e-30))


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    """Take the value of each ``token [R]`` from ``values [R, V]``."""
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


# --- the tests, on the host -----------------------------------------------------------------------


def _judge(
    readings: Sequence[_Read], drafts: _Drafts, rule: Rule, rng: np.random.Generator
) -> Distribution:
    read = jax.tree.map(lambda *batches: np.concatenate(batches), *readings)
    p_values = {"joint": _joint(_spread(read.below, read.own, rng))}
    score, variance, third = (
        float(moment.sum(dtype=np.float64)) for moment in (read.score, read.variance, read.third)
    )
    against_q = drafts.p_value()
    if against_q is not None:
        p_values["drafts against q"] = against_q
    detectable = None
    if variance > _LEAST_VARIANCE:
        u = _spread(read.preferred, read.alike, rng)
        p_values["by preference"] = _even((u.ravel() * _BINS).astype(int), _BINS)
        p_values["towards the drafter"] = _tails(score / np.sqrt(variance), third / variance**1.5)
        needed = -special.ndtri(FALSE_ALARM / 2 / len(p_values)) - special.ndtri(0.05)
        detectable = float(needed / np.sqrt(variance))
    outside = int(read.outside.sum())
    return Distribution(
        p_value=0.0 if outside else min(1.0, len(p_values) * min(p_values.values())),
        p_values=p_values,
        draws=read.outside.size,
        texts=len(read.outside),
        outside=outside,
        detectable=detectable,
        rule=rule,
    )


def _tails(z: float, skewness: float) -> float:
    """Return the p-value of ``z``, a sum with mean 0, variance 1 and this skewness.

    It is twice the tail of Pearson's type III distribution, a gamma distribution that is shifted to
    mean 0; without skewness it is the normal distribution. If the target is sure of most tokens,
    the score is a sum of few terms, and large scores are much likelier than in a normal
    distribution.
    """
    if abs(skewness) < 1e-6:
        return float(special.erfc(abs(z) / np.sqrt(2)))
    shape = 4 / skewness**2
    at = max(0.0, shape + np.sign(skewness) * z * np.sqrt(shape))
    return min(1.0, 2 * float(min(special.gammainc(shape, at), special.gammaincc(shape, at))))


def _spread(below: np.ndarray, width: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a uniform number from each interval, within [0, 1)."""
    return np.clip(below + rng.random(width.shape) * width, 0.0, 1 - 1e-9)


def _even(cells: np.ndarray, count: int) -> float:
    """Return the p-value of cell indices that should be uniform over ``count`` cells."""
    return g_test(np.bincount(cells, minlength=count).astype(float), np.full(count, 1 / count))


def _joint(u: np.ndarray) -> float:
    """Return the p-value of disjoint triples of successive ``u [R, T]`` in the cells of a cube."""
    triples = u[:, : u.shape[1] // 3 * 3].reshape(-1, 3)
    side = int(np.clip((len(triples) / 60) ** (1 / 3), 2, 6))
    return _even((triples * side).astype(int) @ side ** np.arange(3), side**3)
