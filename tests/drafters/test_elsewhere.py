"""A drafter on another machine than its target: from `Drafter.remote_inputs`, and alone with `append_unverified`."""

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

MADE = {
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
    """What a client has of the target: neither the layers that the drafter does not run, nor anything of use in their place."""
    layers = [
        layer if n in drafter.reads(target.config) else {}
        for n, layer in enumerate(target.params["layers"])
    ]
    return target.replace(params=target.params | {"layers": layers})


def after_prompt(target: Target, drafter):
    """State and cache after all but the prompts' last tokens, as the target's machine has them; and as another one has."""
    taps = drafter.taps(target.config)
    output, entries = target.read(PROMPT, taps=taps)
    count = jnp.array([9, 9])
    following = jnp.roll(PROMPT, -1, axis=1)
    cache = target.new_cache(2, CAPACITY).append(entries, count, after=output.hidden)
    here = drafter.append_committed(
        target,
        drafter.start(target, 2, CAPACITY),
        Committed(PROMPT, following, output, entries, count, cache),
    )
    arrays = {
        name: np.asarray(array)
        for name, array in drafter.remote_inputs(target, output, entries).items()
    }  # over the wire
    assert all(array.shape[:2] == PROMPT.shape for array in arrays.values())
    part = part_of(target, drafter)
    there = drafter.start(part, 2, CAPACITY)
    for begin, end in ((0, 4), (4, 10)):  # in two pieces
        piece = {name: jnp.asarray(array[:, begin:end]) for name, array in arrays.items()}
        rest = jnp.clip(count - begin, 0, end - begin)
        there = drafter.append_remote(
            part, there, RemoteFeatures(PROMPT[:, begin:end], following[:, begin:end], piece, rest)
        )
    kept = part.new_cache(2, CAPACITY).of_layers(drafter.reads(target.config))
    kept = (
        kept.append(drafter.remote_entries(part, arrays), count, after=count)
        if kept.layers
        else None
    )
    return here, cache.of_layers(drafter.reads(target.config)), there, kept


def propose(drafter, target, state, root, cache, depth):
    given = {"cache": cache} if drafter.reads(target.config) else {}
    sampling, keys = (
        Sampling(temperature=0.0).rows(2),
        jnp.broadcast_to(jax.random.key(0), (depth, 2)),
    )
    draft, _ = drafter.propose(target, state, root, sampling, keys, jnp.ones(2, bool), **given)
    return np.asarray(draft.tokens)


@pytest.mark.full
@pytest.mark.parametrize("name", MADE)
def test_it_drafts_elsewhere_what_it_drafts_beside_its_target(target, name) -> None:
    drafter = with_chain(MADE[name](target), 3)
    assert drafter.drafts_elsewhere
    here, cache, there, kept = after_prompt(target, drafter)
    root = jnp.asarray(PROMPT[:, -1])
    expected = propose(drafter, target, here, root, cache, 3)
    assert (
        propose(drafter, part_of(target, drafter), there, root, kept, 3).tolist()
        == expected.tolist()
    )
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MADE if name != "prompt lookup"])
def test_going_on_from_what_it_assumes_is_drafting_on(target, name) -> None:
    """A chain of seven is the chain of three, and below it, its tokens assumed, one of four."""
    drafter = MADE[name](target)
    _, _, state, kept = after_prompt(target, drafter)
    part, root = part_of(target, drafter), jnp.asarray(PROMPT[:, -1])
    whole = propose(with_chain(drafter, 7), part, state, root, kept, 7)
    assumed = np.pad(
        whole[:, :3], ((0, 0), (0, 2))
    )  # the root and two drafted ones; the rest is filler
    following = np.pad(whole[:, 1:4], ((0, 0), (0, 2)))
    further, entries = drafter.append_unverified(
        part, state, assumed, following, jnp.array([3, 3]), kept
    )
    if kept is not None:
        kept = kept.append(entries, jnp.array([3, 3]), after=entries[0][0][:, 0, 0])
    rest = propose(with_chain(drafter, 4), part, further, jnp.asarray(whole[:, 3]), kept, 4)
    assert rest.tolist() == whole[:, 3:].tolist()
    # The state to come back to is as it was.
    again = propose(with_chain(drafter, 7), part, state, root, after_prompt(target, drafter)[3], 7)
    assert again.tolist() == whole.tolist()


@pytest.mark.full
def test_nothing_is_assumed_in_rows_where_nothing_counts(target) -> None:
    for name in ("moa", "eagle3"):
        drafter = MADE[name](target)
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
