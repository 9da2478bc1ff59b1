"""Coupled sampling: a text depends only on the target, the prompt, the key and the settings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax import decoding
from specjax.decoding import loop, verification
from specjax.decoding.options import GenerationOptions, default_rule
from specjax.drafters import DraftModel, NoDraft, PromptLookup
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree, UnionTree
from specjax.errors import InputError
from specjax.evaluation import conformance, metrics
from specjax.sampling import Sampling
from tests.conftest import FEW_TOKENS, SHAPES, outputs, tiny_target

# Every temperature with every kind of truncation, and a greedy row among them.
SETTINGS = [(0.0, 1.0, 0, 0.0)]
SETTINGS += [
    (t, *cut) for t in (0.6, 1.0, 1.5) for cut in ((1.0, 0, 0.0), (0.9, 0, 0.0), (1.0, 5, 0.05))
]
MIXED = Sampling(*map(np.array, zip(*[(t, k, p, m) for t, p, k, m in SETTINGS], strict=True)))
ROWS, NEW = len(SETTINGS), 24
PROMPTS = np.random.default_rng(0).integers(0, 11, (ROWS, 6))
LENGTHS = np.resize([6, 1, 3], ROWS)
KEYS = jax.random.split(jax.random.key(5), ROWS)


def drafters() -> dict:
    small = tiny_target(seed=5, num_layers=1)
    return {
        **{
            f"draft model, {name}": DraftModel(small, draft=shape) for name, shape in SHAPES.items()
        },
        "prompt lookup": PromptLookup(draft=Chain(3)),
    }


@pytest.fixture(scope="module")
def run(target):
    return partial(specjax.generate, target, rule="coupled", max_new_tokens=NEW, sampling=MIXED)


@pytest.fixture(scope="module")
def plain(run) -> list[list[int]]:
    return outputs(run(None, PROMPTS, LENGTHS, key=KEYS))


@pytest.mark.full
@pytest.mark.thorough_except("draft model, dynamic")
@pytest.mark.parametrize("name", ["draft model, dynamic", "prompt lookup"])
def test_no_drafter_changes_the_text_at_any_setting(run, plain, name) -> None:
    """Check many settings; `conformance.check_coupled` checks every drafter at fewer settings."""
    assert outputs(run(drafters()[name], PROMPTS, LENGTHS, key=KEYS)) == plain


def test_rows_differ_and_keys_matter(run, plain) -> None:
    alike = Sampling(temperature=np.ones(ROWS), top_p=0.99)
    result = run(None, np.tile(PROMPTS[:1], (ROWS, 1)), key=jax.random.key(5), sampling=alike)
    assert len({tuple(text) for text in outputs(result)}) == ROWS
    again = outputs(run(None, PROMPTS, LENGTHS, key=jax.random.split(jax.random.key(6), ROWS)))
    assert again[0] == plain[0]  # the greedy row
    assert sum(a == b for a, b in zip(again[1:], plain[1:], strict=True)) <= 1


@pytest.mark.full
@pytest.mark.thorough_except("None")
@pytest.mark.parametrize("name", [None, "draft model, dynamic"])
def test_a_row_is_the_same_alone_and_in_any_batch(target, run, plain, name) -> None:
    drafter = drafters()[name] if name else None
    order = np.random.default_rng(1).permutation(ROWS)
    settings = Sampling(**{name: values[order] for name, values in MIXED.by_row(ROWS).items()})
    moved = outputs(
        run(drafter, PROMPTS[order], LENGTHS[order], key=KEYS[order], sampling=settings)
    )
    assert moved == [plain[row] for row in order]
    for row in (0, 2, 6) if drafter is None else (2,):
        only_row, (temperature, top_p, top_k, min_p) = slice(row, row + 1), SETTINGS[row]
        alone = run(
            drafter,
            PROMPTS[only_row],
            LENGTHS[only_row],
            key=KEYS[only_row],
            sampling=Sampling(temperature, top_k, top_p, min_p),
        )
        assert outputs(alone)[0] == plain[row]


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 3])
def test_streaming_gives_the_same_text(target, plain, steps) -> None:
    options = {"max_new_tokens": NEW, "sampling": MIXED, "key": KEYS, "rule": "coupled"}
    *_, last = specjax.stream(
        target, drafters()["draft model, static"], PROMPTS, LENGTHS, **options, steps=steps
    )
    assert outputs(last) == plain


@pytest.mark.full
def test_a_generation_that_is_cut_continues_with_the_same_text(run, plain) -> None:
    """Check that a text continues the same from its own output with the same keys.

    The random numbers belong to the position.
    """
    cut = LENGTHS + np.resize([1, 7, 12], ROWS)
    prompts = np.zeros((ROWS, cut.max()), int)
    for row, length in enumerate(cut):
        prompts[row, :length] = plain[row][:length]
    rest = run(
        drafters()["draft model, chain"], prompts, cut, key=KEYS, max_new_tokens=LENGTHS + NEW - cut
    )
    assert outputs(rest) == plain


@pytest.mark.full
@pytest.mark.parametrize("draws", [25_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(None, marks=pytest.mark.thorough),
        "draft model",
        pytest.param("prompt lookup", marks=pytest.mark.thorough),
    ],
)
def test_the_text_has_the_exact_distribution(name, draws) -> None:
    conformance.check_distribution(
        few(), {None: None, **small()}[name], rule="coupled", draws=draws
    )


def few() -> specjax.Target:
    return tiny_target(seed=2, **FEW_TOKENS)


def small() -> dict:
    model = tiny_target(seed=5, num_layers=1, **FEW_TOKENS)
    return {
        "draft model": DraftModel(model, draft=DynamicTree(top_k=3, depth=2, nodes=7)),
        "prompt lookup": PromptLookup(),
    }


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
def test_noise_that_serves_two_positions_fails_the_distribution(monkeypatch) -> None:
    keys = loop.position_keys
    monkeypatch.setattr(
        loop, "position_keys", lambda row_keys, positions: keys(row_keys, positions // 2)
    )
    assert (
        max(conformance.p_values(few(), None, rule="coupled", draws=25_000))
        < conformance.FALSE_ALARM
    )


@struct.dataclass
class OtherNoise(DraftModel):
    """A drafter that drafts with other random numbers than the target's."""

    def propose(self, target, state, root, sampling, keys, active):
        own_keys = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(keys)
        return super().propose(target, state, root, sampling, own_keys, active)


@pytest.mark.full
def test_a_drafter_with_noise_of_its_own_is_accepted_less_and_changes_nothing(run, plain) -> None:
    drafter = drafters()["draft model, static"]
    independent = run(
        OtherNoise(drafter.model, draft=drafter.draft_shape), PROMPTS, LENGTHS, key=KEYS
    )
    assert outputs(independent) == plain
    same = run(drafter, PROMPTS, LENGTHS, key=KEYS)
    assert (
        metrics.summarise(independent.stats).acceptance_length
        < metrics.summarise(same.stats).acceptance_length - 0.2
    )


@pytest.mark.full
@pytest.mark.thorough_except("sampling0")
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.5, top_p=0.5)]
)
def test_children_beyond_a_truncation_are_the_next_likely_ones(target, sampling) -> None:
    """Check that a drafter's further children are useful if truncation leaves few tokens.

    The target may keep a token that the drafter's truncation drops. Here both keep about two
    tokens.
    """
    drafter = drafters()["draft model, static"]
    lengths = {}
    for rule in ("independent", "coupled"):
        prompts = np.tile(PROMPTS, (4, 1))
        result = specjax.generate(
            target, drafter, prompts, max_new_tokens=64, sampling=sampling, rule=rule
        )
        lengths[rule] = metrics.summarise(result.stats).acceptance_length
    assert lengths["coupled"] > lengths["independent"], lengths


@pytest.mark.full
def test_a_perfect_drafter_is_always_right(target, run) -> None:
    result = run(DraftModel(target, draft=Chain(3)), PROMPTS, LENGTHS, key=KEYS)
    assert metrics.summarise(result.stats).acceptance_length == 4.0


@pytest.mark.thorough  # one key that judges and draws is among the mutants
@pytest.mark.usefixtures("compiled_anew")
def test_numbers_that_draft_and_residual_share_bias_the_other_rules(monkeypatch) -> None:
    """Check that shared noise makes a rule other than matching fail the distribution.

    Equal noise is exact only if the rule asks for nothing but equality. Here the random numbers of
    a rejected token draw the next one too.
    """
    keys_of_step, split = loop._keys_of_step, verification.split_keys

    def shared(state, depth):
        keys, draft_keys, _ = keys_of_step(state, depth)
        return keys, draft_keys, draft_keys[0]

    def as_the_drafter_does(keys, count):
        accept_keys, _ = split(keys, count)
        return accept_keys, keys

    drafter = DraftModel(tiny_target(seed=5, num_layers=1, **FEW_TOKENS), draft=Chain(1))
    monkeypatch.setattr(loop, "_keys_of_step", shared)
    monkeypatch.setattr(verification, "split_keys", as_the_drafter_does)
    # One token is enough: it is the draft, or it is drawn in place of the draft.
    (p_value,) = conformance.p_values(
        few(), drafter, [Sampling()], rule="rejection", draws=50_000, horizon=1
    )
    assert p_value < conformance.FALSE_ALARM


def test_the_default_rules(target) -> None:
    assert {name: default_rule(shape) for name, shape in SHAPES.items()} == {
        "chain": "independent",
        "adaptive": "independent",
        "static": "coupled",
        "dynamic": "coupled",
        "sampled": "independent",
    }
    drafter = DraftModel(tiny_target(seed=5, num_layers=1), draft=StaticTree(((0,), (1,))))
    for rule, expected in ((None, "coupled"), ("independent", "independent")):
        _, state = decoding.start(
            target, drafter, [[1]], options=GenerationOptions(sampling=Sampling(), rule=rule)
        )
        assert state.sampling.rule == expected


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_rules_of_chains_are_refused_for_trees(target, rule) -> None:
    """Check that the rule is refused rather than replaced by another.

    A user who compares drafters by one rule must be told which drafters it does not fit.
    """
    model, options = (
        tiny_target(seed=5, num_layers=1),
        GenerationOptions(sampling=Sampling(), rule=rule),
    )
    # As many nodes as levels, and yet they may branch.
    branching = (DynamicTree(2, 3, 4), UnionTree((Chain(1), Chain(4)), most=4))
    for shape in branching:
        with pytest.raises(InputError, match="verifies chains, but the draft is a"):
            options.rule_for(shape)
    for name, shape in SHAPES.items():
        if name in ("chain", "adaptive"):
            assert options.rule_for(shape) == rule
        else:
            with pytest.raises(
                InputError, match=f"rule='{rule}': verifies chains, but the draft is a {name}"
            ):
                decoding.start(target, DraftModel(model, draft=shape), [[1]], options=options)
    assert {options.rule_for(drafter.draft_shape) for drafter in (NoDraft(), PromptLookup())} == {
        rule
    }


@pytest.mark.full
def test_of_a_certain_q_the_rules_of_chains_come_to_matching() -> None:
    """Check that every rule of chains accepts equally often if q is one-hot.

    So copied tokens, which have no q, are verified as the rule says.
    """
    p, x, rows = (
        np.random.default_rng(0).dirichlet(np.ones(5), 4).astype(np.float32),
        np.array([0, 1, 2]),
        20_000,
    )
    p[np.arange(3), x] += 1  # accepted often
    p /= p.sum(axis=1, keepdims=True)
    reached = np.append(np.cumprod([1.0, *p[np.arange(3), x]]), 0.0)
    sampling, keys = Sampling().rows(rows), jax.random.split(jax.random.key(0), rows)

    def every_row(values: np.ndarray) -> jax.Array:
        return jnp.broadcast_to(values, (rows, *values.shape))

    for rule, q in (
        ("independent", None),
        ("block", every_row(np.eye(5)[x])),
        ("rejection", every_row(np.eye(5)[x])),
    ):
        draft = Draft.chain(jnp.zeros(rows, int), every_row(x), q)
        verdict = verification.verify(
            draft, jnp.log(every_row(p)), sampling.replace(rule=rule), keys
        )
        counts = np.bincount(np.asarray(verdict.count) - 1, minlength=4)
        assert conformance.g_test(counts, reached[:-1] - reached[1:]) >= conformance.FALSE_ALARM, (
            rule
        )
