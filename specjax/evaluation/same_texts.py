"""Whether a text is the same with a drafter as without: greedy, and with coupled sampling. And how far rounding reaches.

A pass over several tokens rounds differently from a pass over one. Two logits that nearly tie may change places, and from there
on two texts of one prompt differ although nothing is wrong. How near is near enough is measured: the same model reads the same
text in passes of one token, of as many as a draft has nodes, and of all tokens at once, and the largest change of any logit is
taken. The difference of two logits changes by at most twice as much. That bound is called ``rounding`` here. It belongs to one
machine, one model and its dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.drafters.base import Drafter
from specjax.models.transformer import Target
from specjax.progress import track
from specjax.sampling import Sampling, perturbed, position_keys, position_noise

ROWS = 8
"""Prompts of one batch."""


@dataclass(frozen=True)
class Parting:
    """Where two texts of one prompt begin to differ.

    Attributes:
        prompt: its number, from 0.
        position: how many tokens after the prompt.
        plain: the token without the drafter there; -1 where the text has ended.
        drafted: the one with it.
        margin: the difference of their logits in a pass over the whole text; for coupled sampling with the position's random
            numbers, in units of logits too. Infinite where one has ended.
    """

    prompt: int
    position: int
    plain: int
    drafted: int
    margin: float


@dataclass(frozen=True)
class SameTexts:
    """How texts with a drafter compare with those without.

    Attributes:
        texts: how many of either.
        tokens: of those with the drafter.
        partings: of the texts that differ.
        lag: how far any token of the texts with the drafter is behind the target's own choice there, at most; in logits.
        rounding: how far rounding may carry two logits apart.
    """

    texts: int
    tokens: int
    partings: tuple[Parting, ...]
    lag: float
    rounding: float

    @property
    def passes(self) -> bool:
        """Whether rounding explains what differs, also after the place where two texts part."""
        return max((self.lag, *(parting.margin for parting in self.partings))) <= self.rounding


Prompts = Sequence[tuple[np.ndarray, np.ndarray]]
"""Batches of prompts: right-padded tokens ``[B, W]`` and lengths ``[B]``."""


def measure_rounding(target: Target, prompts: Prompts, widths: Sequence[int], max_new_tokens: int) -> float:
    """How far two passes may differ in the difference of two logits: twice the largest difference of one.

    Args:
        target: the target model.
        prompts: the first batch is continued greedily, without a drafter, and the text is read anew.
        widths: tokens of a pass, beside 1 and all.
        max_new_tokens: most tokens that are read.
    """
    tokens, lengths = prompts[0]
    options = GenerationOptions(max_new_tokens=max_new_tokens, eos_token_ids=())
    result = decoding.generate(target, None, tokens, lengths, **vars(options))
    _, state = decoding.start(target, None, tokens, lengths, options)
    text = _continuations(result, lengths, max_new_tokens)
    sizes = sorted({1, *(min(width, text.shape[1]) for width in widths)})
    return 2 * float(_largest_difference(target, state, jnp.asarray(text), widths=tuple(sizes)))


def _read_at_once(target: Target, state: decoding.DecodeState, text: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tokens ``[B, T]`` that are read to judge each of ``text [B, T]``, and the target's logits after them, of one pass."""
    read = jnp.concatenate([state.roots[:, None], text[:, :-1]], axis=1)
    return read, target.score(read, state.cache)[0].logits


@partial(jax.jit, static_argnames="widths")
def _largest_difference(target: Target, state: decoding.DecodeState, text: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    """Between a pass over all of ``text [B, T]`` and passes over so many tokens each: of any logit, at any place."""
    read, whole = _read_at_once(target, state, text)

    def by_parts(width: int) -> jax.Array:
        count = read.shape[1] // width * width
        parts = jnp.moveaxis(read[:, :count].reshape(len(read), -1, width), 1, 0)

        def go(cache, part):
            output, cache = target.forward(part, cache)
            return cache, output.logits

        logits = jax.lax.scan(go, state.cache, parts)[1]
        return jnp.moveaxis(logits, 0, 1).reshape(len(read), count, -1)

    return jnp.stack([jnp.max(jnp.abs(each - whole[:, : each.shape[1]])) for each in map(by_parts, widths)]).max()


def compare(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    *,
    temperature: float,
    max_new_tokens: int,
    rounding: float,
    key: jax.Array,
) -> SameTexts:
    """The texts of ``prompts`` with the drafter and without.

    Args:
        target: the target model.
        drafter: what is put to the test.
        prompts: batches of them.
        temperature: 0 is greedy; otherwise sampling is coupled, so that the text must be the same, too.
        max_new_tokens: of each text.
        rounding: as `measure_rounding` found it.
        key: consumed.
    """
    partings: list[Parting] = []
    lag, texts, count = 0.0, 0, 0
    what = "comparing greedy texts" if temperature == 0 else "comparing coupled texts"
    for number, (tokens, lengths) in enumerate(track(prompts, what)):
        keys = jax.random.split(jax.random.fold_in(key, number), len(tokens))
        options = GenerationOptions(max_new_tokens, Sampling(temperature=temperature), keys, rule="coupled")
        plain, drafted = (decoding.generate(target, each, tokens, lengths, **vars(options)) for each in (None, drafter))
        _, state = decoding.start(target, None, tokens, lengths, options)
        said = [_continuations(result, lengths, max_new_tokens) for result in (plain, drafted)]
        lags = [sharding.to_host(_lags(target, state, jnp.asarray(each)), target.mesh) for each in said]
        sizes = [np.asarray(result.lengths) - lengths for result in (plain, drafted)]
        partings += _partings(texts, said, sizes, lags)
        inside = np.arange(max_new_tokens) < sizes[1][:, None]
        lag = max(lag, float(lags[1][inside].max()))
        texts, count = texts + len(tokens), count + int(sizes[1].sum())
    return SameTexts(texts, count, tuple(partings), lag, rounding)


def _continuations(result: decoding.Result, lengths: np.ndarray, count: int) -> np.ndarray:
    """``[B, count]`` what came after the prompts; filler after the end of a text."""
    return np.take_along_axis(np.asarray(result.tokens), np.asarray(lengths)[:, None] + np.arange(count), axis=1)


@jax.jit
def _lags(target: Target, state: decoding.DecodeState, text: jax.Array) -> jax.Array:
    """``[B, T]`` how far each token of ``text`` is behind the one that the target chooses there, in logits."""
    _, values = _read_at_once(target, state, text)
    if state.sampling.coupled:
        positions = state.lengths + jnp.arange(text.shape[1])[:, None]
        noise = jnp.moveaxis(position_noise(position_keys(state.keys, positions), values.shape[-1]), 0, 1)
        values = perturbed(values, state.sampling, noise) * state.sampling.temperature[:, None, None]
    return jnp.max(values, axis=-1) - jnp.take_along_axis(values, text[..., None], axis=-1)[..., 0]


def _partings(
    before: int, said: Sequence[np.ndarray], sizes: Sequence[np.ndarray], lags: Sequence[np.ndarray]
) -> list[Parting]:
    """Of one batch, each of the arguments without the drafter and with it; ``before`` prompts came before it."""
    found = []
    for row, (plain, drafted) in enumerate(zip(*said, strict=True)):
        one, other = plain[: sizes[0][row]].tolist(), drafted[: sizes[1][row]].tolist()
        if one == other:
            continue
        pairs = enumerate(zip(one, other, strict=False))
        place = next((i for i, (left, right) in pairs if left != right), min(len(one), len(other)))
        ended = place >= min(len(one), len(other))
        margin = float("inf") if ended else abs(float(lags[0][row, place] - lags[1][row, place]))
        left, right = (each[place] if place < len(each) else -1 for each in (one, other))
        found.append(Parting(before + row, place, left, right, margin))
    return found
