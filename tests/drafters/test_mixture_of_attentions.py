"""Test Mixture of Attentions.

Drafts are compared with NumPy, masks with their definition, and training with drafting.
"""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import decoding
from specjax.config import ConfigError
from specjax.decoding.options import GenerationOptions
from specjax.drafters import EagleWithLayerAttention, MixtureOfAttentions, layer_attention
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.config import MLA, Layer, ModelConfig, Rope
from specjax.models.fields import CheckpointError
from specjax.sampling import Sampling
from specjax.training.contract import StudentInputs
from specjax.training.methods import Eagle1Training, HassTraining, MoATraining
from specjax.training.methods.moa import block_masks, block_starts, draft_blocks, draft_everywhere
from specjax.training.objectives.windows import score
from tests.conftest import LAYERED, tiny_config, tiny_target
from tests.training.test_methods import batch_of

STRETCHED = Rope(theta=100.0, kind="linear", factor=4.0, original_max_positions=512)


def target_of(**changes):
    return tiny_target(num_layers=3, rope=STRETCHED, **changes)


def strong(target, **options) -> MixtureOfAttentions:
    """Return a drafter with weights so large that every key, position and state matters.

    Its norms and biases differ from one and zero.
    """
    drafter = MixtureOfAttentions.init(target, jax.random.key(3), Chain(4), **options)
    rng = np.random.default_rng(0)

    def larger(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 2:
            return leaf * 12
        return jnp.asarray(leaf + rng.uniform(0.1, 0.5, leaf.shape), leaf.dtype)

    return drafter.replace(params=jax.tree.map(larger, drafter.params))


# --- an oracle in numpy: one token at a time, one head at a time ---


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(x: np.ndarray, position: float, rope: Rope) -> np.ndarray:
    """Return one head with RoPE at one position."""
    half = len(x) // 2
    factor = rope.factor if rope.kind == "linear" else 1
    angle = position / factor * rope.theta ** (-np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    )


def block(
    params,
    config: ModelConfig,
    x,
    position: int,
    past: list[tuple[np.ndarray, int]],
    itself: bool = True,
) -> np.ndarray:
    """Return the output of a Llama block at one token.

    ``past`` lists the states that its keys and values are computed from, and their positions.
    """
    sources = [*past, (x, position)] if itself else past
    normed = [(rms(state, params["input_norm"], config.norm_eps), at) for state, at in sources]
    query = rms(x, params["input_norm"], config.norm_eps) @ params["q"]
    size, group, attended = config.head_dim, config.num_heads // config.num_kv_heads, []
    for head in range(config.num_heads):
        here = slice(head // group * size, (head // group + 1) * size)
        q = turn(query[head * size : (head + 1) * size], position, config.rope)
        keys = [turn((state @ params["k"])[here], at, config.rope) for state, at in normed]
        values = [(state @ params["v"])[here] for state, _ in normed]
        scores = np.array([q @ key for key in keys]) / np.sqrt(size)
        weights = np.exp(scores - scores.max()) if len(scores) else scores
        attended.append(
            weights / weights.sum() @ np.array(values) if len(scores) else np.zeros(size)
        )
    x = x + np.concatenate(attended) @ params["o"]
    y = rms(x, params["post_norm"], config.norm_eps)
    gate = y @ params["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (y @ params["up"])) @ params["down"]


def slow_summary(
    drafter: MixtureOfAttentions, layers: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Return the summary of one token.

    ``layers`` has the token's keys and values ``[kv_heads, d]`` in each layer.
    """
    assert drafter.config.lsa is not None
    config, params = drafter.config.lsa.block, numbers(drafter)
    x = [
        np.concatenate([part for head in zip(*layer, strict=True) for part in head])
        for layer in layers
    ]
    outputs = []
    for i, state in enumerate(x):
        past = [(past_state, j) for j, past_state in enumerate(x) if j != i]
        outputs.append(block(params["layer_self_attention"], config, state, i, past))
    return np.mean(outputs, axis=0) @ params["ekv2e"] + params["ekv2e_bias"]


# Every text is padded to LONGEST and every draft to DEEPEST, so that a target compiles once.
LONGEST = 24
DEEPEST = 5


@jax.jit
def read_by_target(target, tokens):
    output, entries = target.score(tokens[None])
    return output.hidden[0], entries


@partial(jax.jit, static_argnames="layers")
def run_last_layers(target, rows, entries, root, layers):
    """Return the output of the target's last layers over a draft.

    The root is at position ``root``, after the other tokens of its text, whose entries are
    ``entries``.
    """
    index = jnp.arange(entries[0][0].shape[2])
    visible = jnp.broadcast_to(index < root, (1, DEEPEST, len(index)))
    at = root + jnp.arange(DEEPEST)[None]
    hidden = target.run(rows[None], layers=layers, positions=at, scratch=[(entries, visible)])[0]
    return target.norm(hidden)[0]


def slow_chain(
    drafter: MixtureOfAttentions,
    target,
    text: list[int],
    drafted: list[int],
) -> np.ndarray:
    """Return the logits ``[n, V]`` after the root and after each drafted token.

    The root is the last token of ``text``.
    """
    params, config = numbers(drafter), drafter.config
    hidden, entries = read_by_target(target, np.pad(text, (0, LONGEST - len(text))))
    root = len(text) - 1
    embeddings = np.asarray(target.params["embed"], np.float64)
    summaries = []
    for t in range(root):
        layers = [
            (np.asarray(k[0, :, t], np.float64), np.asarray(v[0, :, t], np.float64))
            for k, v in entries
        ]
        if config.lsa is not None:
            summaries.append((slow_summary(drafter, layers), t))
        else:
            summaries.append((np.asarray(hidden[t], np.float64), t))
    read, below, expected = text[:-1], np.zeros((DEEPEST, config.self_layer.hidden_size)), []
    for position, token in enumerate([text[-1], *drafted], start=root):
        past = [(embeddings[past_token], at) for at, past_token in enumerate(read)]
        x = block(params["self_attention"], config.self_layer, embeddings[token], position, past)
        x = block(
            params["cross_attention"], config.cross_layer, x, position, summaries, itself=False
        )
        read = [*read, token]
        if config.tli:  # the last layers read the whole draft again
            below[position - root] = x
            layers, rows = drafter.tli_layers(target), jnp.asarray(below, jnp.float32)
            states = run_last_layers(target, rows, entries[slice(*layers)], root, layers)
            x = states[position - root]
        expected.append(np.asarray(target.head(jnp.asarray(x, jnp.float32))))
    return np.array(expected)


def numbers(drafter):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), drafter.params)


VARIANTS = {
    "plain": {},
    "tli": {"tli": 2},
    "no lsa": {"lsa": False},
    "no lsa, tli": {"lsa": False, "tli": 1},
}


def variants(in_suite: str):
    """Mark all variants but ``in_suite``, which has every part, as thorough."""
    return [
        pytest.param(name, marks=[pytest.mark.thorough] * (name != in_suite)) for name in VARIANTS
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", variants("tli"))
def test_drafts_are_those_of_the_definition(name) -> None:
    """Check prompts of different lengths, one of a single token, and accepted tokens in between."""
    target = target_of()
    drafter = strong(target, **VARIANTS[name])
    prompts = np.array([[1, 4, 2, 4, 2], [5, 9, 0, 0, 0], [3, 0, 0, 0, 0]])
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, prompts, np.array([5, 2, 1]), options)
    propose, advance = jax.jit(decoding.propose_step), jax.jit(decoding.advance)
    for step in range(3):
        draft, drafting = propose(target, drafter, state)
        for row in range(3):
            text = np.asarray(state.tokens[row, : int(state.lengths[row])]).tolist()
            drafted = np.asarray(draft.tokens[row, 1:]).tolist()
            expected = slow_chain(drafter, target, text, drafted[:-1]).argmax(-1).tolist()
            assert drafted == expected, (step, row)
        state, _ = advance(target, drafter, drafting, draft)


STATIC = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))


@pytest.mark.full
@pytest.mark.parametrize(
    "shape", [pytest.param(STATIC, marks=pytest.mark.thorough), DynamicTree(3, 3, 9)]
)
def test_nodes_of_a_tree_hang_where_they_say(shape) -> None:
    target = target_of()
    drafter = strong(target, tli=1).replace(draft=shape)
    text = [1, 4, 2, 4, 2]
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, np.array([text]), None, options)
    draft, _ = jax.jit(decoding.propose_step)(target, drafter, state)
    parents, tokens = np.asarray(draft.parents).reshape(-1), np.asarray(draft.tokens[0])
    for parent in set(parents[1:].tolist()):
        path, node = [], parent
        while node > 0:
            path, node = [int(tokens[node]), *path], parents[node]
        children = {int(tokens[child]) for child in np.flatnonzero(parents == parent)}
        logits = slow_chain(drafter, target, text, path)[-1]
        assert children == set(np.argsort(-logits)[: len(children)].tolist()), parent


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
def test_layers_are_summarised_once_for_every_verified_token(monkeypatch) -> None:
    """Check that layer self-attention is not in the program of `propose_step`."""
    target, ran = target_of(), []
    drafter = strong(target)
    original = layer_attention.mean_over_layers

    def counting(params, block, remembered, mesh):
        ran.append(remembered.shape[1])
        return original(params, block, remembered, mesh)

    monkeypatch.setattr(layer_attention, "mean_over_layers", counting)
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, np.array([[1, 4, 2, 4, 2]]), None, options)
    assert ran == [16]  # the prompt, padded
    draft, state = jax.eval_shape(decoding.propose_step, target, drafter, state)
    assert ran == [16]
    jax.eval_shape(decoding.advance, target, drafter, state, draft)
    assert ran == [16, drafter.draft_shape.depth + 1]  # the accepted path


@pytest.mark.full
def test_nothing_is_asked_of_the_target_while_it_drafts() -> None:
    """Check K-step boundedness: a draft does not depend on the target's cache.

    This holds without target layer inference.
    """
    target = target_of()
    drafter = strong(target)
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, np.array([[1, 4, 2, 4, 2]]), None, options)
    lost = state.replace(
        cache=state.cache.replace(layers=jax.tree.map(lambda x: x * jnp.nan, state.cache.layers))
    )
    propose = jax.jit(decoding.propose_step)
    with_cache, without = (propose(target, drafter, rows)[0] for rows in (state, lost))
    np.testing.assert_array_equal(with_cache.tokens, without.tokens)


@pytest.mark.full
def test_no_cache_is_copied_in_the_compiled_loop() -> None:
    """Check the target's cache and the drafter's."""
    target = tiny_target(num_layers=3, num_heads=8, num_kv_heads=4, head_dim=32)
    drafter = MixtureOfAttentions.init(target, jax.random.key(0), Chain(3), tli=1, num_kv_heads=2)
    drafter, state = decoding.start(
        target, drafter, np.array([[1, 4, 2]]), options=GenerationOptions(max_new_tokens=450)
    )
    program = decoding.decode.lower(target, drafter, state, 5).compile().as_text().splitlines()
    for cache in (state.cache, state.drafter.tokens, state.drafter.summaries):
        shape = ",".join(map(str, cache.layers[0][0].shape))
        assert any(f"f32[{shape}]" in line for line in program)
        assert [line for line in program if f"f32[{shape}]" in line and " copy(" in line] == []


def test_the_default_draft_is_the_authors(tmp_path) -> None:
    target = target_of()
    drafter = MixtureOfAttentions.init(target, jax.random.key(0))
    drafter.save_pretrained(tmp_path)
    by_class = MixtureOfAttentions.from_pretrained(tmp_path)
    by_name = load_drafter(str(tmp_path), None, target.config)
    for moa in (drafter, by_class, by_name):
        assert moa.draft == DynamicTree(top_k=8, depth=6, nodes=1 + 62)


@pytest.mark.thorough
def test_without_layer_self_attention_a_target_with_latents_will_do() -> None:
    latent = tiny_config(mla=MLA(8, 4, 4, 4), num_kv_heads=4)
    target = specjax.Target.init(latent, jax.random.key(0))
    target = target.replace(
        params=jax.tree.map(lambda leaf: leaf * 25 if leaf.ndim > 1 else leaf, target.params)
    )
    conformance.check_greedy(
        target, MixtureOfAttentions.init(target, jax.random.key(1), Chain(3), lsa=False, tli=1)
    )


# --- training ---

DOCUMENTS = [[1, 2, 3, 4, 9, 3, 1, 2, 10], [5, 6, 7, 8]]
MASK = [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]
BATCH = batch_of(DOCUMENTS, MASK)


def slow_starts(tokens: int, segments: list[int], mask: list[int], length: int) -> list[int]:
    """Return the first token of the block of each token.

    A block begins at a token of a prompt, and at every multiple of ``length`` from the first token
    of its document on.
    """
    starts = []
    for i in range(tokens):
        start, first = i, segments.index(segments[i])
        while start > first and mask[start - 1] and (start - first) % length:
            start -= 1
        starts.append(start)
    return starts


@pytest.mark.parametrize("length", [1, 2, 3, 5, 12])
def test_blocks_begin_where_they_should(length) -> None:
    segments = np.asarray(BATCH["segments"][0, :-1]).tolist()
    expected = slow_starts(len(segments), segments, MASK, length)
    assert block_starts(BATCH, jnp.array([length]))[0].tolist() == expected
    assert len(set(expected)) < len(expected) or length == 1


@pytest.mark.parametrize("length", [1, 3, 5])
def test_masks_are_those_of_the_definition(length) -> None:
    """Check that a token sees its document before the block, and the block up to itself."""
    segments = np.asarray(BATCH["segments"][0, :-1])
    starts = slow_starts(len(segments), segments.tolist(), MASK, length)
    before, inside = block_masks(BATCH["segments"][:, :-1], jnp.array([starts]))
    for i in range(len(segments)):
        for j in range(len(segments)):
            together = segments[i] == segments[j] and j <= i
            assert bool(before[0, i, j]) == (together and j < starts[i]), (i, j)
            assert bool(inside[0, i, j]) == (together and j >= starts[i]), (i, j)


@pytest.mark.full
@pytest.mark.parametrize("name", variants("tli"))
def test_a_window_is_read_as_if_each_block_were_a_draft(name) -> None:
    """Compare every position of two documents with drafts by the definition."""
    target = target_of()
    student = strong(target, **VARIANTS[name])
    output, entries = score(target, BATCH)
    starts = block_starts(BATCH, jnp.array([5]))
    whole, _ = jax.jit(draft_blocks)(
        student, BATCH, target, output, entries, starts, jnp.array([False])
    )
    tokens = np.asarray(BATCH["tokens"][0]).tolist()
    segments = np.asarray(BATCH["segments"][0]).tolist()
    for i, start in enumerate(np.asarray(starts[0]).tolist()):
        begin = segments.index(segments[i])
        text, drafted = tokens[begin : start + 1], tokens[start + 1 : i + 1]
        expected = slow_chain(student, target, text, drafted)[-1]
        np.testing.assert_allclose(
            target.head(whole[0, i]), expected, atol=2e-3, rtol=1e-4, err_msg=str(i)
        )


@pytest.mark.full
@pytest.mark.parametrize("name", variants("no lsa, tli"))
def test_held_out_chains_are_drafts(name) -> None:
    """Check the chains that the evaluation simulates, at every step, from every root."""
    target = target_of()
    student = strong(target, **VARIANTS[name])
    output, entries = score(target, BATCH)
    states = draft_everywhere(student, BATCH, target, output, entries, 3)
    steps = [target.head(hidden)[0] for hidden in states]
    text = DOCUMENTS[0]
    for root in (0, 1, 4):
        expected = slow_chain(student, target, text[: root + 1], text[root + 1 : root + 3])
        for step in range(3):
            np.testing.assert_allclose(steps[step][root], expected[step], atol=2e-3, rtol=1e-4)


@pytest.mark.full
def test_held_out_windows_are_judged_by_such_chains() -> None:
    """Check acceptance length and accuracies by the definition.

    There is a chain of five from every token that five tokens follow.
    """
    target, text = target_of(), [1, 2, 3, 4, 9, 3, 1, 2, 10, 5]
    student, batch = strong(target), batch_of([text])
    metrics = MoATraining(target="here").evaluation(
        student, {**batch, "key": jax.random.key(0), "progress": 1.0}, target
    )
    likeliest = np.asarray(score(target, batch)[0].logits[0]).argmax(-1)
    lengths, right = [], []
    for root in range(1, len(text) - 5):
        logits = slow_chain(student, target, text[: root + 1], text[root + 1 : root + 5])
        right.append(logits.argmax(-1) == likeliest[root : root + 5])
        lengths.append(1 + np.cumprod(right[-1]).sum())
    np.testing.assert_allclose(metrics["acceptance_length"].value, np.mean(lengths), rtol=1e-5)
    assert 0 < np.mean(right) < 1


def test_blocks_and_staircases_are_drawn_as_asked() -> None:
    method = MoATraining(target="here", staircase_until=0.5)
    for progress, share in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (1.0, 0.0)):
        length, staircase = method.draw(
            jax.random.split(jax.random.key(0), 4000), jnp.array(progress)
        )
        assert set(np.asarray(length).tolist()) == set(range(6, 15))
        assert abs(float(staircase.mean()) - share) < 0.04


@pytest.mark.full
def test_the_staircase_hides_what_lies_before_the_block() -> None:
    """Change a token before the block: a block sees it through the summaries only.

    Without summaries nothing changes.
    """
    target = target_of()
    student = strong(target, lsa=False)
    output, entries = score(target, BATCH)
    starts = block_starts(BATCH, jnp.array([5]))

    def at(tokens, staircase):
        batch = {**BATCH, "tokens": tokens}
        return jax.jit(draft_blocks)(
            student, batch, target, output, entries, starts, jnp.array([staircase])
        )[0][0]

    # The target's output and entries stay the same.
    changed_tokens = BATCH["tokens"].at[0, 1].set(7)
    for staircase in (True, False):
        difference = at(changed_tokens, staircase) - at(BATCH["tokens"], staircase)
        gap = np.abs(np.asarray(difference)).max(-1)
        changed = np.flatnonzero(gap > 1e-4).tolist()
        assert changed == ([1] if staircase else list(range(1, 9))), staircase


@pytest.mark.full
def test_the_objective_is_its_formula() -> None:
    target = target_of()
    student = strong(target, tli=1)
    method = MoATraining(
        target="here",
        tli=1,
        shortest_block=5,
        longest_block=5,
        staircase_until=0.0,
        feature_weight=0.3,
    )
    batch = {**BATCH, "key": jax.random.key(0), "progress": jnp.ones(())}
    loss, metrics = jax.jit(method.objective)(student, batch, target)
    output, entries = score(target, batch, taps=(2,))
    starts = block_starts(batch, jnp.array([5]))
    hidden, first_states = draft_blocks(
        student, batch, target, output, entries, starts, jnp.array([False])
    )
    ours, theirs = (
        np.asarray(jax.nn.log_softmax(x[0]), np.float64)
        for x in (target.head(hidden), output.logits)
    )

    def smooth(a, b):
        gap = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        return np.where(gap < 1, gap**2 / 2, gap - 0.5).mean(-1)

    token = -(np.exp(theirs) * ours).sum(-1)
    feature = smooth(hidden[0], output.hidden[0]) + smooth(first_states[0], output.taps[0, :, 0])
    counted = np.array(MASK, bool)
    np.testing.assert_allclose(metrics["token_loss"], token[counted].sum() / 12, rtol=1e-4)
    np.testing.assert_allclose(loss, (token + 0.3 * feature)[counted].sum() / 12, rtol=1e-4)


@pytest.mark.full
def test_every_parameter_learns() -> None:
    target = target_of()
    method = MoATraining(target="here", tli=1, shortest_block=2, longest_block=4)
    student = method.init(
        jax.random.key(0), StudentInputs(tokenizer=None, counts=np.ones(11), target=target)
    )  # type: ignore[arg-type]
    assert_all_learn(method, student, target)


def assert_all_learn(method, student, target) -> None:
    batch = {**BATCH, "key": jax.random.key(0), "progress": jnp.zeros(())}

    def loss(params):
        return method.objective(student.replace(params=params), batch, target)[0]

    for path, gradient in jax.tree_util.tree_leaves_with_path(
        jax.jit(jax.grad(loss))(student.params)
    ):
        assert np.abs(np.asarray(gradient)).max() > 0, path


# --- the ablation without cross-attention ---


@pytest.mark.full
def test_eagle_reads_summaries_of_all_layers() -> None:
    """Compare the state that EAGLE drafts from with its definition.

    The features of the pairs are the summaries.
    """
    target, text = target_of(), [1, 4, 2, 4, 2]
    drafter = EagleWithLayerAttention.init(target, jax.random.key(3), Chain(2))
    drafter = drafter.replace(
        params=jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim == 2 else leaf, drafter.params)
    )
    entries, embedded = target.score(np.array([text]))[1], target.embed(jnp.array([text[1:]]))
    summaries = []
    for t in range(len(text) - 1):
        layers = [
            (np.asarray(k[0, :, t], np.float64), np.asarray(v[0, :, t], np.float64))
            for k, v in entries
        ]
        summaries.append(slow_summary(drafter, layers))
    features = jnp.asarray(np.array(summaries), jnp.float32)[None]
    causal = jnp.tril(jnp.ones((1, len(text) - 1, len(text) - 1), bool))
    states, _ = drafter.run(features, embedded, jnp.arange(len(text) - 1)[None], causal, ((),))
    options = GenerationOptions(max_new_tokens=4, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, np.array([text]), None, options)
    np.testing.assert_allclose(state.drafter.newest[0, 0], states[0, -1], atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [Eagle1Training, pytest.param(HassTraining, marks=pytest.mark.thorough)]
)
def test_eagle_learns_to_summarise(kind, tmp_path) -> None:
    target, method = target_of(), kind(target="here", lsa=True)
    student = method.init(
        jax.random.key(0), StudentInputs(tokenizer=None, counts=np.ones(11), target=target)
    )  # type: ignore[arg-type]
    assert_all_learn(method, student, target)
    assert method.evaluation(student, BATCH, target)["acceptance_length"].value >= 1
    student.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), Chain(2), target.config, dtype=jnp.float32)
    assert isinstance(again, EagleWithLayerAttention)
    assert again.config == student.config
    jax.tree.map(np.testing.assert_array_equal, again.params, student.params)
    with pytest.raises(
        InputError, match=r"made for a target with .* \(3, 2, 4\), but target has \(3, 4, 4\)"
    ):
        again.check(target_of(num_kv_heads=4))


# --- checkpoints and errors ---


def test_it_is_saved_and_read_again(tmp_path) -> None:
    target = target_of()
    for name, options in VARIANTS.items():
        drafter = strong(target, **options)
        drafter.save_pretrained(tmp_path / name)
        again = load_drafter(str(tmp_path / name), Chain(4), target.config, dtype=jnp.float32)
        assert isinstance(again, MixtureOfAttentions) and again.config == drafter.config
        jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


@pytest.mark.parametrize("kind", [EagleWithLayerAttention, MixtureOfAttentions])
def test_heads_that_all_layers_have_in_place_of_the_model_s_are_what_is_saved(
    kind, tmp_path
) -> None:
    layered, larger = (
        target_of(layers=(Layer(num_kv_heads=1, head_dim=size),) * 3) for size in (4, 6)
    )
    drafter = kind.init(layered, jax.random.key(0), Chain(2))
    drafter.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path, draft=Chain(2))
    assert again.config == drafter.config
    again.check(layered)
    with pytest.raises(
        InputError, match=r"made for a target with .* \(3, 1, 4\), but target has \(3, 1, 6\)"
    ):
        again.check(larger)


def test_the_sizes_of_llama_3_8b_are_the_papers() -> None:
    llama = ModelConfig(
        vocab_size=64,
        hidden_size=32 * 128,
        intermediate_size=14336,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    drafter = jax.eval_shape(
        lambda key: MixtureOfAttentions.init(specjax.Target.init(llama, key), key),
        jax.random.key(0),
    )
    layer, lsa = drafter.config.self_layer, drafter.config.lsa.block
    assert (layer.num_kv_heads, layer.intermediate_size) == (4, 6144)
    assert (lsa.hidden_size, lsa.intermediate_size) == (2048, 3072)
    assert (lsa.num_heads, lsa.num_kv_heads) == (32, 8)
    assert drafter.params["layer_self_attention"]["q"].shape == (2048, 2048)
    assert drafter.params["ekv2e"].shape == (2048, 4096)


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    target = target_of()
    drafter = strong(target)
    with pytest.raises(
        InputError, match=r"made for a target with .* \(11, 16, 3\), but target has \(11, 16, 2\)"
    ):
        drafter.check(tiny_target())
    latent = tiny_config(mla=MLA(8, 4, 4, 4), num_kv_heads=4)
    with pytest.raises(InputError, match="this target stores latents"):
        MixtureOfAttentions.init(specjax.Target.init(latent, jax.random.key(0)), jax.random.key(0))
    layered = tiny_target(**LAYERED["differing"])
    with pytest.raises(
        InputError,
        match=r"layer 1 has \(heads, size\) \(\(1, 8\), .*and layer 0 has \(\(2, 4\), \(2, 4\)\)",
    ):
        MixtureOfAttentions.init(layered, jax.random.key(0))
    sharing = tiny_target(**LAYERED["sharing"])
    with pytest.raises(
        InputError,
        match=r"\(tli=1\) runs layers \[3\], which read the entries of layers before layer 3",
    ):
        MixtureOfAttentions.init(sharing, jax.random.key(0), lsa=False, tli=1).check(sharing)
    with pytest.raises(InputError, match="tli=3: the target has 3 layers"):
        MixtureOfAttentions.init(target, jax.random.key(0), tli=3)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    moa_config = content["moa_config"]
    lsa = moa_config["layer_self_attention"]
    for change, message in [
        ({"target_layer_inference": 3}, "tli=3: the target has 3 layers"),
        ({"target_layer_inference": "1"}, "moa_config: target_layer_inference='1'"),
        (
            {"layer_self_attention": lsa | {"num_attention_heads": 3}},
            "config.json: layer_self_attention: num_attention_heads=3",
        ),
        (
            {"layer_self_attention": lsa | {"target_head_dim": "4"}},
            "layer_self_attention: target_head_dim='4'",
        ),
        (
            {"layer_self_attention": lsa | {"target_num_key_value_heads": 4}},
            "'Ekv2E.weight' has shape",
        ),
    ]:
        file.write_text(json.dumps(content | {"moa_config": moa_config | change}))
        with pytest.raises(CheckpointError, match=message):
            MixtureOfAttentions.from_pretrained(tmp_path)


OF_TARGET = {  # config.json of `target_of(num_kv_heads=4)`, as transformers wrote it at that time
    "_name_or_path": "some/target",
    "architectures": ["MOASpec"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 11,
}
NOT_IN_VLLM = (
    *("_name_or_path", "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id"),
    *("initializer_range", "intermediate_size", "num_hidden_layers", "num_key_value_heads"),
    *("pretraining_tp", "tie_word_embeddings", "use_cache"),
)
BLOCKS = {  # the width, the size of all keys (of 2, 1 and 2 heads) and of the MLP
    "self_attention": (16, 8, 40),
    "cross_attention": (16, 4, 56),
    "layer_self_attention": (32, 16, 72),
}


def published_tensors(bias: bool = False) -> dict[str, np.ndarray]:
    """Return tensors under the authors' names, for blocks of different sizes.

    In drafters for Qwen2 two of the blocks have biases.
    """
    rng = np.random.default_rng(0)
    tensors = {"Ekv2E.weight": rng.normal(size=(16, 32)) * 0.3, "Ekv2E.bias": rng.normal(size=16)}
    for name, (width, keys, intermediate) in BLOCKS.items():
        rows = {"q": width, "k": keys, "v": keys, "o": width}
        matrices = {f"self_attn.{part}_proj": (size, width) for part, size in rows.items()}
        matrices |= {"mlp.gate_proj": (intermediate, width), "mlp.up_proj": (intermediate, width)}
        matrices |= {"mlp.down_proj": (width, intermediate)}
        tensors |= {
            f"{name}.{part}.weight": rng.normal(size=shape) * 0.3
            for part, shape in matrices.items()
        }
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = rng.uniform(0.5, 1.5, width)
        if bias and name != "cross_attention":
            tensors |= {
                f"{name}.self_attn.{part}_proj.bias": rng.normal(size=rows[part]) for part in "qkv"
            }
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def publish(directory, layout: str, bias: bool = False, **changes) -> None:
    """Write a drafter as the authors' training code does, or as their converter for vLLM does."""
    content = OF_TARGET | ({"model_type": "qwen2"} if bias else {})
    if layout == "vllm":
        content = {name: value for name, value in content.items() if name not in NOT_IN_VLLM}
        content |= {
            "model_type": "moa_spec",
            "architectures": ["MOASpecModel"],
            "disable_LSA": False,
            "kv_hidden_size": 32,
        }
        for block, heads, size in (
            ("self_attention", 2, 40),
            ("cross_attention", 1, 56),
            ("layer_self_attention", 2, 72),
        ):
            content |= {f"{block}_num_key_value_heads": heads, f"{block}_intermediate_size": size}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(content | changes))
    save_file(published_tensors(bias), directory / "model.safetensors")


@pytest.mark.parametrize("layout", ["authors", "vllm"])
def test_published_checkpoints_are_read_and_written_back(tmp_path, layout) -> None:
    """Check that each has the sizes of its tensors, and is read back from every layout."""
    publish(tmp_path / "published", layout)
    target = target_of(num_kv_heads=4)
    drafter = load_drafter(str(tmp_path / "published"), None, target.config, dtype=jnp.float32)
    assert isinstance(drafter, MixtureOfAttentions)
    assert drafter.draft == DynamicTree(top_k=8, depth=6, nodes=1 + 62)
    drafter.check(target)
    self_layer, cross = drafter.config.self_layer, drafter.config.cross_layer
    lsa = drafter.config.lsa
    assert lsa is not None and drafter.config.tli == 0

    def sizes(block: ModelConfig) -> tuple[int, int, int, int]:
        return block.num_heads, block.num_kv_heads, block.head_dim, block.intermediate_size

    assert sizes(self_layer) == (4, 2, 4, 40)
    assert sizes(cross) == (4, 1, 4, 56)
    assert sizes(lsa.block) == (4, 2, 8, 72)
    assert (lsa.target_kv_heads, lsa.target_head_dim) == (4, 4)
    # The converter does not save the target's number of layers, so it is not checked.
    assert lsa.target_layers == drafter.config.target_layers == (3 if layout == "authors" else None)
    assert self_layer.rope == Rope(
        theta=100.0, kind="linear", factor=4.0, original_max_positions=512
    )
    assert cross.rope == lsa.block.rope == Rope(theta=100.0)
    tensors = published_tensors()
    np.testing.assert_array_equal(
        drafter.params["cross_attention"]["k"], tensors["cross_attention.self_attn.k_proj.weight"].T
    )
    np.testing.assert_array_equal(drafter.params["ekv2e"], tensors["Ekv2E.weight"].T)
    for again in (layout, "specjax"):
        drafter.save_pretrained(tmp_path / again, layout=again)
        saved = load_file(tmp_path / again / "model.safetensors")
        assert saved.keys() == tensors.keys()
        jax.tree.map(np.testing.assert_array_equal, saved, tensors)
        read = MixtureOfAttentions.from_pretrained(tmp_path / again, dtype=np.float32)
        assert read.config == drafter.config
        jax.tree.map(np.testing.assert_array_equal, read.params, drafter.params)
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("published", layout)
    )
    same = before.keys() & after.keys() - {"rope_scaling"}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    not_written = {"_name_or_path", "attention_dropout", "initializer_range"}
    not_written |= {"pretraining_tp", "use_cache", "mlp_bias"}
    assert {name for name in before if name not in after} <= not_written


@pytest.mark.parametrize("layout", ["authors", "vllm"])
def test_by_name_a_published_checkpoint_has_the_target_layer_inference_that_the_name_says(
    layout, tmp_path
) -> None:
    publish(tmp_path / "published", layout)
    target = target_of(num_kv_heads=4)
    drafter = load_drafter(
        f"moa,tli=1:{tmp_path / 'published'}", Chain(4), target.config, dtype=jnp.float32
    )
    by_class = MixtureOfAttentions.from_pretrained(
        tmp_path / "published", draft=Chain(4), dtype=jnp.float32, tli=1
    )
    assert isinstance(drafter, MixtureOfAttentions)
    assert drafter.config == by_class.config and drafter.config.tli == 1
    assert drafter.fingerprint() == by_class.fingerprint()
    plain = load_drafter(
        f"moa:{tmp_path / 'published'}", Chain(4), target.config, dtype=jnp.float32
    )
    # A client and a server do not fit if only one of them has tli.
    assert plain.fingerprint() != by_class.fingerprint()
    by_class.save_pretrained(tmp_path / "ours")
    with pytest.raises(
        InputError,
        match=r"tli=2: the checkpoint says that it was trained with tli=1; leave tli out",
    ):
        load_drafter(f"moa,tli=2:{tmp_path / 'ours'}", None, target.config, dtype=jnp.float32)
    same = load_drafter(f"moa,tli=1:{tmp_path / 'ours'}", None, target.config, dtype=jnp.float32)
    assert same.config == by_class.config


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "tli"),
    [
        ("vllm", 1),
        *[
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [("vllm", 0), ("authors", 2)]
        ],
    ],
)
def test_published_checkpoints_draft_by_the_definition(tmp_path, layout, tli) -> None:
    publish(tmp_path / "published", layout)
    target = target_of(num_kv_heads=4)
    drafter = MixtureOfAttentions.from_pretrained(
        tmp_path / "published", draft=Chain(4), dtype=jnp.float32, tli=tli
    )
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, np.array([[1, 4, 2, 4, 2]]), None, options)
    assert [
        cache.layers[0][0].shape[1] for cache in (state.drafter.tokens, state.drafter.summaries)
    ] == [2, 1]
    propose, advance = jax.jit(decoding.propose_step), jax.jit(decoding.advance)
    for _ in range(2):
        draft, drafting = propose(target, drafter, state)
        text = np.asarray(state.tokens[0, : int(state.lengths[0])]).tolist()
        drafted = np.asarray(draft.tokens[0, 1:]).tolist()
        assert drafted == slow_chain(drafter, target, text, drafted[:-1]).argmax(-1).tolist()
        state, _ = advance(target, drafter, drafting, draft)


def test_biases_of_a_published_checkpoint_are_told_by_its_tensors(tmp_path) -> None:
    publish(tmp_path / "published", "authors", bias=True)
    drafter = MixtureOfAttentions.from_pretrained(tmp_path / "published", dtype=np.float32)
    config = drafter.config
    assert config.lsa is not None
    assert (config.self_layer.qkv_bias, config.cross_layer.qkv_bias) == (True, False)
    assert drafter.params["layer_self_attention"]["k_bias"].shape == (16,)
    for layout in MixtureOfAttentions.layouts:
        drafter.save_pretrained(tmp_path / layout, layout=layout)
        again = MixtureOfAttentions.from_pretrained(tmp_path / layout, dtype=np.float32)
        lsa = config.lsa if layout != "vllm" else replace(config.lsa, target_layers=None)
        assert again.config.self_layer.qkv_bias and again.config.lsa == lsa
        jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


def test_target_layer_inference_is_asked_for_where_a_checkpoint_does_not_say(tmp_path) -> None:
    publish(tmp_path / "vllm", "vllm")
    drafter = MixtureOfAttentions.from_pretrained(tmp_path / "vllm", tli=3)
    with pytest.raises(InputError, match="tli=3: the target has 3 layers"):
        drafter.check(target_of(num_kv_heads=4))
    publish(tmp_path / "authors", "authors")
    for wrong, message in (
        (3, "tli=3: the target has 3 layers"),
        (-1, "tli=-1: must not be negative"),
        ("1", "tli='1': must be"),
    ):
        with pytest.raises(CheckpointError, match=message):
            MixtureOfAttentions.from_pretrained(tmp_path / "authors", tli=wrong)
    drafter = MixtureOfAttentions.from_pretrained(tmp_path / "authors", tli=2)
    drafter.save_pretrained(tmp_path / "ours")
    for options in ({}, {"tli": 2}):
        read = MixtureOfAttentions.from_pretrained(tmp_path / "ours", **options)
        assert read.config == drafter.config
    with pytest.raises(
        CheckpointError, match=r"config\.json: tli=0: .* trained with tli=2; leave tli out"
    ):
        MixtureOfAttentions.from_pretrained(tmp_path / "ours", tli=0)


def test_a_checkpoint_from_before_cross_attention_had_sizes_is_read(tmp_path) -> None:
    drafter = strong(target_of(), tli=1)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    del content["moa_config"]["cross_attention"]
    file.write_text(json.dumps(content))
    assert MixtureOfAttentions.from_pretrained(tmp_path).config == drafter.config


def test_what_a_published_layout_cannot_say_is_refused(tmp_path) -> None:
    publish(tmp_path / "vllm", "vllm")
    drafter = MixtureOfAttentions.from_pretrained(tmp_path / "vllm", dtype=np.float32)
    with pytest.raises(
        InputError, match=r"its config\.json is the target's, .* give target=DIRECTORY"
    ):
        drafter.save_pretrained(tmp_path / "no", layout="authors")
    target_of(num_kv_heads=2).save_pretrained(tmp_path / "other")
    with pytest.raises(
        InputError,
        match=r"target=.*other': it has .* \(11, 16, 3, 4, 2, 4\), .* needs \(11, 16, 3, 4, 4, 4\)",
    ):
        drafter.save_pretrained(tmp_path / "no", layout="authors", target=str(tmp_path / "other"))
    target_of(num_kv_heads=4).save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "authors", layout="authors", target=str(tmp_path / "target"))
    read = MixtureOfAttentions.from_pretrained(tmp_path / "authors", dtype=np.float32)
    assert (read.config.self_layer, read.config.cross_layer) == (
        drafter.config.self_layer,
        drafter.config.cross_layer,
    )
    with pytest.raises(
        InputError,
        match=r"layout='sglang': a Mixture of Attentions drafter .* 'specjax', 'authors', 'vllm'",
    ):
        drafter.save_pretrained(tmp_path / "no", layout="sglang")
    odd = MixtureOfAttentions.init(
        target_of(num_heads=6, num_kv_heads=2, head_dim=4), jax.random.key(0)
    )
    with pytest.raises(
        InputError,
        match=r"layout='vllm': all blocks need the target's number of query heads, .* \[6, 6, 4\]",
    ):
        odd.save_pretrained(tmp_path / "no", layout="vllm")
    for changes, message in [
        (
            {"self_attention_num_key_value_heads": 3},
            "num_heads=4 is not a multiple of num_kv_heads=3",
        ),
        (
            {"cross_attention_intermediate_size": 57},
            "'cross_attention.mlp.down_proj.weight' has shape",
        ),
        ({"kv_hidden_size": 36}, "reads 36 numbers, which are no keys and values of size 4"),
        ({"disable_LSA": True}, "is no part of a Mixture of Attentions drafter"),
        (
            {"layer_self_attention_intermediate_size": "72"},
            "layer_self_attention_intermediate_size='72'",
        ),
    ]:
        publish(tmp_path / message[:9], "vllm", **changes)
        with pytest.raises(CheckpointError, match=message):
            MixtureOfAttentions.from_pretrained(tmp_path / message[:9])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            MoATraining(target="here", shortest_block=4, longest_block=3),
            "shortest_block=4, method.longest_block=3",
        ),
        (
            MoATraining(target="here", longest_block=9),
            "longest_block=9: must be from 1 to data.window=8",
        ),
        (MoATraining(target="here", longest_block=8, staircase_until=2.0), "staircase_until=2.0"),
        (MoATraining(target="here", longest_block=8, tli=-1), "tli=-1"),
    ],
)
def test_options_out_of_range_are_refused(method, message) -> None:
    with pytest.raises(ConfigError, match=message):
        method.check(8)


def test_rope_of_cross_attention_is_never_stretched() -> None:
    config = strong(target_of()).config
    assert config.self_layer.rope == STRETCHED
    assert config.cross_layer.rope == Rope(theta=100.0) and config.lsa is not None
    assert config.lsa.block.rope == config.cross_layer.rope
