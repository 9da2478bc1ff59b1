"""Drafts as a client handles them: small trees of tokens in host memory."""

from dataclasses import dataclass

import numpy as np

from specjax.drafts import tree


@dataclass(frozen=True)
class Tree:
    """A drafted tree.

    Attributes:
        tokens: ``[N]`` int32 token ids; the first is the root's.
        parents: ``[N]`` index of each node's parent, which is less than the node's; -1 for the
            root. Siblings stand in the drafter's order, the likeliest first.

    Examples:
        >>> from specjax.client.trees import Tree
        >>> tree = Tree(np.array([7, 2, 5, 3, 4]), np.array([-1, 0, 0, 1, 2]))
        >>> tree.path  # the likeliest child of the root, and below it its likeliest
        (2, 3)
        >>> tree.below(5).tokens.tolist()  # the subtree of the other child
        [5, 4]
    """

    tokens: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray) -> "Tree":
        """Make a tree of the nodes that are valid and whose ancestors are all valid."""
        is_kept = valid.copy()
        for node in range(1, len(is_kept)):
            is_kept[node] &= is_kept[parents[node]]
        new_index = np.cumsum(is_kept) - 1
        return cls(tokens[is_kept], np.where(parents[is_kept] < 0, -1, new_index[parents[is_kept]]))

    @classmethod
    def chain(cls, root: int, tokens: tuple[int, ...]) -> "Tree":
        """Make a chain of the tokens below a root."""
        return cls(np.array([root, *tokens], np.int32), np.arange(-1, len(tokens)))

    @property
    def root(self) -> int:
        """The token of the root."""
        return int(self.tokens[0])

    @property
    def depths(self) -> np.ndarray:
        """The depth of each node, ``[N]``; 0 for the root."""
        return tree.depths(self.parents)

    @property
    def depth(self) -> int:
        """The number of tokens on the longest path below the root."""
        return int(self.depths.max())

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens of the likeliest path, from the root's likeliest child down to a leaf."""
        return tuple(int(self.tokens[node]) for node in self._path_nodes)

    @property
    def _path_nodes(self) -> list[int]:
        nodes, node = [], 0
        while (children := np.flatnonzero(self.parents == node)).size:
            node = int(children[0])
            nodes.append(node)
        return nodes

    def below(self, token: int) -> "Tree | None":
        """Return the subtree of the root's child with this token; None without such a child."""
        children = np.flatnonzero((self.parents == 0) & (self.tokens == token))
        if not children.size:
            return None
        child = children[0]
        is_inside = np.zeros(len(self.tokens), bool)
        is_inside[child] = True
        for node in range(child + 1, len(is_inside)):
            is_inside[node] = is_inside[self.parents[node]]
        new_index = np.cumsum(is_inside) - 1
        parents = np.where(np.arange(len(is_inside)) == child, -1, new_index[self.parents])
        return Tree(self.tokens[is_inside], parents[is_inside])

    def joined(self, below: "Tree") -> "Tree":
        """Return this tree with another one attached to the end of its `path`.

        The last token of the path is the root of the other tree.
        """
        end = (self._path_nodes or [0])[-1]
        offset = len(self.tokens) - 1
        parents_below = np.where(below.parents[1:] == 0, end, below.parents[1:] + offset)
        return Tree(
            np.concatenate([self.tokens, below.tokens[1:]]),
            np.concatenate([self.parents, parents_below]),
        )

    def cut(self, nodes: int, depth: int) -> "Tree":
        """Return the tree with at most ``nodes`` nodes, none deeper than ``depth``.

        The nodes of the `path` come first, then all others level by level.
        """
        # A parent comes before its children in this order, so that no node loses its parent.
        depths = self.depths
        order = depths + len(depths)
        order[[0, *self._path_nodes]] = 0
        is_kept = np.zeros(len(depths), bool)
        is_kept[np.lexsort((depths, order))[:nodes]] = True
        return Tree.of(self.tokens, self.parents, is_kept & (depths <= depth))
