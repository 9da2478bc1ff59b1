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
  position. For a draft without q it is the order of the root's children, then all other tokens. A
  rule that accepts too much prefers what the drafter prefers, at every position.
- ``towards the drafter``: a score test for a rule that accepts drafted tokens too often or too
  rarely. It is the most powerful test for small errors of that kind.
- ``drafts against q``: whether the drafter samples from the q that it returns. After each prompt,
  many first tokens are drafted and counted. It is left out with coupled sampling, and if the
  drafter returns no q.

To get p and q, the finished texts are read again token by token, with plain decoding's own passes,
and the drafter drafts at every position without verification. The q of the drafts from which the
text was generated cannot be used: how far a step went depends on the tokens that it emitted (block
verification judges them together), so the step in which a token falls depends on the token itself,
and the test would be biased.
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
from specjax.drafters.base import Committed, Drafter, LikelyTokens
from specjax.drafts import tree
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, SampledTree
from specjax.evaluation.conformance import SETTINGS, g_test
from specjax.models.transformer import Target
from specjax.progress import track
from specjax.sampling import RowSampling, Rule, Sampling, probabilities

FALSE_ALARM = 1e-5
"""The maximum probability, over all random keys, that a correct target and drafter fail."""

NEW_TOKENS = 32
"""The number of sampled tokens of each text."""

_EXCESS = 0.05
"""The excess for which the score test is the most powerful one.

A rule with this excess accepts drafted tokens 5% too often. For another excess the test is nearly
the most powerful one.
"""

_BINS = 20
_DRAFTS_PER_TEXT = 16  # drafts per text for the test against q
# Every fourth batch uses all settings: truncation takes a CPU as long as all the rest.
_MIXED_EVERY = 4
_MAX_ROWS = 256  # the maximum number of rows of a batch; more are not faster on a CPU
# The maximum size of an array, which limits the rows of a batch for large vocabularies.
_MAX_ARRAY_SIZE = 2**27
# The smallest variance of the score, summed over all tokens. Below it, the tests by preference and
# towards the drafter are left out: they would detect only an excess of more than 64%, and the
# approximation of the score's tails is poor.
_LEAST_VARIANCE = 100.0


@dataclass(frozen=True)
class DistributionResult:
    """The results of the tests of sampled texts.

    Attributes:
        p_value: a bound on the probability that a correct target and drafter look as bad or worse:
            the smallest of the ``p_values`` times their number, at most 1. It is 0 if a token was
            sampled that truncation excludes.
        p_values: the p-value of each test, see `specjax.evaluation.drawn_texts`.
        draws: the number of sampled tokens.
        texts: the number of texts.
        outside: the number of sampled tokens that top-k, top-p or min-p exclude, by more than
            rounding explains.
        detectable: the excess preference for drafted tokens that the score test detects with
            probability 95%. None if the drafter drafted too little for the test.
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

        For a correct target and drafter it is False with probability `FALSE_ALARM` at most.
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
) -> DistributionResult:
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
        rounding: how much rounding may change the difference between two logits, at most.
    """
    rule = GenerationOptions(rule=rule).rule_for(drafter.draft_shape)
    rows_of_all_settings = _rows_of(target, drafter, tokens, lengths, settings, rule)
    rows_of_first_setting = _rows_of(target, drafter, tokens, lengths, settings[:1], rule)
    repeats, batches = _plan(target, drafter, len(rows_of_all_settings.lengths), draws)
    batch_intervals: list[_Intervals] = []
    draft_counts = _DraftCounts()
    keys = list(jax.random.split(key, batches))
    for batch, batch_key in enumerate(track(keys, "drawing texts and reading them again")):
        if batch % _MIXED_EVERY == 0:
            rows, row_repeats = rows_of_all_settings, repeats
        else:
            rows, row_repeats = rows_of_first_setting, repeats * len(settings)
        batch_intervals.append(
            _batch(target, drafter, rows, row_repeats, rule, batch_key, rounding, draft_counts)
        )
    return _judge(
        batch_intervals,
        draft_counts,
        rule,
        np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist()),
    )


def _plan(target: Target, drafter: Drafter, rows: int, draws: int) -> tuple[int, int]:
    """Return how often each row is repeated in a batch, and the number of batches."""
    repeats = -(-draws // (rows * NEW_TOKENS))
    max_repeats = max(
        1,
        min(_MAX_ARRAY_SIZE // (drafter.draft_shape.nodes * target.config.vocab_size), _MAX_ROWS)
        // rows,
    )
    batches = -(-repeats // max_repeats)
    return -(-repeats // batches), batches


@dataclass(frozen=True)
class _Rows:
    """One row for each pair of a prompt and a setting.

    The prompts are prefilled once for each of the two states, and not again for each batch.

    Attributes:
        lengths: the lengths of the prompts.
        coolest: the lowest temperature.
        drawing: the state after the prompts, for sampling texts.
        rereading: the state after the prompts, for reading the texts again with the drafter of
            `_rereading_drafter`.
    """

    lengths: np.ndarray
    coolest: float
    drawing: decoding.DecodeState
    rereading: decoding.DecodeState


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
        rereading=start(_rereading_drafter(drafter), "independent"),
    )


class _DraftCounts:
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
    draft_counts: _DraftCounts,
) -> "_Intervals":
    """Sample the text of each row several times, read it again, and add to ``draft_counts``."""
    count = len(rows.lengths) * repeats
    draw_key, read_key, draft_key = jax.random.split(key, 3)
    state = _repeat(rows.drawing, jax.random.split(draw_key, count), repeats)
    result = decoding.decode(target, drafter, state, NEW_TOKENS)
    raise_if_failed(target, result)
    positions = np.repeat(rows.lengths, repeats)[:, None] + np.arange(NEW_TOKENS)
    texts = np.take_along_axis(sharding.to_host(result.tokens, target.mesh), positions, axis=1)
    reader = _rereading_drafter(drafter)
    state = _repeat(rows.rereading, jax.random.split(read_key, count), repeats)
    if rule != "coupled":
        keys = (
            jax.random.split(one_key, count)
            for one_key in jax.random.split(draft_key, _DRAFTS_PER_TEXT)
        )
        tokens, qs = zip(
            *(_first_drafts(target, reader, state, row_keys, repeats) for row_keys in keys),
            strict=True,
        )
        # All `qs` are equal, because q does not depend on the key: the first one is enough.
        if qs[0] is not None:
            draft_counts.add(
                *sharding.to_host((jnp.concatenate(tokens, axis=1), qs[0]), target.mesh)
            )
    top_p_factor = np.exp(rounding / rows.coolest)
    intervals = sharding.to_host(
        _reread(target, reader, state, jnp.asarray(texts.T), rounding, top_p_factor), target.mesh
    )
    return jax.tree.map(np.transpose, intervals)


def _rereading_drafter(drafter: Drafter) -> Drafter:
    """Return the drafter for reading texts again.

    A drafter of chains or sampled trees gets a chain of 1, because only its q after the root is
    used, or its first token.
    """
    one_is_enough = isinstance(drafter.draft_shape, Chain | SampledTree)
    return replace(drafter, draft=Chain(1)) if one_is_enough else drafter  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnames="repeats")
def _repeat(state: decoding.DecodeState, keys: jax.Array, repeats: int) -> decoding.DecodeState:
    return replace(jax.tree.map(lambda leaf: jnp.repeat(leaf, repeats, axis=0), state), keys=keys)


@partial(jax.jit, static_argnames="repeats")
def _first_drafts(
    target: Target, drafter: Drafter, state: decoding.DecodeState, keys: jax.Array, repeats: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return the first drafted token of each root ``[rows, repeats]``, and q ``[rows, V]``."""
    draft, _ = decoding.propose_step(target, drafter, replace(state, keys=keys))
    first_child = jnp.asarray(tree.first_children(draft.parents))[..., 0]
    tokens = jnp.take_along_axis(
        draft.tokens, jnp.broadcast_to(first_child, keys.shape)[:, None], axis=1
    )[:, 0]
    return tokens.reshape(-1, repeats), None if draft.q is None else draft.q[::repeats, 0]


# --- reading the texts again, on the device -------------------------------------------------------


@struct.dataclass
class _Intervals:
    """The intervals of R texts of T tokens in the target's distribution, and their scores.

    Attributes:
        likelier_mass: ``[R, T]`` the target's probability of all tokens that are likelier.
        equal_mass: ``[R, T]`` the target's probability of the token itself and of equally likely
            ones.
        preferred_mass: ``[R, T]`` the target's probability of all tokens that the drafter prefers
            to the token.
        tied_mass: ``[R, T]`` the target's probability of the token and of equally preferred ones.
        score: ``[R, T]`` the relative change of the token's probability, per unit of excess
            preference for drafted tokens.
        variance: ``[R, T]`` the variance of the score under the target. The mean of the score is 0.
        third_moment: ``[R, T]`` the mean of the cube of the score under the target.
        outside: ``[R, T]`` bool whether truncation excludes the token.
    """

    likelier_mass: jax.Array
    equal_mass: jax.Array
    preferred_mass: jax.Array
    tied_mass: jax.Array
    score: jax.Array
    variance: jax.Array
    third_moment: jax.Array
    outside: jax.Array


@jax.jit
def _reread(
    target: Target,
    drafter: Drafter,
    state: decoding.DecodeState,
    texts: jax.Array,
    rounding: jax.Array | float,
    top_p_factor: jax.Array | float,
) -> _Intervals:
    """Read texts again with the target and the drafter.

    Args:
        target: the target.
        drafter: the drafter from `_rereading_drafter`.
        state: the state after the prompts.
        texts: ``[T, R]`` the sampled tokens.
        rounding: see `draw_and_test`.
        top_p_factor: the factor of top-p that allows for rounding: a token at the border is not
            counted as excluded.

    Returns:
        The `_Intervals`, all of its arrays ``[T, R]``.
    """

    def read_token(
        state: decoding.DecodeState, token: jax.Array
    ) -> tuple[decoding.DecodeState, _Intervals]:
        draft, after, logits = _forced_step(target, drafter, state, token)
        p = probabilities(logits, state.sampling)
        loose = replace(state.sampling, top_p=jnp.minimum(1.0, state.sampling.top_p * top_p_factor))
        raised = logits + rounding * jax.nn.one_hot(token, logits.shape[-1])
        if loose.truncated:
            outside = _at(probabilities(raised, loose), token) == 0
        else:
            outside = jnp.zeros(token.shape, bool)
        return after, _intervals_of(draft, p, logits, state.sampling, token, outside)

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
    root, path_length = state.roots[:, None], draft.depth + 1
    output, entries = target.score(root, state.cache, taps=drafter.taps(target.config))
    count = jnp.ones_like(state.lengths)
    cache = state.cache.append(entries, count, after=output.hidden)

    def padded(leaf: jax.Array, axis: int = 1) -> jax.Array:
        return jnp.pad(leaf, [(0, path_length - 1 if i == axis else 0) for i in range(leaf.ndim)])

    committed = Committed(
        tokens=padded(root),
        following=padded(token[:, None]),
        output=jax.tree.map(padded, output.states),
        entries=jax.tree.map(partial(padded, axis=2), entries),
        count=count,
        cache=cache,
        likely=_likely_after_root(target, drafter, draft, output.logits),
    )
    verdict = Verdict(
        path=jnp.zeros((len(count), path_length), jnp.int32), count=count, token=token
    )
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


def _likely_after_root(
    target: Target, drafter: Drafter, draft: Draft, logits: jax.Array
) -> LikelyTokens | None:
    """Return `Committed.likely` if the target has read the root alone, with ``logits [R, 1, V]``.

    The log-probabilities of the other nodes are NaN.
    """
    if not (count := drafter.likely_tokens(target.config)):
        return None
    likely = LikelyTokens.of(logits, count)
    unread = ((0, 0), (0, draft.tokens.shape[1] - 1), (0, 0))
    return LikelyTokens(
        tokens=jnp.pad(likely.tokens, unread),
        logprobs=jnp.pad(likely.logprobs, unread, constant_values=jnp.nan),
    )


def _intervals_of(
    draft: Draft,
    p: jax.Array,
    logits: jax.Array,
    sampling: RowSampling,
    token: jax.Array,
    outside: jax.Array,
) -> _Intervals:
    """Return the `_Intervals` of one position, ``[R]`` each.

    ``p`` and ``logits [R, V]`` are the target's.
    """
    if draft.q is not None:
        preference = _log(draft.q[:, 0]) - _log(_untruncated(p, logits, sampling))
        change = _change_if_accepted_too_much(p, draft.q[:, 0])
    else:
        order = _order_of_children(draft, p.shape[-1])
        preference, change = -order, _change_if_chosen_too_much(p, jnp.isfinite(order))
    score = change / jnp.where(p > 0, p, 1.0)
    return _Intervals(
        *_masses(p, p, token),
        *_masses(p, preference, token),
        score=_at(score, token),
        variance=jnp.sum(change * score, axis=-1),
        third_moment=jnp.sum(change * score**2, axis=-1),
        outside=outside,
    )


def _masses(p: jax.Array, order: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the total p of all tokens with a greater ``order [R, V]``, and with the same."""
    rank = _at(order, token)[:, None]
    return jnp.sum(jnp.where(order > rank, p, 0.0), axis=-1), jnp.sum(
        jnp.where(order == rank, p, 0.0), axis=-1
    )


def _change_if_accepted_too_much(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the change ``[R, V]`` of p if sampled tokens are accepted too often by `_EXCESS`.

    A token with q > p gains `_EXCESS` times its p, at most q - p. The total gain is taken from the
    tokens with p > q, in proportion to p - q. The result is divided by `_EXCESS`, so it is the
    change per unit of excess.
    """
    gain = jnp.minimum(jnp.maximum(q - p, 0.0), _EXCESS * p)
    missing = jnp.maximum(p - q, 0.0)
    total = jnp.sum(missing, axis=-1, keepdims=True)
    return (
        gain - missing * jnp.sum(gain, axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    ) / _EXCESS


def _change_if_chosen_too_much(p: jax.Array, drafted: jax.Array) -> jax.Array:
    """Return the change ``[R, V]`` of p if drafted tokens, which were not sampled, are preferred.

    Drafted tokens gain in proportion to p, all others lose in proportion to p. Positions where the
    others are nearly impossible are left out, because a single token would decide the score.
    """
    mass = jnp.sum(jnp.where(drafted, p, 0.0), axis=-1, keepdims=True)
    is_used = (mass > 0.01) & (mass < 1 - _EXCESS)
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
    """Return p, extended to the tokens that truncation excludes.

    It is the untruncated softmax, scaled so that it equals p for all tokens that are not excluded.
    """
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
    batch_intervals: Sequence[_Intervals],
    draft_counts: _DraftCounts,
    rule: Rule,
    rng: np.random.Generator,
) -> DistributionResult:
    intervals = jax.tree.map(lambda *batches: np.concatenate(batches), *batch_intervals)
    p_values = {
        "joint": _triples_p_value(
            _uniform_in_intervals(intervals.likelier_mass, intervals.equal_mass, rng)
        )
    }
    score, variance, third_moment = (
        float(moment.sum(dtype=np.float64))
        for moment in (intervals.score, intervals.variance, intervals.third_moment)
    )
    against_q = draft_counts.p_value()
    if against_q is not None:
        p_values["drafts against q"] = against_q
    detectable = None
    if variance > _LEAST_VARIANCE:
        u = _uniform_in_intervals(intervals.preferred_mass, intervals.tied_mass, rng)
        p_values["by preference"] = _uniformity_p_value((u.ravel() * _BINS).astype(int), _BINS)
        p_values["towards the drafter"] = _score_p_value(
            score / np.sqrt(variance), third_moment / variance**1.5
        )
        needed = -special.ndtri(FALSE_ALARM / 2 / len(p_values)) - special.ndtri(0.05)
        detectable = float(needed / np.sqrt(variance))
    outside = int(intervals.outside.sum())
    return DistributionResult(
        p_value=0.0 if outside else min(1.0, len(p_values) * min(p_values.values())),
        p_values=p_values,
        draws=intervals.outside.size,
        texts=len(intervals.outside),
        outside=outside,
        detectable=detectable,
        rule=rule,
    )


def _score_p_value(z: float, skewness: float) -> float:
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


def _uniform_in_intervals(
    below: np.ndarray, width: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw a uniform number from each interval, within [0, 1)."""
    return np.clip(below + rng.random(width.shape) * width, 0.0, 1 - 1e-9)


def _uniformity_p_value(cells: np.ndarray, count: int) -> float:
    """Return the p-value of cell indices that should be uniform over ``count`` cells."""
    return g_test(np.bincount(cells, minlength=count).astype(float), np.full(count, 1 / count))


def _triples_p_value(u: np.ndarray) -> float:
    """Return the p-value of disjoint triples of successive ``u [R, T]`` in the cells of a cube."""
    triples = u[:, : u.shape[1] // 3 * 3].reshape(-1, 3)
    side = int(np.clip((len(triples) / 60) ** (1 / 3), 2, 6))
    return _uniformity_p_value((triples * side).astype(int) @ side ** np.arange(3), side**3)
