"""A layer of Mamba-2 against one that goes token by token in float64: texts and trees."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import sharding
from specjax.drafters import EarlyExit, PromptLookup
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.config import MoE, Rope
from specjax.models.linear_attention import Ancestry, Context
from specjax.models.mamba2 import mamba2
from specjax.models.memory import LayerMemory, Mamba2
from specjax.models.states import State, empty_nodes
from specjax.planning import work
from specjax.sampling import Sampling
from specjax.serving.engine import Engine
from tests.conftest import SHAPES, tiny_config, tiny_target
from tests.models.test_delta_rule import ancestors, mask_of, paths_of, random_tree

SIZES = Mamba2(key_heads=2, value_heads=6, key_dim=8, value_dim=4)
SHORT = Mamba2(3, 3, 5, 4, kernel=2, convolution_bias=False, projection_bias=True)
CONFIG = tiny_config(num_layers=2, linear=SIZES, linear_layers=(0,))
TOLERANCE = 2e-5


def drawn(seed: int, sizes: Mamba2 = SIZES):
    """Return the configuration of a model with such layers, and a layer's random parameters."""
    config = replace(CONFIG, linear=sizes)
    declared = {
        name: param
        for name, param in declarations.declare_layer(config, "").items()
        if "mamba." in param.name
    }
    rng = np.random.default_rng(seed)

    def value(param: declarations.Param) -> np.ndarray:
        if param.init == "log_rates":  # some heads forget at once, others hardly anything
            return np.log(np.geomspace(1e-2, 8.0, param.shape[0])).astype(np.float32)
        spread = 0.2 if len(param.shape) == 2 else 0.4
        return (rng.normal(size=param.shape) * spread + (param.init == "ones")).astype(np.float32)

    return config, {name: value(param) for name, param in declared.items()}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


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
            total = params.get(f"conv_{name}_bias", np.zeros(heads * dim)).copy()
            for back in range(min(t + 1, sizes.kernel)):
                total += inputs[name][t - back] * params[f"conv_{name}"][:, 0, -1 - back]
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


@jax.jit
def run(params, x, context):
    values, keys, _ = context.state.newest
    sizes = replace(
        SIZES,
        key_heads=keys.shape[1],
        value_heads=values.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        kernel=keys.shape[2] + 1,
    )
    return mamba2(params, replace(CONFIG, linear=sizes), x, context)


def chain_of(count: int) -> np.ndarray:
    return np.tril(np.ones((1, count, count), bool))


def read_text(params, sizes: Mamba2, x, count) -> State:
    """Return the state after the first ``count [B]`` tokens of each row."""
    ancestry = Ancestry.of(chain_of(x.shape[1]), [], sizes.kernel)
    empty = State.zeros(sizes, x.shape[0], jnp.float32)
    return run(params, x, Context(empty, [], ancestry, np.asarray(count)))[1]


@pytest.mark.parametrize("sizes", [SIZES, SHORT], ids=["groups", "short"])
def test_a_text_is_as_token_by_token(sizes) -> None:
    """A text is read in pieces of odd sizes, one of them longer than a chunk of 64 tokens."""
    config, params = drawn(0, sizes)
    x = np.random.default_rng(0).normal(size=(2, 70, config.hidden_size)).astype(np.float32)
    expected = np.stack([alone(params, sizes, config.norm_eps, row) for row in x])
    assert np.abs(expected).max() > 0.3
    state, start = State.zeros(sizes, 2, jnp.float32), 0
    for size in (1, 2, 67):
        ancestry = Ancestry.of(chain_of(size), [], sizes.kernel)
        context = Context(state, [], ancestry, np.full(2, size))
        y, state = run(params, x[:, start : start + size], context)
        np.testing.assert_allclose(y, expected[:, start : start + size], atol=TOLERANCE)
        start += size
    whole = read_text(params, sizes, x, [70, 70])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE), state, whole)


def tree_below_texts():
    """Return a tree of 14 nodes below texts of 9 and 1 tokens, and the expected outputs.

    The expected output of a node is that of the text and the node's path, read alone. Returns the
    parameters, the texts, the state after them, the nodes, their paths and the outputs.
    """
    rng = np.random.default_rng(3)
    config, params = drawn(1)
    lengths, paths = [9, 1], paths_of(random_tree(rng, 14))
    texts, nodes = (
        rng.normal(size=(2, count, config.hidden_size)).astype(np.float32) for count in (9, 14)
    )
    expected = np.zeros(nodes.shape)
    for row, number in np.ndindex(2, 14):
        text_and_path = np.concatenate([texts[row, : lengths[row]], nodes[row, paths[number]]])
        expected[row, number] = alone(params, SIZES, config.norm_eps, text_and_path)[-1]
    return params, texts, read_text(params, SIZES, texts, lengths), nodes, paths, expected


def test_in_a_tree_each_node_is_as_its_path_and_an_accepted_path_is_written() -> None:
    params, texts, state, nodes, paths, expected = tree_below_texts()
    ancestry = Ancestry.of(mask_of(paths)[None], [], SIZES.kernel)
    y, entry = run(params, nodes, Context(state, [], ancestry))
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    assert [part.shape for part in entry] == [
        part.shape for part in empty_nodes(SIZES, 2, 14, jnp.float32)
    ]
    longest = max(paths, key=len)
    accepted = [part[:, :, np.array(longest)] for part in entry]
    after = jax.jit(State.append)(state, accepted, jnp.array([len(longest), 1]))
    read = np.concatenate([texts[0], nodes[0, longest]])[None]
    again = read_text(params, SIZES, read, [read.shape[1]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[0], atol=TOLERANCE), after, again)


def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    """The tokens that a node's convolution reads are partly in the state and partly in scratch."""
    params, _, state, nodes, paths, expected = tree_below_texts()
    above, depths = ancestors(paths), np.array([len(path) for path in paths])
    scratch = tuple(
        np.full(part.shape, 7.0, part.dtype) for part in empty_nodes(SIZES, 2, 14, jnp.float32)
    )
    for depth in range(1, depths.max() + 1):
        level = np.flatnonzero(depths == depth)
        repeated = np.resize(level, 14)  # nodes are repeated, so that all levels share a program
        visible = jnp.asarray(above[None, repeated])
        ancestry = Ancestry.of(np.eye(14, dtype=bool)[None], [visible], SIZES.kernel)
        y, entry = run(params, nodes[:, repeated], Context(state, [scratch], ancestry))
        np.testing.assert_allclose(y[:, : len(level)], expected[:, level], atol=TOLERANCE)
        for slots, new in zip(scratch, entry, strict=True):
            slots[:, :, level] = new[:, :, : len(level)]


@pytest.mark.full
def test_in_bfloat16_nothing_depends_on_which_tokens_were_drafted() -> None:
    """The vectors are rounded before anything reads them, and not in the entry alone.

    Of tokens that are read at once, or below drafted ones, nearly all numbers are equal. The state
    after committed tokens, and after their entries, differs by less than rounding would change it.
    """
    config, params = drawn(4)
    params = jax.tree.map(lambda value: jnp.asarray(value, jnp.bfloat16), params)
    x = np.random.default_rng(4).normal(size=(2, 14, config.hidden_size))
    x, empty = jnp.asarray(x, jnp.bfloat16), State.zeros(SIZES, 2, jnp.bfloat16)
    ancestry, count = Ancestry.of(chain_of(14), [], SIZES.kernel), np.array([14, 9])
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
    config, params = drawn(2)
    x = np.random.default_rng(2).normal(size=(1, 12, config.hidden_size)).astype(np.float32)
    documents = jnp.array([[0] * 5 + [1] * 7])
    ancestry = replace(Ancestry.of(chain_of(12), [], SIZES.kernel), documents=documents)
    y, _ = run(params, x, Context(State.zeros(SIZES, 1, jnp.float32), [], ancestry))
    expected = [alone(params, SIZES, config.norm_eps, part) for part in (x[0, :5], x[0, 5:])]
    np.testing.assert_allclose(y[0], np.concatenate(expected), atol=TOLERANCE)


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
PROMPT = np.array([[1, 2, 3, 1, 2, 3, 1, 2]])


def generated(target, drafter):
    options = {"max_new_tokens": 24, "sampling": Sampling(temperature=0.0)}
    result = specjax.generate(target, drafter, PROMPT, **options)
    return np.asarray(result.tokens)


@pytest.mark.thorough
def test_on_two_devices_the_text_is_the_same(tmp_path) -> None:
    """A device has the heads of a group, with their states."""
    hybrid = tiny_target(**HYBRID, scale=4.0)
    hybrid.save_pretrained(tmp_path)
    split = specjax.Target.from_pretrained(
        tmp_path, dtype=np.float32, mesh=sharding.make_mesh(1, 2)
    )
    drafter = EarlyExit(layers=2, draft=SHAPES["static"])
    np.testing.assert_array_equal(generated(split, drafter), generated(hybrid, drafter))
    np.testing.assert_array_equal(generated(hybrid, None), generated(hybrid, drafter))
    table = split.new_cache(2, 8).states[0].table
    assert table.sharding.shard_shape(table.shape) == (2, 2, 8, 6)
    conv = split.params["layers"][0]["conv_b"]
    assert conv.sharding.shard_shape(conv.shape) == (8, 1, 4)


@pytest.mark.full
def test_a_shared_prefix_brings_its_state() -> None:
    """A second request goes on from the state at the end of a page, and has the text of its own."""
    target = tiny_target(**HYBRID, scale=4.0, max_positions=256)
    prompt = np.random.default_rng(0).integers(0, 11, 40).tolist()
    sizes = {"rows": 2, "widths": (2,), "page": 8, "chunk": 16, "capacity": 128, "steps": 4}
    with Engine(target, PromptLookup(), drafts=("chain:3",), **sizes) as engine:
        texts = [[*prompt, 1], [*prompt, 7, 2]]
        handles = []
        for text in texts:
            handles.append(engine.submit(text, max_new_tokens=20))
            handles[-1].result(60.0)
        assert handles[1].cached_tokens >= 32
        for text, handle in zip(texts, handles, strict=True):
            alone_text = specjax.generate(
                target,
                None,
                np.array([text]),
                max_new_tokens=20,
                sampling=Sampling(temperature=0.0),
            )
            expected = np.asarray(alone_text.tokens)[0, len(text) :]
            np.testing.assert_array_equal(handle.result(60.0).tokens, expected)


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
