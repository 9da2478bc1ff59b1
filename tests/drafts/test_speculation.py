"""Tests of what a request may state as its ``speculation``."""

import pytest

from specjax.drafts.names import parse_shape, shape_name
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.drafts.speculation import NO_LIMIT, DraftLimit
from specjax.errors import InputError

DRAFTS = (None, Chain(3), DynamicTree(4, 2, 7))


@pytest.mark.parametrize(
    ("stated", "speculation"),
    [
        (None, DraftLimit()),
        ("auto", DraftLimit(NO_LIMIT, None)),
        ("off", DraftLimit(0)),
        (0, DraftLimit(0)),
        (5, DraftLimit(5)),
        ("chain:3", DraftLimit(3, 1)),
        (Chain(3), DraftLimit(3, 1)),
        ("dynamic:4,2,7", DraftLimit(2, 2)),
    ],
)
def test_what_may_be_stated(stated, speculation) -> None:
    assert DraftLimit.of(stated, DRAFTS) == speculation


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            "chain:2",
            "speculation='chain:2': give auto, off, a largest depth such as 2, chain:3, dynamic:4",
        ),
        ("none", "speculation='none': give auto"),
        ("of", "speculation='of': give auto"),
        ("", "speculation='': give auto"),
        (True, "speculation=True: give auto"),
        (1.5, "speculation=1.5: give auto"),
        (-1, "speculation=-1: a depth is at least 0"),
        (2**31, "speculation=2147483648: a depth is at least 0 and below"),
    ],
)
def test_anything_else_is_refused(stated, message) -> None:
    with pytest.raises(InputError, match=message):
        DraftLimit.of(stated, DRAFTS)


@pytest.mark.parametrize(
    "name",
    ["chain:4", "chain:4,0.25", "dynamic:3,2,5", "sampled:2,1", "eagle", "medusa", "eagle+chain:2"],
)
def test_a_shape_has_the_name_that_it_is_read_from(name) -> None:
    assert shape_name(parse_shape(name)) == name


def test_a_tree_of_ones_own_is_described() -> None:
    assert shape_name(StaticTree(((0,), (1,)))) == "static tree, 3 nodes, 1 deep"
