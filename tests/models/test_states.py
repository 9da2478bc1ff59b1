"""States of linear attention through whole generations: drafts leave no trace in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, sharding
from specjax.decoding import GenerationOptions
from specjax.drafters import EarlyExit, PromptLookup
from specjax.errors import InputError
from specjax.models.cache import KVCache
from specjax.models.config import LinearAttention
from specjax.models.states import State, empty_nodes
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from tests.conftest import HYBRID, SHAPES, compilations, tiny_config, tiny_target

TOLERANCE = 1e-4
PROMPTS = np.array([[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 0, 0, 0]])
LENGTHS = np.array([8, 5])
GREEDY = GenerationOptions(max_new_tokens=30, sampling=Sampling(temperature=0.0))


@pytest.fixture(scope="module")
def hybrid():
    return tiny_target(**HYBRID)


@jax.jit
def at_once(target, tokens, count):
    """Return the cache after the first ``count [B]`` tokens of each row, read in one pass."""
    return target.commit(tokens, target.new_cache(*tokens.shape), count)[1]


def generated(target, drafter, prompts=PROMPTS, lengths=LENGTHS, options=GREEDY):
    drafter, state = decoding.start(target, drafter, prompts, lengths, options)
    return decoding.decode(target, drafter, state, max_steps=100)


def check_states(result, expected, tolerance: float = TOLERANCE) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)
        assert np.abs(theirs).max() > 0.1


DRAFTERS = {
    "plain": lambda: None,
    "lookup": lambda: PromptLookup(draft=4),
    "early exit": lambda: EarlyExit(layers=2, draft=3),
    "static tree": lambda: EarlyExit(layers=2, draft=SHAPES["static"]),
    "dynamic tree": lambda: EarlyExit(layers=2, draft=SHAPES["dynamic"]),
}


THOROUGH = {"plain", "early exit", "dynamic tree"}


@pytest.mark.full
@pytest.mark.thorough_except("lookup")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in THOROUGH else ())
        for name in DRAFTERS
    ],
)
def test_after_a_generation_the_states_are_those_of_the_text_read_at_once(hybrid, name) -> None:
    state = generated(hybrid, DRAFTERS[name]())
    np.testing.assert_array_equal(state.lengths, LENGTHS + 30)
    np.testing.assert_array_equal(state.cache.length, LENGTHS + 29)
    np.testing.assert_array_equal(state.tokens, generated(hybrid, None).tokens)
    if name != "plain":
        accepted, drafted = np.sum(state.stats.accepted), np.sum(state.stats.drafted)
        assert 0 < accepted < drafted
    expected = at_once(hybrid, state.tokens, state.cache.length)
    check_states(state.cache.states, expected.states)


@pytest.mark.full
def test_a_row_that_has_finished_keeps_its_state(hybrid) -> None:
    """A neighbour goes on, and the same passes have drafts for both rows."""
    drafter, state = decoding.start(hybrid, EarlyExit(layers=2, draft=3), PROMPTS, LENGTHS, GREEDY)
    state = state.replace(max_lengths=jnp.array([38, 9]))
    while not state.done[1]:
        state = decoding.decode(hybrid, drafter, state, max_steps=1)
    before = jax.tree.map(np.asarray, state.cache.states)
    state = decoding.decode(hybrid, drafter, state, max_steps=3)
    assert not np.array_equal(before[0].table[0], state.cache.states[0].table[0])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), before, state.cache.states)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lookup", "dynamic tree"])
def test_a_row_alone_is_as_in_a_batch(hybrid, name) -> None:
    together = generated(hybrid, DRAFTERS[name]())
    for row in range(2):
        alone = generated(hybrid, DRAFTERS[name](), PROMPTS[[row, row]], LENGTHS[[row, row]])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        states_alone, states_in_batch = (
            jax.tree.map(lambda x, index=index: x[index], state.cache.states)
            for state, index in ((alone, 0), (together, row))
        )
        # Neighbours may make passes wider, so that the states differ by rounding.
        check_states(states_alone, states_in_batch)


@pytest.mark.full
def test_with_a_cache_in_8_bits_the_text_is_that_of_plain_decoding(hybrid) -> None:
    """Keys and values are rounded; states and the entries of drafted tokens are not."""
    target = hybrid.replace(cache_dtype="int8")
    plain, drafted = (generated(target, DRAFTERS[name]()) for name in ("plain", "static tree"))
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    kinds = [{part.dtype.name for part in jax.tree.leaves(layer)} for layer in drafted.cache.layers]
    assert kinds == [set(), {"int8", "float32"}, set()]
    assert {part.dtype.name for part in jax.tree.leaves(drafted.cache.states)} == {"float32"}
    check_states(drafted.cache.states, at_once(target, drafted.tokens, drafted.cache.length).states)


@pytest.mark.full
@pytest.mark.parametrize("cache_dtype", ["float", "int8"])
def test_what_is_not_float32_is_of_the_type_of_the_activations(cache_dtype) -> None:
    """States and drafted entries have the same types wherever they come from.

    So the same compiled programs serve all of them.
    """
    target = Target.init(tiny_config(**HYBRID), jax.random.key(0), jnp.bfloat16).replace(
        cache_dtype=cache_dtype
    )
    empty, scratch = target.new_cache(2, 8), target.new_scratch(2, 3)
    read = at_once(target, PROMPTS, LENGTHS)
    for states in (empty.states, read.states):
        linear_states = [state for state in states if state is not None]
        assert {state.table.dtype.name for state in linear_states} == {"float32"}
        assert {part.dtype.name for state in linear_states for part in state.newest} == {"bfloat16"}
    _, new = target.read(PROMPTS)
    for entries in (scratch, new):
        assert [part.dtype.name for part in entries[0]] == ["float32"] * 3 + ["bfloat16"] * 3


@pytest.mark.full
def test_wide_numbers_that_jax_is_told_to_make_change_nothing(hybrid) -> None:
    """The text has two chunks.

    Other libraries of the same process may enable ``jax_enable_x64``.
    """
    tokens = np.random.default_rng(0).integers(0, 11, (1, 90))
    expected = hybrid.forward(tokens)[0].logits
    with jax.enable_x64(True):
        cache = hybrid.new_cache(1, 96)
        states, cache = hybrid.commit(tokens, cache)
        np.testing.assert_allclose(hybrid.head(states.hidden), expected, atol=TOLERANCE)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.states)} == {"float32"}


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.ones((1, 8, 8), bool)},
        {"cache": True},
        {"commit": LENGTHS},
        {"scratch": [((), None)]},
    ],
)
def test_documents_are_refused_beside_what_they_stand_in_place_of(hybrid, options) -> None:
    if "cache" in options:
        options = {"cache": hybrid.new_cache(2, 8)}
    with pytest.raises(
        InputError, match="documents: cannot be combined with mask, cache, scratch and commit"
    ):
        hybrid.read(PROMPTS, documents=np.zeros((2, 8), int), **options)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_on_two_devices_the_text_is_the_same(hybrid, shape, tmp_path) -> None:
    hybrid.save_pretrained(tmp_path)
    mesh = sharding.make_mesh(*shape)
    split = specjax.Target.from_pretrained(tmp_path, dtype=np.float32, mesh=mesh)
    single, sharded = (generated(target, DRAFTERS["static tree"]()) for target in (hybrid, split))
    np.testing.assert_array_equal(single.tokens, sharded.tokens)
    check_states(sharded.cache.states, single.cache.states)
    table = sharded.cache.states[0].table
    assert table.sharding.shard_shape(table.shape) == (2 // shape[0], 4 // shape[1], 8, 6)


@pytest.mark.full
def test_generating_again_compiles_nothing(hybrid) -> None:
    generated(hybrid, DRAFTERS["static tree"]())
    before = compilations()
    generated(hybrid, DRAFTERS["static tree"](), PROMPTS[:, ::-1])
    assert compilations() == before


# --- the state by itself --------------------------------------------------------------------------


def random_entry(rng: np.random.Generator, sizes: LinearAttention, count: int):
    entry = [
        rng.normal(size=part.shape).astype(np.float32)
        for part in empty_nodes(sizes, 3, count, jnp.float32)
    ]
    entry[2] = -np.abs(entry[2])  # logarithms of decay factors
    return entry


def test_appending_moves_the_newest_tokens_along() -> None:
    sizes = LinearAttention(key_heads=1, value_heads=2, key_dim=2, value_dim=3)
    rng = np.random.default_rng(0)
    start = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), State.zeros(sizes, 3, jnp.float32)
    )
    entry = random_entry(rng, sizes, 5)
    after = jax.jit(State.append)(start, entry, np.array([0, 2, 5]))
    for old, new, tokens in zip(start.newest, after.newest, entry[3:], strict=True):
        np.testing.assert_array_equal(new[0], old[0])
        np.testing.assert_array_equal(
            new[1], np.concatenate([old[1][:, 2:], tokens[1][:, :2]], axis=1)
        )
        np.testing.assert_array_equal(new[2], tokens[2][:, 2:])
    np.testing.assert_array_equal(after.table[0], start.table[0])
    assert not np.array_equal(after.table[1], start.table[1])


@pytest.mark.full
def test_a_prompt_committed_at_once_is_as_its_entries_appended(hybrid) -> None:
    tokens, count = np.random.default_rng(1).integers(0, 11, (2, 70)), np.array([70, 33])
    empty = hybrid.new_cache(2, 80)
    states, new = jax.jit(hybrid.read)(tokens, empty)
    appended = empty.append(new, count, after=states.hidden)
    committed = jax.jit(hybrid.commit)(tokens, empty, count)[1]
    check_states(committed.states, appended.states)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE),
        committed.layers,
        appended.layers,
    )


def test_layers_are_chosen_with_their_states(hybrid) -> None:
    cache = hybrid.new_cache(2, 8)
    assert [len(entry) for entry in cache.layers] == [0, 2, 0]
    assert [state is None for state in cache.states] == [False, True, False]
    part = cache.of_layers((1, 2))
    assert [len(entry) for entry in part.layers] == [2, 0] and part.states[1] is cache.states[2]
    assert KVCache.create([((1, 2), (1, 2))], batch=1, capacity=2).states == ()


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.020), ("float32", 0.028)])
def test_a_draft_takes_a_few_hundredths_of_what_copies_of_the_states_would(dtype, share) -> None:
    """The sizes are those of Qwen3.5-9B and Qwen3-Next: one layer, one row and 60 nodes."""
    sizes = LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128)

    def size_of(tree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    entries = size_of(jax.eval_shape(lambda: empty_nodes(sizes, 1, 60, dtype)))
    state = size_of(jax.eval_shape(lambda: State.zeros(sizes, 1, dtype)))
    print(
        f"{dtype}: {entries / 60} bytes a node, {state} bytes a state: {entries / (60 * state):.2%}"
    )
    assert entries < share * 60 * state
