"""Whether texts drawn with a drafter have the target's own distribution: tests for a vocabulary of any size.

Where a vocabulary is tiny, all continuations can be enumerated and counted (`specjax.evaluation.conformance`). With 150,000
tokens they cannot. So each drawn token is compared with p, the target's distribution at its own place given the text before it.

Put all tokens in some order. A drawn token x covers an interval: it begins at the mass of the tokens before x and is p(x) long.
Draw a number u evenly from it. If x was drawn from p, then u is evenly distributed over [0, 1], whatever p is, and the numbers
of successive tokens are independent (Rosenblatt 1952; Brockwell 2007 for discrete distributions). So the numbers of all places
and all prompts can be counted together. The order may depend on the text before the token; it decides which deviations the test
sees best. Three questions are asked of the same texts, and one of the drafts:

- ``joint``: likelier tokens first, and three successive numbers together. They must fill a cube evenly.
- ``by preference``: tokens with the largest q/p first, where q is the drafter's distribution at that place. A rule that accepts
  too much favours what q favours, at every place.
- ``towards the drafter``: one direction alone, that of a rule which accepts drafted tokens too often or too rarely. This is a
  score test, which is the most powerful one for small faults of that kind.
- ``drafts against q``: whether the drafter draws from the q that it hands over. After each prompt many first tokens are drafted
  and counted. Not asked where nobody reads q.

To know p and q, the finished texts are read again token by token, by plain decoding's own passes, and the drafter is asked at
every place for a draft that nobody verifies. The drafts that the text was made with will not do: under block verification it
depends on a token whether it still belongs to the step that drafted it.
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
"""The chance that a right pair fails, over all random keys."""

NEW_TOKENS = 32
"""Drawn in each text."""

_SHARE = 0.05
"""The score test is the most powerful one for a rule that accepts this share too much, and nearly so for others."""

_BINS = 20
_DRAFTS = 16  # of each text, for their q
_MIXED_EVERY = 4  # truncation takes a CPU as long as all the rest
_ROWS = 256  # of a batch at most; more do not make it faster on a CPU
_NUMBERS = 2**27  # of one array on the device at most: what bounds the rows of a batch for large vocabularies
_LEAST_VARIANCE = 100.0  # of the score: below it, less than a doubling would show, and no approximation holds


@dataclass(frozen=True)
class Distribution:
    """What came of the drawn texts.

    Attributes:
        p_value: how likely a right pair is to look as bad or worse: the smallest of the ``p_values`` times their number, at
            most 1. 0 where a token was drawn that truncation rules out.
        p_values: of each question, see `specjax.evaluation.drawn_texts`.
        draws: drawn tokens.
        texts: that they are in.
        outside: drawn tokens that the settings' truncation rules out, by more than rounding explains.
        detectable: a rule that favours drafted tokens by this share fails 95 times of 100. None where the drafter proposed too
            little to tell.
        rule: which verified the drafts.
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
        """Whether the target can have drawn the texts. A right pair is refused with probability `FALSE_ALARM`."""
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
    """Draw texts with the drafter, ``draws`` tokens or a few more, and ask whether they are the target's.

    Args:
        target: the target model.
        drafter: what is put to the test.
        tokens: ``[P, W]`` prompts, right-padded; each is continued many times, with a key for every text.
        lengths: ``[P]``.
        settings: to draw with; each of its numbers is one for all prompts. Most batches are drawn with the first, and every
            fourth with all of them side by side.
        rule: None is the one that suits the drafter's shape.
        draws: of tokens.
        key: consumed.
        rounding: how far two passes of the target may differ in the difference of two logits.
    """
    rule = GenerationOptions(rule=rule).rule_for(drafter.draft_shape)
    mixed, first = (_rows_of(target, drafter, tokens, lengths, some, rule) for some in (settings, settings[:1]))
    repeats, batches = _plan(target, drafter, len(mixed.lengths), draws)
    found: list[_Read] = []
    drafts = _Drafts()
    keys = list(jax.random.split(key, batches))
    for number, of_batch in enumerate(track(keys, "drawing texts and reading them again")):
        if number % _MIXED_EVERY == 0:
            found.append(_batch(target, drafter, mixed, repeats, rule, of_batch, rounding, drafts))
        else:
            found.append(_batch(target, drafter, first, repeats * len(settings), rule, of_batch, rounding, drafts))
    return _judge(found, drafts, rule, np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist()))


def _plan(target: Target, drafter: Drafter, rows: int, draws: int) -> tuple[int, int]:
    """How often each of ``rows`` is repeated in a batch, and how many batches there are."""
    wanted = -(-draws // (rows * NEW_TOKENS))
    fit = max(1, min(_NUMBERS // (drafter.draft_shape.nodes * target.config.vocab_size), _ROWS) // rows)
    batches = -(-wanted // fit)
    return -(-wanted // batches), batches


@dataclass(frozen=True)
class _Rows:
    """Prompts and settings, each pair of them one row. The prompts are read once however often they are continued.

    Attributes:
        lengths: of the prompts.
        coolest: the lowest temperature.
        drawing: the state after the prompts, to draw texts from.
        reading: the same, to read them again from, with `_reader`'s drafter.
    """

    lengths: np.ndarray
    coolest: float
    drawing: decoding.DecodeState
    reading: decoding.DecodeState


def _rows_of(
    target: Target, drafter: Drafter, tokens: np.ndarray, lengths: np.ndarray, settings: Sequence[Sampling], rule: Rule
) -> _Rows:
    names = Sampling.__dataclass_fields__
    each = {name: np.repeat([getattr(setting, name) for setting in settings], len(tokens)) for name in names}
    tokens, lengths = np.tile(tokens, (len(settings), 1)), np.tile(lengths, len(settings))

    def start(drafter: Drafter, rule: Rule) -> decoding.DecodeState:
        # No token ends a text: which of its tokens are counted must not depend on what they are.
        options = GenerationOptions(NEW_TOKENS, Sampling(**each), eos_token_ids=(), rule=rule)
        return decoding.start(target, drafter, tokens, lengths, options)[1]

    coolest = float(np.min(each["temperature"]))
    return _Rows(lengths, coolest, drawing=start(drafter, rule), reading=start(_reader(drafter), "independent"))


class _Drafts:
    """First tokens of drafts after the prompts, and the q that was handed over with them, by row."""

    def __init__(self) -> None:
        self._counts: dict[int, np.ndarray] = {}
        self._q: dict[int, np.ndarray] = {}

    def add(self, tokens: np.ndarray, q: np.ndarray) -> None:
        """``tokens [rows, n]`` drawn with ``q [rows, V]``."""
        for row, (drawn, own) in enumerate(zip(tokens, q, strict=True)):
            self._q.setdefault(row, own.astype(np.float64))
            self._counts[row] = self._counts.get(row, np.zeros(len(own))) + np.bincount(drawn, minlength=len(own))

    def p_value(self) -> float | None:
        """Of all rows together, by Fisher's method; None where no draft had a q, or no row has two tokens that come often."""
        each = [g_test(self._counts[row], own) for row, own in self._q.items()]
        each = [value for value in each if value < 1]  # 1 is the value of a single cell
        if not each:
            return None
        return float(special.chdtrc(2 * len(each), -2 * np.sum(np.log(each)))) if min(each) > 0 else 0.0


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
    """Draw each row's text ``repeats`` times, and read the texts again; adds to ``drafts``."""
    count = len(rows.lengths) * repeats
    draw_key, read_key, draft_key = jax.random.split(key, 3)
    state = _repeat(rows.drawing, jax.random.split(draw_key, count), repeats)
    drawn = decoding.decode(target, drafter, state, NEW_TOKENS)
    raise_if_failed(target, drawn)
    places = np.repeat(rows.lengths, repeats)[:, None] + np.arange(NEW_TOKENS)
    texts = np.take_along_axis(sharding.to_host(drawn.tokens, target.mesh), places, axis=1)
    reader = _reader(drafter)
    state = _repeat(rows.reading, jax.random.split(read_key, count), repeats)
    if rule != "coupled":
        keys = (jax.random.split(of_drafts, count) for of_drafts in jax.random.split(draft_key, _DRAFTS))
        tokens, qs = zip(*(_first_drafts(target, reader, state, each, repeats) for each in keys), strict=True)
        if qs[0] is not None:  # the same every time
            drafts.add(*sharding.to_host((jnp.concatenate(tokens, axis=1), qs[0]), target.mesh))
    looser = np.exp(rounding / rows.coolest)
    read = sharding.to_host(_read(target, reader, state, jnp.asarray(texts.T), rounding, looser), target.mesh)
    return jax.tree.map(np.transpose, read)


def _reader(drafter: Drafter) -> Drafter:
    """The drafter as it is asked for its preferences: where it draws, its distribution after the newest token is enough."""
    draws = isinstance(drafter.draft_shape, Chain | SampledTree)
    return replace(drafter, draft=Chain(1)) if draws else drafter  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnames="repeats")
def _repeat(state: decoding.DecodeState, keys: jax.Array, repeats: int) -> decoding.DecodeState:
    return replace(jax.tree.map(lambda leaf: jnp.repeat(leaf, repeats, axis=0), state), keys=keys)


@partial(jax.jit, static_argnames="repeats")
def _first_drafts(
    target: Target, drafter: Drafter, state: decoding.DecodeState, keys: jax.Array, repeats: int
) -> tuple[jax.Array, jax.Array | None]:
    """The first token that is drafted below each root ``[rows, repeats]``, and each row's q ``[rows, V]``."""
    draft, _ = decoding.propose_step(target, drafter, replace(state, keys=keys))
    first = jnp.asarray(tree.first_children(draft.parents))[..., 0]
    tokens = jnp.take_along_axis(draft.tokens, jnp.broadcast_to(first, keys.shape)[:, None], axis=1)[:, 0]
    return tokens.reshape(-1, repeats), None if draft.q is None else draft.q[::repeats, 0]


# --- reading the texts again, on the device --------------------------------------------------------------------------


@struct.dataclass
class _Read:
    """Of R texts of T tokens each, where they lie in the target's distribution.

    Attributes:
        below: ``[R, T]`` the target's mass of the tokens that it finds likelier.
        own: ``[R, T]`` that of the token itself, and of those that are as likely.
        preferred: ``[R, T]`` as ``below``, of the tokens that the drafter prefers.
        alike: ``[R, T]`` as ``own``, of those that it prefers as much.
        score: ``[R, T]`` the derivative of the log-probability by the share in which drafted tokens are favoured.
        variance: ``[R, T]`` that of the score, under the target; its mean is 0.
        third: ``[R, T]`` the mean of the score's cube, under the target.
        outside: ``[R, T]`` bool, whether truncation rules the token out.
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
    """`_Read` of ``texts [T, R]``, all of its arrays ``[T, R]``; ``state`` is that after the prompts.

    ``looser`` is how much more top-p may leave than it says, for all that rounding knows.
    """

    def read_token(state: decoding.DecodeState, token: jax.Array) -> tuple[decoding.DecodeState, _Read]:
        draft, after, logits = _forced_step(target, drafter, state, token)
        p = probabilities(logits, state.sampling)
        loose = replace(state.sampling, top_p=jnp.minimum(1.0, state.sampling.top_p * looser))
        raised = logits + rounding * jax.nn.one_hot(token, logits.shape[-1])
        outside = _at(probabilities(raised, loose), token) == 0 if loose.truncated else jnp.zeros(token.shape, bool)
        return after, _place(draft, p, logits, state.sampling, token, outside)

    return jax.lax.scan(read_token, state, texts)[1]


def _forced_step(
    target: Target, drafter: Drafter, state: decoding.DecodeState, token: jax.Array
) -> tuple[Draft, decoding.DecodeState, jax.Array]:
    """One step as `specjax.decoding.step` makes it, but nothing of the draft is accepted and ``token [R]`` is what comes.

    Returns:
        The draft, the next state, and the target's logits ``[R, V]`` after the root: plain decoding's own.
    """
    draft, state = decoding.propose_step(target, drafter, state)
    root, room = state.roots[:, None], draft.depth + 1
    output, entries = target.score(root, state.cache, taps=drafter.taps(target.config))
    one = jnp.ones_like(state.lengths)
    cache = state.cache.append(entries, one, after=output.hidden)

    def wide(leaf: jax.Array, axis: int = 1) -> jax.Array:
        return jnp.pad(leaf, [(0, room - 1 if i == axis else 0) for i in range(leaf.ndim)])

    committed = Committed(
        tokens=wide(root),
        following=wide(token[:, None]),
        output=jax.tree.map(wide, output.states),
        entries=jax.tree.map(partial(wide, axis=2), entries),
        count=one,
        cache=cache,
    )
    verdict = Verdict(path=jnp.zeros((len(one), room), jnp.int32), count=one, token=token)
    places = jnp.minimum(state.lengths, state.tokens.shape[1] - 1)
    after = replace(
        state,
        tokens=state.tokens.at[jnp.arange(len(one)), places].set(token),
        lengths=state.lengths + 1,
        keys=jax.vmap(partial(jax.random.fold_in, data=0))(state.keys),
        cache=cache,
        drafter=drafter.update(target, state.drafter, draft, verdict, committed),
    )
    return draft, after, output.logits[:, 0]


def _place(draft: Draft, p: jax.Array, logits: jax.Array, sampling: RowSampling, token: jax.Array, outside: jax.Array) -> _Read:
    """What `_Read` says of one place, ``[R]`` each; ``p`` and ``logits [R, V]`` are the target's."""
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
    """The mass under p of what has a larger number in ``order [R, V]`` than ``token [R]``, and of what has the same."""
    own = _at(order, token)[:, None]
    return jnp.sum(jnp.where(order > own, p, 0.0), axis=-1), jnp.sum(jnp.where(order == own, p, 0.0), axis=-1)


def _change_if_accepted_too_much(p: jax.Array, q: jax.Array) -> jax.Array:
    """``[R, V]`` how p changes, for a share of 1, where tokens drawn from q are accepted by `_SHARE` too often.

    A token that q likes more gains its share, as far as q has it; the others lose what rejection gives them.
    """
    gain = jnp.minimum(jnp.maximum(q - p, 0.0), _SHARE * p)
    missing = jnp.maximum(p - q, 0.0)
    total = jnp.sum(missing, axis=-1, keepdims=True)
    return (gain - missing * jnp.sum(gain, axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0)) / _SHARE


def _change_if_chosen_too_much(p: jax.Array, drafted: jax.Array) -> jax.Array:
    """``[R, V]`` the same where drafted tokens were chosen: they gain, the others lose in proportion.

    Places where the others are all but impossible are left out: a single token would decide the score.
    """
    mass = jnp.sum(jnp.where(drafted, p, 0.0), axis=-1, keepdims=True)
    tells = (mass > 0.01) & (mass < 1 - _SHARE)
    return jnp.where(tells, p * jnp.where(drafted, 1.0, -mass / jnp.where(tells, 1 - mass, 1.0)), 0.0)


def _order_of_children(draft: Draft, vocab: int) -> jax.Array:
    """``[R, V]`` which child of the root holds each token, infinity where none does."""
    rows, nodes = draft.tokens.shape
    is_child = jnp.broadcast_to(jnp.asarray(draft.parents), (rows, nodes))[:, 1:] == 0
    number = jnp.where(is_child & draft.drafted, jnp.arange(1.0, nodes), jnp.inf)
    return jnp.full((rows, vocab), jnp.inf).at[jnp.arange(rows)[:, None], draft.tokens[:, 1:]].min(number)


def _untruncated(p: jax.Array, logits: jax.Array, sampling: RowSampling) -> jax.Array:
    """p, and for tokens that truncation takes away what they would have, were each of them kept."""
    if not sampling.truncated:
        return p
    whole = jax.nn.softmax(logits / sampling.temperature[:, None], axis=-1)
    best = jnp.max(whole, axis=-1, keepdims=True)
    return jnp.where(p > 0, p, whole * jnp.max(p, axis=-1, keepdims=True) / best)


def _log(values: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(values, 1e-30))


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    """``[R]`` of ``values [R, V]`` that of each ``token [R]``."""
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


# --- the tests, on the host ------------------------------------------------------------------------------------------


def _judge(found: Sequence[_Read], drafts: _Drafts, rule: Rule, rng: np.random.Generator) -> Distribution:
    read = jax.tree.map(lambda *batches: np.concatenate(batches), *found)
    p_values = {"joint": _joint(_spread(read.below, read.own, rng))}
    score, variance, third = (float(each.sum(dtype=np.float64)) for each in (read.score, read.variance, read.third))
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
    """The p-value of ``z``, a sum of mean 0, variance 1 and this ``skewness``: twice its tail under Pearson's type III.

    That is a gamma distribution moved to mean 0, and the normal one where the skewness is 0. Where the target is sure of most
    tokens, few places make up the score, and large scores are far likelier than a normal distribution says.
    """
    if abs(skewness) < 1e-6:
        return float(special.erfc(abs(z) / np.sqrt(2)))
    shape = 4 / skewness**2
    at = max(0.0, shape + np.sign(skewness) * z * np.sqrt(shape))
    return min(1.0, 2 * float(min(special.gammainc(shape, at), special.gammaincc(shape, at))))


def _spread(below: np.ndarray, own: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A number drawn evenly from each interval, in [0, 1)."""
    return np.clip(below + rng.random(own.shape) * own, 0.0, 1 - 1e-9)


def _even(cells: np.ndarray, count: int) -> float:
    """The p-value of numbers of cells, of which there are ``count``, all as likely."""
    return g_test(np.bincount(cells, minlength=count).astype(float), np.full(count, 1 / count))


def _joint(u: np.ndarray) -> float:
    """The p-value of three successive numbers of ``u [R, T]`` in the cells of a cube; each number is in one triple at most."""
    triples = u[:, : u.shape[1] // 3 * 3].reshape(-1, 3)
    side = int(np.clip((len(triples) / 60) ** (1 / 3), 2, 6))
    return _even((triples * side).astype(int) @ side ** np.arange(3), side**3)
