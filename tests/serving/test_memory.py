"""How many pages a given memory holds: as many as the arrays of an engine's state really take."""

import jax
import pytest

from specjax.decoding import rows as device_rows
from specjax.drafters import NoDraft, PromptLookup
from specjax.drafters.draft_model import DraftModel
from specjax.errors import InputError
from specjax.serving import memory
from tests.conftest import tiny_target

PAGE, CAPACITY = 8, 32


@pytest.mark.parametrize("kind", ["none", "lookup", "model"])
def test_pages_take_what_is_said(kind: str) -> None:
    target = tiny_target()
    drafter = {"none": None, "lookup": PromptLookup(draft=2), "model": DraftModel(tiny_target(), draft=2)}[kind]

    def taken(pages: int) -> int:
        sizes = {"rows": 2, "capacity": CAPACITY, "pages": pages, "page": PAGE}
        state = device_rows.empty(target, drafter or NoDraft(), **sizes)
        return sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.drafter)) if leaf.dtype != state.keys.dtype)

    each = memory.page_bytes(target, drafter, PAGE)
    assert taken(12) - taken(4) == 8 * each
    assert memory.pages_in(7.9 * each / 1e9, target, drafter, page=PAGE, capacity=CAPACITY) == 7


def test_memory_for_less_than_a_text_is_refused() -> None:
    target = tiny_target()
    each = memory.page_bytes(target, None, PAGE)
    assert memory.pages_in(4 * each / 1e9, target, None, page=PAGE, capacity=CAPACITY) == 4
    with pytest.raises(InputError, match=r"cache_gb=.*a text may have 32; give at least"):
        memory.pages_in(3.9 * each / 1e9, target, None, page=PAGE, capacity=CAPACITY)
