"""The operations of a program, counted against the sizes of its products."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from specjax.models.config import MoE
from specjax.models.moe import mixture
from specjax.sharding import make_mesh
from specjax.training.arithmetic import count_flops
from tests.conftest import tiny_target

X, W = jnp.ones((6, 4)), jnp.ones((4, 4))
ONE = 2 * 6 * 4 * 4
"""The operations of ``X @ W``."""


def of(function, *arguments) -> float:
    return count_flops(jax.make_jaxpr(function)(*arguments))


def in_turns(x, w):
    return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x, w: jnp.tanh(x @ w), 1),
        (lambda x, w: jax.jit(lambda x: (x @ w) @ w)(x), 2),
        (in_turns, 5),
        (lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: in_turns(x, w), x), 15),
        (lambda x, w: jax.lax.map(lambda row: row @ w, x), 1),
        (lambda x, w: jax.lax.cond(x[0, 0] > 0, in_turns, lambda x, w: x @ w, x, w), 5),
        # A gradient by both inputs has two products for each one.
        (jax.grad(lambda x, w: (x @ w).sum(), argnums=(0, 1)), 3),
        (jax.grad(lambda x, w: jnp.sin(in_turns(x, w)).sum(), argnums=(0, 1)), 15),
        (lambda x, w: jax.lax.ragged_dot(x, jnp.stack([w] * 3), jnp.array([1, 3, 2])), 1),
        (lambda x, w: jnp.einsum("nh,ehi->eni", x, jnp.stack([w] * 3)), 3),
    ],
)
def test_the_products_of_a_program(function, products) -> None:
    assert of(function, X, W) == products * ONE


def test_gradients_of_ragged_products_count_each_row_once() -> None:
    def loss(x, w):
        return jnp.sin(jax.lax.ragged_dot(x, w, jnp.array([1, 3, 2]))).sum()

    assert of(jax.grad(loss, argnums=(0, 1)), X, jnp.stack([W] * 3)) == 3 * ONE


def test_what_is_computed_again_counts_again() -> None:
    def twice(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w).sum()

    assert of(jax.grad(jax.checkpoint(twice)), X, W) > of(jax.grad(twice), X, W)


def test_all_devices_count() -> None:
    mesh = make_mesh(2, 1)
    rows = PartitionSpec("data")
    split = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    assert of(split, X, W) == ONE


def test_experts_that_no_token_has_do_not_count() -> None:
    """Sorted by expert, 32 experts cost at most some blocks more than the chosen ones."""
    tokens, hidden, chosen = 2048, 16, 2
    target = tiny_target(moe=MoE(32, chosen, 8), hidden_size=hidden)
    (layer, *_), config = target.params["layers"], target.config
    x = jnp.ones((1, tokens, hidden))
    needed = tokens * chosen * 3 * 2 * hidden * 8
    counted = of(lambda x: mixture(layer, config, x), x)
    assert needed < counted < 4 * needed
    assert config.moe is not None
    dense = dataclasses.replace(config, moe=dataclasses.replace(config.moe, experts_per_token=16))
    assert of(lambda x: mixture(layer, dense, x), x) > 32 / chosen * needed
