"""The shapes of drafts. The user selects a shape, and the drafter fills it with tokens."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from specjax.errors import InputError

Choices = tuple[tuple[int, ...], ...]
"""A tree as paths of ranks, one for each node except the root.

The *rank* of a child says which of the drafter's tokens it has: rank 0 is the likeliest token, rank
1 the second likeliest. If tokens are sampled, rank 0 is the first sample, rank 1 the second. So
(0, 2) is the third likeliest child of the root's likeliest child.
"""


@dataclass(frozen=True)
class Template:
    """The indices with which a fixed tree is drafted.

    A drafter *reads* a node: it computes the distribution of the next token. The ``branching`` best
    tokens are the *candidates* for the node's children, and some candidates are nodes of the tree.
    All nodes of one depth that have children are read together. This gives one level of candidates:
    level 0 has those below the root, level 1 those below the nodes of depth 1, and so on.

    All levels have the same size, so that they fit into one array: ``width * branching``
    candidates, first the children of the first node read, by rank, then those of the second. If
    fewer than ``width`` nodes are read, the rest is padding, which is not used.

    So a node has up to five indices. For example, in the tree ``((0,), (1,), (0, 0), (1, 0), (1,
    1), (1, 0, 0))``, up to 2 nodes are read together, and a node has up to 2 children::

        node                          0    1    2    3      4      5      6
        path                          ()   0    1    0,0    1,0    1,1    1,0,0
        candidate within its level    -    0    1    0      2      3      0
        candidate over all levels     -    0    1    4      6      7      8
        place among the nodes read    -    0    1    -      2      -      -
        slot of scratch               0    1    2    -      3      -      -

    The root is read first, alone. This gives level 0: its two children and padding. Then nodes 1
    and 2 are read, which gives level 1. Its candidate 1, the second child of node 1, is not in the
    tree. Of the nodes of level 1, only node 4 has a child. It is read at place 2, beside padding
    (candidate 0) at place 3, which gives level 2. The KV of the nodes that a drafter reads is in
    its scratch by place (see `read_nodes`). The last line applies to drafters whose scratch has the
    root in its first slot: early exit, a compressed cache, Mixture of Attentions. Draft models and
    feature drafters (EAGLE, MTP) have the root, or its pair, in their cache already, so a node's
    slot is its place.

    Here ``parents`` is -1, 0, 0, 1, 2, 2, 4. ``frontier`` is ((0, 1), (2, 0)). ``source`` is the
    fourth line without the root; ``places`` is the fifth, with -1 instead of a dash. `expand` shows
    the arrays while this tree grows.

    Attributes:
        parents: ``[N]`` the parent of each node, -1 for the root.
        frontier: ``[depth - 1, width]`` the candidates of each level, counted within the level,
            that are read for the next one; padded with 0. Nothing is read below the last level.
        source: ``[N - 1]`` the candidate of each node except the root, counted over all levels.
        places: ``[N]`` the index of each node among the nodes read: ``width`` places for depth 1,
            then ``width`` for depth 2, and so on. -1 for nodes without a child, and for the root,
            which is read before drafting begins.
        width: the maximum number of nodes below the root that are read together.
        branching: the highest rank of a child plus one.
    """

    parents: np.ndarray
    frontier: np.ndarray
    source: np.ndarray
    places: np.ndarray
    width: int
    branching: int


@lru_cache(maxsize=256)
def template_of(choices: Choices) -> Template:
    """Return the `Template` of a tree."""
    indices = {(): 0} | {path: index for index, path in enumerate(choices, 1)}
    depth, branching = max(map(len, choices)), 1 + max(path[-1] for path in choices)
    levels = [[path for path in choices if len(path) == level] for level in range(1, depth + 1)]
    has_child = {path[:-1] for path in choices}
    read = [[path for path in level if path in has_child] for level in levels[:-1]]
    width = max(map(len, read), default=1)
    place = {(): 0} | {path: place for level in read for place, path in enumerate(level)}

    def candidate(path: tuple[int, ...]) -> int:  # the index within its level
        return place[path[:-1]] * branching + path[-1]

    frontier = np.zeros((depth - 1, width), np.int32)
    places = np.full(len(choices) + 1, -1, np.int32)
    for level, nodes in enumerate(read):
        frontier[level, : len(nodes)] = [candidate(path) for path in nodes]
        places[[indices[path] for path in nodes]] = level * width + np.arange(len(nodes))
    return Template(
        parents=np.array([-1] + [indices[path[:-1]] for path in choices]),
        frontier=frontier,
        source=np.array(
            [(len(path) - 1) * width * branching + candidate(path) for path in choices]
        ),
        places=places,
        width=width,
        branching=branching,
    )


class DraftShape:
    """The shape of a draft, which drafter and target need to know before they compile.

    Attributes:
        depth: D, the maximum number of drafted tokens that a step can accept.
        nodes: N, the number of nodes of the tree, with the root.
        branching: the maximum number of children of a node: the number of ranks of the drafter's
            distribution that are used.
        width: the maximum number of nodes that the drafter reads in one pass.

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
    def is_chain(self) -> bool:
        """True if no draft of the shape has a node with two children.

        A dynamic tree or a union with one node for each level may still branch.

        Examples:
            >>> specjax.Chain(3).is_chain, specjax.DynamicTree(top_k=2, depth=3, nodes=4).is_chain
            (True, False)
        """
        return self.nodes == self.depth + 1 and self.branching <= 1

    @property
    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes that verification is compiled for, ascending.

        It runs with the smallest one that holds the draft. Only chains have more than one, because
        the first nodes of a chain are a chain again.
        """
        return (self.nodes,)

    def __str__(self) -> str:
        """Return a short description."""
        return f"{self._kind}, {self.nodes} nodes, {self.depth} deep"

    @property
    def read_slots(self) -> int:
        """The number of scratch slots for drafted nodes: ``width`` per level, without the last."""
        return (self.depth - 1) * self.width

    def check(self, vocab_size: int) -> None:
        """Raise InputError if the vocabulary has too few tokens for the shape."""
        if self.branching > vocab_size:
            raise InputError(
                f"draft={type(self).__name__}: a node has {self.branching} children, but the"
                f" vocabulary has {vocab_size} tokens; give at most {vocab_size}"
            )


class FixedShape(DraftShape):
    """A shape that is fixed as ``choices`` before drafting."""

    choices: Choices
    template: Template

    @property
    def is_chain(self) -> bool:
        """True if each level has one node."""
        return self.nodes == self.depth + 1

    def _settle(self, choices: Choices) -> None:
        """Set the attributes that follow from the choices."""
        template = template_of(choices)
        _set(
            self,
            choices=choices,
            template=template,
            depth=len(template.frontier) + 1,
            nodes=len(choices) + 1,
        )
        _set(self, branching=template.branching, width=template.width)


@dataclass(frozen=True)
class Chain(FixedShape):
    """A chain of ``length`` tokens (gamma in the papers), which are sampled from q.

    With ``stop_below``, the draft of a row ends after the first token whose probability under q is
    below this bound. (With coupled sampling, it is the probability that the target samples the same
    token, given the random numbers of its position.) That token stays in the draft: dropping it
    because of its value would bias the output.

    Raises:
        InputError: ``length`` is below 1, or ``stop_below`` is outside of [0, 1].

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
            raise InputError(
                f"draft=Chain(length={self.length}): a draft has at least 1 token; for none, use"
                " drafter=None"
            )
        _check_nodes("Chain", self.length + 1)
        if not 0 <= self.stop_below <= 1:
            raise InputError(
                f"draft=Chain(stop_below={self.stop_below:g}): a probability lies in [0, 1]; 0"
                " never stops early"
            )
        self._settle(complete_tree((1,) * self.length))

    def __str__(self) -> str:
        """Return a short description."""
        return f"chain of {self.length}" + (
            f", ending below {self.stop_below:g}" if self.stop_below else ""
        )

    @property
    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes that verification is compiled for."""
        return halvings(self.nodes) if self.stop_below else (self.nodes,)


@dataclass(frozen=True)
class StaticTree(FixedShape):
    """A fixed tree. Each node's children are the drafter's likeliest tokens, without sampling.

    Attributes:
        choices: a path of ranks for each node except the root, parents before children. For
            example, ``((0,), (1,), (0, 0))`` has the likeliest token, the second likeliest, and the
            likeliest after the first. See `EAGLE_TREE`, `MEDUSA_TREE` and `complete_tree`.

    Raises:
        InputError: A path is empty, occurs twice, has a negative rank, or does not follow its
            parent.

    Examples:
        >>> print(specjax.StaticTree(((0,), (1,), (0, 0))))
        static tree, 4 nodes, 2 deep
        >>> specjax.StaticTree(((0, 0),))
        Traceback (most recent call last):
        specjax.errors.InputError: draft=StaticTree: (0, 0) is there without its parent (0,); ...
    """

    choices: Choices
    _kind = "static tree"

    def __post_init__(self) -> None:
        try:
            _set(self, choices=tuple(tuple(int(rank) for rank in path) for path in self.choices))
        except TypeError:
            raise InputError(
                f"draft=StaticTree({self.choices!r}): give a sequence of paths, such as ((0,),"
                " (0, 0))"
            ) from None
        _check_nodes("StaticTree", len(self.choices) + 1)
        if not self.choices:
            raise InputError(
                "draft=StaticTree(choices=()): a draft has at least 1 node; for none, use"
                " drafter=None"
            )
        paths: set[tuple[int, ...]] = {()}
        for path in self.choices:
            if min(path, default=-1) < 0:
                raise InputError(f"draft=StaticTree: {path} is not a path of ranks from 0 up")
            if path in paths:
                raise InputError(
                    f"draft=StaticTree: {path} occurs twice; siblings must have different ranks"
                )
            if path[:-1] not in paths:
                where = "stands before" if path[:-1] in self.choices else "is there without"
                raise InputError(
                    f"draft=StaticTree: {path} {where} its parent {path[:-1]}; list parents before"
                    " children"
                )
            paths.add(path)
        self._settle(self.choices)


@dataclass(frozen=True)
class SampledTree(FixedShape):
    """A complete tree whose siblings are sampled from q without replacement.

    Attributes:
        widths: the number of children of each node by its depth.

    Raises:
        InputError: There is no width, or one is below 1.

    Examples:
        >>> print(specjax.SampledTree((3, 2, 1)))  # 1 root, 3 children, 3 * 2 and 3 * 2 * 1 below
        sampled tree, 16 nodes, 3 deep
    """

    widths: tuple[int, ...]
    _kind = "sampled tree"

    def __post_init__(self) -> None:
        _set(self, widths=tuple(self.widths))
        self._settle(complete_tree(self.widths))


@dataclass(frozen=True)
class DynamicTree(DraftShape):
    """EAGLE-2's tree, which is deeper where the drafter is confident. Children are not sampled.

    See Li et al. 2024, arXiv 2406.16858. The score of a candidate is the product of the drafter's
    probabilities along its path. (With coupled sampling, they are the probabilities given the
    random numbers.) The drafter reads the ``top_k`` best candidates of each level. The ``top_k``
    likeliest next tokens of each of them are the candidates of the next level. The ``nodes - 1``
    best candidates of all levels form the draft. Among equal scores, the earlier candidate wins.

    Attributes:
        top_k: the number of children of a node, and of nodes read per level.
        depth: the number of levels below the root, as SGLang's ``num_steps``. EAGLE's own code
            counts one less: its ``depth=7`` is 8 here.
        nodes: the number of nodes of the draft, with the root.

    Raises:
        InputError: A number is below 1, or ``nodes`` exceeds the number of candidates, or is too
            small for a single path.

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
        candidates = self.top_k + (self.depth - 1) * self.top_k**2
        if not self.depth < self.nodes <= candidates + 1:
            raise InputError(
                f"draft={self!r}: nodes must be at least depth + 1 = {self.depth + 1}, the root"
                f" included, and at most {candidates + 1}, the number of candidates of top_k and"
                " depth, and the root"
            )
        _set(self, branching=self.top_k, width=self.top_k if self.depth > 1 else 1)

    def read_whole(self) -> "DynamicTree":
        """Return the same tree for a drafter that reads nodes at no cost.

        It reads as many nodes per level as the draft may hold, instead of ``top_k``. So the draft
        has the best of all paths with ``top_k`` children per node.
        """
        return _ReadWhole(self.top_k, self.depth, self.nodes)


@dataclass(frozen=True)
class _ReadWhole(DynamicTree):
    """A dynamic tree that reads all nodes of a level; see `DynamicTree.read_whole`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, width=min(self.nodes - 1, self.top_k ** (self.depth - 1)))


@dataclass(frozen=True)
class UnionTree(DraftShape):
    """One tree from the drafts of several drafters, see `specjax.drafters.Together`.

    Each part drafts its shape, of which the first ``slots`` nodes below the root are used. Paths
    that several parts offer are in the tree once.

    Attributes:
        shapes: the shape that each part drafts.
        slots: the maximum number of nodes below the root that each part offers. None: as many as
            its shape has.
        most: the maximum number of nodes below the root of the whole tree. The parts before the
            last one have all of their slots. The last one has what they leave: the more of its
            nodes the others offer as well, the more. None: there is room for all slots.

    Raises:
        InputError: There is no shape, or a number of nodes is not possible.

    Examples:
        >>> union = specjax.UnionTree((specjax.DynamicTree(4, 3, 13), specjax.Chain(8)), (12, 4))
        >>> print(union)
        union of (dynamic tree, 13 nodes, 3 deep; chain of 8, cut to 4), 17 nodes, 4 deep
        >>> union = specjax.UnionTree((specjax.Chain(2), specjax.Chain(8)), most=8)
        >>> print(union)  # the second part has 6 nodes or more
        union of (chain of 2; chain of 8), 9 nodes, 8 deep
    """

    shapes: tuple[DraftShape, ...]
    slots: tuple[int, ...] | None = None
    most: int | None = None
    _kind = "union"

    def __post_init__(self) -> None:
        shapes = tuple(self.shapes)
        if not shapes:
            raise InputError("draft=UnionTree(shapes=()): give the shape of each part")
        whole = tuple(shape.nodes - 1 for shape in shapes)
        slots = whole if self.slots is None else tuple(self.slots)
        if len(slots) != len(shapes):
            raise InputError(
                f"slots={slots}: there are {len(shapes)} parts; give one number for each"
            )
        for slot, largest, shape in zip(slots, whole, shapes, strict=True):
            if not 0 <= slot <= largest:
                raise InputError(
                    f"slots={slots}: a part drafts a {shape}, so give it a number from 0 to"
                    f" {largest}"
                )
        if not any(slots):
            raise InputError(f"slots={slots}: no part may draft; give at least one a slot")
        room = sum(slots)
        if self.most is not None:
            before = sum(slots[:-1])
            if type(self.most) is not int or not before < self.most <= room:
                raise InputError(
                    f"most={self.most!r}: the parts have {before} slots before the last one and"
                    f" {room} in all; give a number from {before + 1} to {room}, or None"
                )
            room = self.most
        _check_nodes("UnionTree", 1 + room)
        _set(
            self,
            shapes=shapes,
            slots=slots,
            depth=max(
                min(slot, shape.depth, room) for slot, shape in zip(slots, shapes, strict=True)
            ),
            nodes=1 + room,
            branching=sum(map(min, slots, (shape.branching for shape in shapes))),
            width=max(shape.width for shape in shapes),
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of nodes that each part may offer at least, whatever the others offer."""
        assert self.slots is not None
        *before, last = self.slots
        return (*before, min(last, self.nodes - 1 - sum(before)))

    @property
    def splits(self) -> tuple[DraftShape, ...]:
        """Other divisions of the nodes among the same parts, from which an engine may choose.

        They are the first part alone; a quarter of the first part beside all of the others; and the
        others without the first part. There are none if a part has fewer slots than its shape has
        nodes, because somebody has chosen these.

        Examples:
            >>> union = specjax.UnionTree((specjax.Chain(4), specjax.Chain(8)))
            >>> for split in union.splits:
            ...     print(split)
            chain of 4
            union of (chain of 1; chain of 8), 10 nodes, 8 deep
            union of (chain of 4, cut to 0; chain of 8), 9 nodes, 8 deep
            >>> specjax.UnionTree((specjax.Chain(4), specjax.Chain(8)), slots=(4, 2)).splits
            ()
        """
        assert self.slots is not None
        (first, *rest), (count, *rest_slots) = self.shapes, self.slots
        is_whole = self.nodes == sum(shape.nodes - 1 for shape in self.shapes) + 1
        if not is_whole or not count or not any(rest_slots):
            return ()
        splits: list[DraftShape] = [first]
        if isinstance(first, Chain) and first.length > 1:
            few = replace(first, length=max(1, first.length // 4))
            splits.append(UnionTree((few, *rest)))
        elif count // 4 >= first.depth:
            splits.append(UnionTree(self.shapes, (count // 4, *rest_slots)))
        return (*splits, UnionTree(self.shapes, (0, *rest_slots)))

    def __str__(self) -> str:
        """Return a short description."""
        assert self.slots is not None
        parts = (
            str(shape) if slot == shape.nodes - 1 else f"{shape}, cut to {slot}"
            for shape, slot in zip(self.shapes, self.slots, strict=True)
        )
        return f"union of ({'; '.join(parts)}), {self.nodes} nodes, {self.depth} deep"

    def check(self, vocab_size: int) -> None:
        """Raise InputError if the vocabulary has too few tokens for the shape of a part."""
        for shape in self.shapes:
            shape.check(vocab_size)


MAX_NODES = 4096
"""The maximum number of nodes of a tree. The size of masks grows with its square."""


def _check_nodes(name: str, nodes: int) -> None:
    if nodes > MAX_NODES:
        raise InputError(
            f"draft={name}: it makes {nodes} nodes with the root; give at most {MAX_NODES}"
        )


def _set(shape: DraftShape, **attributes: Any) -> None:
    """Set attributes of a frozen dataclass in its constructor.

    Equality depends on its declared fields alone.
    """
    for name, value in attributes.items():
        object.__setattr__(shape, name, value)


def halvings(nodes: int) -> tuple[int, ...]:
    """Return ``nodes`` and its repeated halves down to 2 or 3, ascending.

    There are few, because each one is a compiled pass of the target.
    """
    widths = [nodes]
    while widths[0] > 3:
        widths.insert(0, -(-widths[0] // 2))
    return tuple(widths)


@lru_cache(maxsize=256)
def complete_tree(widths: tuple[int, ...]) -> Choices:
    """Return the choices of a tree in which each node of depth d has ``widths[d]`` children.

    The nodes are sorted by level.

    Raises:
        InputError: There is no width, or one is below 1.

    Examples:
        >>> specjax.complete_tree((2, 1))
        ((0,), (1,), (0, 0), (1, 0))
    """
    if not widths or any(width < 1 or width != int(width) for width in widths):
        raise InputError(
            f"widths={widths}: give the number of children at each depth, each a whole number of at"
            " least 1"
        )
    _check_nodes(f"widths={widths}", 1 + sum(accumulate(widths, mul)))
    level: list[tuple[int, ...]] = [()]
    choices: list[tuple[int, ...]] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        choices += level
    return tuple(choices)
