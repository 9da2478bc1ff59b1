"""Mixtures of experts against a slow sum over each token's experts, also on a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sharding
from specjax.models import moe, params
from specjax.models.config import MoE
from tests.conftest import MIXTURES, tiny_config

KINDS = {
    "deepseek": MIXTURES["deepseek_v3"]["moe"],
    "qwen": MIXTURES["qwen3_moe"]["moe"],
    "plain": MoE(num_experts=6, experts_per_token=3, intermediate_size=8),
    "one": MoE(
        num_experts=12,
        experts_per_token=1,
        intermediate_size=8,
        scoring="sigmoid",
        shared_experts=2,
    ),
}


def layer_of(kind: MoE):
    config = tiny_config(moe=kind)
    declared = params.declare_layer(config, "", 1)
    layer = params.initialise(declared, jax.random.key(0))
    layer = jax.tree.map(lambda leaf: leaf * 20 if leaf.ndim > 1 else leaf, layer)
    if kind.corrected:
        layer["correction"] = 0.3 * jax.random.normal(jax.random.key(1), layer["correction"].shape)
    return config, layer


def mlp(x, gate, up, down):
    a = x @ gate
    return (a / (1 + np.exp(-a)) * (x @ up)) @ down


def slow_route(kind: MoE, layer, token) -> dict[int, float]:
    """Return the experts of one token with their weights.

    They follow section 2.1.2 of the DeepSeek-V3 report, word by word.
    """
    logits = token @ layer["router"]
    scores = (
        1 / (1 + np.exp(-logits))
        if kind.scoring == "sigmoid"
        else np.exp(logits) / np.exp(logits).sum()
    )
    biased = scores + (layer["correction"] if kind.corrected else 0)
    size = kind.num_experts // kind.groups
    groups = [range(size * group, size * (group + 1)) for group in range(kind.groups)]
    # A group counts as much as its two best experts together.
    groups.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
    allowed = [expert for group in groups[: kind.groups_kept] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -biased[expert])[: kind.experts_per_token]
    total = sum(scores[expert] for expert in chosen) if kind.normalise else 1.0
    return {expert: kind.scale * scores[expert] / total for expert in chosen}


def slow_mixture(kind: MoE, layer, tokens: np.ndarray) -> np.ndarray:
    layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), layer)
    rows = []
    for token in tokens.astype(np.float64):
        weights = slow_route(kind, layer, token)
        experts = [layer[f"experts_{name}"] for name in ("gate", "up", "down")]
        y = sum(
            weight * mlp(token, *(part[expert] for part in experts))
            for expert, weight in weights.items()
        )
        if kind.shared_experts:
            y = y + mlp(token, *(layer[f"shared_{name}"] for name in ("gate", "up", "down")))
        rows.append(y)
    return np.array(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 20])
def test_it_is_the_sum_over_each_tokens_own_experts(kind, count) -> None:
    """Only the chosen experts are run for one token, and all experts for many tokens."""
    config, layer = layer_of(KINDS[kind])
    tokens = np.asarray(jax.random.normal(jax.random.key(2), (count, config.hidden_size)))
    y = jax.jit(moe.mixture, static_argnums=1)(layer, config, tokens[None])[0]
    expected = slow_mixture(KINDS[kind], layer, tokens)
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(y, expected, atol=1e-4, rtol=1e-4)


def test_the_bias_decides_the_choice_and_not_the_weight() -> None:
    config, layer = layer_of(KINDS["deepseek"])
    kind = replace(KINDS["deepseek"], groups=1, groups_kept=1, normalise=False, scale=1.0)
    x = jnp.ones((1, config.hidden_size))
    scores = jax.nn.sigmoid(x @ layer["router"])[0]
    layer["correction"] = jnp.zeros(8).at[jnp.argsort(scores)[:2]].set(10.0)  # to the two worst
    chosen, weights = moe.route(layer, replace(config, moe=kind), x)
    assert set(chosen[0].tolist()) == set(jnp.argsort(scores)[:2].tolist())
    np.testing.assert_allclose(weights[0], scores[chosen[0]], rtol=1e-5)


@pytest.mark.full
def test_an_expert_that_overflows_on_other_tokens_harms_none() -> None:
    config, layer = layer_of(KINDS["plain"])
    x = jax.random.normal(jax.random.key(2), (1, 20, config.hidden_size))
    chosen, _ = moe.route(layer, config, x[0])
    (spared,) = np.nonzero(~np.isin(chosen, 0).any(axis=1))
    layer["experts_down"] = layer["experts_down"].at[0].set(1e38)
    y = moe.mixture(layer, config, x)[0]
    assert 0 < len(spared) < 20
    assert np.isfinite(y[spared]).all()
    assert not np.isfinite(y).all()
    gradient = jax.grad(lambda x: moe.mixture(layer, config, x)[0, spared].sum())(x)
    assert np.isfinite(gradient[0, spared]).all()


@pytest.mark.full_except("deepseek-mesh0")
@pytest.mark.parametrize(
    ("kind", "mesh"), [("deepseek", (2, 4)), ("one", (1, 4)), ("plain", (2, 2)), ("plain", (2, 4))]
)
def test_experts_run_where_they_lie(kind, mesh) -> None:
    config, layer = layer_of(KINDS[kind])
    x = jax.random.normal(jax.random.key(2), (2, 3, config.hidden_size))
    run = jax.jit(moe.mixture, static_argnums=(1, 3))
    expected = run(layer, config, x)
    mesh = sharding.make_mesh(*mesh)
    split = jax.device_put(
        layer, params.shardings(params.declare_layer(config, "", 1), mesh, config.axis_units)
    )
    local, devices = config.moe.num_experts, mesh.shape["model"]
    local = local if local % devices else local // devices  # "plain" has 6: not split on 4 devices
    assert split["experts_up"].addressable_shards[0].data.shape[0] == local
    compiled = run.lower(split, config, x, mesh).compile()
    np.testing.assert_allclose(run(split, config, x, mesh), expected, atol=1e-4)
    assert "all-gather" not in compiled.as_text()  # weights stay where they are


@pytest.mark.thorough
def test_gradients_are_the_same_on_a_mesh() -> None:
    config, layer = layer_of(KINDS["deepseek"])
    x = jax.random.normal(jax.random.key(2), (2, 3, config.hidden_size))
    mesh = sharding.make_mesh(2, 4)
    split = jax.device_put(
        layer, params.shardings(params.declare_layer(config, "", 1), mesh, config.axis_units)
    )

    def gradient(layer, mesh):
        return jax.jit(
            jax.grad(lambda layer: jnp.sum(jnp.tanh(moe.mixture(layer, config, x, mesh))))
        )(layer)

    expected, result = gradient(layer, None), gradient(split, mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), result, expected)


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 20])
def test_gradients_are_those_of_running_all_experts(count) -> None:
    config, layer = layer_of(KINDS["deepseek"])
    kind = config.moe
    x = jax.random.normal(jax.random.key(2), (1, count, config.hidden_size))

    def dense(layer, x):
        chosen, weights = moe.route(layer, config, x[0])
        shares = jnp.einsum("nk,nke->ne", weights, jax.nn.one_hot(chosen, kind.num_experts))
        inner = jax.nn.silu(jnp.einsum("nh,ehi->nei", x[0], layer["experts_gate"]))
        inner = inner * jnp.einsum("nh,ehi->nei", x[0], layer["experts_up"])
        y = jnp.einsum("nei,eih,ne->nh", inner, layer["experts_down"], shares)
        return y + moe.mlp(layer, x[0], "shared_")

    def loss(function):
        return jax.jit(
            jax.grad(lambda layer, x: jnp.sum(jnp.tanh(function(layer, x))), argnums=(0, 1))
        )(layer, x)

    expected, result = loss(dense), loss(lambda layer, x: moe.mixture(layer, config, x)[0])
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-3), result, expected
    )


def test_the_unit_of_gpt_oss_is_its_formula() -> None:
    """Inputs are cut at a limit, the gate from above alone (model card, section 2.1)."""
    config = tiny_config(moe=replace(KINDS["plain"], limit=2.0))
    gate, up = np.random.default_rng(0).normal(size=(2, 5, 8)) * 3
    result = moe._gated(config, jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    gate, up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
    np.testing.assert_allclose(
        result, gate / (1 + np.exp(-1.702 * gate)) * (up + 1), rtol=1e-4, atol=1e-6
    )
