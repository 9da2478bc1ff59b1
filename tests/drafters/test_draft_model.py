"""Compare the draft model's own cache with reading the whole text again."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Draft, DraftModel, EarlyExit
from specjax.drafters.methods.draft_model import MAX_PADDING
from specjax.drafts import tree
from specjax.drafts.shapes import Chain, SampledTree
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import Sampling, probabilities
from tests.conftest import HYBRID, SHAPES, blocks, tiny_target

PROMPTS = np.array([[1, 4, 2, 4, 2, 7], [3, 0, 0, 0, 0, 0], [5, 9, 10, 0, 0, 0]])
LENGTHS = np.array([6, 1, 3])
SAMPLING = Sampling(temperature=0.8)
OPTIONS = GenerationOptions(max_new_tokens=40, sampling=SAMPLING)


# Models are arguments, so that all models of one shape share a compiled program.
step, advance = jax.jit(decoding.step), jax.jit(decoding.advance)
propose_step = jax.jit(decoding.propose_step)
forward = jax.jit(Target.forward)


@partial(jax.jit, static_argnames="layers")
def read_whole(model, tokens, layers=None) -> jax.Array:
    """Return ``[B, T, V]`` logits of the whole text, read at once."""
    return model.forward(tokens, layers=layers)[0].logits


def check_q(model, state, draft, layers=None) -> None:
    """Check that every q of ``draft`` is the model's own distribution given the text before it.

    The expected distribution is computed without a cache.
    """
    for row, length in enumerate(np.asarray(state.lengths)):
        text = np.zeros((1, 64), np.int32)
        text[0, :length] = state.tokens[row, :length]
        text[0, length : length + 3] = draft.tokens[row, 1:]
        logits = read_whole(model, text, layers)[:, length - 1 : length + 2]
        np.testing.assert_allclose(
            draft.q[row, :3], probabilities(logits, SAMPLING.rows(1))[0], atol=1e-4
        )


@pytest.mark.full
@pytest.mark.thorough_except("unlike the target")
@pytest.mark.parametrize("kind", ["unlike the target", "the target itself"])
def test_q_is_the_models_own_distribution_after_every_step(target, kind) -> None:
    """Check steps with drafts that are accepted in part or in full."""
    model = target if kind == "the target itself" else tiny_target(seed=5, num_layers=1)
    drafter = DraftModel(model=model, draft=Chain(3))
    _, state = decoding.start(target, drafter, PROMPTS, LENGTHS, OPTIONS)
    counts = set()
    for _ in range(8):
        draft = propose(drafter, target, state)
        check_q(model, state, draft)
        np.testing.assert_array_equal(draft.q[:, 3], 0)  # the last node has no child
        state, info = step(target, drafter, state)
        counts |= set(np.asarray(info.emitted).tolist())
    assert counts == {4} if kind == "the target itself" else len(counts) > 1


@struct.dataclass
class OnlyAppends(DraftModel):
    """A draft model that observes every step through `append_committed` only."""

    def update(self, target, state, draft, verdict, committed):
        return self.append_committed(target, state, committed)


@pytest.mark.full
@pytest.mark.thorough_except("like the target-OnlyAppends")
@pytest.mark.parametrize("kind", [DraftModel, OnlyAppends])
@pytest.mark.parametrize("model", ["the target itself", "like the target"])
def test_steps_with_drafts_of_its_own_and_without_mix(target, model, kind) -> None:
    """Check that the model has read the whole text before every draft.

    This holds after full acceptance, after roots without a draft, and after one or several drafts
    from elsewhere.
    """
    softer = target.replace(params=target.params | {"lm_head": 0.6 * target.params["lm_head"]})
    draft_model = target if model == "the target itself" else softer
    drafter, observer = DraftModel(draft_model, draft=Chain(3)), kind(draft_model, draft=Chain(3))
    _, state = decoding.start(target, drafter, PROMPTS, LENGTHS, OPTIONS)
    empty, behind = draft_model.new_cache(3, 64), []
    for depths in ([0], [], [0, 0, 0], [2], [0, 1], [1, 0]):
        state, _ = step(target, drafter, state)
        behind += state.drafter.behind.tolist()
        for depth in depths:
            guess = jnp.zeros((3, depth), jnp.int32)
            state, _ = advance(target, observer, state, Draft.chain(state.roots, guess))
        draft, proposed = propose_step(target, drafter, state)
        check_q(draft_model, state, draft)
        texts = jnp.pad(state.tokens, ((0, 0), (0, 64 - state.tokens.shape[1])))
        _, fresh = forward(draft_model, texts, empty, state.lengths)
        np.testing.assert_array_equal(proposed.drafter.cache.length, state.lengths)
        for row, length in enumerate(np.asarray(state.lengths)):
            for cached, read in zip(
                jax.tree.leaves(proposed.drafter.cache.layers),
                jax.tree.leaves(fresh.layers),
                strict=True,
            ):
                np.testing.assert_allclose(
                    cached[row, :, :length], read[row, :, :length], atol=1e-4
                )
    assert set(behind) == ({True} if model == "the target itself" else {True, False})


@pytest.mark.full
def test_early_exit_drafts_with_the_first_layers() -> None:
    target, drafter = tiny_target(num_layers=3), EarlyExit(layers=2, draft=Chain(3))
    _, state = decoding.start(target, drafter, PROMPTS, LENGTHS, OPTIONS)
    for _ in range(6):
        check_q(target, state, propose(drafter, target, state), layers=(0, 2))
        state, _ = step(target, drafter, state)


def test_early_exit_needs_a_layer_that_reads_earlier_tokens() -> None:
    target = tiny_target(**blocks("--M*"))
    EarlyExit(layers=3).check(target)  # a state is enough
    with pytest.raises(InputError, match=r"EarlyExit\(layers=2\): none.* give at least 3"):
        EarlyExit(layers=2).check(target)


def test_init_and_round_trip(target, tmp_path) -> None:
    drafter = DraftModel.init(target, jax.random.key(0), draft=Chain(2), hidden_size=8)
    assert drafter.model.config.vocab_size == target.config.vocab_size
    assert drafter.model.config.num_layers == 1
    drafter.save_pretrained(tmp_path)
    again = DraftModel.from_pretrained(tmp_path, draft=Chain(2), dtype=np.float32)
    jax.tree.map(np.testing.assert_array_equal, drafter.model.params, again.model.params)
    drafter.check(target)
    with pytest.raises(InputError, match="vocabulary of 11 tokens and target one of 1035"):
        drafter.check(tiny_target(vocab_size=11 + MAX_PADDING))


@jax.jit
def propose(drafter, target, state):
    return decoding.propose_step(target, drafter, state)[0]


_thorough = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.full
@pytest.mark.thorough_except("chain--3")
@pytest.mark.parametrize(
    ("name", "padding"),
    [("chain", -3), ("sampled", 5), _thorough("chain", 5), _thorough("dynamic", -3)],
)
def test_a_vocabulary_of_another_width_serves(target, name, padding) -> None:
    """Check a vocabulary that is padded beyond the target's, or smaller than the target's.

    The text is the same as with a model that has the target's vocabulary.
    """
    same = tiny_target(seed=5, num_layers=1)
    vocab = 11 + padding
    # The added rows are copies of other tokens' rows.
    rows = np.resize(np.asarray(same.params["embed"]), (vocab, 16))
    head = np.resize(np.asarray(same.params["lm_head"]).T, (vocab, 16)).T
    resized = same.replace(
        params=same.params | {"embed": rows, "lm_head": head},
        config=replace(same.config, vocab_size=vocab),
    )
    prompts = np.minimum(PROMPTS, 7)  # ids that are in both vocabularies
    texts = []
    for model in (same, resized):
        drafter = DraftModel(model=model, draft=SHAPES[name])
        started, state = decoding.start(target, drafter, prompts, LENGTHS, OPTIONS)
        draft = propose(started, target, state)
        assert draft.q is None or draft.q.shape[-1] == 11
        assert np.asarray(draft.tokens[:, 1:]).max() < min(11, model.config.vocab_size)
        if padding > 0 and model is resized:  # the cut logits are the same model's
            np.testing.assert_array_equal(draft.tokens, texts[0][0])
        coupled = specjax.generate(
            target,
            drafter,
            prompts,
            LENGTHS,
            max_new_tokens=24,
            sampling=Sampling(temperature=0.8, top_p=0.9),
            rule="coupled",
        )
        texts.append((np.asarray(draft.tokens), coupled.tokens))
    np.testing.assert_array_equal(texts[0][1], texts[1][1])


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_adaptive_draft_is_the_fixed_one_up_to_its_first_improbable_token(
    target, temperature
) -> None:
    """Check tokens and q against those of the fixed chain, including the first improbable token.

    Rows end independently.
    """
    model, threshold = tiny_target(seed=5, num_layers=1), 0.35
    sampling = Sampling(temperature=temperature)
    lengths = set()
    for seed in range(6):
        drafts = {}
        for stop_below in (0.0, threshold):
            drafter = DraftModel(model=model, draft=Chain(6, stop_below=stop_below))
            options = replace(OPTIONS, sampling=sampling, key=jax.random.key(seed))
            _, state = decoding.start(target, drafter, (PROMPTS + seed) % 11, LENGTHS, options)
            drafts[stop_below] = propose(drafter, target, state)
        fixed, adaptive = drafts[0.0], drafts[threshold]
        for row in range(3):
            text = np.zeros((1, 64), np.int32)
            text[0, : LENGTHS[row]] = state.tokens[row, : LENGTHS[row]]
            text[0, LENGTHS[row] : LENGTHS[row] + 6] = fixed.tokens[row, 1:]
            p = probabilities(read_whole(model, text), Sampling(temperature or 1.0).rows(1))[0]
            below = [
                bool(p[LENGTHS[row] - 1 + i, fixed.tokens[row, 1 + i]] < threshold)
                for i in range(6)
            ]
            expected = below.index(True) + 1 if True in below else 6
            assert int(adaptive.length[row]) == expected
            np.testing.assert_array_equal(
                adaptive.tokens[row, : expected + 1], fixed.tokens[row, : expected + 1]
            )
            if temperature:
                np.testing.assert_array_equal(adaptive.q[row, :expected], fixed.q[row, :expected])
            lengths.add(expected)
    assert len(lengths) > 2


@pytest.mark.full
def test_the_drafting_loop_ends_with_the_last_row_that_drafts(target) -> None:
    """Check that a draft that always stops at once leaves the rest of the buffers unchanged."""
    drafter = DraftModel(model=tiny_target(seed=5, num_layers=1), draft=Chain(6, stop_below=1.0))
    _, state = decoding.start(target, drafter, PROMPTS, LENGTHS, OPTIONS)
    draft = propose(drafter, target, state)
    np.testing.assert_array_equal(draft.length, 1)
    np.testing.assert_array_equal(draft.q[:, 1:], 0)
    assert drafter.node_counts == (2, 4, 7)


KEPT = [(kind, name) for kind in ("unlike the target", "the target itself") for name in SHAPES]


@pytest.mark.full
@pytest.mark.thorough_except("unlike the target-dynamic")
@pytest.mark.parametrize(("kind", "name"), KEPT)
def test_a_kept_cache_drafts_what_a_new_one_does(target, name, kind) -> None:
    """Compare the draft with one after reading the whole text anew.

    The accepted paths end at nodes that were read, at leaves and at the root.
    """
    model = target if kind == "the target itself" else tiny_target(seed=5, num_layers=1)
    drafter = DraftModel(model=model, draft=SHAPES[name])
    _, state = decoding.start(target, drafter, PROMPTS, LENGTHS, OPTIONS, capacity=64)
    counts, behind = set(), set()
    for _ in range(8):
        draft = propose(drafter, target, state)
        _, anew = decoding.start(
            target,
            drafter,
            state.tokens,
            state.lengths,
            replace(OPTIONS, max_new_tokens=4),
            capacity=64,
        )
        fresh = propose(drafter, target, anew.replace(keys=state.keys))
        np.testing.assert_array_equal(draft.tokens, fresh.tokens)
        np.testing.assert_array_equal(draft.parents, fresh.parents)
        if draft.q is not None:
            np.testing.assert_allclose(draft.q, fresh.q, atol=1e-4)
        state, info = step(target, drafter, state)
        counts |= set(np.asarray(info.emitted).tolist())
        behind |= set(np.asarray(state.drafter.behind).tolist())
    assert len(counts) > 1 or counts == {4}
    assert True in behind or kind == "unlike the target"


def check_tree_q(model, state, draft, parents, layers=None) -> None:
    """Check that q of every node with children is the model's own distribution after its path.

    The expected distribution is computed without a cache.
    """
    parents = np.asarray(parents)
    depths = tree.depths(parents)
    paths = tree.paths(parents, int(depths.max()))
    for row, length in enumerate(np.asarray(state.lengths)):
        for node in sorted(set(parents[1:].tolist())):
            text = np.zeros((1, 64), np.int32)
            text[0, :length] = state.tokens[row, :length]
            path = paths[node, 1 : depths[node] + 1]
            text[0, length : length + len(path)] = draft.tokens[row, path]
            logits = read_whole(model, text, layers)[:, length - 1 + len(path)]
            np.testing.assert_allclose(
                draft.q[row, node], probabilities(logits, SAMPLING.rows(1))[0], atol=1e-4
            )


@pytest.mark.full
@pytest.mark.thorough_except("draft model")
@pytest.mark.parametrize("kind", ["draft model", "early exit"])
def test_every_q_of_a_tree_is_the_models_own_after_its_path(kind) -> None:
    """Check that a node sees its ancestors only, at their own positions, whatever else was read."""
    shape = SampledTree((3, 2, 2, 1))
    target, model = tiny_target(num_layers=3), tiny_target(seed=5, num_layers=1)
    drafter = (
        DraftModel(model=model, draft=shape)
        if kind == "draft model"
        else EarlyExit(layers=2, draft=shape)
    )
    _, state = decoding.start(target, drafter, PROMPTS, LENGTHS, OPTIONS)
    for _ in range(3):
        draft = propose(drafter, target, state)
        layers = None if kind == "draft model" else (0, 2)
        check_tree_q(
            model if kind == "draft model" else target, state, draft, shape.template.parents, layers
        )
        state, _ = step(target, drafter, state)


def test_a_draft_model_made_of_a_targets_first_layers_can_be_saved(tmp_path) -> None:
    target = tiny_target(
        model_type="mistral", num_layers=8, sliding_window=4, windowed_layers=tuple(range(8))
    )
    drafter = DraftModel.init(target, jax.random.key(0))
    drafter.save_pretrained(tmp_path)
    read = DraftModel.from_pretrained(tmp_path).model.config
    assert read == drafter.model.config
    assert (read.num_layers, read.windowed_layers) == (2, (0, 1))


def test_a_hybrid_of_too_few_layers_is_refused_and_what_is_said_then_helps() -> None:
    target = tiny_target(**(HYBRID | {"num_layers": 4, "linear_layers": (0, 1, 2)}))
    with pytest.raises(InputError, match=r"=2: none of.* give 4 or more, or other linear_layers$"):
        DraftModel.init(target, jax.random.key(0), num_layers=2)
    blocked = tiny_target(**blocks("-M-*"))
    for count, cause in ((1, "mlp_layers"), (3, "linear_layers and mlp_layers")):
        with pytest.raises(InputError, match=rf"={count}: .* give 4 or more, or other {cause}$"):
            DraftModel.init(blocked, jax.random.key(0), num_layers=count)
    four = DraftModel.init(target, jax.random.key(0), num_layers=4)
    assert four.model.config.linear_layers == (0, 1, 2)
    two = DraftModel.init(target, jax.random.key(0), num_layers=2, linear_layers=(0,))
    assert two.model.config.linear_layers == (0,)
