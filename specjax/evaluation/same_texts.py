"""The comparison of texts with and without a drafter, greedy and with coupled sampling.

A pass over several tokens rounds differently from a pass over one token. So the order of two nearly
equal logits may change, and from there on the two texts of a prompt differ although nothing is
wrong. The size of this effect is measured: the same model reads the same text in passes of one
token, of as many tokens as a draft has nodes, and of all tokens at once. The difference of two
logits changes by at most twice the largest change of any logit. This bound is called ``rounding``.
It is valid for one machine, one model and one dtype.
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
"""The number of prompts of a batch."""


@dataclass(frozen=True)
class Parting:
    """The first difference between the two texts of a prompt.

    Attributes:
        prompt: the index of the prompt.
        position: the number of tokens after the prompt.
        plain: the token there without the drafter; -1 if that text has ended.
        drafted: the token there with the drafter; -1 if that text has ended.
        margin: the difference between their logits in a pass over the whole text; with coupled
            sampling, after adding the random numbers of the position. Infinite if a text has ended.
    """

    prompt: int
    position: int
    plain: int
    drafted: int
    margin: float


@dataclass(frozen=True)
class SameTexts:
    """The comparison of texts with a drafter and without.

    Attributes:
        texts: the number of texts of each kind.
        tokens: the number of tokens of the texts with the drafter.
        partings: the first difference of each pair of texts that differ.
        lag: the largest distance in logits between a token of the texts with the drafter and the
            target's own choice at its position.
        rounding: the bound on the change of the difference between two logits by rounding.
    """

    texts: int
    tokens: int
    partings: tuple[Parting, ...]
    lag: float
    rounding: float

    @property
    def passes(self) -> bool:
        """True if rounding explains all differences, also those after the first one of a text."""
        return max((self.lag, *(parting.margin for parting in self.partings))) <= self.rounding


Prompts = Sequence[tuple[np.ndarray, np.ndarray]]
"""Batches of prompts: right-padded tokens ``[B, W]`` and lengths ``[B]``."""


def measure_rounding(
    target: Target, prompts: Prompts, widths: Sequence[int], max_new_tokens: int
) -> float:
    """Measure the effect of rounding: twice the largest change of a logit between two passes.

    Args:
        target: the target.
        prompts: batches of prompts. The first batch is continued greedily, without a drafter, and
            the text is read in several ways.
        widths: the number of tokens of a pass, beside 1 and all.
        max_new_tokens: the maximum number of tokens to read.
    """
    tokens, lengths = prompts[0]
    options = GenerationOptions(max_new_tokens=max_new_tokens, eos_token_ids=())
    result = decoding.generate(target, None, tokens, lengths, **vars(options))
    _, state = decoding.start(target, None, tokens, lengths, options)
    text = _continuations(result, lengths, max_new_tokens)
    sizes = sorted({1, *(min(width, text.shape[1]) for width in widths)})
    return 2 * float(_largest_difference(target, state, jnp.asarray(text), widths=tuple(sizes)))


def _read_at_once(
    target: Target, state: decoding.DecodeState, text: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens ``[B, T]`` before those of ``text [B, T]``, and the logits of one pass."""
    tokens = jnp.concatenate([state.roots[:, None], text[:, :-1]], axis=1)
    return tokens, target.score(tokens, state.cache)[0].logits


@partial(jax.jit, static_argnames="widths")
def _largest_difference(
    target: Target, state: decoding.DecodeState, text: jax.Array, widths: tuple[int, ...]
) -> jax.Array:
    """Return the largest difference of a logit between one pass and passes of the given widths."""
    tokens, whole = _read_at_once(target, state, text)

    def by_parts(width: int) -> jax.Array:
        count = tokens.shape[1] // width * width
        parts = jnp.moveaxis(tokens[:, :count].reshape(len(tokens), -1, width), 1, 0)

        def read_part(cache, part):
            output, cache = target.forward(part, cache)
            return cache, output.logits

        logits = jax.lax.scan(read_part, state.cache, parts)[1]
        return jnp.moveaxis(logits, 0, 1).reshape(len(tokens), count, -1)

    return jnp.stack(
        [jnp.max(jnp.abs(logits - whole[:, : logits.shape[1]])) for logits in map(by_parts, widths)]
    ).max()


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
    """Generate texts with the drafter and without, and compare them.

    Args:
        target: the target.
        drafter: the drafter to test.
        prompts: batches of prompts.
        temperature: the temperature; 0 is greedy. Otherwise sampling is coupled, so that the texts
            must be equal as well.
        max_new_tokens: the maximum number of new tokens of each text.
        rounding: the result of `measure_rounding`.
        key: the random key, which is consumed.
    """
    partings: list[Parting] = []
    lag, texts, count = 0.0, 0, 0
    what = "comparing greedy texts" if temperature == 0 else "comparing coupled texts"
    for batch, (tokens, lengths) in enumerate(track(prompts, what)):
        keys = jax.random.split(jax.random.fold_in(key, batch), len(tokens))
        options = GenerationOptions(
            max_new_tokens, Sampling(temperature=temperature), keys, rule="coupled"
        )
        plain = decoding.generate(target, None, tokens, lengths, **vars(options))
        drafted = decoding.generate(target, drafter, tokens, lengths, **vars(options))
        _, state = decoding.start(target, None, tokens, lengths, options)
        outputs = [_continuations(result, lengths, max_new_tokens) for result in (plain, drafted)]
        lags = [
            sharding.to_host(_lags(target, state, jnp.asarray(output)), target.mesh)
            for output in outputs
        ]
        sizes = [np.asarray(result.lengths) - lengths for result in (plain, drafted)]
        partings += _partings(texts, outputs, sizes, lags)
        inside = np.arange(max_new_tokens) < sizes[1][:, None]
        lag = max(lag, float(lags[1][inside].max()))
        texts, count = texts + len(tokens), count + int(sizes[1].sum())
    return SameTexts(texts, count, tuple(partings), lag, rounding)


def _continuations(result: decoding.Result, lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the output tokens ``[B, count]``, with padding after the end of a text."""
    return np.take_along_axis(
        np.asarray(result.tokens), np.asarray(lengths)[:, None] + np.arange(count), axis=1
    )


@jax.jit
def _lags(target: Target, state: decoding.DecodeState, text: jax.Array) -> jax.Array:
    """Return the distance ``[B, T]`` in logits of each token to the target's choice there."""
    _, values = _read_at_once(target, state, text)
    if state.sampling.coupled:
        positions = state.lengths + jnp.arange(text.shape[1])[:, None]
        noise = jnp.moveaxis(
            position_noise(position_keys(state.keys, positions), values.shape[-1]), 0, 1
        )
        values = (
            perturbed(values, state.sampling, noise) * state.sampling.temperature[:, None, None]
        )
    return jnp.max(values, axis=-1) - jnp.take_along_axis(values, text[..., None], axis=-1)[..., 0]


def _partings(
    first_prompt: int,
    outputs: Sequence[np.ndarray],
    sizes: Sequence[np.ndarray],
    lags: Sequence[np.ndarray],
) -> list[Parting]:
    """Return the partings of one batch.

    Args:
        first_prompt: the index of the first prompt of the batch.
        outputs: ``[B, T]`` the output tokens without the drafter, and with it.
        sizes: ``[B]`` the number of output tokens of each.
        lags: ``[B, T]`` the `_lags` of each.
    """
    partings = []
    for row, (plain_tokens, drafted_tokens) in enumerate(zip(*outputs, strict=True)):
        plain = plain_tokens[: sizes[0][row]].tolist()
        drafted = drafted_tokens[: sizes[1][row]].tolist()
        if plain == drafted:
            continue
        shorter = min(len(plain), len(drafted))
        pairs = enumerate(zip(plain, drafted, strict=False))
        position = next(
            (i for i, (token, drafted_token) in pairs if token != drafted_token), shorter
        )
        if position >= shorter:
            margin = float("inf")
        else:
            margin = abs(float(lags[0][row, position] - lags[1][row, position]))
        plain_token, drafted_token = (
            text[position] if position < len(text) else -1 for text in (plain, drafted)
        )
        partings.append(Parting(first_prompt + row, position, plain_token, drafted_token, margin))
    return partings
