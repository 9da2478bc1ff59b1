"""The loop: lossless end to end, rows that stand alone, ends in the middle of a block, and nothing compiled twice."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax.decoding import engine
from specjax.drafters import DraftModel, EarlyExit, NoDraft, PromptLookup
from specjax.errors import InputError
from specjax.evaluation import conformance, metrics
from specjax.sampling import Sampling
from specjax.tree import Chain, DynamicTree, SampledTree, StaticTree, complete_tree, halvings
from tests.conftest import compilations, tiny_target

PROMPTS = np.array([[1, 4, 2, 4, 2, 7], [3, 0, 0, 0, 0, 0], [5, 9, 10, 0, 0, 0]])
LENGTHS = np.array([6, 1, 3])


def drafters(target, length: int = 3) -> dict:
    small = tiny_target(seed=5, num_layers=1, vocab_size=11 if target is None else target.config.vocab_size)
    return {
        "draft model": DraftModel(model=small, draft=Chain(length)),
        "prompt lookup": PromptLookup(draft=Chain(length)),
        "early exit": EarlyExit(layers=1, draft=Chain(length)),
        "adaptive draft model": DraftModel(model=small, draft=Chain(length, stop_below=0.3)),
        "dynamic draft model": DraftModel(model=small, draft=DynamicTree(top_k=3, depth=length, nodes=8)),
        "sampled draft model": DraftModel(model=small, draft=SampledTree((2,) * length)),
        "static early exit": EarlyExit(layers=1, draft=StaticTree(complete_tree((2, 1, 2)[:length]))),
    }


NAMES = list(drafters(None))
ENDINGS = ["draft model", "prompt lookup", "dynamic draft model", "static early exit"]  # of every way to draft one


def outputs(result) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(np.asarray(result.tokens), result.lengths, strict=True)]


def greedy_oracle(target, prompt: list[int], count: int, eos=()) -> list[int]:
    """One token at a time, the whole text read again each time, no cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = forward(target, padded).logits
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
        if tokens[-1] in eos:
            break
    return tokens


forward = jax.jit(lambda target, tokens: target.forward(tokens)[0])


@pytest.mark.parametrize("name", [None, *NAMES])
def test_greedy_equals_decoding_without_a_cache(target, name) -> None:
    drafter = drafters(target)[name] if name else None
    result = specjax.generate(target, drafter, PROMPTS, LENGTHS, max_new_tokens=40)
    for row, length in enumerate(LENGTHS):
        assert outputs(result)[row] == greedy_oracle(target, PROMPTS[row, :length].tolist(), 40)


@pytest.mark.parametrize("name", [None, "adaptive draft model"])
def test_a_large_cache_is_read_as_far_as_it_is_filled(target, name, monkeypatch) -> None:
    """Rows of different lengths, across the boundary between its two compiled parts."""
    monkeypatch.setattr(engine, "LARGE_CACHE", 40)
    drafter = drafters(target)[name] if name else None
    result = specjax.generate(target, drafter, PROMPTS, LENGTHS, max_new_tokens=43)
    assert engine.cache_parts(PROMPTS.shape[1] + 43 + 4) == (6, 53)
    for row, length in enumerate(LENGTHS):
        assert outputs(result)[row] == greedy_oracle(target, PROMPTS[row, :length].tolist(), 43)


@struct.dataclass
class DropsUnsure(DraftModel):
    """Ends a draft *before* its first improbable token: the token is judged and then thrown away."""

    def propose(self, target, state, root, sampling, keys):
        draft, state = super().propose(target, state, root, sampling, keys)
        sure = jnp.take_along_axis(draft.q[:, :-1], draft.tokens[:, 1:, None], axis=2)[..., 0] >= 0.3
        kept = jnp.cumprod(sure, axis=1).astype(bool)
        return replace(draft, valid=draft.valid.at[:, 1:].set(draft.valid[:, 1:] & kept)), state

    @property
    def node_counts(self):
        return (1, *halvings(self.draft.nodes))


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_a_stop_rule_that_drops_the_improbable_token_fails_the_same_test(rule) -> None:
    target = tiny_target(seed=2, vocab_size=4, num_layers=2)
    kept = drafters(target, length=2)["adaptive draft model"]
    drafter = DropsUnsure(model=kept.model, draft=kept.draft)
    for distance, bound in conformance.distances(target, drafter, [Sampling()], rule=rule, draws=100_000):
        assert distance > 3 * bound


@pytest.mark.parametrize("name", [None, "dynamic draft model"])
def test_a_row_is_the_same_alone(target, name) -> None:
    """As in any batch, which the conformance suite sees to."""
    drafter = drafters(target)[name] if name else None
    keys = jax.random.split(jax.random.key(3), 3)
    run = partial(specjax.generate, target, drafter, max_new_tokens=30)
    together = run(PROMPTS, LENGTHS, sampling=Sampling(temperature=np.array([0.0, 1.0, 0.7]), top_p=0.9), key=keys)
    for row, temperature in enumerate((0.0, 1.0, 0.7)):
        one = slice(row, row + 1)
        alone = run(PROMPTS[one], LENGTHS[one], sampling=Sampling(temperature=temperature, top_p=0.9), key=keys[one])
        assert outputs(alone)[0] == outputs(together)[row]


@pytest.mark.parametrize("name", ENDINGS)
def test_end_of_sequence_inside_an_accepted_block(target, name) -> None:
    full = outputs(specjax.generate(target, None, PROMPTS, LENGTHS, max_new_tokens=40))
    drafter = drafters(target)[name]
    for eos in range(target.config.vocab_size):  # token 0 too
        result = specjax.generate(target, drafter, PROMPTS, LENGTHS, max_new_tokens=40, eos_token_ids=(eos,))
        for row, length in enumerate(LENGTHS):
            new = full[row][length:]
            expected = new[: new.index(eos) + 1] if eos in new else new
            assert outputs(result)[row] == full[row][:length] + expected
            summary = metrics.summarise(result.stats, row)
            assert summary.emitted == len(expected)
            assert summary.accepted <= summary.emitted


@pytest.mark.parametrize("name", ENDINGS)
def test_the_limit_falls_inside_an_accepted_block(target, name) -> None:
    full = outputs(specjax.generate(target, None, PROMPTS, LENGTHS, max_new_tokens=12))
    for limits in ([1, 2, 12], [12, 5, 6], [7, 12, 3], [4, 11, 12]):  # one shape, one compilation
        result = specjax.generate(target, drafters(target)[name], PROMPTS, LENGTHS, max_new_tokens=np.array(limits))
        for row, length in enumerate(LENGTHS):
            assert outputs(result)[row] == full[row][: length + limits[row]]
            assert metrics.summarise(result.stats, row).emitted == limits[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_full_acceptance_for_200_steps(temperature, rule) -> None:
    """Drafter = target: after full acceptance the draft model has yet to read its own last token."""
    target = tiny_target(max_positions=1024)
    drafter = DraftModel(model=target, draft=Chain(3))
    result = specjax.generate(
        target, drafter, PROMPTS, LENGTHS, max_new_tokens=800, sampling=Sampling(temperature=temperature), rule=rule
    )
    for row in range(3):
        summary = metrics.summarise(result.stats, row)
        assert (summary.steps, summary.acceptance_length, summary.acceptance_rate) == (200, 4.0, 1.0)
        assert summary.histogram == (0, 0, 0, 0, 200)
        assert summary.by_position == (1.0, 1.0, 1.0)


def test_full_acceptance_of_a_tree_for_200_steps() -> None:
    """The path ends at a leaf every time, which the draft model has yet to read."""
    target = tiny_target(max_positions=1024)
    drafter = DraftModel(model=target, draft=StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))))
    result = specjax.generate(target, drafter, PROMPTS, LENGTHS, max_new_tokens=800)
    for row in range(3):
        summary = metrics.summarise(result.stats, row)
        assert (summary.steps, summary.acceptance_length, summary.drafted) == (200, 4.0, 5 * 200)
        assert summary.by_position == (1.0, 1.0, 1.0)


def test_a_long_prompt_is_read_in_chunks(monkeypatch) -> None:
    from specjax.models import transformer

    target = tiny_target()
    prompt = np.random.default_rng(0).integers(0, 11, (2, 45))
    lengths = np.array([45, 17])
    whole = target.prefill(jnp.asarray(prompt), jnp.asarray(lengths), 60, taps=(1,))
    monkeypatch.setattr(transformer, "PREFILL_CHUNK", 16)
    output, cache = target.prefill(jnp.asarray(prompt), jnp.asarray(lengths), 60, taps=(1,))
    np.testing.assert_allclose(output.hidden, whole[0].hidden, atol=1e-4)
    np.testing.assert_allclose(output.taps, whole[0].taps, atol=1e-4)
    np.testing.assert_array_equal(cache.length, lengths - 1)
    for (keys, values), (whole_keys, whole_values) in zip(cache.layers, whole[1].layers, strict=True):
        np.testing.assert_allclose(keys[:, :, :45], whole_keys[:, :, :45], atol=1e-4)
        np.testing.assert_allclose(values[:, :, :45], whole_values[:, :, :45], atol=1e-4)


@pytest.mark.parametrize("name", ENDINGS)
def test_stream_yields_what_generate_returns(target, name) -> None:
    options = {"max_new_tokens": 30, "sampling": Sampling(temperature=0.9), "key": jax.random.key(1)}
    whole = specjax.generate(target, drafters(target)[name], PROMPTS, LENGTHS, **options)
    parts = list(specjax.stream(target, drafters(target)[name], PROMPTS, LENGTHS, **options, steps=2))
    assert outputs(parts[-1]) == outputs(whole)
    assert metrics.summarise(parts[-1].stats) == metrics.summarise(whole.stats)
    for earlier, later in itertools.pairwise(parts):
        assert np.all(earlier.lengths <= later.lengths)
        for a, b in zip(outputs(earlier), outputs(later), strict=True):
            assert b[: len(a)] == a


@pytest.mark.parametrize("name", [None, *NAMES])
def test_a_second_call_compiles_nothing(target, name) -> None:
    drafter = drafters(target)[name] if name else None
    run = partial(specjax.generate, target, drafter, max_new_tokens=20)
    run(PROMPTS, LENGTHS, sampling=Sampling(temperature=0.5, top_p=0.9), key=jax.random.key(0))
    before = compilations()
    other = Sampling(temperature=np.array([0.0, 2.0, 1.0]), top_k=3)
    run((PROMPTS + 1) % 11, LENGTHS[::-1].copy(), sampling=other, key=jax.random.key(9))
    assert compilations() == before
    run(PROMPTS[:, :5], LENGTHS - (LENGTHS > 5), key=jax.random.key(9))
    assert compilations() > before  # another shape: the counter counts


def test_the_state_is_donated(target) -> None:
    _, state = engine.start(target, None, PROMPTS, LENGTHS, max_new_tokens=20)
    engine.decode(target, NoDraft(), state, 5)
    assert all(buffer.is_deleted() for buffer in jax.tree.leaves(state.cache))


@pytest.mark.parametrize("name", [None, *NAMES])
def test_the_compiled_loop_updates_caches_in_place_and_never_leaves_the_device(name) -> None:
    """The state is aliased to the result, no buffer of a cache's shape is copied, all scratch space together is smaller than
    one layer's keys or a few times the attention scores, and nothing is sent to the host. One row: with more of them XLA finds
    the fast products by itself.
    """
    target = tiny_target(num_heads=8, num_kv_heads=4, head_dim=32)
    drafter, state = engine.start(
        target, drafters(target)[name] if name else None, PROMPTS[:1], max_new_tokens=450, sampling=Sampling()
    )
    compiled = engine.decode.lower(target, drafter, state, 5).compile()
    keys = state.cache.layers[0][0]
    shape = ",".join(map(str, keys.shape))
    program = compiled.as_text().splitlines()
    assert [line for line in program if f"f32[{shape}]" in line and " copy(" in line] == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(buffer.nbytes for buffer in jax.tree.leaves(state.cache))
    # Attention scores of all nodes, before and after the softmax, are the largest of what is computed in a step.
    scores = target.config.num_heads * drafter.draft.nodes * state.cache.capacity * 4
    assert memory.temp_size_in_bytes < max(keys.nbytes, 3 * scores)
    transfers = ("infeed(", "outfeed(", " send(", " recv(", "callback")
    assert [line for line in program if any(word in line for word in transfers)] == []


def test_statistics_agree_with_each_other(target) -> None:
    result = specjax.generate(target, drafters(target)["early exit"], PROMPTS, LENGTHS, max_new_tokens=60)
    for row in range(3):
        stats = jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], result.stats)
        assert stats.histogram.sum() == stats.steps
        assert stats.drafted == stats.drafted_at.sum() == 3 * stats.steps
        assert stats.accepted == stats.accepted_at.sum()
        assert metrics.summarise(result.stats, row).emitted == 60


BAD = [
    ({"tokens": [[]]}, "empty prompt"),
    ({"tokens": [[1, 2]], "lengths": [0]}, "empty prompt"),
    ({"tokens": [[1, 2]], "lengths": [3]}, "lengths=3"),
    ({"tokens": [[1, 11]]}, "id 11 is outside the vocabulary of 11"),
    ({"tokens": [[-1, 1]]}, "id -1 is outside"),
    ({"tokens": [[0.5]]}, "must be whole numbers"),
    ({"tokens": [1, 2]}, r"\[batch, prompt\]"),
    ({"tokens": [[1] * 500]}, "512 positions"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"eos_token_ids": (11,)}, r"eos_token_ids=\[11\]"),
    ({"sampling": Sampling(temperature=-0.1)}, "temperature=-0.1"),
    ({"sampling": Sampling(top_p=0.0)}, "top_p=0"),
    ({"sampling": Sampling(top_p=1.1)}, r"top_p=1\.1"),
    ({"sampling": Sampling(top_k=-1)}, "top_k=-1"),
    ({"sampling": Sampling(min_p=2)}, "min_p=2"),
    ({"sampling": Sampling(temperature=[1.0, 2.0, 3.0])}, "one for each of the 1 rows"),
    ({"rule": "argmax"}, "rule='argmax'"),
    ({"tokens": [[1, 2], [3]]}, "right-pad them"),
    ({"eos_token_ids": 2}, r"give a sequence of ids, such as \(2,\)"),
    ({"key": 0}, "key=0: give a random key"),
    ({"max_new_tokens": 2**32 + 3}, "512 positions"),
    ({"key": jax.random.split(jax.random.key(0), 3)}, "one for each of the 1 rows"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused_by_name(target, change, message) -> None:
    arguments = {"tokens": [[1, 2]], "max_new_tokens": 20} | change
    with pytest.raises(InputError, match=message):
        specjax.generate(target, None, **arguments)


def test_a_drafter_that_does_not_fit_is_refused(target) -> None:
    other = DraftModel(model=tiny_target(vocab_size=12))
    with pytest.raises(InputError, match="vocabulary of 12 tokens and target one of 11"):
        specjax.generate(target, other, [[1]])
    for layers in (0, 3):
        with pytest.raises(InputError, match=rf"EarlyExit\(layers={layers}\): the target has 3"):
            specjax.generate(target, EarlyExit(layers=layers), [[1]])
    with pytest.raises(InputError, match="max_ngram=0"):
        specjax.generate(target, PromptLookup(max_ngram=0), [[1]])
