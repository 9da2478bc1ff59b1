"""Take, put and rearrange the rows of every array in a decode state.

A decode state is a tree of arrays whose first axis is the row, and of paged caches. The pools of a paged cache have no row
axis: rows own pages of them by the cache's table. So these functions treat pools apart.
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
    """``tree`` with a `PagedCache` for every `KVCache`, those of drafters among them; they are empty. Other caches, and all
    else, stay as they are."""

    def one(node: Any) -> Any:
        return PagedCache.like(node, pages=pages, page=page, mesh=target.mesh) if isinstance(node, KVCache) else node

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, KVCache))


def retire(state: DecodeState, mask: HostOrDevice) -> DecodeState:
    """The state with the rows of ``mask [B]`` free: they are done, and nothing of theirs is read any more."""

    def forget(node: Any) -> Any:
        return replace(node, length=jnp.where(mask, 0, node.length)) if isinstance(node, PagedCache) else node

    state = jax.tree.map(forget, state, is_leaf=_is_paged)
    return replace(state, done=state.done | mask, lengths=jnp.where(mask, 1, state.lengths))


def with_table(state: Tree, table: HostOrDevice) -> Tree:
    """``state`` with these pages for its rows, in all of its caches."""
    return jax.tree.map(lambda node: node.with_table(jnp.asarray(table)) if _is_paged(node) else node, state, is_leaf=_is_paged)


def map_rows(function: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """``function`` of every array that has the row axis first. Pools have none, and pass whole."""

    def one(node: Any) -> Any:
        if not _is_paged(node):
            return function(node)
        return replace(node, **jax.tree.map(function, _of_rows(node)))

    return jax.tree.map(one, tree, is_leaf=_is_paged)


def _of_rows(cache: PagedCache) -> dict[str, Any]:
    """What of a cache has a row axis."""
    return {"table": cache.table, "length": cache.length, "states": cache.states}


def put_rows(tree: Tree, part: Tree, put: Callable[[jax.Array, jax.Array], jax.Array]) -> Tree:
    """``tree`` with ``put(leaf, new)`` for every array that has the row axis first, ``new`` being that of ``part``. Pools are
    those of ``part``, which has been working on them; where it has none, they stay."""

    def one(node: Any, new: Any) -> Any:
        if not _is_paged(node):
            return put(node, new)
        return replace(node, layers=new.layers or node.layers, **jax.tree.map(put, _of_rows(node), _of_rows(new)))

    return jax.tree.map(one, tree, part, is_leaf=_is_paged)


def without_pools(tree: Tree) -> Tree:
    """Return ``tree`` with caches that have no pools: what belongs to rows alone."""
    return jax.tree.map(lambda node: replace(node, layers=()) if _is_paged(node) else node, tree, is_leaf=_is_paged)


def _is_paged(node: Any) -> bool:
    return isinstance(node, PagedCache)


def first_rows(state: DecodeState, width: int) -> DecodeState:
    """Return the first ``width`` rows of a state."""
    return map_rows(lambda leaf: leaf[:width], state)


def put_first(leaf: jax.Array, new: jax.Array) -> jax.Array:
    """``leaf`` with ``new`` as its first rows."""
    return jax.lax.dynamic_update_slice_in_dim(leaf, new, 0, axis=0)
