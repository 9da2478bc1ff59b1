"""The shapes a draft can have."""

from dataclasses import dataclass

import numpy as np

from specjax.errors import InputError


@dataclass(frozen=True)
class Chain:
    """A draft of ``length`` tokens in a row (gamma in the papers): a tree with one branch.

    Raises:
        InputError: ``length`` is below 1.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"draft=Chain(length={self.length}): a draft has at least 1 token; for none, use drafter=None")

    @property
    def depth(self) -> int:
        """Most drafted tokens that one step can accept, D."""
        return self.length

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root included, N."""
        return self.length + 1


def chain_parents(nodes: int) -> np.ndarray:
    """``[N]`` parents of a chain: -1, 0, 1, …"""
    return np.arange(-1, nodes - 1)
