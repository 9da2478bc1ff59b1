"""A layer of Kimi Delta Attention against one that goes token by token: texts and trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models.kimi_delta_attention import kimi_delta_attention
from specjax.models.memory import KimiDeltaAttention
from specjax.models.states import State, empty_nodes
from tests.models.state_layers import StateLayer, of_newest, silu


def alone(params, sizes: KimiDeltaAttention, eps: float, x: np.ndarray) -> np.ndarray:
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    heads, dim = sizes.key_heads, sizes.key_dim
    projected = {name: x.astype(np.float64) @ params[name] for name in "qkv"}
    decays = x @ params["decay_in"] @ params["decay"] + params["rate_bias"]
    steps = np.log1p(np.exp(decays)).reshape(-1, heads, dim)
    alphas = np.exp(-np.exp(params["log_rate"]) * steps)
    betas = 1 / (1 + np.exp(-(x @ params["beta"])))
    gates = 1 / (
        1 + np.exp(-(x @ params["output_gate_in"] @ params["output_gate"]).reshape(-1, heads, dim))
    )
    tables, out = np.zeros((heads, dim, dim)), []
    for t in range(len(x)):
        q, k, v = (
            silu(of_newest(projected[name], params[f"conv_{name}"], t)).reshape(heads, dim)
            for name in "qkv"
        )
        outputs = []
        for head in range(heads):
            unit_k = k[head] / np.sqrt(k[head] @ k[head] + 1e-6)
            unit_q = q[head] / np.sqrt(q[head] @ q[head] + 1e-6) / np.sqrt(dim)
            table = alphas[t, head][:, None] * tables[head]
            table = table + np.outer(unit_k, betas[t, head] * (v[head] - table.T @ unit_k))
            tables[head], y = table, table.T @ unit_q
            y = y / np.sqrt(np.mean(y * y) + eps) * params["norm"]
            outputs.append(y * gates[t, head])
        out.append(np.concatenate(outputs) @ params["o"])
    return np.array(out)


SIZES = KimiDeltaAttention(key_heads=3, key_dim=6)
LAYER = StateLayer(SIZES, kimi_delta_attention, "self_attn.", alone)


def test_a_text_is_as_token_by_token() -> None:
    LAYER.check_text()


def test_in_a_tree_each_node_is_as_its_path_and_an_accepted_path_is_written() -> None:
    LAYER.check_tree()


@pytest.mark.full
def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    LAYER.check_below_drafted()


@pytest.mark.full
def test_documents_do_not_see_each_other() -> None:
    LAYER.check_documents()


def test_an_entry_has_a_thirtieth_of_a_state() -> None:
    """The sizes are those of Kimi Linear 48B-A3B, in bfloat16."""
    sizes = KimiDeltaAttention(key_heads=32, key_dim=128)
    entry, state = (
        jax.eval_shape(lambda: empty_nodes(sizes, 1, 1, jnp.bfloat16)),
        jax.eval_shape(lambda: State.zeros(sizes, 1, jnp.bfloat16)),
    )
    stored, of_state = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (entry, state)
    )
    assert stored == sizes.node_bytes(2) == 73_728
    assert of_state == sizes.state_bytes(2) == 2_170_880
    assert 29 < of_state / stored < 30


@pytest.mark.full
def test_what_is_not_accepted_may_be_infinite() -> None:
    rng = np.random.default_rng(0)
    entry = [
        rng.normal(size=part.shape).astype(np.float32)
        for part in empty_nodes(SIZES, 1, 5, jnp.float32)
    ]
    entry[2] = -np.abs(entry[2])
    state = State.zeros(SIZES, 1, jnp.float32)
    expected = State.append(state, [part[:, :, :2] for part in entry], jnp.array([2]))
    for part in entry:
        part[:, :, 2:] = np.nan
    after = State.append(state, entry, jnp.array([2]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, expected)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="key_heads=0: must be at least 1"):
        KimiDeltaAttention(key_heads=0, key_dim=4)
    with pytest.raises(InputError, match="kernel=1: must be at least 2 tokens"):
        KimiDeltaAttention(key_heads=1, key_dim=4, kernel=1)
