"""Test the drafts of drafters that read the target's features.

The expected drafts come from reading the whole text again for every token.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import MTP, Eagle, Eagle3, MixtureOfAttentions
from specjax.drafters.features import FeatureDrafter
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.sampling import Sampling
from specjax.training.objectives.ahead import counted
from specjax.training.objectives.unrolling import unroll
from tests.conftest import tiny_target

IDS = np.array([0, 1, 3, 4, 7, 8, 10])


def strong(drafter):
    """Return the drafter with weights so large that every key, position and state matters."""
    return drafter.replace(
        params=jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, drafter.params)
    )


WINDOW = {"sliding_window": 3, "windowed_layers": (0,)}

DRAFTERS = {
    "eagle": lambda target: strong(Eagle.init(target, jax.random.key(3), Chain(3))),
    "eagle3": lambda target: strong(
        Eagle3.init(target, jax.random.key(3), Chain(3), ids=IDS, taps=(0, 1))
    ),
    "eagle3.1": lambda target: strong(
        Eagle3.init(
            target,
            jax.random.key(3),
            Chain(3),
            variant={"fc_norm": True, "norm_output": True},
            num_layers=2,
        )
    ),
    "mtp": lambda target: strong(MTP.init(target, jax.random.key(3), Chain(4), modules=3)),
    "mtp, deepseek": lambda target: strong(
        in_deepseek_layout(MTP.init(target, jax.random.key(3), Chain(3), modules=2))
    ),
    "mtp, mimo_v2": lambda target: strong(
        in_mimo_v2_layout(MTP.init(target, jax.random.key(3), Chain(3), modules=2, **WINDOW))
    ),
    "eagle with a window": lambda target: strong(
        Eagle.init(target, jax.random.key(3), Chain(3), **WINDOW)
    ),
    "eagle3 with a window": lambda target: strong(
        Eagle3.init(
            target,
            jax.random.key(3),
            Chain(3),
            num_layers=2,
            sliding_window=3,
            windowed_layers=(0, 1),
        )
    ),
}


def moa(target) -> MixtureOfAttentions:
    """Return a drafter that the target feeds, but not with features."""
    return MixtureOfAttentions.init(target, jax.random.key(3), Chain(3), tli=1)


def in_deepseek_layout(drafter: MTP) -> MTP:
    """Return the drafter with DeepSeek's way to join embedding and state, and to pass the state on.

    The norms of the modules differ.
    """
    modules = [
        {**module, "norm": module["norm"] * (1 + i)}
        for i, module in enumerate(drafter.params["modules"])
    ]
    return drafter.replace(
        params={"modules": modules},
        config=replace(drafter.config, layout="deepseek", first_layer=2),
    )


def in_mimo_v2_layout(drafter: MTP) -> MTP:
    """Return the drafter with MiMo-V2's rule: every module reads the target's states."""
    return drafter.replace(config=replace(drafter.config, layout="mimo_v2"))


WIDTH = 24
"""The width of all passes of the oracle, so that each module compiles one program.

A text does not see the padding after it.
"""


@jax.jit
def read_text(drafter: FeatureDrafter, target, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the target's features ``[n, H']``, and the embeddings ``[n, H]`` of the next tokens.

    The features are of all but the last of ``tokens [n + 1]``.
    """
    output = target.forward(tokens[None, :-1], taps=drafter.taps(target.config))[0]
    return drafter.features(output)[0], drafter.embed(target, tokens[None, 1:])[0]


@partial(jax.jit, static_argnames="module")
def read_pairs(
    drafter: FeatureDrafter, features: jax.Array, embedded: jax.Array, module: int
) -> jax.Array:
    """Return the states ``[n, H]`` of a module at n pairs; the first is at position ``module``."""
    causal, nothing = jnp.tril(jnp.ones((1, WIDTH, WIDTH), bool)), ((),) * drafter.sizes.num_layers
    if window := drafter.sizes.window_of(0):
        causal &= ~jnp.tril(jnp.ones((WIDTH, WIDTH), bool), -window)
    at = module + jnp.arange(WIDTH)[None]
    states = drafter.run(features[None], embedded[None], at, causal, nothing, module)[0][0]
    # What a state has beside the network's own is computed below in another way.
    return states[:, : drafter.sizes.hidden_size]


def slow_states(
    drafter: FeatureDrafter, target, tokens: np.ndarray, tokens_read: int
) -> list[tuple[jax.Array, int]]:
    """Return the state ``[H]`` at each pair of a text, and the module that computed it.

    The target has read the first ``tokens_read`` tokens. Each pair is read in a pass of its own
    over all pairs up to it: without a cache, without scratch, and with a causal mask only.
    """
    text = np.pad(tokens, (0, WIDTH + drafter.modules - len(tokens)))
    features, embedded = map(np.asarray, read_text(drafter, target, text))
    features = features[:tokens_read]
    last = drafter.modules - 1
    # The first pairs have no input and no state.
    inputs: list[list] = [[None] * module for module in range(drafter.modules)]
    states: list[list] = [[None] * module for module in range(drafter.modules)]
    for pair in range(len(tokens) - 1):
        for module in range(drafter.modules):
            beyond = pair - module >= tokens_read
            if pair < module or (beyond and module < last):
                continue  # the module has no input at this pair
            if beyond:  # the drafter's own state takes the place of the target's feature
                inputs[module].append(states[last][pair - 1])
            else:
                reads_target = module == 0 or drafter.config.reads == "target"
                inputs[module].append(
                    features[pair - module] if reads_target else states[module - 1][pair - 1]
                )
            read = np.stack(inputs[module][module:])
            padded = np.pad(read, ((0, WIDTH - len(read)), (0, 0)))
            outputs = read_pairs(drafter, padded, embedded[module : module + WIDTH], module)
            states[module].append(np.asarray(outputs[len(read) - 1]))
    modules = [min(max(0, pair - tokens_read + 1), last) for pair in range(len(tokens) - 1)]
    return [(jnp.asarray(states[module][pair]), module) for pair, module in enumerate(modules)]


VARIANTS = ("eagle3.1", "mtp, deepseek", "eagle3 with a window")
"""Drafters whose special parts the test of unrolled steps covers, too."""


@pytest.mark.full
@pytest.mark.thorough_except("eagle", "eagle3")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in VARIANTS)) for n in DRAFTERS]
)
def test_drafts_are_those_of_reading_everything_again(name) -> None:
    """Check prompts of different lengths, one of a single token, and accepted tokens in between."""
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    prompts = np.array([[1, 4, 2, 4, 2], [5, 9, 0, 0, 0], [3, 0, 0, 0, 0]])
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, prompts, np.array([5, 2, 1]), options)
    propose, advance = jax.jit(decoding.propose_step), jax.jit(decoding.advance)
    for step in range(4):
        draft, drafting = propose(target, drafter, state)
        for row in range(3):
            text = np.asarray(state.tokens[row, : int(state.lengths[row])])
            if len(text) == 1:
                continue  # there is no pair to draft from
            drafted = np.asarray(draft.tokens[row, 1:])
            states = slow_states(
                drafter, target, np.concatenate([text, drafted[:-1]]), len(text) - 1
            )
            logits = np.stack([drafter.logits(target, *state) for state in states[len(text) - 2 :]])
            vocabulary = drafter.vocabulary(target)
            expected = logits.argmax(-1)
            if vocabulary is not None:
                expected = np.asarray(vocabulary.ids)[expected]
            assert drafted.tolist() == expected.tolist(), (step, row)
        state, _ = advance(target, drafter, drafting, draft)


TREE = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "shape"),
    [("eagle3", TREE), ("eagle3", DynamicTree(3, 3, 9)), ("mtp", DynamicTree(3, 4, 12))],
)
def test_nodes_of_a_tree_hang_where_they_say(name, shape) -> None:
    """Check that every node is among the likeliest after reading its path only.

    So parents, positions and scratch are right.
    """
    target = tiny_target()
    drafter = DRAFTERS[name](target).replace(draft=shape)
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, np.array([[1, 4, 2, 4, 2]]), None, options)
    draft, _ = jax.jit(decoding.propose_step)(target, drafter, state)
    parents = np.asarray(draft.parents).reshape(-1)
    vocabulary = drafter.vocabulary(target)
    tokens = np.asarray(draft.tokens[0])
    ids = np.arange(11) if vocabulary is None else np.asarray(vocabulary.ids)
    text = np.array([1, 4, 2, 4, 2])
    for parent in set(parents[1:].tolist()):
        path, node = [], parent
        while node > 0:
            path, node = [tokens[node], *path], parents[node]
        states = slow_states(drafter, target, np.concatenate([text, np.array(path, int)]), 4)
        logits = np.asarray(drafter.logits(target, *states[-1]))
        children = [tokens[node] for node in range(1, len(parents)) if parents[node] == parent]
        assert children == ids[np.argsort(-logits)[: len(children)]].tolist()


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    "name", ["mtp", *[pytest.param(name, marks=pytest.mark.thorough) for name in ("eagle3", "moa")]]
)
def test_a_long_prompt_is_absorbed_in_parts_and_a_mesh_changes_nothing(name, monkeypatch) -> None:
    target = tiny_target()
    drafter = moa(target) if name == "moa" else DRAFTERS[name](target)
    prompts = np.array([[1, 4, 2, 4, 2, 7, 3, 9], [5, 9, 10, 0, 0, 0, 0, 0]])
    lengths = np.array([8, 3])
    options = GenerationOptions(max_new_tokens=16, sampling=Sampling(temperature=0.0))
    whole = specjax.generate(target, drafter, prompts, lengths, **vars(options))
    mesh = specjax.make_mesh(data=2, model=2)
    placed = target.replace(params=jax.device_put(target.params), mesh=mesh)
    spread = drafter.replace(mesh=mesh)
    monkeypatch.setattr("specjax.decoding.state.PREFILL_CHUNK", 3)
    jax.clear_caches()
    parts = specjax.generate(target, drafter, prompts, lengths, **vars(options))
    meshed = specjax.generate(placed, spread, prompts, lengths, **vars(options))
    for result in (parts, meshed):
        np.testing.assert_array_equal(result.tokens, whole.tokens)
        np.testing.assert_array_equal(result.stats.accepted_at, whole.stats.accepted_at)
    assert whole.stats.accepted.sum() > 0


@pytest.mark.full
@pytest.mark.thorough_except("eagle")
@pytest.mark.parametrize("name", DRAFTERS)
def test_unrolled_steps_are_what_the_drafter_infers(name) -> None:
    """Check every step at every position of a window with two documents.

    The expected states come from reading one document up to there, token by token.
    """
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    tokens = np.random.default_rng(1).integers(0, 11, 12)
    segments = np.array([0] * 5 + [1] * 7)
    batch = {
        "tokens": jnp.asarray(tokens[None]),
        "segments": jnp.asarray(segments[None]),
        "loss_mask": jnp.ones((1, 11), bool),
    }
    mask = jnp.tril(jnp.ones((11, 11), bool)) & (segments[:-1, None] == segments[None, :-1])
    output = target.forward(tokens[None, :-1], mask=mask[None], taps=drafter.taps(target.config))[0]
    counts = []
    for step, states in enumerate(
        unroll(drafter, batch, target, drafter.features(output), 3, detach=False)
    ):
        counts.append(np.flatnonzero(counted(batch, step)[0]).tolist())
        for place in counts[-1]:
            begin = 0 if place < 5 else 5
            text = tokens[
                begin : place + 2 + step
            ]  # the pair of `place`, and a token for each step
            expected, _ = slow_states(drafter, target, text, place + 1 - begin)[-1]
            ours = states[0, place, : len(expected)]
            np.testing.assert_allclose(ours, expected, atol=1e-3, rtol=1e-3)
    # The pairs of the first document, which has 5 tokens, begin at 0 to 3. Token 11 is the last
    # label.
    assert counts == [[0, 1, 2, 3, 5, 6, 7, 8, 9], [0, 1, 2, 5, 6, 7, 8], [0, 1, 5, 6, 7]]


@pytest.mark.full
@pytest.mark.thorough_except("eagle3")
@pytest.mark.parametrize("name", ["eagle", "eagle3", "moa"])
def test_what_is_remembered_comes_from_the_target(name) -> None:
    """Check that after a generation the cache equals one from reading the text at once.

    It contains no states of the drafter's own.
    """
    target = tiny_target()
    drafter = moa(target) if name == "moa" else DRAFTERS[name](target)
    prompt = np.array([[1, 4, 2, 4, 2]])
    options = GenerationOptions(
        max_new_tokens=20, sampling=Sampling(temperature=1.0), key=jax.random.key(4)
    )
    drafter, state = decoding.start(target, drafter, prompt, None, options)
    state = decoding.decode(target, drafter, state, jnp.asarray(50))
    text = np.asarray(state.tokens[:, : int(state.lengths[0])])
    _, fresh = decoding.start(target, drafter, text, None, GenerationOptions(max_new_tokens=1))
    assert int(state.stats.accepted[0]) > 0
    for of_drafter in ("tokens", "summaries") if name == "moa" else ("cache",):
        after, afresh = (getattr(rows.drafter, of_drafter) for rows in (state, fresh))
        length = int(afresh.length[0])
        assert int(after.length[0]) == length == text.shape[1] - 1
        for grown, read in zip(after.layers, afresh.layers, strict=True):
            for ours, expected in zip(grown, read, strict=True):
                np.testing.assert_allclose(
                    ours[:, :, :length], expected[:, :, :length], atol=1e-3, rtol=1e-3
                )
    if name != "moa":
        np.testing.assert_allclose(state.drafter.newest, fresh.drafter.newest, atol=1e-3, rtol=1e-3)
