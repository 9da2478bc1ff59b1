"""A layer of Mamba-2 against one that goes token by token in float64: texts and trees."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models.config import MoE, Rope
from specjax.models.linear_attention import Ancestry, Context
from specjax.models.mamba2 import mamba2
from specjax.models.memory import LayerMemory, Mamba2
from specjax.models.states import State, empty_nodes
from specjax.planning import work
from tests.conftest import tiny_config
from tests.models.state_layers import StateLayer, chain_of, of_newest, silu

SIZES = Mamba2(key_heads=2, value_heads=6, key_dim=8, value_dim=4)
SHORT = Mamba2(3, 3, 5, 4, kernel=2, convolution_bias=False, projection_bias=True)


def alone(params, sizes: Mamba2, eps: float, x: np.ndarray) -> np.ndarray:
    """Return the output of the layer for one text ``x [T, H]``, in float64, token by token."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}

    def projected(name: str) -> np.ndarray:
        return x.astype(np.float64) @ params[name] + params.get(f"{name}_bias", 0.0)

    inputs = {name: projected(name) for name in ("z", "x", "b", "c", "step")}
    states = np.zeros((sizes.value_heads, sizes.value_dim, sizes.key_dim))
    out = []
    for t in range(len(x)):
        mixed = {}
        for name, (heads, dim) in zip("xbc", sizes.convolved, strict=True):
            total = of_newest(inputs[name], params[f"conv_{name}"], t)
            total = total + params.get(f"conv_{name}_bias", 0.0)
            mixed[name] = silu(total).reshape(heads, dim)
        outputs = []
        for head in range(sizes.value_heads):
            b, c = (mixed[name][head // sizes.group] for name in "bc")
            step = np.log1p(np.exp(inputs["step"][t, head] + params["rate_bias"][head]))
            decay = np.exp(-step * np.exp(params["log_rate"][head]))
            value = mixed["x"][head]
            states[head] = decay * states[head] + step * np.outer(value, b)
            outputs.append(states[head] @ c + params["skip"][head] * value)
        gated = np.concatenate(outputs) * silu(inputs["z"][t])
        groups = gated.reshape(sizes.key_heads, -1)
        normed = groups / np.sqrt(np.mean(groups * groups, axis=1, keepdims=True) + eps)
        out.append((normed.ravel() * params["norm"]) @ params["o"] + params.get("o_bias", 0.0))
    return np.array(out)


GROUPS, ALIKE = (StateLayer(sizes, mamba2, "mamba.", alone) for sizes in (SIZES, SHORT))


@pytest.mark.parametrize("layer", [GROUPS, ALIKE], ids=["groups", "short"])
def test_a_text_is_as_token_by_token(layer) -> None:
    layer.check_text()


def test_in_a_tree_each_node_is_as_its_path_and_an_accepted_path_is_written() -> None:
    GROUPS.check_tree()


def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    GROUPS.check_below_drafted()


@pytest.mark.full
def test_in_bfloat16_nothing_depends_on_which_tokens_were_drafted() -> None:
    """The vectors are rounded before anything reads them, and not in the entry alone.

    Of tokens that are read at once, or below drafted ones, nearly all numbers are equal. The state
    after committed tokens, and after their entries, differs by less than rounding would change it.
    """
    run, params = GROUPS.run, GROUPS.drawn(4)
    params = jax.tree.map(lambda value: jnp.asarray(value, jnp.bfloat16), params)
    x, empty = (
        jnp.asarray(GROUPS.texts(4, 2, 14), jnp.bfloat16),
        State.zeros(SIZES, 2, jnp.bfloat16),
    )
    ancestry, count = Ancestry.of(chain_of(14), [], SIZES.kernel), jnp.array([14, 9])
    committed = run(params, x, Context(empty, [], ancestry, count))[1]
    # A node that nobody sees, so that the text is read as a tree.
    ancestry = Ancestry.of(chain_of(14), [jnp.zeros((1, 14, 1), bool)], SIZES.kernel)
    unseen = empty_nodes(SIZES, 2, 1, jnp.bfloat16)
    y, entry = run(params, x, Context(empty, [unseen], ancestry))
    below = Ancestry.of(chain_of(5), [jnp.ones((1, 5, 9), bool)], SIZES.kernel)
    drafted = [part[:, :, :9] for part in entry]
    rest, _ = run(params, x[:, 9:], Context(empty, [drafted], below))
    assert np.mean(np.asarray(rest == y[:, 9:])) > 0.98
    expected = empty_nodes(SIZES, 2, 14, jnp.bfloat16)
    assert [part.dtype for part in entry] == [part.dtype for part in expected]
    entry = [np.array(part) for part in entry]
    for part in entry:
        part[1, :, 9:] = np.nan  # what is not accepted
    after = jax.jit(State.append)(empty, entry, count)
    largest = float(jnp.abs(committed.table).max())
    np.testing.assert_allclose(after.table, committed.table, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("name", "heads", "node", "state"),
    [
        ("Nano", 64, 23_040, 2_134_016),
        ("Super", 128, 39_936, 4_255_744),
        ("Ultra", 256, 73_728, 8_499_200),
    ],
)
def test_an_entry_of_nemotron_3_has_a_hundredth_of_a_state(name, heads, node, state) -> None:
    """The shares in bfloat16, with the numbers of the files, are 1.08%, 0.94% and 0.87%."""
    sizes = Mamba2(key_heads=8, value_heads=heads, key_dim=128, value_dim=64)
    entry = jax.eval_shape(lambda: empty_nodes(sizes, 1, 1, jnp.bfloat16))
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in entry)
    assert stored == sizes.node_bytes(2) == node
    assert sizes.state_bytes(2) == state
    assert node < 0.012 * state


def test_documents_do_not_see_each_other() -> None:
    GROUPS.check_documents()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_heads": 4}, "value_heads=6 is not a multiple of key_heads=4"),
        ({"kernel": 1}, "kernel=1: must be at least 2 tokens"),
        ({"key_dim": 0}, "key_dim=0: must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        replace(SIZES, **changes)


# --- whole models ---------------------------------------------------------------------------------

HYBRID = {  # one layer of Mamba-2, one with attention, and an MLP alone
    "model_type": "nemotron_h",
    "num_layers": 4,
    "linear": Mamba2(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    "linear_layers": (0, 2),
    "mlp_layers": (3,),
    "gated_mlp": False,
    "activation": "relu2",
    "rope": Rope(kind="none"),
}


def test_the_roofline_counts_states_and_layers_without_a_memory() -> None:
    config = tiny_config(**HYBRID)
    sizes = config.linear
    assert sizes is not None
    assert [config.memory(layer) for layer in (2, 3)] == [
        LayerMemory((), sizes),
        LayerMemory(),
    ]
    assert work.state_bytes(config, 2) == 2 * (4 * 4 * 8 * 6 + 3 * (4 * 6 + 2 * 2 * 8) * 2)
    assert work.cache_bytes(config, 2) == 2 * 2 * config.num_kv_heads * config.head_dim
    arrays = State.zeros(sizes, 1, jnp.bfloat16)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
    assert 2 * stored == work.state_bytes(config, 2)
    nodes = jax.tree.leaves(empty_nodes(sizes, 1, 1, jnp.bfloat16))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in nodes) == sizes.node_bytes(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layers": (2, 3)}, "mlp_layers=.*: must be layers of the num_layers=4, each once"),
        ({"mlp_layers": (1, 3)}, "at least one layer must have ordinary attention"),
        ({"moe": MoE(4, 2, 8, limit=7.0)}, r"moe\.limit=7\.0: must be None with gated_mlp=False"),
        (
            {"moe": MoE(4, 2, 8, biased=True, latent_size=4)},
            r"moe\.latent_size=4: must be None with moe\.biased",
        ),
        ({"norms": "both"}, "mlp_layers: cannot be combined with latent attention"),
    ],
)
def test_impossible_blocks_are_refused(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config(**(HYBRID | changes))
