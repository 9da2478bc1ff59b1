import numpy as np
import pytest

from specjax.errors import InputError
from specjax.tree import Chain, chain_parents, halvings


def test_a_chain_has_a_root_and_its_tokens() -> None:
    assert (Chain(4).depth, Chain(4).nodes) == (4, 5)
    np.testing.assert_array_equal(chain_parents(4), [-1, 0, 1, 2])


@pytest.mark.parametrize("length", [0, -3])
def test_a_draft_length_below_one_is_refused(length) -> None:
    with pytest.raises(InputError, match=rf"Chain\(length={length}\)"):
        Chain(length)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(threshold) -> None:
    with pytest.raises(InputError, match=r"Chain\(stop_below="):
        Chain(4, stop_below=threshold)


def test_widths_are_few_and_hold_every_draft() -> None:
    assert halvings(17) == (3, 5, 9, 17)
    assert halvings(2) == (2,)
    assert Chain(16).widths == (17,)
    assert Chain(12, stop_below=0.4).widths == (2, 4, 7, 13)
