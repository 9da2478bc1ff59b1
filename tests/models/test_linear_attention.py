"""A layer with linear attention against one that goes token by token: texts, trees, training."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.config import LinearAttention
from specjax.models.linear_attention import Ancestry, Context, linear_attention
from specjax.models.states import State, empty_nodes
from tests.conftest import HYBRID, tiny_config, tiny_target
from tests.models.test_delta_rule import ancestors, mask_of, one_token, paths_of, random_tree

SIZES = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
CONFIG = tiny_config(**HYBRID)
TOLERANCE = 2e-5


def drawn(seed: int, sizes: LinearAttention = SIZES):
    """Return the configuration of a model with such layers, and a layer's random parameters."""
    config = replace(CONFIG, linear=sizes)
    declared = {
        n: param
        for n, param in declarations.declare_layer(config, "").items()
        if "linear_attn" in param.name
    }
    params = declarations.initialise(declared, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def livelier(value: np.ndarray) -> np.ndarray:
        return (
            value * 10.0
            if value.ndim == 2
            else value * rng.uniform(0.8, 1.2, value.shape).astype(np.float32)
        )

    return config, {name: livelier(np.asarray(value)) for name, value in params.items()}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


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
            weights = params[f"conv_{name}"][:, 0]
            weighted = [
                projected[name][t - back] * weights[:, -1 - back]
                for back in range(min(t + 1, sizes.kernel))
            ]
            mixed[name] = silu(np.sum(weighted, axis=0)).reshape(heads, dim)
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


@jax.jit
def run(params, x, context):
    return linear_attention(params, replace(CONFIG, linear=_sizes_of(context.state)), x, context)


def _sizes_of(state: State) -> LinearAttention:
    queries, _, values = state.newest
    return LinearAttention(
        queries.shape[1], values.shape[1], queries.shape[3], values.shape[3], queries.shape[2] + 1
    )


def chain_of(count: int) -> np.ndarray:
    return np.tril(np.ones((1, count, count), bool))


def read_text(params, sizes: LinearAttention, x, count) -> State:
    """Return the state after the first ``count [B]`` tokens of each row."""
    ancestry = Ancestry.of(chain_of(x.shape[1]), [], sizes.kernel)
    empty = State.zeros(sizes, x.shape[0], jnp.float32)
    _, state = run(params, x, Context(empty, [], ancestry, np.asarray(count)))
    return state


@pytest.mark.parametrize(
    "sizes", [SIZES, LinearAttention(3, 3, 4, 5, kernel=2)], ids=["groups", "short"]
)
def test_a_text_is_as_token_by_token(sizes) -> None:
    """A text is read from its beginning, in pieces.

    Before the beginning the convolution reads zeros. Each piece goes on from the state before it.
    """
    config, params = drawn(0, sizes)
    x = np.random.default_rng(0).normal(size=(2, 70, config.hidden_size)).astype(np.float32)
    expected = np.stack([alone(params, sizes, config.norm_eps, row) for row in x])
    assert np.abs(expected).max() > 0.3
    state, start = State.zeros(sizes, 2, jnp.float32), 0
    for size in (1, 2, 67):
        ancestry = Ancestry.of(chain_of(size), [], sizes.kernel)
        y, state = run(
            params, x[:, start : start + size], Context(state, [], ancestry, np.full(2, size))
        )
        np.testing.assert_allclose(y, expected[:, start : start + size], atol=TOLERANCE)
        start += size
    whole = read_text(params, sizes, x, [70, 70])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE), state, whole)


def tree_below_texts(sizes: LinearAttention = SIZES):
    """Return a tree of 14 nodes below texts of 9 and 1 tokens, and the expected outputs.

    The expected output of a node is that of the text and the node's path, read alone. Returns the
    parameters, the state after the texts, the nodes, their paths and the outputs.
    """
    rng = np.random.default_rng(3)
    config, params = drawn(1, sizes)
    lengths, paths = [9, 1], paths_of(random_tree(rng, 14))
    texts, nodes = (
        rng.normal(size=(2, count, config.hidden_size)).astype(np.float32) for count in (9, 14)
    )
    expected = np.zeros(nodes.shape)
    for row, number in np.ndindex(2, 14):
        text_and_path = np.concatenate([texts[row, : lengths[row]], nodes[row, paths[number]]])
        expected[row, number] = alone(params, sizes, config.norm_eps, text_and_path)[-1]
    return params, read_text(params, sizes, texts, lengths), nodes, paths, expected


def test_in_a_tree_each_node_is_as_its_path() -> None:
    params, state, nodes, paths, expected = tree_below_texts()
    y, entry = run(
        params, nodes, Context(state, [], Ancestry.of(mask_of(paths)[None], [], SIZES.kernel))
    )
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    assert [part.shape for part in entry] == [
        part.shape for part in empty_nodes(SIZES, 2, 14, jnp.float32)
    ]


def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    """A drafter grows a tree level by level.

    Of the tokens that a node's convolution reads, some are in the state and some in scratch.
    """
    params, state, nodes, paths, expected = tree_below_texts()
    above, depths = ancestors(paths), np.array([len(path) for path in paths])
    scratch = tuple(
        np.full(part.shape, 7.0, np.float32) for part in empty_nodes(SIZES, 2, 14, jnp.float32)
    )
    for depth in range(1, depths.max() + 1):
        level = np.flatnonzero(depths == depth)
        repeated = np.resize(level, 14)  # nodes are repeated, so that all levels share a program
        ancestry = Ancestry.of(
            np.eye(14, dtype=bool)[None], [jnp.asarray(above[None, repeated])], SIZES.kernel
        )
        y, entry = run(params, nodes[:, repeated], Context(state, [scratch], ancestry))
        np.testing.assert_allclose(y[:, : len(level)], expected[:, level], atol=TOLERANCE)
        for slots, new in zip(scratch, entry, strict=True):
            slots[:, :, level] = new[:, :, : len(level)]


def test_two_pieces_of_scratch_and_a_call_of_several_nodes() -> None:
    params, state, nodes, paths, expected = tree_below_texts()
    mask = mask_of(paths)[None]

    def read(start: int, stop: int, scratch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        visible = [jnp.asarray(mask[:, start:stop, first:last]) for first, last, _ in scratch]
        ancestry = Ancestry.of(mask[:, start:stop, start:stop], visible, SIZES.kernel)
        context = Context(state, [entry for *_, entry in scratch], ancestry)
        y, new = run(params, nodes[:, start:stop], context)
        np.testing.assert_allclose(y, expected[:, start:stop], atol=TOLERANCE)
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


@pytest.mark.parametrize("is_chain", [True, False])
def test_gradients_of_the_layer_are_those_of_the_oracle(is_chain) -> None:
    """Gradients along a direction equal differences in float64.

    They are those by the parameters and by the inputs.
    """
    config, params = drawn(2)
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
