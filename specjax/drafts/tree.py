"""Properties of a tree that follow from its parents: ancestors, depths, paths, children.

A tree is given by ``parents``, the index of each node's parent. Parents come before children, and
the root has -1. If ``parents`` is a numpy array ``[N]``, known before tracing, the functions return
numpy arrays, which become constants of the compiled program. If it is a JAX array ``[B, N]``, they
compute on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ancestors(parents: np.ndarray | jax.Array, depth: int | None = None) -> Any:
    """Return ``[…, N, N]`` bool whether node j is on the path from the root to node i.

    A node is on its own path. These are the nodes that node i may attend to.

    Args:
        parents: ``[N]`` or ``[B, N]``, parents before children, ``parents[0] = -1``.
        depth: the depth of the deepest node, if it is known.
    """
    xp = _arrays(parents)
    nodes = xp.arange(parents.shape[-1])
    # ``node`` is the ancestor of each node, one step further up in each pass.
    node = xp.broadcast_to(nodes, parents.shape)
    visible = node[..., None] == nodes
    for _ in range(parents.shape[-1] - 1 if depth is None else depth):
        node = xp.where(node >= 0, xp.take_along_axis(parents, xp.maximum(node, 0), axis=-1), -1)
        visible = visible | (node[..., None] == nodes)
    return visible


def depths(parents: np.ndarray | jax.Array, depth: int | None = None) -> Any:
    """Return the depth ``[…, N]`` of each node. The arguments are those of `ancestors`."""
    if isinstance(parents, np.ndarray) and parents.ndim == 1:  # on the host, one loop is faster
        steps = np.zeros(len(parents), int)
        for node in range(1, len(parents)):
            steps[node] = steps[parents[node]] + 1
        return steps
    return ancestors(parents, depth).sum(axis=-1) - 1


def paths(parents: np.ndarray | jax.Array, depth: int) -> Any:
    """Return the path ``[…, N, depth+1]`` from the root to each node, padded with 0.

    The arguments are those of `ancestors`.
    """
    xp = _arrays(parents)
    visible, nodes = ancestors(parents, depth), xp.arange(parents.shape[-1])
    at_depth = depths(parents, depth)[..., None] == xp.arange(depth + 1)  # […, N, depth+1]
    return (visible[..., :, :, None] * (nodes[:, None] * at_depth)[..., None, :, :]).sum(axis=-2)


def first_children(parents: np.ndarray | jax.Array) -> Any:
    """Return the first child ``[…, N]`` of each node; -1 if it has none."""
    nodes = _arrays(parents).arange(parents.shape[-1])
    return _lowest(parents[..., None, :] == nodes[:, None])


def next_siblings(parents: np.ndarray | jax.Array) -> Any:
    """Return the next sibling ``[…, N]`` of each node; -1 if it has none."""
    nodes = _arrays(parents).arange(parents.shape[-1])
    return _lowest((parents[..., None, :] == parents[..., :, None]) & (nodes > nodes[:, None]))


def _lowest(holds: Any) -> Any:
    """Return the lowest j ``[…, N]`` for which ``holds [..., N, N]`` is true; -1 without one."""
    xp = _arrays(holds)
    count = holds.shape[-1]
    lowest = xp.where(holds, xp.arange(count), count).min(axis=-1)
    return xp.where(lowest < count, lowest, -1)


def _arrays(like: Any) -> Any:
    return np if isinstance(like, np.ndarray) else jnp


def chain_parents(nodes: int) -> np.ndarray:
    """Return the parents ``[N]`` of a chain: -1, 0, 1, and so on."""
    return np.arange(-1, nodes - 1)
