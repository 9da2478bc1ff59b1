"""Test the values that an argument ``draft`` may have."""

import jax
import numpy as np
import pytest

import specjax
from specjax.drafters import EarlyExit, PromptLookup
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError


def test_a_number_is_a_chain_of_that_length_and_a_name_the_shape_of_that_name() -> None:
    assert as_shape(4) == as_shape("chain:4") == as_shape(Chain(4)) == Chain(4)
    assert as_shape("dynamic:2,3,6") == DynamicTree(2, 3, 6)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (0, "a draft has at least 1 token"),
        (True, "draft=True: give a shape such as"),
        (2.5, "draft=2.5: give a shape such as"),
        (None, "draft=None: give a shape such as"),
        ("chain", "draft='chain': must be"),
    ],
)
def test_anything_else_is_refused(draft, message) -> None:
    with pytest.raises(InputError, match=message):
        as_shape(draft)


@pytest.mark.full
def test_every_drafter_takes_a_number(target) -> None:
    prompt = np.array([[1, 2, 3, 1, 2, 3]])
    pairs = [
        (EarlyExit(layers=1, draft=3), EarlyExit(layers=1, draft=Chain(3))),
        (PromptLookup(draft=2), PromptLookup(draft=Chain(2))),
    ]
    for with_number, with_chain in pairs:
        ours, theirs = (
            specjax.generate(target, drafter, prompt, max_new_tokens=9)
            for drafter in (with_number, with_chain)
        )
        assert with_number == with_chain
        # One compiled program serves both.
        assert jax.tree.structure(with_number) == jax.tree.structure(with_chain)
        assert ours.stats.steps == theirs.stats.steps
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    with pytest.raises(InputError, match=r"draft=Chain\(length=0\)"):
        EarlyExit(layers=1, draft=0)
