"""Test DFlash2.

The tests compare it with speculators' classes and the slow oracle. They cover layouts, the
distributions that it draws from, and the trees that it grows.
"""

import itertools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.drafters import DFlash, DFlash2
from specjax.drafters.methods.dflash2 import convolve
from specjax.drafters.registry import load_drafter
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from specjax.sampling import Sampling, noise_of_rows, split_keys
from tests.conftest import tiny_target
from tests.drafters import block_oracles
from tests.drafters.block_oracles import (
    BLOCK,
    Text,
    make_drafter,
    make_text,
    needs_speculators,
    slow_of,
    write_as,
)
from tests.drafters.test_block_oracles import ANCHORS
from tests.drafters.test_dflash import having_heard, of_anchors

SIZES = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    return make_text(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def target(text) -> Target:
    return Target.from_pretrained(text.directory, dtype=np.float32)


# --- against the oracles ---


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"sample_from_anchor": True}, {"conv_kernel_size": 3}])
def test_a_chain_is_that_of_speculators(options, text, target, tmp_path) -> None:
    needs_speculators()
    model = make_drafter(tmp_path / "drafter", "dflash2", text, **SIZES | options)
    blocks = block_oracles.speculators_blocks(model, text, ANCHORS)
    drafter = load_drafter(str(tmp_path / "drafter"), None, target.config, np.float32)
    assert type(drafter) is DFlash2
    states, chains = of_anchors(drafter, target, text)
    np.testing.assert_allclose(states, blocks.states, atol=1e-4)
    np.testing.assert_allclose(drafter.logits(target, states), blocks.logits, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(chains, blocks.chains)
    before = np.concatenate([text.tokens[list(ANCHORS)][:, None], blocks.chains[:, :-1]], axis=1)
    scores = drafter.expected(target, states[:, -before.shape[1] :], before)
    np.testing.assert_allclose(scores, blocks.corrected, atol=1e-4, rtol=1e-4)


WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
ZLAB = {  # fields of config.json, and the options of the slow oracle that they stand for
    "plain": ({}, {}),
    "windows": (WINDOWS, {"window": 6, "window_from": "query"}),
    "windows, of whose blocks nothing is said": (
        WINDOWS | {"is_causal": None},
        {"window": 6, "window_from": "query", "causal": {"sliding_attention": True}},
    ),
    "causal": ({"is_causal": True}, {"causal": {"full_attention": True}}),
}


@pytest.mark.full
@pytest.mark.parametrize("variant", ZLAB)
def test_z_lab_s_layout_is_read_and_written(variant, text, target, tmp_path) -> None:
    needs_speculators()
    fields, means = ZLAB[variant]
    make_drafter(tmp_path / "drafter", "dflash2", text, **SIZES)
    write_as("zlab", tmp_path / "drafter", tmp_path / "zlab", text, **fields)
    drafter = load_drafter(str(tmp_path / "zlab"), None, target.config, np.float32)
    assert (type(drafter), drafter.config.taps, drafter.config.block_size) == (
        DFlash2,
        block_oracles.TAPS,
        BLOCK,
    )
    slow = slow_of(
        tmp_path / "zlab", text, top_k=4, layer_types=tuple(fields.get("layer_types", ())), **means
    )
    states, chains = of_anchors(drafter, target, text)
    for row, at in enumerate(ANCHORS):
        anchor = int(text.tokens[at])
        np.testing.assert_allclose(states[row], slow.block(text.features[:at], anchor), atol=1e-4)
        assert chains[row].tolist() == slow.draft(text.features[:at], anchor)[0]
    drafter.save_pretrained(tmp_path / "again")
    published, saved = (
        load_file(tmp_path / place / "model.safetensors") for place in ("zlab", "again")
    )
    assert published.keys() == saved.keys()
    assert all(np.array_equal(published[name], saved[name]) for name in published)
    again = load_drafter(str(tmp_path / "again"), None, target.config, np.float32)
    assert again.config == drafter.config


PUBLISHED = {"input_embedding_scale": 1.7, "output_multiplier": 0.4, "final_logit_softcapping": 2.0}
FACTORS_AT = {  # fields inside of dflash_config, fields outside of it, and the resulting factors
    "in dflash_config": (PUBLISHED, {}, PUBLISHED),
    "beside it": ({}, PUBLISHED, PUBLISHED),
    "in both, of which the inner ones count": (
        PUBLISHED,
        {"input_embedding_scale": 3.0, "output_multiplier": 2.0, "final_logit_softcapping": 0.5},
        PUBLISHED,
    ),
    "a factor alone": ({"output_multiplier": 0.4}, {}, {"output_multiplier": 0.4}),
    "a bound alone": ({"final_logit_softcapping": 2.0}, {}, {"final_logit_softcapping": 2.0}),
}


@pytest.mark.full
@pytest.mark.thorough_except("in dflash_config-dflash")
@pytest.mark.parametrize("method", ["dflash", "dflash2"])
@pytest.mark.parametrize("which", FACTORS_AT)
def test_factors_of_embeddings_and_logits_are_those_of_z_lab(
    which, method, text, target, tmp_path
) -> None:
    """Compare with the slow network, with factors that change which tokens are drafted."""
    needs_speculators()
    inner, beside, means = FACTORS_AT[which]
    make_drafter(tmp_path / "drafter", method, text, **(SIZES if method == "dflash2" else {}))
    write_as("zlab", tmp_path / "drafter", tmp_path / "zlab", text, **beside)
    raw = json.loads((tmp_path / "zlab" / "config.json").read_text())
    (tmp_path / "zlab" / "config.json").write_text(
        json.dumps(raw | {"dflash_config": raw["dflash_config"] | inner})
    )
    factors = {
        "embedding_factor": means.get("input_embedding_scale", 1.0),
        "logit_factor": means.get("output_multiplier", 1.0),
        "logit_cap": means.get("final_logit_softcapping"),
    }
    slow = slow_of(tmp_path / "zlab", text, top_k=4 if method == "dflash2" else 0, **factors)
    drafter = load_drafter(str(tmp_path / "zlab"), None, target.config, np.float32)
    states, chains = of_anchors(drafter, target, text)
    before = np.concatenate([text.tokens[list(ANCHORS)][:, None], chains[:, :-1]], axis=1)
    slots = states[:, -before.shape[1] :]
    logits = (
        drafter.expected(target, slots, before)
        if method == "dflash2"
        else drafter.logits(target, slots)
    )
    for row, at in enumerate(ANCHORS):
        anchor = int(text.tokens[at])
        np.testing.assert_allclose(states[row], slow.block(text.features[:at], anchor), atol=1e-4)
        chain, expected, _ = slow.draft(text.features[:at], anchor)
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)
        assert chains[row].tolist() == chain
    drafter.save_pretrained(tmp_path / "again")
    again = load_drafter(str(tmp_path / "again"), None, target.config, np.float32)
    assert again.config == drafter.config
    assert again.config.changed_factors == means
    saved = json.loads((tmp_path / "again" / "config.json").read_text())["dflash_config"]
    assert {name: saved[name] for name in means} == means


def test_a_bound_of_the_drafter_takes_the_place_of_the_target_s() -> None:
    target = tiny_target(logit_cap=3.0, logit_divisor=2.0)
    drafter = lively(DFlash2.init(target, jax.random.key(1), block_size=4, **SIZES))
    states = jax.random.normal(jax.random.key(2), (2, 3, target.config.hidden_size))
    products = np.asarray(states, np.float64) @ np.asarray(target.head_weights, np.float64)
    as_targets = 3.0 * np.tanh(products / 2.0 / 3.0)
    np.testing.assert_allclose(drafter.logits(target, states), as_targets, atol=1e-4)
    for factors, expected in (
        ({"final_logit_softcapping": 5.0}, 5.0 * np.tanh(products / 5.0)),
        ({"output_multiplier": 0.3}, 0.3 * products),
        (
            {"output_multiplier": 0.3, "final_logit_softcapping": 5.0},
            5.0 * np.tanh(0.3 * products / 5.0),
        ),
    ):
        changed = drafter.replace(config=replace(drafter.config, **factors))
        np.testing.assert_allclose(changed.logits(target, states), expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("kind", [DFlash, DFlash2])
def test_with_factors_a_greedy_text_is_the_target_s(kind) -> None:
    target = tiny_target()
    sizes = SIZES if kind is DFlash2 else {}
    drafter = kind.init(target, jax.random.key(1), block_size=4, variant=PUBLISHED, **sizes)
    prompts = np.array([[1, 2, 3], [4, 5, 6]])
    plain = specjax.generate(target, None, prompts, max_new_tokens=12)
    drafted = specjax.generate(target, drafter, prompts, max_new_tokens=12)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


@pytest.mark.full
@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_speculators_reads_what_is_written(anchor_drafts, text, target, tmp_path) -> None:
    needs_speculators()
    drafter = DFlash2.init(
        target,
        jax.random.key(1),
        block_size=BLOCK,
        num_layers=2,
        variant={"from_anchor": anchor_drafts},
        taps=(1, 3, 5),
        **SIZES,
    )
    drafter = lively(drafter)
    drafter.save_pretrained(tmp_path, layout="speculators", target=str(text.directory))
    raw = json.loads((tmp_path / "config.json").read_text())
    # speculators fills in the architecture itself.
    raw["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    blocks = block_oracles.speculators_blocks(
        block_oracles.read_drafter(tmp_path, "dflash2"), text, ANCHORS
    )
    states, chains = of_anchors(drafter, target, text)
    np.testing.assert_allclose(states, blocks.states, atol=1e-4)
    np.testing.assert_array_equal(chains, blocks.chains)


def test_a_convolution_is_its_sum() -> None:
    """Check a kernel of three in two blocks of unequal sizes.

    The first token of the second block sees nothing of the first block.
    """
    rng = np.random.default_rng(0)
    x, base, changes = (rng.normal(size=size) for size in ((2, 7, 6), (3, 6), (2, 7, 3, 2)))
    place = np.array([0, 1, 2, 3, 0, 1, 2])
    expected = np.zeros_like(x)
    for row, token, channel in np.ndindex(x.shape):
        for lag in range(min(3, place[token] + 1)):
            kernel = base[lag, channel] + changes[row, token, lag, channel // 3]
            expected[row, token, channel] += kernel * x[row, token - lag, channel]
    convolved = convolve(
        *(jnp.asarray(value, jnp.float32) for value in (x, base, changes)), jnp.asarray(place)
    )
    np.testing.assert_allclose(convolved, expected, atol=1e-5)


# --- without the authors' code ---


def lively(drafter: DFlash2, by: float = 30.0) -> DFlash2:
    """Return the drafter with convolutions and a selector that change what it drafts."""
    keys = iter(jax.random.split(jax.random.key(9), 100))
    params = dict(drafter.params)
    params |= {name: params[name] * by for name in ("predecessors", "successors", "selector")}
    params["layers"] = [
        layer
        | {
            name: value + jax.random.normal(next(keys), value.shape) * 0.3
            for name, value in layer.items()
            if "_conv" in name
        }
        for layer in params["layers"]
    ]
    return drafter.replace(params=params)


def of_tiny(**options) -> DFlash2:
    sizes = {"block_size": 4, "selector_top_k": 4, "selector_rank": 3, "conv_group_size": 8}
    return lively(DFlash2.init(tiny_target(), jax.random.key(1), **sizes | options))


@pytest.mark.full
def test_convolutions_begin_as_doing_nothing() -> None:
    target = tiny_target()
    plain, new = (
        DFlash.init(target, jax.random.key(1), block_size=4),
        DFlash2.init(target, jax.random.key(1), block_size=4),
    )
    shared = {name: plain.params[name] for name in ("fc", "norm", "hidden_norm")}
    layers = [layer | plain.params["layers"][i] for i, layer in enumerate(new.params["layers"])]
    new = new.replace(params=new.params | shared | {"layers": layers})
    state, root = plain.start(target, 1, 8), jnp.array([3])
    np.testing.assert_allclose(
        new.block(target, state, root), plain.block(target, state, root), atol=1e-6
    )


@pytest.mark.full
def test_a_block_is_read_whole_unless_it_is_causal() -> None:
    """Check that a causal block has the same states as if it were read whole.

    Its convolutions look back, too.
    """
    target, root = tiny_target(), jnp.array([3])
    cut = of_tiny(variant={"causal": True}, draft=2)
    state, whole = cut.start(target, 1, 8), replace(cut, draft=specjax.Chain(3))
    assert cut.block(target, state, root).shape[1] == 3
    np.testing.assert_allclose(
        whole.block(target, state, root)[:, :3], cut.block(target, state, root), atol=1e-5
    )
    both_ways = of_tiny(draft=2)
    long = replace(both_ways, draft=specjax.Chain(3)).block(target, state, root)
    np.testing.assert_allclose(long[:, :3], both_ways.block(target, state, root), atol=1e-6)


# --- what is drafted ---


def proposed(drafter, sampling, rows, rule="independent", **settings):
    """Return a draft of several rows, and the keys of its levels.

    The draft is below token 3, after an empty text.
    """
    target = tiny_target()
    keys = split_keys(jax.random.split(jax.random.key(5), rows), drafter.draft_shape.depth)
    state, root = drafter.start(target, rows, 8), jnp.full(rows, 3)
    row_sampling = replace(sampling.rows(rows, rule), **settings)
    draft, _ = jax.jit(lambda *arguments: drafter.propose(target, *arguments))(
        state, root, row_sampling, keys, jnp.ones(rows, bool)
    )
    return jax.tree.map(np.asarray, draft), keys


def slow_scores(drafter, before: int, depth: int) -> np.ndarray:
    """Return the selector's scores ``[V]`` below a node: -inf for all but the candidates.

    ``before`` is the token of the node.
    """
    target = tiny_target()
    block = drafter.block(target, drafter.start(target, 1, 8), jnp.array([3]))
    states = block[0, 1:]  # without the anchor
    state = np.asarray(states, np.float64)[depth]
    logits = np.asarray(drafter.logits(target, states[depth]), np.float64)
    before_code, after_codes, matrix = (
        np.asarray(drafter.params[name], np.float64)
        for name in ("predecessors", "successors", "selector")
    )
    scores = np.full(len(logits), -np.inf)
    for token in np.argsort(-logits)[: drafter.config.selector_top_k]:
        scores[token] = logits[token] + np.sum(
            before_code[before] * (state @ matrix) * after_codes[token]
        )
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.full
def test_drawn_chains_have_the_distribution_that_they_say() -> None:
    """Check the joint distribution of all pairs of tokens.

    The test would notice chains of a drafter that reads the root only, or all tokens.
    """
    drafter, rows, temperature = of_tiny(draft=2), 40_000, 1.7
    draft, _ = proposed(drafter, Sampling(temperature=temperature), rows)
    first, second = draft.tokens[:, 1], draft.tokens[:, 2]
    counts = np.zeros((11, 11))
    np.add.at(counts, (first, second), 1)

    def joint(of_first, of_second) -> np.ndarray:
        return np.stack([of_first[token] * of_second(token) for token in range(11)]).ravel()

    q_first = softmax(slow_scores(drafter, 3, 0) / temperature)
    exact = joint(q_first, lambda token: softmax(slow_scores(drafter, token, 1) / temperature))
    assert (q_first == 0).sum() == 7
    assert conformance.g_test(counts.ravel(), exact) > conformance.FALSE_ALARM
    np.testing.assert_allclose(draft.q[0, 0], q_first, atol=1e-5)
    for row in range(20):
        here = softmax(slow_scores(drafter, int(first[row]), 1) / temperature)
        np.testing.assert_allclose(draft.q[row, 1], here, atol=1e-5)
        np.testing.assert_array_equal(draft.q[row, 1] == 0, here == 0)
    forgets = joint(q_first, lambda _: softmax(slow_scores(drafter, 3, 1) / temperature))
    assert conformance.g_test(counts.ravel(), forgets) < conformance.FALSE_ALARM


@pytest.mark.full
def test_truncation_is_of_the_candidates_distribution() -> None:
    drafter = of_tiny(draft=1)
    draft, _ = proposed(drafter, Sampling(temperature=2.0, top_k=2), 500)
    scores = slow_scores(drafter, 3, 0) / 2
    scores[scores < np.sort(scores)[-2]] = -np.inf
    np.testing.assert_allclose(draft.q[0, 0], softmax(scores), atol=1e-5)
    assert set(draft.tokens[:, 1].tolist()) == set(np.flatnonzero(softmax(scores)).tolist())


@pytest.mark.full
def test_siblings_are_drawn_without_replacement() -> None:
    drafter, rows = of_tiny(draft=specjax.SampledTree((2, 2))), 40_000
    draft, _ = proposed(drafter, Sampling(temperature=2.0), rows)
    q = softmax(slow_scores(drafter, 3, 0) / 2)
    exact = np.outer(q, q) / np.maximum(1 - q, 1e-9)[:, None]
    np.fill_diagonal(exact, 0.0)
    counts = np.zeros((11, 11))
    np.add.at(counts, (draft.tokens[:, 1], draft.tokens[:, 2]), 1)
    assert conformance.g_test(counts.ravel(), exact.ravel()) > conformance.FALSE_ALARM
    for node in (1, 2):
        here = softmax(slow_scores(drafter, int(draft.tokens[0, node]), 1) / 2)
        np.testing.assert_allclose(draft.q[0, node], here, atol=1e-5)
    assert not draft.q[0, 3:].any()


@pytest.mark.full
def test_coupled_chains_are_drawn_with_the_target_s_numbers() -> None:
    """Check that the noise at each position belongs to the target's tokens.

    The order of the candidates does not matter.
    """
    drafter, rows = of_tiny(draft=2), 50
    draft, keys = proposed(drafter, Sampling(temperature=1.5), rows, rule="coupled")
    settings = Sampling(temperature=1.5).rows(rows, "coupled")
    tokens = np.full(rows, 3)
    for depth in range(2):
        noise = np.asarray(noise_of_rows(keys[depth], 11, settings))
        scores = np.stack([slow_scores(drafter, int(token), depth) / 1.5 for token in tokens])
        tokens = np.argmax(scores + noise, axis=-1)
        np.testing.assert_array_equal(draft.tokens[:, 1 + depth], tokens)
    assert len(set(tokens.tolist())) > 1


@pytest.mark.full
def test_a_dynamic_tree_holds_the_best_paths() -> None:
    drafter = of_tiny(draft=specjax.DynamicTree(top_k=3, depth=2, nodes=7))
    draft, _ = proposed(drafter, Sampling(0.0), 1)
    paths = {}
    log_q = np.log(np.maximum(softmax(slow_scores(drafter, 3, 0)), 1e-300))
    for first in np.argsort(-log_q)[:3]:
        paths[(int(first),)] = log_q[first]
        below = np.log(np.maximum(softmax(slow_scores(drafter, int(first), 1)), 1e-300))
        for second in np.argsort(-below)[:3]:
            paths[int(first), int(second)] = log_q[first] + below[second]
    best = sorted(paths, key=lambda path: -paths[path])[:6]
    assert set(best) == paths_of(draft)
    below = [
        {path[1] for path in paths if len(path) == 2 and path[0] == first}
        for first in {path[0] for path in paths}
    ]
    assert any(children != below[0] for children in below)


def test_the_children_of_a_static_tree_s_nodes_are_the_likeliest_after_each() -> None:
    drafter = of_tiny(draft=specjax.StaticTree(specjax.complete_tree((3, 2))))
    draft, _ = proposed(drafter, Sampling(0.0), 1)
    expected = set()
    for first in np.argsort(-slow_scores(drafter, 3, 0))[:3]:
        expected.add((int(first),))
        expected |= {
            (int(first), int(second))
            for second in np.argsort(-slow_scores(drafter, int(first), 1))[:2]
        }
    assert paths_of(draft) == expected


def paths_of(draft) -> set[tuple[int, ...]]:
    """Return the tokens of each node's path, for the first row."""
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)[0]
    paths: list[tuple[int, ...]] = [()]
    for node, parent in itertools.islice(enumerate(parents), 1, None):
        paths.append((*paths[parent], int(draft.tokens[0, node])))
    return set(paths[1:])


@pytest.mark.full
@pytest.mark.parametrize("candidates", [1, 2])
def test_an_end_that_must_not_come_yet_is_no_candidate(candidates) -> None:
    """Check that another candidate replaces the likeliest token if it would end the text too early.

    q still sums to 1.
    """
    drafter = of_tiny(draft=2, selector_top_k=candidates)
    target = tiny_target()
    block = drafter.block(target, drafter.start(target, 1, 8), jnp.array([3]))[:, 1]
    likeliest = int(jnp.argmax(drafter.logits(target, block)))
    early = {
        "stop_token_ids": jnp.full((200, 1), likeliest),
        "tokens_before_stop": jnp.ones(200, jnp.int32),
    }
    draft, _ = proposed(drafter, Sampling(1.0), 200, **early)
    assert (draft.tokens[:, 1] != likeliest).all()
    assert (draft.q[:, 0, likeliest] == 0).all()
    assert ((draft.q[:, 0] > 0).sum(axis=-1) == candidates).all()
    np.testing.assert_allclose(draft.q[:, :2].sum(axis=-1), 1.0, atol=1e-5)


def test_more_children_than_candidates_are_refused() -> None:
    drafter = of_tiny(draft=specjax.StaticTree(tuple((i,) for i in range(5))))
    with pytest.raises(
        InputError,
        match=r"needs 5 children of a node, but this drafter has 4 candidates at each position",
    ):
        drafter.check(tiny_target())
    replace(drafter, draft=specjax.StaticTree(tuple((i,) for i in range(4)))).check(tiny_target())


@pytest.mark.thorough  # tests/drafters/test_dflash.py has small caches every time
def test_a_small_cache_changes_blocks_where_it_drops_tokens_alone() -> None:
    target, whole = tiny_target(), of_tiny()
    features = np.random.default_rng(0).normal(size=(3, 20, 16)).astype(np.float32)

    def block(drafter: DFlash2) -> np.ndarray:
        return np.asarray(
            drafter.block(target, having_heard(drafter, target, features), jnp.array([3, 5, 1]))
        )

    small, large = (
        whole.replace(cache=specjax.Streaming(sinks=1), budget=budget) for budget in (3, 24)
    )
    np.testing.assert_allclose(block(large), block(whole), atol=1e-5)
    assert np.abs(block(small) - block(whole)).max() > 1e-3


def test_of_the_codebooks_a_few_rows_are_read() -> None:
    drafter, target = of_tiny(), tiny_target()
    reads = drafter.drafting_reads(target)
    step_reads = reads.step[0]
    assert {"predecessors", "successors"}.isdisjoint(step_reads)
    assert {"selector", "layers", "fc"} <= step_reads.keys()
    assert reads.level == ()


# --- checkpoints ---

LAYERS = {"num_layers": 2, "sliding_window": 3, "windowed_layers": (1,)}
SAVED = {
    "z-lab's": ("dflash", {}),
    "windows": ("dflash", LAYERS),
    "causal in windows": ("dflash", LAYERS | {"variant": {"causal_in_window": True}}),
    "causal": ("dflash", {"variant": {"causal": True}}),
    "speculators'": ("speculators", {"conv_kernel_size": 3}),
    "from the anchor": ("speculators", {"variant": {"from_anchor": True}}),
    "windows of blocks": ("speculators", LAYERS | {"variant": {"window_of_block": True}}),
    "windows of blocks, causal": (
        "speculators",
        LAYERS | {"variant": {"window_of_block": True, "causal_in_window": True}},
    ),
}


@pytest.mark.parametrize("which", SAVED)
def test_what_is_saved_is_read_bit_for_bit(which, tmp_path) -> None:
    layout, options = SAVED[which]
    drafter = of_tiny(**options)
    drafter.save_pretrained(tmp_path, layout=layout)
    again = load_drafter(str(tmp_path), None, tiny_target().config, np.float32)
    assert (type(again), again.config) == (DFlash2, drafter.config)
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    assert again.draft == drafter.draft == specjax.Chain(drafter.config.depth)


def test_a_layout_that_cannot_say_it_is_refused(tmp_path) -> None:
    with pytest.raises(
        InputError,
        match=(
            "layout='speculators': it cannot express factors of embeddings or logits: write it as"
            " 'dflash'"
        ),
    ):
        of_tiny(variant={"output_multiplier": 0.5}).save_pretrained(tmp_path, layout="speculators")
    with pytest.raises(
        InputError, match="layout='dflash': it cannot express predictions from the anchor"
    ):
        of_tiny(variant={"from_anchor": True}).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match="a DFlash2 drafter is written in the layouts 'dflash', 'speculators'"
    ):
        of_tiny().save_pretrained(tmp_path, layout="deepspec")
    assert not list(tmp_path.iterdir())


def of_field(name: str, value: object):
    """Return a function that changes one field of ``dflash_config``; None removes the field."""

    def change(raw: dict) -> dict:
        nested = {k: v for k, v in (raw["dflash_config"] | {name: value}).items() if v is not None}
        return raw | {"dflash_config": nested}

    return change


def as_dflash(raw: dict) -> dict:
    return raw | {"architectures": ["DFlashDraftModel"]}


FAULTS = {  # a change of config.json, tensors to leave out, and the error message
    "no selector": (
        None,
        ("candidate_selector",),
        r"no tensors candidate_selector\.\*, but selector_rank",
    ),
    "half a selector": (
        None,
        ("candidate_selector.hidden",),
        "'candidate_selector.hidden_projection.weight' .* is missing",
    ),
    "none around attention": (
        None,
        ("layers.0.attention_conv", "layers.1.attention_conv"),
        r"no tensors attention_conv\.\*, but conv_kernel_size",
    ),
    "none around the MLPs": (
        None,
        ("layers.0.mlp_conv", "layers.1.mlp_conv"),
        r"no tensors mlp_conv\.\*, but",
    ),
    "those of one layer": (
        None,
        ("layers.1.mlp_conv",),
        r"'layers\.1\.mlp_conv\.base_kernel' .* missing",
    ),
    "half a convolution": (
        None,
        ("layers.1.mlp_conv.base",),
        r"'layers\.1\.mlp_conv\.base_kernel' .* is missing",
    ),
    "a DFlash by its name": (
        as_dflash,
        (),
        r"declares no selector \(selector_rank\), but there are tensors",
    ),
    "a DFlash by its name, with convolutions": (
        as_dflash,
        ("candidate_selector",),
        (
            r"declares no convolution \(conv_kernel_size\), but there are tensors"
            r" layers\.0\.attention_conv"
        ),
    ),
    "no rank": (of_field("selector_rank", None), (), "dflash_config.selector_rank is missing"),
    "no kernel": (
        of_field("conv_kernel_size", 0),
        (),
        "dflash_config.conv_kernel_size=0: must be a whole number from 1",
    ),
    "a kernel larger than a block": (
        of_field("conv_kernel_size", 5),
        (),
        "conv_kernel_size=5: must be at most block_size=4",
    ),
    "groups that do not fit": (
        of_field("conv_group_size", 5),
        (),
        "conv_group_size=5: must divide the hidden size, 16",
    ),
    "more candidates than tokens": (
        of_field("selector_top_k", 12),
        (),
        "selector_top_k=12: must be at most",
    ),
    "another rank": (of_field("selector_rank", 4), (), "candidate_selector"),
    "another model's layers": (
        lambda raw: raw | {"model_type": "llama"},
        (),
        "the layers of a DFlash2 are those of a 'qwen3'",
    ),
}


FACTORS = [  # a field, values that change nothing, and values that it cannot have
    ("input_embedding_scale", (1, 1.0, None), (0.0, -1.0, "2", math.inf)),
    ("output_multiplier", (1, 1.0, None), (0.0, -1.0, "2", math.nan)),
    ("final_logit_softcapping", (None, 0, 0.0), (-1.0, "30", True, math.nan)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_refused_in_a_line(fault, tmp_path) -> None:
    change, without, message = FAULTS[fault]
    of_tiny(num_layers=2).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(change(raw) if change else raw))
    tensors = load_file(tmp_path / "model.safetensors")
    remaining = {
        name: value for name, value in tensors.items() if not name.startswith(without or "no such")
    }
    save_file(remaining, tmp_path / "model.safetensors")
    kind = DFlash if "a DFlash" in fault else DFlash2
    with pytest.raises(CheckpointError, match=message) as error:
        kind.from_pretrained(tmp_path, dtype=np.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [DFlash, DFlash2])
@pytest.mark.parametrize(("name", "harmless", "impossible"), FACTORS)
def test_factors_that_change_nothing_are_as_if_they_were_not_there(
    kind, name, harmless, impossible, tmp_path
) -> None:
    drafter = kind.init(tiny_target(), jax.random.key(0), block_size=4)
    drafter.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())

    def read(**changes):
        (tmp_path / "config.json").write_text(json.dumps(saved | changes))
        return kind.from_pretrained(tmp_path, dtype=np.float32).config

    for value in harmless:
        assert read(dflash_config=saved["dflash_config"] | {name: value}) == drafter.config
        assert read(**{name: value}) == drafter.config
    for value in impossible:
        with pytest.raises(CheckpointError, match=f"dflash_config.{name}={value!r}: must be"):
            read(dflash_config=saved["dflash_config"] | {name: value})
        with pytest.raises(CheckpointError, match=f"config.json: {name}={value!r}: must be"):
            read(**{name: value})


@pytest.mark.parametrize("layout", ["speculators", "deepspec"])
@pytest.mark.parametrize(("name", "harmless", "impossible"), FACTORS)
def test_layouts_without_factors_refuse_them(name, harmless, impossible, layout, tmp_path) -> None:
    of_deepspec = {"from_anchor": True, "own_embedding": True, "own_head": True}
    variant = of_deepspec if layout == "deepspec" else {}
    drafter = DFlash.init(tiny_target(), jax.random.key(0), block_size=4, variant=variant)
    drafter.save_pretrained(tmp_path, layout=layout)
    saved = json.loads((tmp_path / "config.json").read_text())
    for value in harmless:
        (tmp_path / "config.json").write_text(json.dumps(saved | {name: value}))
        DFlash.from_pretrained(tmp_path, dtype=np.float32)
    (tmp_path / "config.json").write_text(json.dumps(saved | {name: 2.5}))
    with pytest.raises(
        CheckpointError, match=f"config.json: {name}=2.5: must be .* in this layout"
    ):
        DFlash.from_pretrained(tmp_path, dtype=np.float32)


def test_a_checkpoint_of_the_other_kind_is_named(tmp_path) -> None:
    of_tiny().save_pretrained(tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"it describes a DFlash2, .* load it as a DFlash2"):
        DFlash.from_pretrained(tmp_path / "new")
    DFlash.init(tiny_target(), jax.random.key(0), block_size=4).save_pretrained(tmp_path / "old")
    with pytest.raises(
        CheckpointError, match="has neither convolutions nor a selector: load it as a DFlash"
    ):
        DFlash2.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"selector_rank": 0},
            (
                "selector_rank=0, .*: a DFlash2 has convolutions and a selector; each must be at"
                " least 1"
            ),
        ),
        ({"ids": np.array([0, 2, 3])}, "d2t: a DFlash2 drafts any of its target's tokens"),
        (
            {"variant": {"confidence": True}},
            "a DFlash2 has neither a Markov head nor a confidence head",
        ),
        (
            {"variant": {"output_multiplier": 0.0}},
            r"output_multiplier=0\.0: must be a finite number above 0",
        ),
        (
            {"variant": {"final_logit_softcapping": math.nan}},
            "final_logit_softcapping=nan: must be a finite number above 0",
        ),
        (
            {"variant": {"input_embedding_scale": 2.0, "own_embedding": True}},
            (
                r"input_embedding_scale=2\.0: it is for a drafter that uses its target's embedding"
                r" and head"
            ),
        ),
    ],
)
def test_what_no_dflash2_is_cannot_be_made(options, message) -> None:
    with pytest.raises(InputError, match=message):
        of_tiny(**options)
