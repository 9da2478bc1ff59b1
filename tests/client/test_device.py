"""Tests that a client's drafts equal those beside the target, with the same random numbers."""

import jax
import numpy as np
import pytest

import specjax
from specjax import (
    Chain,
    DraftModel,
    DynamicTree,
    Eagle3,
    Medusa,
    MixtureOfAttentions,
    PromptLookup,
    SamplingParams,
    decoding,
)
from specjax.client.device import WIDTHS, ClientDevice, Settings, _pieces
from specjax.client.trees import Tree
from specjax.errors import InputError
from specjax.sampling import make_key
from tests.conftest import compilations, tiny_target

CAPACITY = 128
PROMPT = [1, 4, 2, 7, 4, 2, 7, 9, 4, 2, 3, 6]
TREE = DynamicTree(top_k=2, depth=3, nodes=8)
DRAFTERS = {
    "moa": lambda target: MixtureOfAttentions.init(target, jax.random.key(5), tli=1),
    "moa, entries": (
        lambda target: MixtureOfAttentions.init(target, jax.random.key(5), tli=1).replace(
            told="entries"
        )
    ),
    "eagle3": lambda target: Eagle3.init(target, jax.random.key(5)),
    "draft model": lambda target: DraftModel.init(target, jax.random.key(5), num_layers=1),
}


def told(target, drafter, tokens: list[int]) -> dict[str, np.ndarray]:
    """Return the inputs that a server sends for all ``tokens`` but the last."""
    output, entries = target.read(np.array([tokens]), taps=drafter.taps(target.config))
    return {
        name: np.asarray(array)[0, :-1]
        for name, array in drafter.remote_inputs(target, output, entries).items()
    }


def heard(device: ClientDevice, target, tokens: list[int]):
    return device.append_remote(
        device.start(), tokens[:-1], tokens[1:], told(target, device.drafter, tokens)
    )


BESIDE = [("moa", TREE), ("draft model", Chain(3))]
MORE = [
    (name, shape) for name in DRAFTERS for shape in (Chain(3), TREE) if (name, shape) not in BESIDE
]


@pytest.mark.full
@pytest.mark.thorough_except("moa-shape0")
@pytest.mark.parametrize(
    ("name", "shape"),
    [*BESIDE, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)],
)
def test_it_drafts_what_is_drafted_beside_the_target(target, name: str, shape) -> None:
    drafter = DRAFTERS[name](target).replace(draft=shape)
    device = ClientDevice(target, drafter, [shape], CAPACITY)
    propose_step = jax.jit(decoding.propose_step)
    drafter_state = heard(device, target, PROMPT)
    drafts = set()
    for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2), (0.6, 3)):
        params = SamplingParams(temperature=temperature, top_k=7 if seed == 3 else 0, seed=seed)
        options = decoding.GenerationOptions(
            max_new_tokens=16, sampling=params.with_explicit(), key=make_key(seed), rule="coupled"
        )
        _, state = decoding.start(
            target, drafter, np.array([PROMPT]), options=options, capacity=CAPACITY, mixed=True
        )
        draft, _ = propose_step(target, drafter, state)
        valid = (
            np.ones(draft.tokens.shape, bool) if draft.valid is None else np.asarray(draft.valid)
        )
        parents = np.broadcast_to(draft.parents, draft.tokens.shape)
        expected = Tree.of(np.asarray(draft.tokens)[0], parents[0], valid[0])
        tree = device.propose(
            drafter_state, PROMPT[-1], len(PROMPT), Settings.of(params), shape.depth
        )
        assert tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        drafts.add(tuple(tree.tokens.tolist()))
    assert len(drafts) > 1


@pytest.mark.full
def test_a_draft_model_alone_writes_its_own_text(target) -> None:
    drafter = DRAFTERS["draft model"](target)
    result = specjax.generate(drafter.model, None, np.array([PROMPT]), max_new_tokens=19)
    expected = result.tokens[0].tolist()
    device = ClientDevice(target, drafter, [Chain(3)], CAPACITY)
    settings = Settings.of(SamplingParams())
    state, text = heard(device, target, PROMPT), list(PROMPT)
    for depth in (3, device.alone, 3, 3):  # each draft follows the one before
        path = device.propose(state, text[-1], len(text), settings, depth).path
        state = device.append_unverified(state, [text[-1], *path[:-1]], path)
        text += path
    assert text == expected[: len(text)]
    assert len(text) >= len(PROMPT) + 17


@pytest.mark.full
def test_it_hears_in_pieces_what_it_hears_at_once(target) -> None:
    tokens = np.random.default_rng(0).integers(0, 11, 101).tolist()
    drafter = DRAFTERS["moa"](target)
    device = ClientDevice(target, drafter, [Chain(3)], CAPACITY)
    settings = Settings.of(SamplingParams())
    whole, arrays = heard(device, target, tokens), told(target, drafter, tokens)
    pieced = device.start()
    for begin, end in ((0, 1), (1, 9), (9, 40), (40, 100)):
        piece = {name: array[begin:end] for name, array in arrays.items()}
        pieced = device.append_remote(pieced, tokens[begin:end], tokens[begin + 1 : end + 1], piece)
    for leaf, pieced_leaf in zip(jax.tree.leaves(whole), jax.tree.leaves(pieced), strict=True):
        np.testing.assert_allclose(leaf, pieced_leaf, atol=1e-5)
    trees = [
        device.propose(state, tokens[-1], len(tokens), settings, 3) for state in (whole, pieced)
    ]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()


def test_every_count_is_in_pieces_of_few_sizes() -> None:
    for count in range(300):
        pieces = _pieces(count)
        covered = [
            place for start, width in pieces for place in range(start, min(start + width, count))
        ]
        assert covered == list(range(count))
        assert all(width in WIDTHS for _, width in pieces)


@pytest.mark.full
@pytest.mark.parametrize("name", ["draft model", pytest.param("moa", marks=pytest.mark.thorough)])
def test_nothing_is_compiled_after_the_warm_up(name: str) -> None:
    target = tiny_target(seed=3)
    drafter = DRAFTERS[name](target)
    device = ClientDevice(target, drafter, [Chain(2), TREE], CAPACITY)
    device.warm_up()
    tokens = [*PROMPT] * 6
    arrays = told(target, drafter, tokens)
    before = compilations()
    state = device.append_remote(device.start(), tokens[:-1], tokens[1:], arrays)
    for temperature in (0.0, 1.0):
        settings = Settings.of(
            SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, seed=5)
        )
        for depth in (2, 3, device.alone):
            path = device.propose(state, tokens[-1], len(tokens), settings, depth).path
            device.append_unverified(state, [tokens[-1], *path[:-1]], path)
    assert compilations() == before


@pytest.mark.full
def test_what_it_must_hear(target) -> None:
    heads = {
        "moa": {"means", "layer1.0", "layer1.1"},
        "moa, entries": {"entries"},
        "draft model": set(),
    }
    for name, expected in heads.items():
        device = ClientDevice(target, DRAFTERS[name](target), [Chain(2)], CAPACITY)
        assert set(device.hears) == expected
        arrays = told(target, device.drafter, PROMPT)
        assert {name: array.shape[1:] for name, array in arrays.items()} == device.hears
    assert ClientDevice(target, PromptLookup(), [Chain(2)], CAPACITY).hears == {}


def test_who_needs_the_target_is_refused(target) -> None:
    with pytest.raises(InputError, match="drafter: Medusa needs the target itself"):
        ClientDevice(target, Medusa.init(target, jax.random.key(1)), [Chain(2)], CAPACITY)
