"""The arithmetic of latent attention: rotated pairs, and the scale of the scores."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import mla
from specjax.models.config import MLA, Rope
from specjax.models.rope import rotations
from tests.conftest import MIXTURES, tiny_config

POSITIONS = np.array([[0, 3, 50], [2, 1, 9]])
SIZES = MLA(kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=6, v_head_dim=8)


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_are_those_of_pairs_turned_as_complex_numbers(interleaved) -> None:
    """A pair is two neighbours, or two numbers that are half a head apart."""
    queries, keys = jax.random.normal(jax.random.key(0), (2, 2, 3, 1, 6))
    turn = rotations(Rope(theta=50.0), 6, jnp.asarray(POSITIONS))
    sizes = replace(SIZES, rope_interleaved=interleaved)
    scores = jnp.einsum(
        "bthd,bshd->bts", mla._rotate(sizes, queries, turn), mla._rotate(sizes, keys, turn)
    )
    pairs = [np.asarray(x[:, :, 0], np.float64) for x in (queries, keys)]
    q, k = (
        x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :3] + 1j * x[..., 3:]
        for x in pairs
    )
    angles = (POSITIONS[:, :, None] - POSITIONS[:, None])[..., None] * 50.0 ** (-np.arange(3) / 3)
    expected = (q[:, :, None] * np.conj(k[:, None]) * np.exp(1j * angles)).real.sum(axis=-1)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_the_scale_has_yarns_temperature_twice() -> None:
    """The temperature counts once for the query and once for the key."""
    config = tiny_config(**MIXTURES["deepseek_v3"])
    temperature = 0.1 * 1.2 * np.log(4.0) + 1
    assert mla.scale(config) == pytest.approx((6 + 4) ** -0.5 * temperature**2)
    plain = SimpleNamespace(mla=config.mla, rope=Rope(mscale_all_dim=1.2, factor=4.0))
    assert mla.scale(plain) == pytest.approx((6 + 4) ** -0.5)
