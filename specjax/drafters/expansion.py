"""Grow a draft level by level: chains, static trees, sampled trees and dynamic trees.

The module works with any autoregressive drafter. The drafter provides one function,
``read(frontier, state)``, which reads the nodes of one level together and returns the logits after
each. The module decides which nodes to read next, takes their children from the logits, and
assembles the draft.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.adjustments import NO_TOKEN
from specjax.drafters.candidates import CandidateTokens, Vocabulary, offered_by
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, FixedShape
from specjax.models.cache import Cache, Entries, num_slots, place_entries
from specjax.models.transformer import Target
from specjax.sampling import RowSampling, before_temperature


@struct.dataclass
class Frontier:
    """The nodes of one depth, which are read together.

    There are F nodes. A level with fewer nodes to read is filled up with some candidate of the
    level.

    Attributes:
        tokens: ``[B, F]``, the token ids.
        depth: a scalar, the number of steps below the root, from 1; 0 before anything is drafted.
        parents: ``[B, F]``, the index of each node's parent in the frontier before; 0 if that is
            the root.
        visible: ``[B, F, R]`` bool, which of the nodes that were read before are ancestors of each
            node. The f-th node of depth d has index ``(d - 1) * F + f``. R is
            `DraftShape.read_slots`.
        path: ``[B, F, D]`` int32, the tokens from below the root to each node, the node last, and
            then -1; None if no row has penalties, biases or banned words.
    """

    tokens: jax.Array
    depth: jax.Array
    parents: jax.Array
    visible: jax.Array
    path: jax.Array | None = None

    @property
    def offset(self) -> jax.Array:
        """The number of nodes read before this frontier, a scalar."""
        return (self.depth - 1) * self.tokens.shape[1]


ReadFrontier = Callable[[Frontier, Any], tuple[jax.Array | CandidateTokens, Any]]
"""The type of a function that reads a frontier.

It is ``(frontier, state) -> (logits [B, F, V], state)``. The shapes of the state must not change.
It may return the children as `CandidateTokens` in place of logits.
"""


@struct.dataclass
class _Growth:
    """A draft while it grows.

    A level has C = F * k candidates for k children per node. `specjax.drafts.shapes.Template`
    explains how they are numbered.

    Attributes:
        depth: a scalar, the number of levels that have candidates.
        tokens: ``[D, B, C]``, the tokens of the candidates.
        scores: ``[D, B, C]``, for each candidate the sum of `CandidateTokens.scores` along the path
            from the root: log-probabilities, or 0 for each drawn token; -inf for filler.
        q: ``[D, B, F, V]`` in the drafter's vocabulary, the distribution that the children of each
            node were drawn from; None if they were chosen.
        picked: ``[D, B, F]``, the indices of the candidates of each level that are read.
        is_growing: ``[B]`` bool, the rows whose drafts still grow.
        frontier: the frontier of the newest level.
        state: the state of the drafter.
    """

    depth: jax.Array
    tokens: jax.Array
    scores: jax.Array
    q: jax.Array | None
    picked: jax.Array
    is_growing: jax.Array
    frontier: Frontier
    state: Any


def expand(
    shape: DraftShape,
    read: ReadFrontier,
    logits: jax.Array | CandidateTokens,
    state: Any,
    root: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    active: jax.Array,
    vocabulary: Vocabulary | None = None,
    in_loop: bool = True,
) -> tuple[Draft, jax.Array | np.ndarray, Any]:
    """Draft a tree, with one call of ``read`` for every level but the last.

    There are fewer calls only for a chain that may stop early (see `Chain`), with ``in_loop``: the
    loop ends as soon as every row has stopped or is not active. Until then these rows wait for the
    others.

    Args:
        shape: the shape of the draft.
        read: reads the nodes of a level.
        logits: ``[B, V]``, the drafter's logits at the root, or the children of the root.
        state: the state of the drafter, for ``read``.
        root: ``[B]``, the token at the root of each row.
        sampling: the sampling parameters of the rows.
        keys: ``[D, B]``, one random key for each level and row, from `Drafter.propose`. They are
            consumed.
        active: ``[B]`` bool, the rows that have not finished.
        vocabulary: the vocabulary of the logits, if it is not the target's.
        in_loop: whether the levels run as a loop on the device. If ``read`` does little work,
            unrolled levels are faster.

    Returns:
        A tuple of three. The draft. The places of its nodes, ``[N]`` or ``[B, N]``: the index of
        each node among the nodes that were read; -1 for the root and for nodes that were never
        read. The state of the drafter.
    """
    batch, width, branching = root.shape[0], shape.width, shape.branching
    candidates = width * branching

    def children_of(
        logits: jax.Array | CandidateTokens, depth: jax.Array, path: jax.Array | None
    ) -> CandidateTokens:
        if isinstance(logits, CandidateTokens):
            return logits
        return offered_by(shape, logits, depth, sampling, keys[depth], vocabulary, path)

    def add_level(growth: _Growth, children: CandidateTokens, parent_scores: jax.Array) -> _Growth:
        """Add the ``children`` of nodes with scores ``parent_scores [B, n]`` as a level.

        Pick the nodes to read next.

        For example, take one row of the tree that `specjax.drafts.shapes.Template` shows. The root
        is token 0. After token t the drafter gives t + 1 the probability 1/2 and t + 2 the
        probability 1/4. Scores are shown as probabilities::

            after level         0             1                     2
            tokens              1 2 0 0       2 3 3 4               4 5 3 4
            scores              1/2 1/4 0 0   1/4 1/8 1/8 1/16      1/16 1/32 1/8 1/16
            picked              0 1           2 0                   0 0
            frontier.tokens     1 2           3 2
            frontier.parents    0 0           1 0
            frontier.visible       0000 0000     0100 1000

        Level 0 has the two children of the root, and filler without a score. Both children are
        read. Their parent is the root, and no node was read before them, so nothing is visible. In
        level 1 candidate 2 is read: node 4, with token 3. Its parent has index 1 in the frontier
        before, and is the only node that it sees. Candidate 0 is read too, as filler.
        """
        num_parents, is_growing = children.tokens.shape[1], growth.is_growing
        if children.confidence is not None:
            assert isinstance(shape, Chain)
            is_growing = is_growing & (children.confidence[:, 0] >= shape.stop_below)

        # Level 0 has one parent. It is padded, because `while_loop` needs arrays of one shape.
        def pad_level(values: jax.Array, filler: Any) -> jax.Array:  # [B, n, k] -> [B, C]
            values = jnp.pad(
                values, ((0, 0), (0, width - num_parents), (0, 0)), constant_values=filler
            )
            return values.reshape(batch, candidates)

        # In a row whose chain has stopped, the new candidates are filler: their score is -inf.
        scores = jnp.where(
            growth.is_growing[:, None, None], parent_scores[..., None] + children.scores, -jnp.inf
        )
        tokens, scores = pad_level(children.tokens, 0), pad_level(scores, -jnp.inf)
        picked = _pick(shape, scores, growth.depth)
        frontier = _next_frontier(growth, tokens, picked, branching)
        q = growth.q
        if q is not None and children.q is not None:
            q = q.at[growth.depth, :, :num_parents].set(children.q)
        return replace(
            growth,
            depth=growth.depth + 1,
            tokens=growth.tokens.at[growth.depth].set(tokens),
            scores=growth.scores.at[growth.depth].set(scores),
            q=q,
            picked=growth.picked.at[growth.depth].set(picked),
            is_growing=is_growing,
            frontier=frontier,
        )

    def deepen(growth: _Growth) -> _Growth:
        logits, state = read(growth.frontier, growth.state)
        last = growth.depth - 1
        parent_scores = jnp.take_along_axis(growth.scores[last], growth.picked[last], axis=1)
        children = children_of(logits, growth.depth, growth.frontier.path)
        return add_level(replace(growth, state=state), children, parent_scores)

    no_path = None
    if sampling.adjustments is not None:
        no_path = jnp.full((batch, width, shape.depth), NO_TOKEN, jnp.int32)
    first = children_of(
        logits if isinstance(logits, CandidateTokens) else logits[:, None],
        jnp.zeros((), jnp.int32),
        None if no_path is None else no_path[:, :1],
    )
    vocab = None if first.q is None else first.q.shape[-1]
    root_alone = _empty_growth(shape, vocab, state, active, no_path)
    growth = add_level(root_alone, first, jnp.zeros((batch, 1), jnp.float32))
    if shape.depth > 1 and in_loop:
        growth = _repeat(deepen, shape, growth)
    for _ in range(0 if in_loop else shape.depth - 1):
        growth = deepen(growth)
    assert isinstance(shape, DynamicTree | FixedShape)
    draft, places = (
        _dynamic(shape, growth, root)
        if isinstance(shape, DynamicTree)
        else _fixed(shape, growth, root)
    )
    if draft.q is not None and vocabulary is not None:
        draft = replace(draft, q=vocabulary.widen(draft.q))
    return draft, places, growth.state


def expand_by_depth(
    shape: DraftShape,
    logits: jax.Array,
    root: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    active: jax.Array,
    vocabulary: Vocabulary | None = None,
) -> Draft:
    """Draft a tree whose nodes of one depth all have the same prediction.

    Medusa and the block drafters use it, because their logits at a depth do not depend on the
    drafted tokens above. All nodes of a depth have the same children, which are taken from the
    vocabulary once. With sampling they share the drawn children, too. That is still lossless:
    verification follows one path, so it uses each draw at most once. No node is read, so a dynamic
    tree selects the best nodes among all possible paths.

    Args:
        shape: the shape of the draft.
        logits: ``[B, D, V]``, the drafter's logits at the root and at each depth below it.
        root: ``[B]``, the token at the root of each row.
        sampling: the sampling parameters of the rows.
        keys: ``[D, B]``, as in `expand`. They are consumed.
        active: ``[B]`` bool, the rows that have not finished.
        vocabulary: the vocabulary of the logits, if it is not the target's.
    """
    batch, depth = logits.shape[:2]
    # Here, because they have a row for each row of the batch. The drafted tokens above are unknown.
    depths = jnp.arange(depth)
    ids = None if vocabulary is None else vocabulary.ids
    logits = before_temperature(logits, sampling, depths, ids=ids)
    sampling = replace(sampling, adjustments=None, tokens_before_stop=None)
    # One call for all depths: each depth of a row is passed as a row of its own.
    repeated = jax.tree.map(lambda values: jnp.repeat(values, depth, axis=0), sampling)
    flat = offered_by(
        shape,
        logits.reshape(batch * depth, 1, -1),
        jnp.tile(depths, batch)[:, None],
        repeated,
        keys.T.reshape(-1),
        vocabulary,
    )
    by_depth: CandidateTokens = jax.tree.map(
        lambda values: values.reshape(batch, depth, *values.shape[1:]), flat
    )

    def children_at(depth: jax.Array | int, nodes: int) -> CandidateTokens:
        def for_nodes(values: jax.Array) -> jax.Array:
            level = jnp.take(values, depth, axis=1)
            return jnp.broadcast_to(level, (batch, nodes, *level.shape[2:]))

        return jax.tree.map(for_nodes, by_depth)

    def read(frontier: Frontier, state: tuple[()]) -> tuple[CandidateTokens, tuple[()]]:
        return children_at(frontier.depth, frontier.tokens.shape[1]), state

    shape = shape.read_whole() if isinstance(shape, DynamicTree) else shape
    return expand(
        shape, read, children_at(0, 1), (), root, sampling, keys, active, vocabulary, in_loop=False
    )[0]


def _empty_growth(
    shape: DraftShape,
    vocab: int | None,
    state: Any,
    active: jax.Array,
    no_path: jax.Array | None,
) -> _Growth:
    """Return a draft without candidates.

    ``vocab`` is None if tokens are chosen and not drawn. ``no_path`` is the path of the first
    frontier.
    """
    batch = active.shape[0]
    width, candidates = shape.width, shape.width * shape.branching
    nothing = jnp.zeros((batch, width), jnp.int32)
    return _Growth(
        depth=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((shape.depth, batch, candidates), jnp.int32),
        scores=jnp.full((shape.depth, batch, candidates), -jnp.inf, jnp.float32),
        q=None if vocab is None else jnp.zeros((shape.depth, batch, width, vocab), jnp.float32),
        picked=jnp.zeros((shape.depth, batch, width), jnp.int32),
        is_growing=active,
        frontier=Frontier(
            nothing,
            jnp.zeros((), jnp.int32),
            nothing,
            jnp.zeros((batch, width, shape.read_slots), bool),
            no_path,
        ),
        state=state,
    )


def _repeat(deepen: Callable[[_Growth], _Growth], shape: DraftShape, growth: _Growth) -> _Growth:
    """Call ``deepen`` until the draft has the depth of its shape.

    For a chain that may stop early, the loop ends as soon as every row has stopped or is not
    active. In all other cases the number of turns is fixed, and the loop counts them from 0:
    compilers recognise this form, and a GPU then runs the loop without a round trip to the host
    after each turn.
    """
    may_stop = isinstance(shape, Chain) and shape.stop_below > 0

    def unfinished(carry: tuple[jax.Array, _Growth]) -> jax.Array:
        turn, growth = carry
        has_room = turn < shape.depth - 1
        return has_room & jnp.any(growth.is_growing) if may_stop else has_room

    def body(carry: tuple[jax.Array, _Growth]) -> tuple[jax.Array, _Growth]:
        turn, growth = carry
        return turn + 1, deepen(growth)

    return jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), growth))[1]


def _next_frontier(
    growth: _Growth, tokens: jax.Array, picked: jax.Array, branching: int
) -> Frontier:
    """Return the frontier of the nodes to read next.

    ``picked [B, F]`` are their indices among the candidates of the new level, which have the tokens
    ``tokens [B, C]``.
    """
    previous = growth.frontier
    parents = picked // branching
    # The index of each parent among all nodes that were read. In level 0 the parent is the root,
    # which has no such index: `is_parent` is False there.
    read_index = previous.offset + parents
    nodes_read = jnp.arange(previous.visible.shape[-1])
    is_parent = (read_index[..., None] == nodes_read) & (growth.depth > 0)
    picked_tokens = jnp.take_along_axis(tokens, picked, axis=1)
    path = previous.path
    if path is not None:
        # In level 0 the frontier before is empty: every path is.
        path = jnp.take_along_axis(path, parents[..., None], axis=1)
        path = path.at[:, :, growth.depth].set(picked_tokens)
    return Frontier(
        tokens=picked_tokens,
        depth=growth.depth + 1,
        parents=parents,
        visible=jnp.take_along_axis(previous.visible, parents[..., None], axis=1) | is_parent,
        path=path,
    )


def _pick(shape: DraftShape, scores: jax.Array, level: jax.Array) -> jax.Array:
    """Return the indices ``[B, F]`` of the candidates to read in a level with ``scores [B, C]``."""
    if isinstance(shape, DynamicTree):
        return jax.lax.top_k(scores, shape.width)[1]
    assert isinstance(shape, FixedShape)
    last = jnp.zeros((1, shape.width), jnp.int32)  # nothing is read below the last level
    picked = jnp.concatenate([jnp.asarray(shape.template.frontier), last])[level]
    return jnp.broadcast_to(picked, (scores.shape[0], shape.width))


def _fixed(
    shape: FixedShape, growth: _Growth, root: jax.Array
) -> tuple[Draft, jax.Array | np.ndarray]:
    """Return the draft of a fixed tree, and the nodes' indices as in `expand`."""
    template = shape.template

    def gather(values: jax.Array) -> jax.Array:  # [D, B, C] -> [B, N-1]
        return jnp.moveaxis(values, 0, 1).reshape(root.shape[0], -1)[:, template.source]

    q = None
    if growth.q is not None:
        # For each node, the q of its children. A leaf has none: it gets zeros.
        row = template.places + shape.width
        row[0] = 0  # the root's q is the first row of the first level
        rows = jnp.moveaxis(growth.q, 0, 1).reshape(root.shape[0], shape.depth * shape.width, -1)
        has_child = np.isin(np.arange(shape.nodes), template.parents)
        q = jnp.where(has_child[None, :, None], rows[:, np.where(has_child, row, 0)], 0.0)
    stops_early = isinstance(shape, Chain) and shape.stop_below > 0
    # Siblings are drawn without replacement. If fewer tokens than children have a positive
    # probability, some children do not exist.
    may_lack_tokens = growth.q is not None and shape.branching > 1
    exists = jnp.pad(gather(growth.scores) > -jnp.inf, ((0, 0), (1, 0)), constant_values=True)
    draft = Draft.of_tree(
        tokens=jnp.concatenate([root[:, None], gather(growth.tokens)], axis=1),
        parents=template.parents,
        q=q,
        valid=exists if stops_early or may_lack_tokens else None,
    )
    if not stops_early:
        return draft, template.places
    # If the loop ended early, the last level was never read.
    return draft, jnp.where(draft.depths < growth.depth, template.places, -1)


def _dynamic(shape: DynamicTree, growth: _Growth, root: jax.Array) -> tuple[Draft, jax.Array]:
    """Return the draft of the best candidates of all levels, and the nodes' indices as in `expand`.

    The nodes keep the order of the candidates, so parents come before children. A child never
    scores higher than its parent and comes later. So top-k, which prefers the earlier of two equal
    scores, never selects a child without its parent.
    """
    batch, per_level = root.shape[0], shape.width * shape.branching
    scores, tokens = (
        jnp.moveaxis(values, 0, 1).reshape(batch, -1) for values in (growth.scores, growth.tokens)
    )
    best = jnp.sort(jax.lax.top_k(scores, shape.nodes - 1)[1], axis=1)  # [B, N-1]
    level, candidate = best // per_level, best % per_level
    picked = jnp.moveaxis(growth.picked, 0, 1)  # [B, D, F]

    # For each selected candidate: the index of its parent among the candidates of all levels, and
    # then the parent's index among the nodes.
    parent = jnp.take_along_axis(
        picked.reshape(batch, -1), (level - 1) * shape.width + candidate // shape.branching, axis=1
    )
    parent = parent + (level - 1) * per_level
    is_parent = (best[:, None, :] == parent[:, :, None]) & (level > 0)[:, :, None]
    node = jnp.arange(1, shape.nodes)
    parents = jnp.sum(is_parent * node, axis=-1)

    picked_in_level = jnp.take_along_axis(picked, level[:, :, None], axis=1)  # [B, N-1, F]
    was_read = (picked_in_level == candidate[:, :, None]) & (level < shape.depth - 1)[:, :, None]
    places = jnp.max(
        jnp.where(was_read, level[:, :, None] * shape.width + jnp.arange(shape.width), -1), axis=-1
    )

    def with_root(values: jax.Array, at_root: Any) -> jax.Array:
        return jnp.concatenate(
            [jnp.broadcast_to(at_root, (batch, 1)).astype(values.dtype), values], axis=1
        )

    return Draft.of_tree(
        tokens=with_root(jnp.take_along_axis(tokens, best, axis=1), root[:, None]),
        parents=with_root(parents, -1),
        valid=with_root(jnp.take_along_axis(scores, best, axis=1) > -jnp.inf, True),
        levels=shape.depth,
    ), with_root(places, -1)


def draft_with(
    model: Target,
    cache: Cache,
    shape: DraftShape,
    root: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    active: jax.Array,
    layers: tuple[int, int] | None = None,
) -> Draft:
    """Draft with a model whose cache has the tokens before the root, but not the root.

    Args:
        model: the drafting model.
        cache: the cache of the layers that run. It is only read.
        shape: the shape of the draft.
        root: ``[B]``, the token at the root of each row.
        sampling: the sampling parameters of the rows.
        keys: ``[D, B]``, as in `expand`. They are consumed.
        active: ``[B]`` bool, the rows that have not finished.
        layers: the range of layers that run, as in `Target.run`.
    """
    at_root, new = model.score(root[:, None], cache, layers=layers)
    # The root takes the first slot of the scratch; the nodes follow it.
    scratch = place_entries(
        model.new_scratch(root.shape[0], 1 + shape.read_slots, layers), new, 0, after=at_root.hidden
    )
    read = partial(read_nodes, model, cache, layers=layers)
    return expand(shape, read, at_root.logits[:, 0], scratch, root, sampling, keys, active)[0]


def read_nodes(
    model: Target,
    cache: Cache,
    frontier: Frontier,
    scratch: Entries,
    layers: tuple[int, int] | None = None,
) -> tuple[jax.Array, Entries]:
    """Read the nodes of a frontier with a transformer: a `ReadFrontier`.

    The KV entries of drafted nodes go to the scratch, and the cache is only read. The scratch may
    begin with slots for common ancestors of all nodes that the cache does not have yet, such as the
    root. Their number is the number of slots less `DraftShape.read_slots`. The node with index i
    is stored i slots after them.

    Args:
        model: the drafting model.
        cache: the cache of the layers that run.
        frontier: the nodes.
        scratch: the KV entries of the root and of the nodes read so far, in the layers that run.
        layers: the range of layers that run, as in `Target.run`.
    """
    count, read_slots = frontier.tokens.shape[1], frontier.visible.shape[-1]
    ancestors = num_slots(scratch) - read_slots
    visible = jnp.pad(frontier.visible, ((0, 0), (0, 0), (ancestors, 0)), constant_values=True)
    positions = cache.length[:, None] + ancestors + frontier.depth - 1
    output, new = model.score(
        frontier.tokens,
        cache,
        positions=jnp.broadcast_to(positions, frontier.tokens.shape),
        # Among the nodes of this pass, each sees only itself. It also sees the cache, and its
        # ancestors in the scratch.
        mask=np.eye(count, dtype=bool)[None],
        scratch=[(scratch, visible)],
        layers=layers,
    )
    scratch = place_entries(scratch, new, ancestors + frontier.offset, after=output.hidden)
    return output.logits, scratch
