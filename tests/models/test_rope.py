"""Rotary positions: both ways to rotate a head, against complex numbers and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models import rope
from specjax.models.config import Rope

POSITIONS = jnp.array([[0, 1, 7], [100, 5, 2]])


@pytest.mark.parametrize("way", [rope._rotate_halves, rope._rotate_by_product])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pairs_are_turned(way, dtype) -> None:
    """The pair (x_i, x_{i + d/2}) is a complex number, and is multiplied by e^(i angle)."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 10), dtype)
    result = jax.jit(way)(x, *rope.rotations(Rope(theta=50.0), 10, POSITIONS)[:2])
    angles = np.asarray(POSITIONS, np.float64)[..., None, None] * 50.0 ** (-np.arange(5) / 5)
    pairs = np.asarray(x[..., :5], np.float64) + 1j * np.asarray(x[..., 5:], np.float64)
    rotated = pairs * np.exp(1j * angles)
    expected = np.concatenate([rotated.real, rotated.imag], axis=-1)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(
        np.asarray(result, np.float64), expected, atol=tolerance, rtol=tolerance
    )


def test_pairs_of_neighbours_are_turned_and_other_numbers_stay() -> None:
    """The pair (x_2i, x_2i+1) is a complex number; its parts are then in two halves."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 10))
    turn = rope.rotations(Rope(theta=50.0, turned=0.6), 10, POSITIONS)
    result = np.asarray(turn.turn_keys(rope.separate_pairs(x, 6)))
    angles = np.asarray(POSITIONS, np.float64)[..., None, None] * 50.0 ** (-np.arange(3) / 3)
    rotated = (np.asarray(x[..., 0:6:2]) + 1j * np.asarray(x[..., 1:6:2])) * np.exp(1j * angles)
    expected = np.concatenate([rotated.real, rotated.imag, x[..., 6:]], axis=-1)
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("heads", "positions"), [(4, POSITIONS), (1, POSITIONS), (4, POSITIONS[:1])]
)
def test_both_ways_give_the_same_bits(dtype, heads, positions) -> None:
    """Operations run one by one, because a compiled program may round less often."""
    x = jax.random.normal(jax.random.key(0), (2, 3, heads, 64), dtype)
    turn = rope.rotations(Rope(), 64, positions)[:2]
    np.testing.assert_array_equal(rope._rotate_halves(x, *turn), rope._rotate_by_product(x, *turn))


def test_both_ways_have_the_same_gradient() -> None:
    x, down = jax.random.normal(jax.random.key(0), (2, 2, 3, 4, 10))
    turn = rope.rotations(Rope(), 10, POSITIONS)[:2]
    (halves,), (product,) = (
        jax.vjp(lambda x, way=way: way(x, *turn), x)[1](down)
        for way in (rope._rotate_halves, rope._rotate_by_product)
    )
    np.testing.assert_allclose(product, halves, atol=1e-6)


def test_the_product_is_a_tpus_and_rounds_nothing() -> None:
    """The product has full precision, whatever the default.

    With a TPU's default precision it would round the numbers of a head to bfloat16.
    """
    x, turn = jnp.ones((1, 2, 4, 10)), rope.rotations(Rope(), 10, jnp.array([[3, 4]]))[:2]
    with jax.default_matmul_precision("bfloat16"):
        lowered = {
            platform: (
                jax.jit(lambda x: rope.rotate(x, *turn))
                .trace(x)
                .lower(lowering_platforms=(platform,))
                .as_text()
            )
            for platform in ("tpu", "cpu", "cuda")
        }
    (product,) = [line for line in lowered["tpu"].splitlines() if "stablehlo.dot_general" in line]
    assert "precision = [HIGHEST, HIGHEST]" in product
    assert not any("stablehlo.dot_general" in lowered[platform] for platform in ("cpu", "cuda"))


def test_queries_grow_with_their_position_and_keys_do_not() -> None:
    turn = rope.rotations(
        Rope(original_max_positions=4, query_growth=0.5), 4, jnp.array([[0, 3, 4, 11]])
    )
    x = jnp.ones((1, 4, 2, 4))
    grown = np.asarray(turn.turn_queries(x) / turn.turn_keys(x))
    expected = 1 + 0.5 * np.log([1, 1, 2, 3])
    np.testing.assert_allclose(
        grown, np.broadcast_to(expected[None, :, None, None], grown.shape), rtol=1e-5
    )
    with pytest.raises(InputError, match=r"query_growth=0\.5: it needs original_max_positions"):
        Rope(query_growth=0.5)


# --- scalings, pair by pair as their papers describe them -----------------------------------------


def by_llama3(pair: float, rope: Rope) -> float:
    """Return the frequency of a pair with Llama 3's scaling.

    A wavelength above the context divided by low_freq_factor is stretched. One below the context
    divided by high_freq_factor stays.
    """
    wavelength = 2 * np.pi / pair
    longest, shortest = (
        rope.original_max_positions / bound
        for bound in (rope.low_freq_factor, rope.high_freq_factor)
    )
    if wavelength > longest:
        return pair / rope.factor
    if wavelength < shortest:
        return pair
    share = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - share) * pair / rope.factor + share * pair


def test_llama3_stretches_long_wavelengths_and_keeps_short_ones() -> None:
    scaled = Rope(
        theta=10000.0,
        kind="llama3",
        factor=8.0,
        original_max_positions=64,
        low_freq_factor=1.5,
        high_freq_factor=5.0,
    )
    base = 10000.0 ** (-np.arange(16) / 16)
    result, factor = rope.inverse_frequencies(scaled, 32)
    expected = [by_llama3(pair, scaled) for pair in base]
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    unchanged, stretched = np.isclose(expected, base), np.isclose(expected, base / 8)
    assert unchanged.any() and stretched.any() and not (unchanged | stretched).all() and factor == 1


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_interpolates_by_how_often_a_pair_turns_in_the_original_context(truncate) -> None:
    """The turns of a pair in the original context decide how it is scaled.

    A pair with fewer turns than beta_slow is divided by the factor, one with more than beta_fast
    stays, and between these there is a ramp over the indices of the pairs.
    """
    scaled = Rope(
        theta=500.0,
        kind="yarn",
        factor=4.0,
        original_max_positions=256,
        beta_fast=20.0,
        truncate=truncate,
    )
    base = 500.0 ** (-np.arange(16) / 16)
    # The pairs, as fractional indices, that turn beta_fast times and once.
    bounds = [16 * np.log(256 / (2 * np.pi * turns)) / np.log(500.0) for turns in (20.0, 1.0)]
    first, last = (np.floor(bounds[0]), np.ceil(bounds[1])) if truncate else bounds
    assert 0 < first < last < 15
    share = np.clip((np.arange(16) - first) / (last - first), 0, 1)
    result, factor = rope.inverse_frequencies(scaled, 32)
    np.testing.assert_allclose(result, share * base / 4 + (1 - share) * base, rtol=1e-5)
    assert factor == pytest.approx(0.1 * np.log(4.0) + 1)
    _, deepseek_factor = rope.inverse_frequencies(
        Rope(kind="yarn", factor=4.0, original_max_positions=256, mscale=0.7, mscale_all_dim=1.2),
        32,
    )
    assert deepseek_factor == pytest.approx((0.07 * np.log(4.0) + 1) / (0.12 * np.log(4.0) + 1))


def test_gemma4_turns_a_share_of_the_pairs_at_the_speeds_of_a_whole_head() -> None:
    result, _ = rope.inverse_frequencies(
        Rope(theta=100.0, kind="proportional", turned=0.25, factor=2.0), 16
    )
    np.testing.assert_allclose(result, [0.5, 0.5 * 100.0 ** (-1 / 8), *[0] * 6], rtol=1e-6)
