"""Caches in 8 bits: against values rounded by hand, and one pass against many."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sharding
from specjax.errors import InputError
from specjax.models import layers, params
from specjax.models.attention import by_device
from specjax.models.attention.plain import attend_plainly
from specjax.models.cache import PagedCache
from specjax.models.quantized_cache import (
    QuantizedPart,
    dequantize,
    operand,
    quantize,
    quantized_as,
    rescaled,
)
from specjax.models.transformer import Target
from specjax.serving import memory
from tests.conftest import LAYERED, MIXTURES, own_programs, tiny_config, tiny_target

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 9))
KINDS = {  # changes to `tiny_config`
    "plain": {},
    # As in Gemma 3.
    "windows": {
        "num_layers": 3,
        "sliding_window": 4,
        "windowed_layers": (0, 2),
        "qk_norm": True,
    },
    "sinks": {"sinks": True, "sliding_window": 4, "windowed_layers": (0,)},  # as gpt-oss
    "caps": {"score_cap": 2.0},
    "latents": MIXTURES["deepseek_v3"],
    "sharing": LAYERED["sharing"],
}


def in_8_bits(**changes) -> Target:
    return tiny_target(**changes).replace(cache_dtype="int8")


def rounded_by_hand(x) -> np.ndarray:
    """Return ``[B, heads, S, dim]``, rounded to 8 bits one vector after the other."""
    result = np.zeros_like(x)
    for index in np.ndindex(x.shape[:-1]):
        step = max(np.abs(x[index]).max(), np.float32(1e-30)) / np.float32(127)
        result[index] = [np.float32(round(number / step)) * step for number in x[index]]
    return result


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_vectors_are_rounded_to_127_steps_each(scale, dtype) -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5, 8)) * scale, dtype)
    part = quantize(x)
    floats = np.asarray(x, np.float32)
    assert (part.numbers.dtype, part.scales.dtype) == (jnp.int8, jnp.float32)
    assert (part.shape, part.scales.shape) == (x.shape, (2, 3, 5))
    np.testing.assert_array_equal(np.abs(part.numbers).max(axis=-1), np.full((2, 3, 5), 127))
    step = np.abs(floats).max(axis=-1, keepdims=True) / 127
    assert np.all(np.abs(dequantize(part) - floats) <= step * 0.50005)
    is_tie = np.abs(np.abs(floats / step) % 1 - 0.5) < 1e-4  # may be rounded either way
    assert is_tie.mean() < 0.05
    np.testing.assert_allclose(
        np.where(is_tie, 0, dequantize(part)),
        np.where(is_tie, 0, rounded_by_hand(floats)),
        rtol=1e-5,
    )


@pytest.mark.parametrize("empty", [0.0, 1e-38])
def test_what_is_next_to_nothing_becomes_zeros(empty) -> None:
    part = quantize(jnp.full((1, 1, 2, 4), empty))
    assert not part.numbers.any() and np.all(np.asarray(part.scales) > 0)


def test_what_is_no_number_stays_none() -> None:
    for value in (jnp.nan, jnp.inf):
        part = quantize(jnp.ones((1, 1, 2, 4)).at[0, 0, 1, 2].set(value))
        scales = np.asarray(part.scales)
        assert np.isfinite(scales[0, 0, 0]) and not np.isfinite(scales[0, 0, 1])


def test_a_part_becomes_as_another_is_stored() -> None:
    floats = jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, 3, 4)), jnp.float32)
    part = quantize(floats)
    assert quantized_as(part, part) is part
    np.testing.assert_array_equal(quantized_as(floats, part).numbers, part.numbers)
    np.testing.assert_array_equal(
        quantized_as(part, floats.astype(jnp.bfloat16)), dequantize(part).astype(jnp.bfloat16)
    )
    # A client receives floats, and must store what the server stores.
    again = quantize(dequantize(part))
    np.testing.assert_array_equal(again.numbers, part.numbers)
    np.testing.assert_allclose(again.scales, part.scales, rtol=1e-6)


@pytest.mark.full
@pytest.mark.thorough_except("plain", "windows")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_sees_keys_and_values_rounded_by_hand(kind, monkeypatch) -> None:
    """A float target whose layers round their entries in Python has the same logits.

    One whose layers do not round has other logits.
    """
    small, plain = in_8_bits(**KINDS[kind]), tiny_target(**KINDS[kind])
    logits, unrounded_logits = small.forward(TOKENS)[0].logits, plain.forward(TOKENS)[0].logits

    def by_hand(entry, cache_dtype):
        return tuple(
            jax.pure_callback(rounded_by_hand, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            for x in entry
        )

    with own_programs():
        monkeypatch.setattr(layers, "_remembered", by_hand)
        expected = plain.forward(TOKENS)[0].logits
        expected.block_until_ready()
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(logits - unrounded_logits).max() > 1e-3  # the comparison can fail


def farthest(target: Target, paged: bool = False) -> float:
    """Return how far the logits of one pass over all tokens are from those of several passes.

    The passes over a few tokens have a cache between them.
    """
    whole = target.forward(TOKENS)[0].logits
    cache = target.new_cache(2, 12)
    if paged:
        cache = PagedCache.like(cache, pages=6, page=4).with_table(jnp.arange(6).reshape(2, 3))
    logits = []
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 9)):
        output, cache = target.forward(TOKENS[:, first:last], cache)
        logits.append(output.logits)
    return float(np.abs(np.concatenate(logits, axis=1) - whole).max())


@pytest.mark.full_except("caps-False")
@pytest.mark.thorough_except("plain-True")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.represents("the cache in 8 bits")
def test_a_pass_over_many_tokens_is_many_passes(kind, paged) -> None:
    """A token has the same logits whether it is drafted or committed.

    Losslessness depends on that.
    """
    assert farthest(in_8_bits(**KINDS[kind]), paged) < 1e-4


def sees_its_own_tokens_unrounded(
    right, params, config, x, rotations, mask, past=(), cache_dtype="float"
):
    """Run a layer that is wrong: it rounds its entries, but sees the call's tokens in floats."""
    output, entry = right(params, config, x, rotations, mask, past)
    return output, layers._remembered(entry, cache_dtype)


@pytest.mark.full
@pytest.mark.thorough_except("plain")
@pytest.mark.parametrize("kind", ["plain", "latents"])
def test_who_sees_its_own_tokens_unrounded_is_found(kind, monkeypatch) -> None:
    # Kernels do not take entries of floats beside quantized ones.
    def plainly(q, pieces, sinks=None, *, values_part, kernel, cap=None):
        return attend_plainly(q, pieces, sinks, values_part=values_part, block=16, cap=cap)

    with own_programs():
        monkeypatch.setattr(by_device, "_attend_by_kernel", plainly)
        monkeypatch.setattr(
            layers, "attention", partial(sees_its_own_tokens_unrounded, layers.attention)
        )
        assert farthest(in_8_bits(**KINDS[kind])) > 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 0.30), (jnp.bfloat16, 0.55)])
def test_it_takes_a_quarter_of_float32_and_half_of_bfloat16(dtype, bound) -> None:
    floats = jax.eval_shape(
        partial(Target.init, tiny_config(head_dim=64), jax.random.key(0), dtype)
    )
    small = floats.replace(cache_dtype="int8")

    def size(target: Target) -> int:
        cache = jax.eval_shape(partial(target.new_cache, 1, 4096))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))

    # Layers, parts, heads and slots; 64 numbers of a byte, and a scale of four bytes.
    assert size(small) == 2 * 2 * 2 * 4096 * (64 + 4)
    assert size(small) / size(floats) < bound
    pages = [memory.page_bytes(target, None, 64) for target in (small, floats)]
    assert pages[0] / pages[1] < bound


@pytest.mark.full
def test_it_is_split_over_devices_as_floats_are() -> None:
    target, mesh = in_8_bits(), sharding.make_mesh(data=1, model=2)
    placements = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    on_mesh = target.replace(params=jax.device_put(target.params, placements), mesh=mesh)

    @jax.jit
    def run(target: Target):
        _, cache = target.forward(TOKENS[:, :6], target.new_cache(2, 12))
        return target.forward(TOKENS[:, 6:], cache)[0].logits, cache.layers

    logits, entries = run(on_mesh)
    for part in entries[0]:
        assert isinstance(part, QuantizedPart)
        assert part.numbers.sharding.shard_shape(part.shape) == (2, 1, 12, 4)
        assert part.scales.sharding.shard_shape(part.scales.shape) == (2, 1, 12)
    np.testing.assert_allclose(logits, target.forward(TOKENS)[0].logits[:, 6:], atol=1e-4)


def test_other_types_are_refused_before_anything_is_read(target, tmp_path) -> None:
    with pytest.raises(InputError, match="cache_dtype='int4': must be one of float, int8"):
        target.replace(cache_dtype="int4")
    with pytest.raises(InputError, match="cache_dtype='bfloat16'"):
        Target.from_pretrained(tmp_path / "nowhere", cache_dtype="bfloat16")  # pyright: ignore[reportArgumentType]


def test_it_is_asked_for_as_a_checkpoint_is_read(target, tmp_path) -> None:
    target.save_pretrained(tmp_path / "whole")
    read = Target.from_pretrained(tmp_path / "whole", cache_dtype="int8")
    part = Target.from_pretrained(tmp_path / "whole", cache_dtype="int8", layers=(1, 2))
    assert read.cache_dtype == part.cache_dtype == read.part((0, 1)).cache_dtype == "int8"
    assert read.fingerprint() == target.fingerprint() == part.fingerprint()
    np.testing.assert_allclose(
        read.forward(TOKENS)[0].logits,
        target.replace(cache_dtype="int8").forward(TOKENS)[0].logits,
        atol=1e-5,
    )


def test_scales_are_multiplied_with_scores_as_if_the_numbers_were_floats() -> None:
    keys = quantize(jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 5, 4)), jnp.float32))
    queries = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3, 7, 4)), jnp.float32)
    scores = rescaled(
        jnp.einsum("bhtd,bhsd->bhts", queries, operand(keys, jnp.float32)), keys, (2,)
    )
    np.testing.assert_allclose(
        scores, jnp.einsum("bhtd,bhsd->bhts", queries, dequantize(keys)), rtol=1e-5, atol=1e-6
    )
    floats = dequantize(keys)
    assert operand(floats, jnp.bfloat16) is floats and rescaled(scores, floats, (2,)) is scores
