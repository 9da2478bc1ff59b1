"""A layer with linear attention, over texts, trees and windows of documents, against one that goes token by token."""

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
    """The configuration of a model with such layers, and the parameters of one."""
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
    """What the layer makes of one text ``x [T, H]``, in float64: of each token by itself, and of the kernel - 1 before it."""
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
            taken = [
                projected[name][t - back] * weights[:, -1 - back]
                for back in range(min(t + 1, sizes.kernel))
            ]
            mixed[name] = silu(np.sum(taken, axis=0)).reshape(heads, dim)
        found = []
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
            found.append(y * silu(projected["z"][t].reshape(sizes.value_heads, -1)[head]))
        out.append(np.concatenate(found) @ params["o"])
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
    """The state after the first ``count [B]`` of each row's tokens."""
    ancestry = Ancestry.of(chain_of(x.shape[1]), [], sizes.kernel)
    return run(
        params,
        x,
        Context(State.zeros(sizes, x.shape[0], jnp.float32), [], ancestry, np.asarray(count)),
    )[1]


@pytest.mark.parametrize(
    "sizes", [SIZES, LinearAttention(3, 3, 4, 5, kernel=2)], ids=["groups", "short"]
)
def test_a_text_is_as_token_by_token(sizes) -> None:
    """From its beginning, where the convolution finds nothing; and in pieces, of which each goes on from the state before."""
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
    """Two texts of 9 and of 1 tokens, a tree of 14 nodes below their ends, and what comes of each node by its path."""
    rng = np.random.default_rng(3)
    config, params = drawn(1, sizes)
    lengths, paths = [9, 1], paths_of(random_tree(rng, 14))
    texts, nodes = (
        rng.normal(size=(2, count, config.hidden_size)).astype(np.float32) for count in (9, 14)
    )
    expected = np.zeros(nodes.shape)
    for row, number in np.ndindex(2, 14):
        read = np.concatenate([texts[row, : lengths[row]], nodes[row, paths[number]]])
        expected[row, number] = alone(params, sizes, config.norm_eps, read)[-1]
    return params, read_text(params, sizes, texts, lengths), nodes, paths, expected


def test_in_a_tree_each_node_is_as_its_path() -> None:
    params, state, nodes, paths, expected = tree_below_texts()
    y, own = run(
        params, nodes, Context(state, [], Ancestry.of(mask_of(paths)[None], [], SIZES.kernel))
    )
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    assert [part.shape for part in own] == [
        part.shape for part in empty_nodes(SIZES, 2, 14, jnp.float32)
    ]


def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    """Level by level, as a drafter grows a tree: of what the convolution wants some is in the state, some in slots."""
    params, state, nodes, paths, expected = tree_below_texts()
    above, depths = ancestors(paths), np.array([len(path) for path in paths])
    scratch = tuple(
        np.full(part.shape, 7.0, np.float32) for part in empty_nodes(SIZES, 2, 14, jnp.float32)
    )
    for depth in range(1, depths.max() + 1):
        level = np.flatnonzero(depths == depth)
        wide = np.resize(
            level, 14
        )  # some of them several times, so that all levels share a program
        ancestry = Ancestry.of(
            np.eye(14, dtype=bool)[None], [jnp.asarray(above[None, wide])], SIZES.kernel
        )
        y, own = run(params, nodes[:, wide], Context(state, [scratch], ancestry))
        np.testing.assert_allclose(y[:, : len(level)], expected[:, level], atol=TOLERANCE)
        for slots, new in zip(scratch, own, strict=True):
            slots[:, :, level] = new[:, :, : len(level)]


def test_two_pieces_of_scratch_and_a_call_of_several_nodes() -> None:
    params, state, nodes, paths, expected = tree_below_texts()
    mask = mask_of(paths)[None]

    def read(start: int, stop: int, scratch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        seen = [jnp.asarray(mask[:, start:stop, first:last]) for first, last, _ in scratch]
        ancestry = Ancestry.of(mask[:, start:stop, start:stop], seen, SIZES.kernel)
        y, own = run(
            params, nodes[:, start:stop], Context(state, [entry for *_, entry in scratch], ancestry)
        )
        np.testing.assert_allclose(y, expected[:, start:stop], atol=TOLERANCE)
        return start, stop, own

    first = read(0, 4, [])
    second = read(4, 9, [first])
    read(9, 14, [first, second])


# --- which tokens are on whose path ---------------------------------------------------------------


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
    """Places 0 to 2 are the state's, 3 and 4 drafted, then the call's: a root, its child, and one below slot 4."""
    own = np.array([[[True, False, False], [True, True, False], [False, False, True]]])
    drafted = jnp.array([[[False, False], [False, False], [False, True]]])
    newest = Ancestry.of(own, [drafted], 4).newest
    np.testing.assert_array_equal(newest, [[[0, 1, 2], [1, 2, 5], [1, 2, 4]]])


def test_a_tree_cannot_be_committed_at_once() -> None:
    target = tiny_target(**HYBRID)
    tree = np.array([[[True, False, False], [True, True, False], [True, False, True]]])
    with pytest.raises(InputError, match="mask: layers with a state can only commit a chain"):
        target.run(jnp.zeros((1, 3, 16)), target.new_cache(1, 8), mask=tree, commit=jnp.array([3]))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_document_does_not_depend_on_the_one_before() -> None:
    """In a window of two, the logits of the second are those that it has alone, and have no gradient in the first's tokens."""
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
    """By parameters and inputs, along a direction, against differences in float64."""
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
            there, text = jax.tree.map(
                lambda v, d: np.asarray(v, np.float64) + step * d,
                (params, x),
                direction,  # noqa: B023
            )
            return float(np.sum(weights * alone(there, SIZES, config.norm_eps, text[0])))

        expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
        products = jax.tree.map(
            lambda g, d: float(np.sum(np.asarray(g, np.float64) * d)), gradients, direction
        )
        assert abs(sum(jax.tree.leaves(products)) - expected) < 1e-3 * abs(expected)
