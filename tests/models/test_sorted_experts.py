"""Mixtures on many tokens, which are sorted by expert, against a sum token by token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sharding
from specjax.models import moe, params, sorted_experts
from specjax.models.config import MoE
from specjax.models.quantization import Form
from specjax.models.quantization.gptq import Watched
from specjax.models.quantization.weights import quantize_matrix
from tests.conftest import tiny_config
from tests.models.test_moe import slow_mixture

PLAIN = MoE(num_experts=12, experts_per_token=3, intermediate_size=8)
KINDS = {
    "plain": PLAIN,
    "groups": replace(PLAIN, scoring="sigmoid", groups=4, groups_kept=2, corrected=True, scale=2.5),
    "shared": replace(PLAIN, experts_per_token=1, shared_experts=2),
    "biased": replace(PLAIN, biased=True, limit=2.0),
    "norms its own": replace(PLAIN, beside_mlp=True),
}
"""The last two are compared with the other form alone: the sum token by token has no biases."""
TOKENS = 150


def layer_of(kind: MoE):
    config = tiny_config(moe=kind)
    layer = params.initialise(params.declare_layer(config, "", 1), jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(layer)))
    layer = {
        name: leaf * 20 if leaf.ndim > 1 else leaf + 0.3 * jax.random.normal(next(keys), leaf.shape)
        for name, leaf in layer.items()
    }
    # Biases of experts have two axes, and are zeros.
    layer = {
        name: jax.random.normal(next(keys), leaf.shape) if name.endswith("_bias") else leaf
        for name, leaf in layer.items()
    }
    return config, layer


def tokens_of(config, count: int = TOKENS) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (1, count, config.hidden_size))


def mixture(layer, config, x, mesh=None):
    return jax.jit(lambda layer, x: moe.mixture(layer, config, x, mesh))(layer, x)


def gradients(layer, config, x, mesh=None):
    def loss(layer, x):
        return jnp.sum(jnp.tanh(moe.mixture(layer, config, x, mesh)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(layer, x)


def of_the_other_form(monkeypatch, function, *arguments):
    """Return ``function(*arguments)`` where all experts run on all tokens."""
    with monkeypatch.context() as patch:
        patch.setattr(moe, "LEAST_SORTED", 10**9)
        return function(*arguments)


def assert_near(result, expected, within=1e-6) -> None:
    """Compare leaves, relative to the largest number of each."""

    def compare(a, b) -> None:
        scale = max(float(jnp.abs(b).max()), 1e-30)
        np.testing.assert_allclose(a / scale, b / scale, atol=within)

    jax.tree.map(compare, result, expected)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "groups", "shared"])
def test_many_tokens_are_the_sum_over_each_tokens_own_experts(kind) -> None:
    config, layer = layer_of(KINDS[kind])
    x = tokens_of(config)
    expected = slow_mixture(KINDS[kind], layer, np.asarray(x[0]))
    assert_near(mixture(layer, config, x)[0], expected)


@pytest.mark.full
@pytest.mark.thorough_except("plain", "groups")
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_running_all_experts(monkeypatch, kind) -> None:
    config, layer = layer_of(KINDS[kind])
    x = tokens_of(config)
    assert moe._sorts(config, TOKENS)
    for function in (mixture, gradients):
        expected = of_the_other_form(monkeypatch, function, layer, config, x)
        assert_near(function(layer, config, x), expected, 2e-6)
    by_layer, by_x = gradients(layer, config, x)
    assert all(float(jnp.abs(by_layer[f"experts_{name}"]).max()) > 0 for name in ("gate", "down"))
    assert float(jnp.abs(by_x).max()) > 0


@pytest.mark.full
@pytest.mark.thorough_except("1")
@pytest.mark.parametrize("together", [1, 3])
def test_blocks_of_any_size_give_the_same(monkeypatch, together) -> None:
    """Check sizes that leave rows and whole blocks empty, and loops that also run empty blocks."""
    config, layer = layer_of(KINDS["biased"])
    x = tokens_of(config)
    expected = mixture(layer, config, x), gradients(layer, config, x)
    for is_static in (False, True):
        sizes = sorted_experts._BlockSizes(7, together, is_static)
        monkeypatch.setattr(sorted_experts, "_sizes_on_cpu", lambda *_, sizes=sizes: sizes)
        assert_near((mixture(layer, config, x), gradients(layer, config, x)), expected, 2e-6)


@pytest.mark.full
def test_tokens_are_sorted_in_pieces(monkeypatch) -> None:
    config, layer = layer_of(PLAIN)
    x = tokens_of(config)
    expected = mixture(layer, config, x), gradients(layer, config, x)
    monkeypatch.setattr(sorted_experts, "_PIECE", 64)  # the last piece is not full
    assert_near((mixture(layer, config, x), gradients(layer, config, x)), expected, 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "biased"])
def test_ragged_products_give_the_same(monkeypatch, kind) -> None:
    """Check the form of TPUs here, where the same operation exists."""
    config, layer = layer_of(KINDS[kind])
    x = tokens_of(config)
    expected = mixture(layer, config, x)

    def by_ragged_products(form, experts, run, *arguments, tpu):
        return tpu(*arguments)

    monkeypatch.setattr(sorted_experts, "_by_device", by_ragged_products)
    assert_near(mixture(layer, config, x), expected)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [128, 1024])
def test_a_token_has_the_same_bits_among_any_others(tokens) -> None:
    """Texts must not depend on what runs beside them: neither on its content nor on its order."""
    kind = MoE(num_experts=32, experts_per_token=4, intermediate_size=48)
    config = tiny_config(hidden_size=64, moe=kind)
    layer = params.initialise(params.declare_layer(config, "", 1), jax.random.key(0))
    run = jax.jit(lambda x: moe.mixture(layer, config, x))
    assert moe._sorts(config, tokens)
    first, second = jax.random.normal(jax.random.key(3), (2, 1, tokens, 64))
    expected = np.asarray(run(first)[0])
    order = np.random.default_rng(0).permutation(tokens)
    np.testing.assert_array_equal(run(first[:, order])[0], expected[order])

    # Half of the tokens stay; the others are new, or all the same, which fills few experts.
    half = tokens // 2
    for rest in (second[:, half:], jnp.broadcast_to(second[:, :1], (1, tokens - half, 64))):
        mixed = run(jnp.concatenate([first[:, :half], rest], axis=1))
        np.testing.assert_array_equal(mixed[0, :half], expected[:half])


@pytest.mark.full
def test_all_tokens_may_go_to_the_same_experts(monkeypatch) -> None:
    config, layer = layer_of(PLAIN)
    x = jnp.broadcast_to(tokens_of(config, 1), (1, TOKENS, config.hidden_size))
    result = mixture(layer, config, x), gradients(layer, config, x)
    expected = tuple(
        of_the_other_form(monkeypatch, function, layer, config, x)
        for function in (mixture, gradients)
    )
    assert_near(result, expected, 2e-6)


@pytest.mark.thorough
def test_an_expert_that_overflows_on_its_tokens_harms_no_others() -> None:
    config, layer = layer_of(PLAIN)
    x = tokens_of(config)
    chosen, _ = moe.route(layer, config, x[0])
    spared = ~np.isin(chosen, 0).any(axis=1)
    layer["experts_down"] = layer["experts_down"].at[0].set(1e38)
    y = mixture(layer, config, x)[0]
    assert 0 < spared.sum() < TOKENS
    assert np.isfinite(y[spared]).all()
    assert not np.isfinite(y[~spared]).any(axis=1).all()
    gradient = jax.grad(lambda x: moe.mixture(layer, config, x)[0, spared].sum())(x)
    assert np.isfinite(gradient[0, spared]).all()


@pytest.mark.full
@pytest.mark.thorough_except("groups-mesh0")
@pytest.mark.parametrize(("kind", "mesh"), [("groups", (2, 4)), ("biased", (1, 4))])
def test_a_device_sorts_its_rows_tokens_for_its_own_experts(kind, mesh) -> None:
    config, layer = layer_of(KINDS[kind])
    x = jnp.concatenate([tokens_of(config), -tokens_of(config)])
    expected = mixture(layer, config, x), gradients(layer, config, x)
    mesh = sharding.make_mesh(*mesh)
    declared = params.declare_layer(config, "", 1)
    split = jax.device_put(layer, params.shardings(declared, mesh, config.axis_units))
    assert split["experts_up"].addressable_shards[0].data.shape[0] == 3
    result = mixture(split, config, x, mesh), gradients(split, config, x, mesh)
    assert_near(result, expected, 3e-6)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, (1, 2), (2, 1)])
def test_gradients_are_those_of_a_dense_sum(mesh) -> None:
    """The sum has no loop, no block and no code of the mixture: all experts, times a matrix."""
    config, layer = layer_of(PLAIN)
    x = jnp.concatenate([tokens_of(config), -tokens_of(config)])

    def dense(layer, x):
        scores = jax.nn.softmax(x @ layer["router"])
        weights, chosen = jax.lax.top_k(scores, PLAIN.experts_per_token)
        shares = (jax.nn.one_hot(chosen, PLAIN.num_experts) * weights[..., None]).sum(axis=-2)
        gate = jnp.einsum("bth,ehi->btei", x, layer["experts_gate"])
        up = jnp.einsum("bth,ehi->btei", x, layer["experts_up"])
        return jnp.einsum(
            "btei,eih,bte->bth", jax.nn.silu(gate) * up, layer["experts_down"], shares
        )

    expected = jax.jit(
        jax.grad(lambda layer, x: jnp.sum(jnp.tanh(dense(layer, x))), argnums=(0, 1))
    )(layer, x)
    if mesh is not None:
        mesh = sharding.make_mesh(*mesh)
        declared = params.declare_layer(config, "", 1)
        layer = jax.device_put(layer, params.shardings(declared, mesh, config.axis_units))
    assert_near(gradients(layer, config, x, mesh), expected, 1e-5)


@pytest.mark.full
@pytest.mark.thorough_except("form0")
@pytest.mark.parametrize(
    "form", [Form("int8"), Form("int4", group=16), Form("int8", activations=8)]
)
def test_quantized_experts_give_the_same(monkeypatch, form) -> None:
    config, layer = layer_of(replace(KINDS["biased"], intermediate_size=32))
    for name in ("experts_gate", "experts_up", "experts_down"):
        matrices = [quantize_matrix(np.asarray(matrix), form) for matrix in layer[name]]
        layer[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *matrices)
    x = tokens_of(config)
    expected = of_the_other_form(monkeypatch, mixture, layer, config, x)
    # Inputs are rounded to integers, where two sums that differ in a last bit may part.
    assert_near(mixture(layer, config, x), expected, 1e-4)

    def by_x(layer, config, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(moe.mixture(layer, config, x))))(x)

    expected = of_the_other_form(monkeypatch, by_x, layer, config, x)
    assert_near(by_x(layer, config, x), expected, 1e-4)


@pytest.mark.full
def test_a_calibration_sees_the_inputs_of_each_expert_alone() -> None:
    config, layer = layer_of(KINDS["biased"])
    x = tokens_of(config)
    chosen, _ = moe.route(layer, config, x[0])
    watched = {
        name: Watched.of(leaf) if name in ("experts_gate", "experts_down") else leaf
        for name, leaf in layer.items()
    }

    def total(moments):
        named = {
            name: leaf.replace(moments=moments[name]) if name in moments else leaf
            for name, leaf in watched.items()
        }
        return moe.mixture(named, config, x).sum()

    moments = jax.grad(total)(
        {name: watched[name].moments for name in ("experts_gate", "experts_down")}
    )
    for expert in range(PLAIN.num_experts):
        inputs = x[0][np.isin(chosen, expert).any(axis=1)]
        assert_near(moments["experts_gate"][expert], inputs.T @ inputs)
        unit = moe._gated(
            config,
            inputs @ layer["experts_gate"][expert] + layer["experts_gate_bias"][expert],
            inputs @ layer["experts_up"][expert] + layer["experts_up_bias"][expert],
        )
        assert_near(moments["experts_down"][expert], unit.T @ unit)


def test_the_form_depends_on_shapes_alone() -> None:
    config, layer = layer_of(PLAIN)
    assert not moe._sorts(config, moe.LEAST_SORTED - 1)
    assert moe._sorts(config, moe.LEAST_SORTED)
    many = replace(config, moe=replace(PLAIN, experts_per_token=4))
    assert not moe._sorts(many, 10_000)  # a third of all experts: sorting would not pay

    def loops(count: int) -> str:
        return str(
            jax.make_jaxpr(lambda x: moe.mixture(layer, config, x))(tokens_of(config, count))
        )

    assert "while" in loops(moe.LEAST_SORTED)
    assert "while" not in loops(moe.LEAST_SORTED - 1)
