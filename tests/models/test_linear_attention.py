"""A layer with linear attention against one that goes token by token: texts, trees, training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models.config import LinearAttention
from specjax.models.linear_attention import Ancestry, Context, linear_attention
from specjax.models.states import State
from tests.conftest import HYBRID, tiny_target
from tests.models.state_layers import TOLERANCE, StateLayer, chain_of, of_newest, silu
from tests.models.test_delta_rule import mask_of, one_token

SIZES = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6)


def alone(params, sizes: LinearAttention, eps: float, x: np.ndarray) -> np.ndarray:
    """Return the output of the layer for one text ``x [T, H]``, in float64, token by token.

    The convolution of a token reads the token and the kernel - 1 tokens before it.
    """
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    projected = {
        name: x.astype(np.float64) @ params[name] for name in ("q", "k", "v", "z", "beta", "alpha")
    }
    states = np.zeros((sizes.value_heads, sizes.value_dim, sizes.key_dim))
    out = []
    for t in range(len(x)):
        mixed = {}
        for name, (heads, dim) in zip("qkv", sizes.convolved, strict=True):
            total = of_newest(projected[name], params[f"conv_{name}"], t)
            mixed[name] = silu(total).reshape(heads, dim)
        heads_output = []
        for head in range(sizes.value_heads):
            q, k = (mixed[name][head // sizes.group] for name in "qk")
            q, k = (vector / np.sqrt(vector @ vector + 1e-6) for vector in (q, k))
            beta = 1 / (1 + np.exp(-projected["beta"][t, head]))
            softplus = np.log1p(np.exp(projected["alpha"][t, head] + params["rate_bias"][head]))
            log_alpha = -np.exp(params["log_rate"][head]) * softplus
            states[head], y = one_token(
                states[head], q / np.sqrt(sizes.key_dim), k, mixed["v"][head], beta, log_alpha
            )
            y = y / np.sqrt(np.mean(y * y) + eps) * params["norm"]
            heads_output.append(y * silu(projected["z"][t].reshape(sizes.value_heads, -1)[head]))
        out.append(np.concatenate(heads_output) @ params["o"])
    return np.array(out)


SHORT_SIZES = LinearAttention(3, 3, 4, 5, kernel=2)
GROUPS, SHORT = (
    StateLayer(sizes, linear_attention, "linear_attn.", alone) for sizes in (SIZES, SHORT_SIZES)
)


@pytest.mark.parametrize("layer", [GROUPS, SHORT], ids=["groups", "short"])
def test_a_text_is_as_token_by_token(layer) -> None:
    layer.check_text()


def test_in_a_tree_each_node_is_as_its_path() -> None:
    GROUPS.check_tree()


def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    GROUPS.check_below_drafted()


def test_two_pieces_of_scratch_and_a_call_of_several_nodes() -> None:
    tree = GROUPS.tree()
    mask = mask_of(tree.paths)[None]

    def read(start: int, stop: int, scratch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        visible = [jnp.asarray(mask[:, start:stop, first:last]) for first, last, _ in scratch]
        ancestry = Ancestry.of(mask[:, start:stop, start:stop], visible, SIZES.kernel)
        context = Context(tree.state, [entry for *_, entry in scratch], ancestry)
        y, new = GROUPS.run(tree.params, tree.nodes[:, start:stop], context)
        np.testing.assert_allclose(y, tree.expected[:, start:stop], atol=TOLERANCE)
        return start, stop, new

    first = read(0, 4, [])
    second = read(4, 9, [first])
    read(9, 14, [first, second])


# --- the tokens on a node's path ------------------------------------------------------------------


def test_a_chain_is_known_as_one_when_all_rows_are() -> None:
    chain = chain_of(3)
    assert (
        Ancestry.of(chain, [], 4).is_chain and Ancestry.of(chain.repeat(2, axis=0), [], 4).is_chain
    )
    tree = chain.copy()
    tree[0, 2, 1] = False
    assert not Ancestry.of(np.concatenate([chain, tree]), [], 4).is_chain
    assert not Ancestry.of(chain, [jnp.ones((1, 3, 2), bool)], 4).is_chain
    assert Ancestry.of(np.eye(3, dtype=bool)[None], [None], 4).own is None
    assert (
        Ancestry.of(np.concatenate([np.eye(3, dtype=bool)[None], tree]), [None], 4).own is not None
    )


def test_the_newest_tokens_are_those_of_the_path() -> None:
    """Places 0 to 2 belong to the state, 3 and 4 to drafted tokens, and the rest to the call.

    The call has a root, a child of the root, and a node below slot 4.
    """
    call_mask = np.array([[[True, False, False], [True, True, False], [False, False, True]]])
    drafted = jnp.array([[[False, False], [False, False], [False, True]]])
    newest = Ancestry.of(call_mask, [drafted], 4).newest
    np.testing.assert_array_equal(newest, [[[0, 1, 2], [1, 2, 5], [1, 2, 4]]])


def test_a_tree_cannot_be_committed_at_once() -> None:
    target = tiny_target(**HYBRID)
    tree = np.array([[[True, False, False], [True, True, False], [True, False, True]]])
    with pytest.raises(InputError, match="mask: layers with a state can only commit a chain"):
        target.run(jnp.zeros((1, 3, 16)), target.new_cache(1, 8), mask=tree, commit=jnp.array([3]))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_document_does_not_depend_on_the_one_before() -> None:
    """A window holds two documents.

    The logits of the second equal those that it has alone. They have no gradient in the tokens of
    the first.
    """
    target = tiny_target(**HYBRID, scale=10.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (1, 12)))
    segments = jnp.array([[0] * 5 + [1] * 7])
    mask = jnp.asarray(chain_of(12)) & (segments[:, :, None] == segments[:, None])
    positions = jnp.concatenate([jnp.arange(5), jnp.arange(7)])[None]

    @jax.jit
    def read(x):
        return target.head(target.norm(target.run(x, positions=positions, mask=mask)[0]))

    x = target.embed(tokens)
    np.testing.assert_allclose(read(x)[:, 5:], target.forward(tokens[:, 5:])[0].logits, atol=1e-4)
    gradient = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(read(x)[:, 5:]))))(x))
    assert np.all(gradient[:, :5] == 0) and np.all(np.abs(gradient[:, 5:]).max(-1) > 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("is_chain", [True, False])
def test_gradients_of_the_layer_are_those_of_the_oracle(is_chain) -> None:
    """Gradients along a direction equal differences in float64.

    They are those by the parameters and by the inputs.
    """
    config, params = GROUPS.config, GROUPS.drawn(2)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 9, config.hidden_size)).astype(np.float32)
    weights = rng.normal(size=x.shape)
    ancestry = Ancestry.of(chain_of(9) if is_chain else jnp.asarray(chain_of(9)), [], SIZES.kernel)
    assert ancestry.is_chain == is_chain

    def loss(params, x):
        y, _ = linear_attention(
            params, config, x, Context(State.zeros(SIZES, 1, jnp.float32), [], ancestry)
        )
        return jnp.sum(weights.astype(np.float32) * y)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    assert all(
        np.all(np.isfinite(leaf)) and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients)
    )
    for seed in range(3):
        rng = np.random.default_rng(seed)
        direction = jax.tree.map(lambda value: rng.normal(size=np.shape(value)), (params, x))  # noqa: B023

        def moved(step: float) -> float:
            moved_params, moved_x = jax.tree.map(
                lambda v, d: np.asarray(v, np.float64) + step * d,
                (params, x),
                direction,  # noqa: B023
            )
            return float(np.sum(weights * alone(moved_params, SIZES, config.norm_eps, moved_x[0])))

        expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
        products = jax.tree.map(
            lambda g, d: float(np.sum(np.asarray(g, np.float64) * d)), gradients, direction
        )
        assert abs(sum(jax.tree.leaves(products)) - expected) < 1e-3 * abs(expected)
