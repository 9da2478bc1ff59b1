"""The shapes a draft can have."""

from dataclasses import dataclass

import numpy as np

from specjax.errors import InputError


@dataclass(frozen=True)
class Chain:
    """A draft of ``length`` tokens in a row (gamma in the papers): a tree with one branch.

    With ``stop_below`` a row's draft ends early, after its first token to which the drafter gives a probability below that.
    The token itself stays in the draft: to drop a token because of what it is would bias the output.

    Raises:
        InputError: ``length`` is below 1, or ``stop_below`` outside [0, 1].
    """

    length: int
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"draft=Chain(length={self.length}): a draft has at least 1 token; for none, use drafter=None")
        if not 0 <= self.stop_below <= 1:
            raise InputError(f"draft=Chain(stop_below={self.stop_below:g}): a probability lies in [0, 1]; 0 never stops early")

    @property
    def depth(self) -> int:
        """Most drafted tokens that one step can accept, D."""
        return self.length

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root included, N."""
        return self.length + 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of nodes, ascending, that verification is compiled for: it runs at the smallest that holds the draft."""
        return halvings(self.nodes) if self.stop_below else (self.nodes,)


def halvings(nodes: int) -> tuple[int, ...]:
    """``nodes`` and its halves down to 2 or 3, ascending. Each is a compiled pass of the target, so they are few."""
    widths = [nodes]
    while widths[0] > 3:
        widths.insert(0, -(-widths[0] // 2))
    return tuple(widths)


def chain_parents(nodes: int) -> np.ndarray:
    """``[N]`` parents of a chain: -1, 0, 1, …"""
    return np.arange(-1, nodes - 1)
