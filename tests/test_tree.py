import numpy as np
import pytest

from specjax.errors import InputError
from specjax.tree import Chain, chain_parents


def test_a_chain_has_a_root_and_its_tokens() -> None:
    assert (Chain(4).depth, Chain(4).nodes) == (4, 5)
    np.testing.assert_array_equal(chain_parents(4), [-1, 0, 1, 2])


@pytest.mark.parametrize("length", [0, -3])
def test_a_draft_length_below_one_is_refused(length) -> None:
    with pytest.raises(InputError, match=rf"Chain\(length={length}\)"):
        Chain(length)
