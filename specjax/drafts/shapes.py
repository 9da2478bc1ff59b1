"""The shapes that a draft can have: a user asks for one of these, and drafters fill it."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from specjax.errors import InputError

Choices = tuple[tuple[int, ...], ...]
"""A tree as paths of ranks, one for every node but the root.

The *rank* of a child says which of the drafter's tokens it holds. Of the children of a node, rank 0 is the likeliest token and
rank 1 the second likeliest; where tokens are drawn, the first and the second drawn. So (0, 2) is the node that is reached from
the root by its likeliest child, and from there by the third likeliest.
"""


@dataclass(frozen=True)
class Template:
    """How to draft a tree that is known beforehand.

    A drafter *reads* a node: it computes how likely each token is to come next. The ``branching`` best of them are then
    offered as the node's children. A token that is offered is a *candidate*; only some candidates are nodes of the tree. All
    nodes of one depth that have children are read together, which offers one level of candidates: level 0 those below the
    root, level 1 those below the nodes of depth 1, and so on.

    Every level is numbered alike, so that all levels fit one array: ``width * branching`` candidates, first the children of the
    first node read, by rank, then the children of the second. Where fewer than ``width`` nodes are read, the rest are fillers,
    of which nothing is used.

    So a node has up to five numbers. For example, in the tree ``((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0))`` up to 2 nodes
    are read together, and a node has up to 2 children::

        node                          0    1    2    3      4      5      6
        path                          ()   0    1    0,0    1,0    1,1    1,0,0
        candidate within its level    -    0    1    0      2      3      0
        candidate over all levels     -    0    1    4      6      7      8
        place among the nodes read    -    0    1    -      2      -      -
        slot of scratch               0    1    2    -      3      -      -

    The root is read first, alone, which offers level 0: its two children, and two fillers. Then nodes 1 and 2 are read, which
    offers level 1. Its candidate 1, the second child of node 1, is left out of the tree. Of its nodes only number 4 has a
    child: it is read at place 2, beside a filler (candidate 0) at place 3, which offers level 2. What a drafter remembers of
    the nodes that it reads lies in its scratch by their places (see `read_nodes`). The last line is of drafters whose scratch
    holds the root too, in its first slot: early exit, a compressed cache, Mixture of Attentions. A draft model and drafters of
    features (EAGLE, MTP) have read the root, or its pair, into their cache before, so there a node's slot is its place.

    Here ``parents`` is -1, 0, 0, 1, 2, 2, 4. ``frontier`` is ((0, 1), (2, 0)). ``source`` is the fourth line without the root;
    ``places`` is the fifth, with -1 for nodes that have none. `expand` shows what is held while this tree grows.

    Attributes:
        parents: ``[N]`` the node that each node hangs below, -1 for the root.
        frontier: ``[depth - 1, width]`` which candidates of each level, counted within the level, are read for the next one;
            filled up with 0. Nothing is read below the last level.
        source: ``[N - 1]`` which candidate each node but the root is, counted over all levels.
        places: ``[N]`` where each node stands among the nodes read: ``width`` places for depth 1, then ``width`` for depth 2,
            and so on. -1 for nodes that have no child, and for the root, which is read before drafting begins.
        width: most nodes below the root that are read together.
        branching: most children of a node, by rank: one more than the highest rank.
    """

    parents: np.ndarray
    frontier: np.ndarray
    source: np.ndarray
    places: np.ndarray
    width: int
    branching: int


@lru_cache(maxsize=256)
def template_of(choices: Choices) -> Template:
    """The `Template` of a tree of ``choices``."""
    numbers = {(): 0} | {path: index for index, path in enumerate(choices, 1)}
    depth, branching = max(map(len, choices)), 1 + max(path[-1] for path in choices)
    levels = [[path for path in choices if len(path) == level] for level in range(1, depth + 1)]
    has_child = {path[:-1] for path in choices}
    read = [[path for path in level if path in has_child] for level in levels[:-1]]
    width = max(map(len, read), default=1)
    place = {(): 0} | {path: place for level in read for place, path in enumerate(level)}

    def candidate(path: tuple[int, ...]) -> int:  # within its level
        return place[path[:-1]] * branching + path[-1]

    frontier = np.zeros((depth - 1, width), np.int32)
    places = np.full(len(choices) + 1, -1, np.int32)
    for level, nodes in enumerate(read):
        frontier[level, : len(nodes)] = [candidate(path) for path in nodes]
        places[[numbers[path] for path in nodes]] = level * width + np.arange(len(nodes))
    return Template(
        parents=np.array([-1] + [numbers[path[:-1]] for path in choices]),
        frontier=frontier,
        source=np.array([(len(path) - 1) * width * branching + candidate(path) for path in choices]),
        places=places,
        width=width,
        branching=branching,
    )


class DraftShape:
    """The shape of a draft: how large it is, as the drafter that drafts it and the target that verifies it must know.

    Attributes:
        depth: most drafted tokens that one step can accept, D.
        nodes: nodes of the tree, the root included, N.
        branching: most children of a node: the ranks of the drafter's distribution that are drafted from.
        width: most nodes that the drafter reads in one pass.

    Examples:
        >>> shape = specjax.StaticTree(((0,), (1,), (0, 0)))
        >>> shape.depth, shape.nodes, shape.branching, shape.width
        (2, 4, 2, 1)
    """

    depth: int
    nodes: int
    branching: int
    width: int
    _kind = "draft"

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Numbers of nodes, ascending, that verification is compiled for: it runs at the smallest that holds the draft.

        More than one is for chains, of which the first nodes are a chain again.
        """
        return (self.nodes,)

    def __str__(self) -> str:
        """In a few words."""
        return f"{self._kind}, {self.nodes} nodes, {self.depth} deep"

    @property
    def read_slots(self) -> int:
        """Slots that the drafter's reading of drafted nodes takes above its root: ``width`` a level but the last."""
        return (self.depth - 1) * self.width

    def check(self, vocab_size: int) -> None:
        """Refuse, with an InputError, a shape that a vocabulary cannot fill."""
        if self.branching > vocab_size:
            raise InputError(
                f"draft={type(self).__name__}: asks for {self.branching} children of a node, but the vocabulary has "
                f"{vocab_size} tokens; give at most {vocab_size}"
            )


class FixedShape(DraftShape):
    """A shape that is known, as ``choices``, before anything is drafted."""

    choices: Choices
    template: Template

    def _settle(self, choices: Choices) -> None:
        """Set what follows from the choices, once."""
        template = template_of(choices)
        _set(self, choices=choices, template=template, depth=len(template.frontier) + 1, nodes=len(choices) + 1)
        _set(self, branching=template.branching, width=template.width)


@dataclass(frozen=True)
class Chain(FixedShape):
    """A draft of ``length`` tokens in a row (gamma in the papers): a tree with one branch. Tokens are drawn from q.

    With ``stop_below`` a row's draft ends early, after its first token to which the drafter gives a probability below that.
    (With coupled sampling: a probability that the target draws it too, given the random numbers of its position.)
    The token itself stays in the draft: to drop a token because of what it is would bias the output.

    Raises:
        InputError: ``length`` is below 1, or ``stop_below`` outside [0, 1].

    Examples:
        >>> print(specjax.Chain(4))
        chain of 4
        >>> print(specjax.Chain(12, stop_below=0.4))
        chain of 12, ending below 0.4
    """

    length: int
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"draft=Chain(length={self.length}): a draft has at least 1 token; for none, use drafter=None")
        _check_nodes("Chain", self.length + 1)
        if not 0 <= self.stop_below <= 1:
            raise InputError(f"draft=Chain(stop_below={self.stop_below:g}): a probability lies in [0, 1]; 0 never stops early")
        self._settle(complete_tree((1,) * self.length))

    def __str__(self) -> str:
        """In a few words."""
        return f"chain of {self.length}" + (f", ending below {self.stop_below:g}" if self.stop_below else "")

    @property
    def node_counts(self) -> tuple[int, ...]:
        """All drafts have the full length, unless they may end early."""
        return halvings(self.nodes) if self.stop_below else (self.nodes,)


@dataclass(frozen=True)
class StaticTree(FixedShape):
    """A tree fixed beforehand; each node's children are the drafter's likeliest tokens, chosen and not drawn.

    Attributes:
        choices: a path of ranks for every node but the root, parents before children: ``((0,), (1,), (0, 0))`` is the
            likeliest token, the second likeliest, and the likeliest after the first. See `EAGLE_TREE`, `MEDUSA_TREE` and
            `complete_tree`.

    Raises:
        InputError: a path is empty, occurs twice, stands before its parent or has none, or has a negative rank.

    Examples:
        >>> print(specjax.StaticTree(((0,), (1,), (0, 0))))
        static tree, 4 nodes, 2 deep
        >>> specjax.StaticTree(((0, 0),))
        Traceback (most recent call last):
        specjax.errors.InputError: draft=StaticTree: (0, 0) is there without its parent (0,); list parents before children
    """

    choices: Choices
    _kind = "static tree"

    def __post_init__(self) -> None:
        try:
            _set(self, choices=tuple(tuple(int(rank) for rank in path) for path in self.choices))
        except TypeError:
            raise InputError(f"draft=StaticTree({self.choices!r}): give a sequence of paths, such as ((0,), (0, 0))") from None
        _check_nodes("StaticTree", len(self.choices) + 1)
        if not self.choices:
            raise InputError("draft=StaticTree(choices=()): a draft has at least 1 node; for none, use drafter=None")
        known: set[tuple[int, ...]] = {()}
        for path in self.choices:
            if min(path, default=-1) < 0:
                raise InputError(f"draft=StaticTree: {path} is not a path of ranks from 0 up")
            if path in known:
                raise InputError(f"draft=StaticTree: {path} occurs twice; siblings must have different ranks")
            if path[:-1] not in known:
                where = "stands before" if path[:-1] in self.choices else "is there without"
                raise InputError(f"draft=StaticTree: {path} {where} its parent {path[:-1]}; list parents before children")
            known.add(path)
        self._settle(self.choices)


@dataclass(frozen=True)
class SampledTree(FixedShape):
    """A complete tree whose siblings are drawn from q without replacement.

    Attributes:
        widths: ``widths[d]`` children below every node of depth d.

    Raises:
        InputError: there is no width, or one is below 1.

    Examples:
        >>> print(specjax.SampledTree((3, 2, 1)))  # 3 children of the root, 2 of each of those, 1 of each of those
        sampled tree, 16 nodes, 3 deep
    """

    widths: tuple[int, ...]
    _kind = "sampled tree"

    def __post_init__(self) -> None:
        _set(self, widths=tuple(self.widths))
        self._settle(complete_tree(self.widths))


@dataclass(frozen=True)
class DynamicTree(DraftShape):
    """EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858), deeper where the drafter is confident. Children are chosen, not drawn.

    A token that the drafter offers as a child is a candidate; it scores the product of the drafter's probabilities along its
    path. (With coupled sampling, of its probabilities given the random numbers.) Of every level's candidates the ``top_k`` best
    are read, that is given to the drafter, and each offers its ``top_k`` likeliest next tokens as candidates of the next level.
    Of all candidates ever offered the ``nodes - 1`` best form the draft. Ties go to the one offered first.

    Attributes:
        top_k: children of a node, and nodes read a level.
        depth: levels below the root, as SGLang's ``num_steps``. EAGLE's own code counts one less: its ``depth=7`` is 8 here.
        nodes: of the draft, the root included.

    Raises:
        InputError: a number is below 1, or ``nodes`` is more than is offered, or too few for one path.

    Examples:
        >>> print(specjax.DynamicTree(top_k=10, depth=7, nodes=60))
        dynamic tree, 60 nodes, 7 deep
    """

    _kind = "dynamic tree"
    top_k: int = 10
    depth: int = 7
    nodes: int = 60

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.depth < 1:
            raise InputError(f"draft={self!r}: top_k and depth must be at least 1")
        _check_nodes("DynamicTree", self.nodes)
        offered = self.top_k + (self.depth - 1) * self.top_k**2
        if not self.depth < self.nodes <= offered + 1:
            raise InputError(
                f"draft={self!r}: nodes must be at least depth + 1 = {self.depth + 1}, the root included, and at most "
                f"{offered + 1}, all that top_k and depth can offer"
            )
        _set(self, branching=self.top_k, width=self.top_k if self.depth > 1 else 1)

    def read_whole(self) -> "DynamicTree":
        """The same tree for a drafter that reads nodes at no cost: of every level as many as the draft may hold are read, and
        not ``top_k``, so that the draft holds the best of all paths of ``top_k`` tokens a level."""
        return _ReadWhole(self.top_k, self.depth, self.nodes)


@dataclass(frozen=True)
class _ReadWhole(DynamicTree):
    """See `DynamicTree.read_whole`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, width=min(self.nodes - 1, self.top_k ** (self.depth - 1)))


MAX_NODES = 4096
"""A larger tree is refused: masks grow with the square of it."""


def _check_nodes(name: str, nodes: int) -> None:
    if nodes > MAX_NODES:
        raise InputError(f"draft={name}: makes {nodes} nodes, the root included; give at most {MAX_NODES}")


def _set(shape: DraftShape, **attributes: Any) -> None:
    """Set attributes while a frozen dataclass is made; only its declared fields make it equal to another."""
    for name, value in attributes.items():
        object.__setattr__(shape, name, value)


def halvings(nodes: int) -> tuple[int, ...]:
    """``nodes`` and its halves down to 2 or 3, ascending. Each is a compiled pass of the target, so they are few."""
    widths = [nodes]
    while widths[0] > 3:
        widths.insert(0, -(-widths[0] // 2))
    return tuple(widths)


@lru_cache(maxsize=256)
def complete_tree(widths: tuple[int, ...]) -> Choices:
    """The choices of a tree in which every node of depth d has ``widths[d]`` children, level by level.

    Raises:
        InputError: there is no width, or one below 1.

    Examples:
        >>> specjax.complete_tree((2, 1))
        ((0,), (1,), (0, 0), (1, 0))
    """
    if not widths or any(width < 1 or width != int(width) for width in widths):
        raise InputError(f"widths={widths}: give the number of children at each depth, each a whole number of at least 1")
    _check_nodes(f"widths={widths}", 1 + sum(accumulate(widths, mul)))
    level: list[tuple[int, ...]] = [()]
    choices: list[tuple[int, ...]] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        choices += level
    return tuple(choices)
