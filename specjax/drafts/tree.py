"""Which node of a draft hangs below which, and what follows from it.

A tree is its ``parents``: of each node the number of its parent, parents before children, -1 for the root. The functions take
numpy arrays ``[N]``, known before tracing, and give numpy constants that fold into the compiled program; or JAX arrays
``[B, N]``, and compute on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ancestors(parents: np.ndarray | jax.Array, depth: int | None = None) -> Any:
    """``[…, N, N]`` bool, whether node i's path from the root holds node j: what a node may see. Its own is among them.

    Args:
        parents: ``[N]`` or ``[B, N]``, parents before children, ``parents[0] = -1``.
        depth: of the deepest node, where it is known.
    """
    xp = _arrays(parents)
    nodes = xp.arange(parents.shape[-1])
    node = xp.broadcast_to(nodes, parents.shape)  # of each node, the ancestor that is so many steps up
    visible = node[..., None] == nodes
    for _ in range(parents.shape[-1] - 1 if depth is None else depth):
        node = xp.where(node >= 0, xp.take_along_axis(parents, xp.maximum(node, 0), axis=-1), -1)
        visible = visible | (node[..., None] == nodes)
    return visible


def depths(parents: np.ndarray | jax.Array, depth: int | None = None) -> Any:
    """``[…, N]`` steps from the root to each node. Arguments as of `ancestors`."""
    if isinstance(parents, np.ndarray) and parents.ndim == 1:  # on the host one walk will do
        steps = np.zeros(len(parents), int)
        for node in range(1, len(parents)):
            steps[node] = steps[parents[node]] + 1
        return steps
    return ancestors(parents, depth).sum(axis=-1) - 1


def paths(parents: np.ndarray | jax.Array, depth: int) -> Any:
    """``[…, N, depth+1]`` the nodes from the root to each node; beyond the node itself, 0. Arguments as of `ancestors`."""
    xp = _arrays(parents)
    visible, nodes = ancestors(parents, depth), xp.arange(parents.shape[-1])
    at_depth = depths(parents, depth)[..., None] == xp.arange(depth + 1)  # […, N, depth+1]
    return (visible[..., :, :, None] * (nodes[:, None] * at_depth)[..., None, :, :]).sum(axis=-2)


def first_children(parents: np.ndarray | jax.Array) -> Any:
    """``[…, N]`` each node's child of the lowest number, -1 without one."""
    nodes = _arrays(parents).arange(parents.shape[-1])
    return _lowest(parents[..., None, :] == nodes[:, None])


def next_siblings(parents: np.ndarray | jax.Array) -> Any:
    """``[…, N]`` for each node the next one below the same parent, -1 without one."""
    nodes = _arrays(parents).arange(parents.shape[-1])
    return _lowest((parents[..., None, :] == parents[..., :, None]) & (nodes > nodes[:, None]))


def _lowest(holds: Any) -> Any:
    """``[…, N]`` the lowest j at which ``holds [..., N, N]``, -1 where there is none."""
    xp = _arrays(holds)
    count = holds.shape[-1]
    lowest = xp.where(holds, xp.arange(count), count).min(axis=-1)
    return xp.where(lowest < count, lowest, -1)


def _arrays(like: Any) -> Any:
    return np if isinstance(like, np.ndarray) else jnp


def chain_parents(nodes: int) -> np.ndarray:
    """``[N]`` parents of a chain: -1, 0, 1, …"""
    return np.arange(-1, nodes - 1)
