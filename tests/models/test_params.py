import jax
import jax.numpy as jnp

from specjax.models import params
from tests.conftest import tiny_config


def test_init_has_the_declared_shapes() -> None:
    config = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    declared = params.declare(config)
    initialised = params.initialise(declared, jax.random.key(0), jnp.bfloat16)
    assert jax.tree.structure(declared) == jax.tree.structure(initialised)
    for param, leaf in zip(jax.tree.leaves(declared), jax.tree.leaves(initialised), strict=True):
        assert leaf.shape == param.shape
        assert leaf.dtype == jnp.bfloat16
        assert len(param.axes) == len(param.shape)


def test_names_are_unique_and_the_count_is_right() -> None:
    config = tiny_config(tie_embeddings=True)
    names = [param.name for param in jax.tree.leaves(params.declare(config))]
    assert len(names) == len(set(names))
    attention = 16 * 16 * 2 + 2 * 8 * 16
    layer = attention + 3 * 16 * 24 + 2 * 16
    assert (
        params.count(params.initialise(params.declare(config), jax.random.key(0)))
        == 11 * 16 + 2 * layer + 16
    )
