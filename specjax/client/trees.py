"""Drafts as a client handles them: small trees of tokens, on the host."""

from dataclasses import dataclass

import numpy as np

from specjax.drafts import tree


@dataclass(frozen=True)
class Tree:
    """A drafted tree.

    Attributes:
        tokens: ``[N]`` int32 token ids, the root's first.
        parents: ``[N]`` each node's parent, before its children; -1 for the root. Siblings stand in the drafter's order, the
            likeliest first.

    Examples:
        >>> from specjax.client.trees import Tree
        >>> tree = Tree(np.array([7, 2, 5, 3, 4]), np.array([-1, 0, 0, 1, 2]))
        >>> tree.path  # the likeliest child of the root, and below it its likeliest
        (2, 3)
        >>> tree.below(5).tokens.tolist()  # what hangs below the other one
        [5, 4]
    """

    tokens: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray) -> "Tree":
        """The nodes of ``tokens [N]`` that are ``valid``, with all that they hang below."""
        kept = valid.copy()
        for node in range(1, len(kept)):
            kept[node] &= kept[parents[node]]
        number = np.cumsum(kept) - 1
        return cls(tokens[kept], np.where(parents[kept] < 0, -1, number[parents[kept]]))

    @classmethod
    def chain(cls, root: int, tokens: tuple[int, ...]) -> "Tree":
        """``tokens`` one below the other."""
        return cls(np.array([root, *tokens], np.int32), np.arange(-1, len(tokens)))

    @property
    def root(self) -> int:
        """The root's token."""
        return int(self.tokens[0])

    @property
    def depths(self) -> np.ndarray:
        """``[N]`` steps from the root to each node."""
        return tree.depths(self.parents)

    @property
    def depth(self) -> int:
        """Tokens on the longest path below the root."""
        return int(self.depths.max())

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens from the root's likeliest child down to a leaf, at each node its likeliest child."""
        return tuple(int(self.tokens[node]) for node in self._path_nodes)

    @property
    def _path_nodes(self) -> list[int]:
        nodes, node = [], 0
        while (children := np.flatnonzero(self.parents == node)).size:
            node = int(children[0])
            nodes.append(node)
        return nodes

    def below(self, token: int) -> "Tree | None":
        """The tree whose root is the root's child with ``token``; None where there is no such child."""
        found = np.flatnonzero((self.parents == 0) & (self.tokens == token))
        if not found.size:
            return None
        inside = np.zeros(len(self.tokens), bool)
        inside[found[0]] = True
        for node in range(found[0] + 1, len(inside)):
            inside[node] = inside[self.parents[node]]
        number = np.cumsum(inside) - 1
        parents = np.where(np.arange(len(inside)) == found[0], -1, number[self.parents])
        return Tree(self.tokens[inside], parents[inside])

    def joined(self, below: "Tree") -> "Tree":
        """This tree with another one ``below`` the end of its `path`, which is the other one's root."""
        end = (self._path_nodes or [0])[-1]
        offset = len(self.tokens) - 1
        moved = np.where(below.parents[1:] == 0, end, below.parents[1:] + offset)
        return Tree(np.concatenate([self.tokens, below.tokens[1:]]), np.concatenate([self.parents, moved]))

    def cut(self, nodes: int, depth: int) -> "Tree":
        """At most ``nodes`` nodes, none deeper than ``depth``: those of the `path`, and of the others the first ones, level by
        level."""
        depths = self.depths
        order = depths + len(depths)
        order[[0, *self._path_nodes]] = 0
        kept = np.zeros(len(depths), bool)
        kept[np.lexsort((depths, order))[:nodes]] = True
        return Tree.of(self.tokens, self.parents, kept & (depths <= depth))
