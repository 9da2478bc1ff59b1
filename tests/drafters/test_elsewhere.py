"""Test a drafter that runs on another machine than its target.

It reads `Drafter.remote_inputs`, and continues alone with `append_unverified`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    Chain,
    DraftModel,
    Eagle,
    Eagle3,
    Medusa,
    MixtureOfAttentions,
    PromptLookup,
    Sampling,
    Target,
)
from specjax.drafters.base import Committed, RemoteFeatures
from tests.conftest import tiny_target
from tests.drafters.test_vocabularies import permuted

PROMPT = np.array([[1, 4, 2, 7, 4, 2, 7, 9, 4, 2], [3, 3, 1, 5, 3, 1, 5, 3, 3, 1]])
CAPACITY = 48

DRAFTERS = {
    "moa": lambda target: MixtureOfAttentions.init(target, jax.random.key(1)),
    "moa, one layer of the target": lambda target: MixtureOfAttentions.init(
        target, jax.random.key(1), tli=1
    ),
    "moa, entries": (
        lambda target: MixtureOfAttentions.init(target, jax.random.key(1), tli=1).replace(
            told="entries"
        )
    ),
    "moa without layer attention": lambda target: MixtureOfAttentions.init(
        target, jax.random.key(1), lsa=False
    ),
    "eagle": lambda target: Eagle.init(target, jax.random.key(1)),
    "eagle3": lambda target: Eagle3.init(target, jax.random.key(1)),
    "draft model": lambda target: DraftModel.init(target, jax.random.key(1), num_layers=1),
    "draft model of another tokenizer": lambda target: permuted(
        tiny_target(seed=5, num_layers=1), [7, 0, 10, 3, 1, 8, 4]
    ),
    "prompt lookup": lambda target: PromptLookup(),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def with_chain(drafter, length: int):
    return drafter.replace(draft=Chain(length))


def part_of(target: Target, drafter) -> Target:
    """Return the part of the target that a client has.

    The layers that the drafter does not run are empty.
    """
    layers = [
        layer if n in drafter.reads(target.config) else {}
        for n, layer in enumerate(target.params["layers"])
    ]
    return target.replace(params=target.params | {"layers": layers})


def after_prompt(target: Target, drafter):
    """Return state and cache after all but the prompts' last tokens, on both machines.

    The first pair is from the target's machine, the second from the drafter's.
    """
    taps = drafter.taps(target.config)
    output, entries = target.read(PROMPT, taps=taps)
    count = jnp.array([9, 9])
    following = jnp.roll(PROMPT, -1, axis=1)
    cache = target.new_cache(2, CAPACITY).append(entries, count, after=output.hidden)
    committed = Committed(PROMPT, following, output, entries, count, cache)
    here = drafter.append_committed(target, drafter.start(target, 2, CAPACITY), committed)
    inputs = drafter.remote_inputs(target, output, entries)
    arrays = {name: np.asarray(array) for name, array in inputs.items()}  # what is sent
    assert all(array.shape[:2] == PROMPT.shape for array in arrays.values())
    part = part_of(target, drafter)
    there = drafter.start(part, 2, CAPACITY)
    for begin, end in ((0, 4), (4, 10)):
        piece = {name: jnp.asarray(array[:, begin:end]) for name, array in arrays.items()}
        rest = jnp.clip(count - begin, 0, end - begin)
        there = drafter.append_remote(
            part, there, RemoteFeatures(PROMPT[:, begin:end], following[:, begin:end], piece, rest)
        )
    layers = drafter.reads(target.config)
    remote_cache = part.new_cache(2, CAPACITY).of_layers(layers)
    if remote_cache.layers:
        entries = drafter.remote_entries(part, arrays)
        remote_cache = remote_cache.append(entries, count, after=count)
    else:
        remote_cache = None
    return here, cache.of_layers(layers), there, remote_cache


def propose(drafter, target, state, root, cache, depth):
    options = {"cache": cache} if drafter.reads(target.config) else {}
    sampling = Sampling(temperature=0.0).rows(2)
    keys = jnp.broadcast_to(jax.random.key(0), (depth, 2))
    draft, _ = drafter.propose(target, state, root, sampling, keys, jnp.ones(2, bool), **options)
    return np.asarray(draft.tokens)


@pytest.mark.full
@pytest.mark.thorough_except("moa, entries", "moa, one layer of the target")
@pytest.mark.parametrize("name", DRAFTERS)
def test_it_drafts_elsewhere_what_it_drafts_beside_its_target(target, name) -> None:
    drafter = with_chain(DRAFTERS[name](target), 3)
    assert drafter.drafts_elsewhere
    here, cache, there, remote_cache = after_prompt(target, drafter)
    root = jnp.asarray(PROMPT[:, -1])
    expected = propose(drafter, target, here, root, cache, 3)
    remote = propose(drafter, part_of(target, drafter), there, root, remote_cache, 3)
    assert remote.tolist() == expected.tolist()
    for local_leaf, remote_leaf in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(local_leaf, remote_leaf, atol=1e-5)


@pytest.mark.full
@pytest.mark.thorough_except("moa", "moa, one layer of the target")
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "prompt lookup"])
def test_going_on_from_what_it_assumes_is_drafting_on(target, name) -> None:
    """Compare a chain of seven with a chain of three and one of four below it.

    The tokens of the first chain are assumed to be accepted.
    """
    drafter = DRAFTERS[name](target)
    _, _, state, remote_cache = after_prompt(target, drafter)
    part, root = part_of(target, drafter), jnp.asarray(PROMPT[:, -1])
    whole = propose(with_chain(drafter, 7), part, state, root, remote_cache, 7)
    # The root and two drafted tokens; the rest is padding.
    assumed = np.pad(whole[:, :3], ((0, 0), (0, 2)))
    following = np.pad(whole[:, 1:4], ((0, 0), (0, 2)))
    further, entries = drafter.append_unverified(
        part, state, assumed, following, jnp.array([3, 3]), remote_cache
    )
    if remote_cache is not None:
        remote_cache = remote_cache.append(entries, jnp.array([3, 3]), after=entries[0][0][:, 0, 0])
    rest = propose(with_chain(drafter, 4), part, further, jnp.asarray(whole[:, 3]), remote_cache, 4)
    assert rest.tolist() == whole[:, 3:].tolist()
    # The earlier state is unchanged.
    cache = after_prompt(target, drafter)[3]
    again = propose(with_chain(drafter, 7), part, state, root, cache, 7)
    assert again.tolist() == whole.tolist()


@pytest.mark.full
def test_nothing_is_assumed_in_rows_where_nothing_counts(target) -> None:
    for name in ("moa", "eagle3"):
        drafter = DRAFTERS[name](target)
        _, _, state, _ = after_prompt(target, drafter)
        same, _ = drafter.append_unverified(
            target, state, PROMPT[:, :4], PROMPT[:, 1:5], jnp.array([0, 2])
        )
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(same), strict=True):
            np.testing.assert_array_equal(before[0], after[0])
            if before.dtype == jnp.int32 and before.ndim == 1 and before[1] == 9:  # a length
                assert after[1] in (9, 11)


def test_who_needs_more_than_it_is_told_does_not_draft_elsewhere(target) -> None:
    assert not Medusa.init(target, jax.random.key(1)).drafts_elsewhere
