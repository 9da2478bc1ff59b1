import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.config import OptimizerConfig
from specjax.training.optimizer import learning_rates, make_optimizer


@pytest.mark.parametrize("method", ["adamw", "muon"])
def test_decay_touches_matrices_only(method) -> None:
    layer = {"q": jnp.ones((2, 2)), "mlp_conv_base": jnp.ones((2, 2, 2))}
    params = {"embed": jnp.ones((3, 2)), "layers": [layer], "norm": jnp.ones(2)}
    optimizer = make_optimizer(
        OptimizerConfig(method=method, learning_rate=0.1, warmup_steps=1, weight_decay=0.5), 10
    )
    state = optimizer.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(optimizer.update)
    for _ in range(3):
        updates, state = update(zeros, state, params)
    assert np.all(updates["layers"][0]["q"] < 0)
    assert np.all(updates["embed"] < 0)
    assert np.all(updates["norm"] == 0)
    # DFlash2's kernels do nothing at 1, and not at 0.
    assert np.all(updates["layers"][0]["mlp_conv_base"] == 0)


@pytest.mark.full
def test_the_learning_rates_are_those_of_the_updates() -> None:
    """AdamW moves a parameter with a constant gradient by exactly the learning rate."""
    config = OptimizerConfig(learning_rate=0.3, warmup_steps=3, weight_decay=0.0, clip=1e9)
    optimizer = make_optimizer(config, 10)
    parameters = {"norm": jnp.zeros(2)}
    state = optimizer.init(parameters)
    sizes = []
    for _ in range(10):
        updates, state = optimizer.update({"norm": jnp.ones(2)}, state, parameters)
        sizes.append(-float(updates["norm"][0]))
    np.testing.assert_allclose(learning_rates(config, 10), sizes, rtol=1e-4, atol=1e-7)
    assert max(sizes) > 0.29
