"""Test drafters that draft one tree together."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax import conformance, decoding, sharding
from specjax.decoding.loop import advance, propose_step
from specjax.decoding.options import GenerationOptions, default_rule
from specjax.drafters import (
    Draft,
    Drafter,
    DraftModel,
    Eagle,
    Eagle3,
    EarlyExit,
    Medusa,
    NoDraft,
    PromptLookup,
    Suffix,
    Together,
    TokenRecycling,
    WithPrediction,
)
from specjax.drafters.methods.draft_model import DraftModelState
from specjax.drafters.registry import load_drafter, split_name
from specjax.drafts.names import parse_shape
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree, UnionTree
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models import params
from specjax.sampling import Sampling
from specjax.serving import Engine
from tests.conftest import FEW_TOKENS, SHAPES, tiny_config, tiny_target

PROMPTS = np.array([[1, 4, 2, 1, 4, 2], [3, 3, 5, 8, 0, 0], [9, 0, 0, 0, 0, 0]])
LENGTHS = np.array([6, 4, 1])


@struct.dataclass
class Fixed(Drafter[tuple[()]]):
    """A drafter that always drafts the same ``tokens [D]``, or ``[B, D]``; or nothing."""

    tokens: jax.Array
    draft: Chain = struct.field(pytree_node=False, default=Chain(3))
    silent: bool = struct.field(pytree_node=False, default=False)

    def propose(self, target, state, root, sampling, keys, active):
        drafted = jnp.broadcast_to(self.tokens, (root.shape[0], self.tokens.shape[-1]))
        valid = jnp.full(drafted.shape, not self.silent)
        return Draft.chain(root, drafted, valid=valid), state


@struct.dataclass
class Silent(Fixed):
    @property
    def node_counts(self):
        return (1, self.draft_shape.nodes)


def draft_model(shape, **sizes) -> DraftModel:
    return DraftModel(tiny_target(seed=5, num_layers=1, **sizes), draft=shape)


PAIRS = {
    "tree and copies": lambda target: (draft_model(SHAPES["dynamic"]), PromptLookup(draft=4)),
    "two trees": lambda target: (
        Eagle3.init(target, jax.random.key(3), SHAPES["static"]),
        TokenRecycling(successors=3, draft=SHAPES["dynamic"]),
    ),
    "sampled tree and copies": lambda target: (
        draft_model(SHAPES["sampled"]),
        PromptLookup(draft=3),
    ),
    "three": lambda target: (
        EarlyExit(layers=1, draft=Chain(2)),
        draft_model(SHAPES["adaptive"]),
        WithPrediction(NoDraft(), jnp.array([3, 1, 4, 1, 5, 9, 2, 6]), longest=3),
    ),
    "earlier text and a tree": lambda target: (
        Suffix.of_texts([[1, 4, 2, 7, 3, 1, 4, 2]], draft=SHAPES["dynamic"]),
        draft_model(Chain(3)),
    ),
    "the target and copies": lambda target: (DraftModel(target, Chain(4)), PromptLookup(draft=4)),
}


OFTEN = ("tree and copies",)


@pytest.mark.full
@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=[pytest.mark.thorough] * (pair not in OFTEN)) for pair in PAIRS],
)
def test_the_contract(target, pair) -> None:
    drafter = Together(PAIRS[pair](target))
    conformance.check(target, drafter, new_tokens=12, come_and_go=pair not in OFTEN)


@pytest.mark.thorough
def test_texts_may_come_and_go(target) -> None:
    parts = draft_model(Chain(1)), PromptLookup(draft=2)
    conformance.check_rows_that_come_and_go(target, Together(parts), new_tokens=12)


def small(seed: int = 0, **changes):
    return tiny_target(seed, **{**FEW_TOKENS, "num_layers": 1, **changes})


def small_model(shape) -> DraftModel:
    return DraftModel(small(seed=5), draft=shape)


# Two levels at least, which make three tokens with the bonus token.
SMALL_PAIRS = {
    "sampled tree and fixed": lambda target: Together(
        (small_model(SampledTree((2, 1))), Fixed(jnp.array([2, 0]), draft=Chain(2))), slots=(4, 1)
    ),
    "draft model and earlier text": lambda target: Together(
        (
            small_model(Chain(2)),
            Suffix.of_texts([[0, 1, 2, 3, 0, 2, 1, 3, 1, 0, 3, 2, 0]], draft=DynamicTree(2, 2, 5)),
        )
    ),
    "EAGLE-3 and token recycling": lambda target: Together(
        (
            Eagle3.init(target, jax.random.key(3), DynamicTree(3, 2, 7), ids=np.array([0, 2, 3])),
            TokenRecycling(successors=2, draft=Chain(2)),
        )
    ),
    "draft model and Medusa": lambda target: Together(
        (
            small_model(SampledTree((2, 2))),
            Medusa.init(target, jax.random.key(3), StaticTree(((0,), (1,), (0, 0)))),
        )
    ),
}


@pytest.mark.full
@pytest.mark.thorough_except(
    "sampled tree and fixed-coupled",
    "sampled tree and fixed-independent",
    "EAGLE-3 and token recycling-independent",
)
@pytest.mark.parametrize("rule", ["coupled", "independent"])
@pytest.mark.parametrize("pair", SMALL_PAIRS)
def test_the_distribution_is_the_targets(pair, rule) -> None:
    target = small(num_layers=2)
    conformance.check_distribution(target, SMALL_PAIRS[pair](target), rule=rule, draws=10_000)


# --- a step -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except("0.0-None")
@pytest.mark.parametrize("most", [None, 10])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_every_step_the_union_accepts_at_least_what_each_part_would(
    target, temperature, most
) -> None:
    """Test it with a limit, too: the last part has the nodes that the slots of the others leave."""
    parts = (draft_model(DynamicTree(2, 3, 8)), PromptLookup(draft=4), Fixed(jnp.array([2, 7, 1])))
    union = UnionTree(tuple(part.draft_shape for part in parts), (6, 3, 3), most)
    options = GenerationOptions(
        max_new_tokens=40, sampling=Sampling(temperature=temperature), rule="coupled"
    )
    together = Together(parts, draft=union)
    drafter, state = decoding.start(target, together, PROMPTS, LENGTHS, options)
    alone = [Together((part,), (slot,)) for part, slot in zip(parts, union.shares, strict=True)]

    @jax.jit
    def accepted(state):
        after, info = decoding.step(target, drafter, state)
        counts = []
        for index, part in enumerate(alone):
            of_part = replace(state, drafter=(state.drafter[index],))
            # Only to propose: `advance` with the state of all parts reads no drafter's results.
            draft, _ = propose_step(target, part, of_part)
            counts.append(advance(target, drafter, state, draft)[1].accepted)
        return after, info, jnp.stack(counts)

    gained = 0
    for _ in range(12):
        state, info, counts = jax.device_get(accepted(state))
        assert np.all(info.accepted >= counts), (info.accepted, counts)
        best = counts.max(axis=0)
        gained += int(np.sum(info.accepted - best))
        # No path of a single part is longer than the union's, which follows one of them.
        offered = info.draft.offered_by
        for row in np.flatnonzero(info.active):
            path = info.path[row, 1 : 1 + info.accepted[row]]
            assert offered[row, path].any(axis=-1).all()
    assert gained == 0  # every accepted path is that of one part: parts are trees


@pytest.mark.full
def test_64_nodes_are_decoded_and_a_part_may_be_silent_in_some_rows(target) -> None:
    """Check the text, a row that fills all 64 nodes, and rows in which one part offers nothing."""
    recycling = TokenRecycling(successors=6, draft=DynamicTree(6, 4, 32))
    union = Together((draft_model(DynamicTree(4, 4, 33)), recycling))
    assert union.draft_shape.nodes == 64  # the root, 32 and 31
    plain = specjax.generate(target, None, PROMPTS, LENGTHS, max_new_tokens=24)
    options = GenerationOptions(max_new_tokens=24)
    drafter, state = decoding.start(target, union, PROMPTS, LENGTHS, options)
    step, infos = jax.jit(decoding.step), []
    while not np.all(state.lengths == LENGTHS + 24):
        state, info = step(target, drafter, state)
        infos.append(jax.device_get(info))
        assert infos[-1].active.any()
    assert np.array_equal(state.tokens[:, : plain.tokens.shape[1]], plain.tokens)
    assert max(info.drafted.max() for info in infos) == 63
    assert all(info.scored.max() == 64 for info in infos[1:])
    # Row 0 repeats a token of its prompt, and the others do not yet.
    offered = [info.draft.offered_by.any(axis=1).tolist() for info in infos[:2]]
    assert offered[0] == [[True, True], [True, False], [True, False]]
    assert offered[1] == [[True, False], [True, True], [True, True]]


# --- the states of the parts ----------------------------------------------------------------------


def entries_of(cache, row: int, length: int) -> list[np.ndarray]:
    """Return the keys and values of the first ``length`` tokens of a row."""
    return [np.asarray(part)[row, :, :length] for part in jax.tree.leaves(cache.layers)]


def follow(target, drafter, state, tokens: np.ndarray):
    """Return the state after a step whose second part drafts ``tokens [B, D]``."""
    fixed = Fixed(jnp.asarray(tokens), draft=Chain(tokens.shape[1]))
    return jax.jit(decoding.step)(target, replace(drafter, parts=(drafter.parts[0], fixed)), state)


def assert_equal_states(state, expected, row: int, text: np.ndarray) -> None:
    """Compare two states of a drafter in a row whose newest token, the root, ends ``text``."""
    length = len(text) - 1
    if isinstance(state, DraftModelState):  # one of them may have read a token more
        for either in (state, expected):
            is_behind = bool(either.behind[row])
            assert int(either.cache.length[row]) == len(text) - 1 - is_behind
            assert not is_behind or int(either.last[row]) == text[-2]
            length = min(length, int(either.cache.length[row]))
    else:
        assert int(state.cache.length[row]) == int(expected.cache.length[row]) == length
        np.testing.assert_allclose(state.newest[row], expected.newest[row], atol=1e-4)
    entries = (entries_of(either.cache, row, length) for either in (state, expected))
    for got, expected_entry in zip(*entries, strict=True):
        np.testing.assert_allclose(got, expected_entry, atol=1e-4)


WITH_STATES = {
    "draft model": lambda target: draft_model(DynamicTree(2, 3, 7)),
    "EAGLE": lambda target: Eagle.init(target, jax.random.key(3), Chain(3)),
    "EAGLE-3": lambda target: Eagle3.init(target, jax.random.key(3), Chain(3)),
    "EAGLE-3 with a tree": lambda target: Eagle3.init(target, jax.random.key(3), SHAPES["dynamic"]),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_part_reads_an_accepted_path_that_came_from_another_part(target, kind) -> None:
    """The state is then that of reading the same tokens one by one."""
    inner = WITH_STATES[kind](target)
    options = GenerationOptions(max_new_tokens=30)
    plain = decoding.generate(target, None, PROMPTS, LENGTHS, max_new_tokens=30)
    texts = np.stack(
        [row[length : length + 30] for row, length in zip(plain.tokens, LENGTHS, strict=True)]
    )
    union = Together((inner, Fixed(jnp.zeros((3, 3), jnp.int32))))
    drafter, state = decoding.start(target, union, PROMPTS, LENGTHS, options)
    _, slow = decoding.start(target, Together((inner,)), PROMPTS, LENGTHS, options)
    nothing = Draft.of_tree(jnp.zeros((3, 1), jnp.int32), np.array([-1]))
    one_token = jax.jit(advance)
    emitted = 0
    for _ in range(6):
        state, _ = follow(target, drafter, state, texts[:, emitted : emitted + 3])
        emitted += 4  # the other part is right, and the target adds a token
        assert np.array_equal(state.lengths, LENGTHS + emitted)
        while np.all(slow.lengths < state.lengths):  # plain steps: each token is committed alone
            root = replace(nothing, tokens=slow.roots[:, None])
            slow, _ = one_token(target, Together((inner,)), slow, root)
        for row, length in enumerate(LENGTHS + emitted):
            text = plain.tokens[row, :length]
            assert_equal_states(state.drafter[0], slow.drafter[0], row, text)
    # Tokens of the other part were needed.
    assert np.all(np.asarray(state.stats.accepted_only_by)[:, 1] >= 3)


# --- statistics and widths ------------------------------------------------------------------------


@pytest.mark.full
def test_tokens_are_counted_for_the_parts_that_offered_them(target) -> None:
    plain = specjax.generate(target, None, PROMPTS[:1], max_new_tokens=9)
    text = jnp.asarray(plain.tokens[0, 6:])
    wrong = text.at[1].set((text[1] + 1) % 11)
    # In the first step the parts offer 4 right tokens, 1 right token, and nothing.
    parts = Fixed(text[:4], Chain(4)), Fixed(wrong[:3], Chain(3)), Fixed(text, Chain(2), True)
    parts = (*parts[:2], replace(parts[2], tokens=text[:2]))
    drafter, state = decoding.start(
        target, Together(parts), PROMPTS[:1], options=GenerationOptions(max_new_tokens=9)
    )
    state, info = jax.jit(decoding.step)(target, drafter, state)
    assert info.emitted.tolist() == [5]
    assert info.drafted.tolist() == [6]  # the first token is offered twice
    stats = metrics.summarise(jax.device_get(state.stats))
    assert stats.drafted_by == (4, 3, 0)
    assert stats.accepted_by == (4, 1, 0)
    assert stats.accepted_only_by == (3, 0, 0)


@pytest.mark.full
def test_tokens_after_the_end_of_a_text_are_not_counted(target) -> None:
    plain = specjax.generate(target, None, PROMPTS[:1], max_new_tokens=4)
    text = jnp.asarray(plain.tokens[0, 6:])
    result = specjax.generate(
        target,
        Together((Fixed(text, Chain(4)), Fixed(text[:1], Chain(1)))),
        PROMPTS[:1],
        max_new_tokens=2,
    )
    assert result.stats.accepted_by.tolist() == [[2, 1]]
    assert result.stats.accepted_only_by.tolist() == [[1, 0]]


@pytest.mark.full
def test_nodes_that_no_row_fills_are_not_computed(target) -> None:
    first = Fixed(jnp.array([2, 7, 1]))
    silent = Silent(jnp.zeros(6, jnp.int32), Chain(6), silent=True)
    union = Together((first, silent))
    assert union.node_counts == (4, 7, 10)
    generate = partial(specjax.generate, target, tokens=PROMPTS, lengths=LENGTHS)
    alone, both = (generate(drafter=d, max_new_tokens=12) for d in (first, union))
    assert np.array_equal(alone.tokens, both.tokens)
    assert np.array_equal(alone.stats.scored, both.stats.scored)
    # With 2 of the 6 nodes in one row, the step runs with 7 nodes.
    speaking = Together((first, Fixed(jnp.array([8, 8]), Chain(2)), silent))
    assert speaking.node_counts == (4, 8, 12)
    result = generate(drafter=speaking, max_new_tokens=12)
    assert np.array_equal(alone.tokens, result.tokens)
    assert set((result.stats.scored / result.stats.steps).tolist()) == {8.0}
    # If nobody offers anything, the root is alone.
    result = generate(drafter=Together((silent, silent)), max_new_tokens=4)
    assert np.array_equal(alone.tokens[0, :10], result.tokens[0])
    assert np.array_equal(result.stats.scored, result.stats.steps)


# --- meshes and engines ---------------------------------------------------------------------------


@pytest.mark.full
def test_rows_of_a_mesh_have_the_texts_of_plain_decoding(target) -> None:
    mesh = sharding.make_mesh(data=2, model=2)
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    on_mesh = target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    parts = PromptLookup(draft=3), TokenRecycling(successors=2, draft=Chain(3))
    prompts, lengths = np.concatenate([PROMPTS, PROMPTS[:1]]), np.append(LENGTHS, 6)
    plain = specjax.generate(target, None, prompts, lengths, max_new_tokens=10)
    result = specjax.generate(on_mesh, Together(parts), prompts, lengths, max_new_tokens=10)
    assert np.array_equal(result.tokens, plain.tokens)
    assert np.all(result.stats.accepted_by.sum(axis=0) > 0)


@pytest.mark.full
@pytest.mark.thorough_except("0.0-slots0", "1.0-slots1")
@pytest.mark.parametrize("slots", [(0, 4), (3, 0)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_part_without_slots_drafts_nothing(target, slots, temperature) -> None:
    """Compare with plain decoding, and with the other part alone."""
    parts = draft_model(Chain(3)), PromptLookup(draft=4)
    union = Together(parts, slots=slots)
    options = {"max_new_tokens": 20, "rule": "coupled", "sampling": Sampling(temperature)}
    plain = specjax.generate(target, None, PROMPTS, LENGTHS, **options)
    result = specjax.generate(target, union, PROMPTS, LENGTHS, **options)
    alone = specjax.generate(target, parts[slots[0] == 0], PROMPTS, LENGTHS, **options)
    assert np.array_equal(result.tokens, plain.tokens)
    assert np.array_equal(result.stats.histogram[:, :4], alone.stats.histogram[:, :4])
    idle = slots.index(0)
    assert not result.stats.drafted_by[:, idle].any()
    assert np.array_equal(result.stats.accepted_by[:, 1 - idle], result.stats.accepted)


@pytest.mark.full
@pytest.mark.thorough_except("slots1")
@pytest.mark.parametrize("slots", [(0, 4), (3, 0)])
def test_a_part_that_gets_slots_drafts_as_if_it_had_always_drafted(target, slots) -> None:
    """Compare the drafts after some steps with those of parts that have just read the text."""
    union, options = Together((draft_model(Chain(3)), PromptLookup(draft=4))), GenerationOptions(30)
    both, state = decoding.start(target, union, PROMPTS[:1], options=options)
    idle = replace(both, draft=UnionTree((Chain(3), Chain(4)), slots))
    step = jax.jit(decoding.step)
    for _ in range(6):
        state, info = step(target, idle, state)
        assert not info.draft.offered_by[..., slots.index(0)].any()
    draft, _ = propose_step(target, both, state)
    text = state.tokens[:1, : int(state.lengths[0])]
    assert text.shape[1] >= PROMPTS.shape[1] + 6
    _, fresh = decoding.start(target, union, text, options=options)
    expected, _ = propose_step(target, both, fresh)
    assert expected.offered_by[..., slots.index(0)].any()
    assert np.array_equal(draft.tokens, expected.tokens)
    assert np.array_equal(draft.offered_by, expected.offered_by)


@pytest.mark.full
def test_an_engine_divides_the_slots_of_a_union_and_measures_its_parts(target) -> None:
    """Check the texts under each division, and what calls with the union say of the first part."""
    parts = draft_model(Chain(4)), Fixed(jnp.array([1, 4, 2]), draft=Chain(3))
    union = Together(parts)
    splits = union.draft_shape.splits  # pyright: ignore[reportAttributeAccessIssue]
    plain = specjax.generate(target, None, PROMPTS, LENGTHS, max_new_tokens=20)
    with Engine(target, union, rows=3, widths=(3,), capacity=32) as engine:
        drafts = engine._config.choices
        assert drafts == (None, Chain(3), union.draft_shape, *splits)

        def texts(**options) -> list[list[int]]:
            handles = [
                engine.submit(prompt[:length].tolist(), max_new_tokens=20, **options)
                for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
            ]
            return [list(handle.result().tokens) for handle in handles]

        expected = [
            tokens[length : length + 20].tolist()
            for tokens, length in zip(plain.tokens, LENGTHS, strict=True)
        ]
        for draft in (union.draft_shape, *splits):
            assert texts(speculation=draft) == expected
        assert texts() == expected
        before = engine.statistics.parts
        choice = engine._loop.choice
        index = drafts.index(splits[0])
        for _ in range(12):
            assert texts(speculation=union.draft_shape) == expected
        statistics = engine.statistics
    first, second = statistics.parts
    assert first.accepted > before[0].accepted and second.accepted > before[1].accepted
    alone = specjax.generate(target, parts[0], PROMPTS, LENGTHS, max_new_tokens=20)
    tokens_a_step = 60 / alone.stats.steps.sum()
    assert choice.tokens_a_step(index) == pytest.approx(tokens_a_step, rel=0.15)
    assert choice.tokens_a_step(index) < choice.tokens_a_step(drafts.index(union.draft_shape))


@pytest.mark.full
def test_an_engine_turns_from_a_union_to_the_first_part_and_counts_by_part(target) -> None:
    parts = PromptLookup(draft=3), TokenRecycling(successors=2, draft=Chain(3))
    union = Together(parts)
    plain = specjax.generate(target, None, PROMPTS, LENGTHS, max_new_tokens=20)
    drafts = (None, "chain:2", union.draft_shape)
    with Engine(target, union, drafts=drafts, rows=3, widths=(3,), capacity=32) as engine:
        handles = [
            engine.submit(prompt[:length].tolist(), max_new_tokens=20)
            for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
        ]
        for handle, tokens, length in zip(handles, plain.tokens, LENGTHS, strict=True):
            assert list(handle.result().tokens) == tokens[length : length + 20].tolist()
        statistics = engine.statistics
    assert [part.name for part in statistics.parts] == ["PromptLookup", "TokenRecycling"]
    assert sum(part.accepted for part in statistics.parts) >= statistics.accepted > 0
    assert all(part.accepted_only <= part.accepted for part in statistics.parts)


# --- shapes and names -----------------------------------------------------------------------------


def test_slots_and_shapes() -> None:
    parts = (EarlyExit(1, draft=Chain(4)), PromptLookup(draft=8))
    union = Together(parts, slots=(4, 3))
    assert union.draft_shape == UnionTree((Chain(4), Chain(8)), (4, 3))
    assert replace(union, slots=(2, 2)).draft_shape.slots == (2, 2)
    assert replace(union).draft_shape == union.draft_shape
    assert jax.tree.map(lambda leaf: leaf, union) == union
    reshaped = replace(union, draft=parse_shape("chain:2+chain:5"))
    assert [part.draft_shape for part in reshaped.drafting] == [Chain(2), Chain(5)]
    assert default_rule(union.draft_shape) == "coupled"
    assert repr(union).startswith("Together(parts=(EarlyExit(layers=1, ")
    alone = replace(union, draft=Chain(2))
    assert [part.draft_shape for part in alone.drafting] == [Chain(2)]
    assert alone.draft_shape == Chain(2)


def test_what_cannot_be_used_is_refused(target) -> None:
    lookup = PromptLookup(draft=4)
    with pytest.raises(InputError, match="it has 1 parts, but there are 2 drafters"):
        Together((lookup, lookup), draft=UnionTree((Chain(3),))).check(target)
    with pytest.raises(InputError, match="prompt lookup copies one continuation"):
        Together((lookup, lookup), draft=parse_shape("chain:3+dynamic")).check(target)
    with pytest.raises(InputError, match="PromptLookup is one drafter, and drafts one shape"):
        PromptLookup(draft=UnionTree((Chain(3),)))
    with pytest.raises(InputError, match="max_ngram=0"):
        Together((lookup, replace(lookup, max_ngram=0)), draft=Chain(2)).check(target)
    with pytest.raises(InputError, match=r"drafts a union of .*, but predictions need chains"):
        WithPrediction(Together((lookup, lookup))).check(target)
    with pytest.raises(InputError, match="verifies chains"):
        specjax.generate(target, Together((lookup, lookup)), PROMPTS, rule="block")


def test_names() -> None:
    load = partial(load_drafter, target=tiny_config())
    drafter = load("early-exit:1+prompt-lookup:2", draft="chain:2+chain:6")
    assert isinstance(drafter, Together) and drafter.part_names == ("EarlyExit", "PromptLookup")
    assert drafter.draft_shape == UnionTree((Chain(2), Chain(6)))
    assert load("early-exit:1+prompt-lookup", draft=None).draft_shape.slots == (4, 8)
    with pytest.raises(InputError, match=r"has 2 parts; give one shape for each, such as 'chain"):
        load("early-exit:1+prompt-lookup", draft=4)
    assert split_name("prompt-lookup+embedded:eagle3+mtp:x/a+b") == [
        "prompt-lookup",
        "embedded:eagle3",
        "mtp:x/a+b",
    ]
    assert split_name("a.b:Own@runs/x+y+c.d:Other@z") == ["a.b:Own@runs/x+y", "c.d:Other@z"]


def test_a_directory_with_a_plus_is_one_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "a+prompt-lookup").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_name("a+prompt-lookup") == ["a+prompt-lookup"]
