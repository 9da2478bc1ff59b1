"""Check that ``jit`` never runs the program of one class for an object of another class."""

import dataclasses

import jax
import pytest
from flax import struct

from specjax.drafters import Drafter, PromptLookup
from specjax.drafts.shapes import Chain, DraftShape
from specjax.models.transformer import Target
from tests.conftest import tiny_target


@struct.dataclass
class OtherHead(Target):
    """A target with equal fields and another method."""


@struct.dataclass
class OtherLookup(PromptLookup):
    """A drafter with equal fields and another method."""


def defined_again() -> Drafter:
    """Return a drafter of a class that each call defines anew, as a cell of a notebook does."""

    @struct.dataclass
    class Mine(Drafter):
        draft: DraftShape = struct.field(pytree_node=False, default=Chain(3))

    return Mine()


@pytest.mark.parametrize("kind", ["target", "drafter", "defined again"])
def test_two_classes_with_equal_fields_are_two_tree_definitions(kind) -> None:
    """Check structures as jit compares them, also after replace and after a round trip."""
    if kind == "target":
        first = tiny_target()
        second = OtherHead(**vars(first))
    elif kind == "drafter":
        first = PromptLookup()
        second = OtherLookup(**vars(first))
    else:
        first, second = defined_again(), defined_again()
    assert jax.tree.structure(first) != jax.tree.structure(second)
    assert jax.tree.structure((first, 1)) != jax.tree.structure((second, 1))
    copy = jax.tree.map(lambda leaf: leaf, second)
    assert type(copy) is type(second)
    assert jax.tree.structure(copy) == jax.tree.structure(second)
    same = dataclasses.replace(second)
    assert jax.tree.structure(same) == jax.tree.structure(second)
    assert hash(jax.tree.structure(same)) == hash(jax.tree.structure(second))
