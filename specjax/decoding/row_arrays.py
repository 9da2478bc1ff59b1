"""Read, write and reorder the rows of every array in a decode state.

A decode state is a tree of arrays whose first axis is the row, and of paged caches. The pools of a
paged cache have no row axis: the cache's table assigns their pages to rows. So these functions
treat pools separately.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.state import DecodeState
from specjax.models.cache import KVCache, PagedCache
from specjax.models.transformer import Target

Tree = TypeVar("Tree")


HostOrDevice = jax.Array | np.ndarray
"""An array that the host makes for every call."""


def to_pages(tree: Tree, pages: int, page: int, target: Target) -> Tree:
    """Replace every `KVCache` in ``tree`` by an empty `PagedCache`, also those of drafters.

    Other caches and all other nodes stay as they are.
    """

    def page_node(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return node
        return PagedCache.like(node, pages=pages, page=page, mesh=target.mesh)

    return jax.tree.map(page_node, tree, is_leaf=lambda node: isinstance(node, KVCache))


def retire(state: DecodeState, mask: HostOrDevice) -> DecodeState:
    """Free the rows of ``mask [B]``: they are done, and their cached tokens are not read again."""

    def forget(node: Any) -> Any:
        if not isinstance(node, PagedCache):
            return node
        return replace(node, length=jnp.where(mask, 0, node.length))

    # Attention reads as many blocks as the longest row needs, so a free row must not be long.
    state = jax.tree.map(forget, state, is_leaf=_is_paged)
    # A length of 1, not 0, because the root is the token before it.
    return replace(state, done=state.done | mask, lengths=jnp.where(mask, 1, state.lengths))


def with_table(state: Tree, table: HostOrDevice) -> Tree:
    """Give all caches in ``state`` this table of pages."""
    return jax.tree.map(
        lambda node: node.with_table(jnp.asarray(table)) if _is_paged(node) else node,
        state,
        is_leaf=_is_paged,
    )


def map_rows(function: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """Apply ``function`` to every array that has a row axis. Pools have none and do not change."""

    def map_node(node: Any) -> Any:
        if not _is_paged(node):
            return function(node)
        return replace(node, **jax.tree.map(function, _of_rows(node)))

    return jax.tree.map(map_node, tree, is_leaf=_is_paged)


def _of_rows(cache: PagedCache) -> dict[str, Any]:
    """Return the fields of a cache that have a row axis."""
    return {"table": cache.table, "length": cache.length, "states": cache.states}


def put_rows(tree: Tree, part: Tree, write: Callable[[jax.Array, jax.Array], jax.Array]) -> Tree:
    """Write ``part`` into ``tree`` with ``write(leaf, new)`` for every array that has a row axis.

    The pools come from ``part``, because the computation on it has written them. If ``part`` has no
    pools, those of ``tree`` stay.
    """

    def put_node(node: Any, new: Any) -> Any:
        if not _is_paged(node):
            return write(node, new)
        of_rows = jax.tree.map(write, _of_rows(node), _of_rows(new))
        return replace(node, layers=new.layers or node.layers, **of_rows)

    return jax.tree.map(put_node, tree, part, is_leaf=_is_paged)


def without_pools(tree: Tree) -> Tree:
    """Return ``tree`` with the pools of its caches removed: only arrays of rows are left."""
    return jax.tree.map(
        lambda node: replace(node, layers=()) if _is_paged(node) else node, tree, is_leaf=_is_paged
    )


def _is_paged(node: Any) -> bool:
    return isinstance(node, PagedCache)


def first_rows(state: DecodeState, width: int) -> DecodeState:
    """Return the first ``width`` rows of a state."""
    return map_rows(lambda leaf: leaf[:width], state)


def put_first(leaf: jax.Array, new: jax.Array) -> jax.Array:
    """Replace the first rows of ``leaf`` by ``new``."""
    return jax.lax.dynamic_update_slice_in_dim(leaf, new, 0, axis=0)
