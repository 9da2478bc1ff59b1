"""How much memory a page of an engine's caches takes, before there is an engine."""

from typing import Any

import jax

from specjax import decoding
from specjax.decoding import rows as device_rows
from specjax.drafters import Drafter, NoDraft
from specjax.errors import InputError
from specjax.models.cache import groups_of
from specjax.models.transformer import Target

USUAL_CAPACITY = 4096
"""Tokens of the longest text, unless asked for otherwise, where the models have room for more."""


def usual_page() -> int:
    """Tokens of a page, unless asked for otherwise.

    Examples:
        >>> from specjax.serving.memory import usual_page
        >>> usual_page()  # on a TPU 256
        64
    """
    return 256 if jax.default_backend() == "tpu" else 64


def page_bytes(target: Target, drafter: Drafter | None, page: int) -> int:
    """Bytes of a page of ``page`` tokens, in the target's cache and the drafter's together; on a mesh, of a page of each group.

    Nothing is computed: it follows from the shapes.

    Examples:
        >>> from specjax.serving.memory import page_bytes
        >>> alone = page_bytes(target, None, page=16)
        >>> alone == 2 * page_bytes(target, None, page=8)
        True
        >>> page_bytes(target, specjax.PromptLookup(draft=2), page=16) == alone  # it has no cache
        True
    """

    def size(pages: int) -> int:
        def empty(target: Target, drafter: Drafter) -> Any:
            sizes = {"rows": groups_of(target.mesh), "capacity": 2 * page, "pages": pages, "page": page}
            return device_rows.empty(target, drafter, **sizes)

        state = jax.eval_shape(empty, target, drafter or NoDraft())
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache, state.drafter)))

    return size(2) - size(1)


def pages_in(gigabytes: float, target: Target, drafter: Drafter | None, *, page: int, capacity: int | None = None) -> int:
    """How many pages there are in so much memory: for each group of rows, as `Engine` takes them.

    Args:
        gigabytes: of 10**9 bytes, on all devices together.
        target: the target.
        drafter: its drafter; None: there is none.
        page: tokens of a page.
        capacity: most tokens of a text; None: as `Engine` has it.

    Raises:
        InputError: one text would not fit.

    Examples:
        >>> from specjax.serving.memory import page_bytes, pages_in
        >>> pages_in(10 * page_bytes(target, None, 8) / 1e9, target, None, page=8, capacity=64)
        10
    """
    capacity = capacity or min(decoding.most_positions(target, drafter or NoDraft()), USUAL_CAPACITY)
    each, least = page_bytes(target, drafter, page), -(-capacity // page)
    pages = int(gigabytes * 1e9 / each + 1e-6)
    if pages < least:
        raise InputError(
            f"cache_gb={gigabytes:g}: {max(pages, 0) * page} tokens, and a text may have {capacity}; give at least "
            f"{least * each / 1e9:.3g}, or a smaller capacity"
        )
    return pages
