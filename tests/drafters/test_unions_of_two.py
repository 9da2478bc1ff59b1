"""Test the unions of every two registered drafters."""

from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement

import jax
import numpy as np
import pytest

from specjax import decoding
from specjax.decoding.loop import propose_step
from specjax.decoding.options import GenerationOptions
from specjax.drafters import (
    Drafter,
    EagleWithLayerAttention,
    NoDraft,
    PromptLookup,
    Together,
    TrainedDrafter,
    registry,
)
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.sampling import Sampling
from tests.conftest import tiny_target
from tests.drafters.test_together import LENGTHS, PROMPTS
from tests.drafters.test_vocabularies import permuted
from tests.drafts.test_union import paths_of
from tests.evaluation.test_conformance import METHODS, SMALL

DRAFTERS: dict[str, tuple[Callable[[DraftShape], Drafter], str]] = {
    "draft-model": (METHODS["draft model"], "sampled"),
    "draft-model-intersect": (
        lambda shape: permuted(
            tiny_target(seed=5, num_layers=1), [7, 0, 10, 3, 1, 8, 4], draft=shape
        ),
        "dynamic",
    ),
    "early-exit": (METHODS["early exit"], "sampled"),
    "streaming": (METHODS["streaming"], "chain"),
    "snapkv": (METHODS["snapkv"], "static"),
    "eagle": (METHODS["eagle"], "dynamic"),
    "eagle-lsa": (
        lambda shape: EagleWithLayerAttention.init(tiny_target(), jax.random.key(3), shape),
        "chain",
    ),
    "eagle3": (METHODS["eagle3"], "static"),
    "peagle": (METHODS["peagle"], "static"),
    "moa": (METHODS["moa"], "chain"),
    "mtp": (METHODS["mtp"], "chain"),
    "medusa": (METHODS["medusa"], "static"),
    "gemma4-assistant": (METHODS["assistant"], "chain"),
    "dflash": (METHODS["dflash"], "chain"),
    "dflash2": (METHODS["dflash2"], "dynamic"),
    "dspark": (METHODS["dspark"], "adaptive"),
    "token-recycling": (METHODS["token recycling"], "dynamic"),
    "suffix": (METHODS["suffix"], "chain"),
    "prompt-lookup": (METHODS["prompt lookup"], "chain"),
}
"""The drafters by their names in the registry, each with the shape that it drafts here."""

PAIRS = list(combinations_with_replacement(DRAFTERS, 2))
every_pair = pytest.mark.parametrize(("first", "second"), PAIRS, ids=map("+".join, PAIRS))


def parts_of(first: str, second: str) -> tuple[Drafter, Drafter]:
    """Return two small drafters. Two of one kind have different shapes."""
    (make_first, shape), (make_second, second_shape) = DRAFTERS[first], DRAFTERS[second]
    return (
        scaled(make_first(SMALL[shape])),
        scaled(make_second(Chain(3) if first == second else SMALL[second_shape])),
    )


def scaled(drafter: Drafter) -> Drafter:
    """Scale new parameters as `tiny_target` does, so that drafts depend on the target's states."""
    if not isinstance(drafter, TrainedDrafter):
        return drafter
    return drafter.replace(
        params=jax.tree.map(lambda leaf: leaf * 25 if leaf.ndim > 1 else leaf, drafter.params)
    )


def first_draft(target, drafter: Drafter) -> Draft:
    """Return the draft after the prompts, of greedy rows and of rows with coupled sampling."""
    options = GenerationOptions(
        max_new_tokens=12,
        sampling=Sampling(temperature=np.array([0.0, 1.0, 0.7])),
        rule="coupled",
        key=jax.random.split(jax.random.key(3), len(LENGTHS)),
    )
    drafter, state = decoding.start(target, drafter, PROMPTS, LENGTHS, options)
    return jax.device_get(jax.jit(propose_step)(target, drafter, state)[0])


def offered_paths(draft: Draft, row: int, part: int) -> set[tuple[int, ...]]:
    """Return the paths below the root that a part of a union offers."""
    assert draft.offered_by is not None
    nodes = np.flatnonzero(np.asarray(draft.offered_by)[row, :, part])
    paths = paths_of(draft, row)
    return {paths[node] for node in nodes}


def test_every_registered_drafter_may_be_a_part() -> None:
    """Check the table: the pairs below are those of all registered drafters."""
    assert set(DRAFTERS) == set(registry.METHODS)
    for name, (make, shape) in DRAFTERS.items():
        if trained := registry.METHODS[name].trained:
            assert type(jax.eval_shape(partial(make, SMALL[shape]))) is trained  # never initialised


@pytest.mark.full
@pytest.mark.thorough_except(
    "draft-model+prompt-lookup",
    "eagle3+token-recycling",
    "eagle3+suffix",
    "mtp+suffix",
    "medusa+prompt-lookup",
    "dflash+token-recycling",
)
@every_pair
def test_two_drafters_have_the_text_of_plain_decoding(target, first, second) -> None:
    union = Together(parts_of(first, second))
    conformance.check_greedy(target, union, new_tokens=12)
    conformance.check_coupled(target, union, new_tokens=12)


@pytest.mark.full
@pytest.mark.thorough_except("early-exit+gemma4-assistant", "eagle3+dflash")
@every_pair
def test_each_of_two_drafters_offers_what_it_would_alone(target, first, second) -> None:
    """Check the draft after the prompts: every part reads the layers of the target that it needs.

    Texts do not depend on it, since any draft is verified.
    """
    parts = parts_of(first, second)
    union = first_draft(target, Together(parts))
    for index, part in enumerate(parts):
        alone = first_draft(target, Together((part,)))
        paths = [offered_paths(union, row, index) for row in range(len(LENGTHS))]
        assert paths == [offered_paths(alone, row, 0) for row in range(len(LENGTHS))]
        assert any(paths)


def test_a_drafter_of_nothing_may_be_one_part_but_not_all() -> None:
    union = Together((NoDraft(), PromptLookup(draft=3)))
    assert (union.draft_shape.nodes, union.draft_shape.shares) == (4, (0, 3))
    with pytest.raises(InputError, match=r"slots=\(0, 0\): no part may draft; give at least one"):
        Together((NoDraft(), NoDraft()))
