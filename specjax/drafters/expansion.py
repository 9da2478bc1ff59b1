"""Growing a draft, level by level, with any autoregressive drafter: chains, static, sampled and dynamic trees.

A drafter brings one function, ``read(frontier, state)``, which reads the nodes of one level together and gives the logits
after each of them. All the rest is here: which nodes to read next, where their children's tokens come from, and the draft that
comes out of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.drafters.candidates import CandidateTokens, Vocabulary, offered_by
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, FixedShape
from specjax.models.cache import Cache, Entry, place_entries, slots_of
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class Frontier:
    """Nodes of one depth, to be read together. Where a level has fewer than F of them the rest repeat one.

    Attributes:
        tokens: ``[B, F]``.
        depth: scalar, steps below the root, from 1.
        parents: ``[B, F]`` which node of the frontier before each hangs below; 0 where that is the root.
        visible: ``[B, F, R]`` bool, which of the nodes read before each hangs below. The f-th node of depth d is number
            ``(d - 1) * F + f``; R is `DraftShape.read_slots`.
    """

    tokens: jax.Array
    depth: jax.Array
    parents: jax.Array
    visible: jax.Array

    @property
    def offset(self) -> jax.Array:
        """Scalar, nodes read before this frontier."""
        return (self.depth - 1) * self.tokens.shape[1]


ReadFrontier = Callable[[Frontier, Any], tuple[jax.Array | CandidateTokens, Any]]
"""``(frontier, state) -> (logits [B, F, V], state)``; the state's shapes must not change. In place of logits it may give what
the nodes offer."""


@struct.dataclass
class _Growth:
    """A draft while it grows. C = F * k candidates a level; see `specjax.drafts.shapes.Template` for their numbers.

    Attributes:
        depth: scalar, levels of candidates so far.
        tokens: ``[D, B, C]`` candidates.
        scores: ``[D, B, C]`` sums of the candidates' own scores from the root (see `CandidateTokens`); -inf: there is none.
        q: ``[D, B, F, V]`` in the drafter's vocabulary, what the candidates below each read node were drawn from; None where
            they were chosen.
        picked: ``[D, B, F]`` candidates of each level that were read.
        going: ``[B]`` bool, rows that draft on.
        frontier: the newest level's.
        state: the drafter's.
    """

    depth: jax.Array
    tokens: jax.Array
    scores: jax.Array
    q: jax.Array | None
    picked: jax.Array
    going: jax.Array
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
    """Draft a tree, one call of ``read`` for every level but the last.

    Rows that have finished or whose chain has ended (see `Chain`) wait for the others; the loop ends with the last of them.

    Args:
        shape: of the draft.
        read: reads the nodes of a level.
        logits: ``[B, V]`` the drafter's at the root, or what the root offers.
        state: the drafter's, for ``read``.
        root: ``[B]``.
        sampling: the rows' settings.
        keys: ``[D, B]``, one for each level, as `Drafter.propose` is given them; consumed.
        active: ``[B]`` bool, the rows that have not finished.
        vocabulary: of the logits, where it is not the target's.
        in_loop: whether the levels are turns of a loop. Where ``read`` is little work they are better written out.

    Returns:
        The draft; ``[N]`` or ``[B, N]`` each node's place among the nodes read, from 0, and -1 for those never read and
        the root; and the state.
    """
    batch, width, branching = root.shape[0], shape.width, shape.branching
    candidates = width * branching

    def offered(logits: jax.Array | CandidateTokens, depth: jax.Array) -> CandidateTokens:
        if isinstance(logits, CandidateTokens):
            return logits
        return offered_by(shape, logits, depth, sampling, keys[depth], vocabulary)

    def offer(growth: _Growth, children: CandidateTokens, above: jax.Array) -> _Growth:
        """What nodes with scores ``above [B, n]`` offer as ``children``, and which of them to read.

        For example, one row of the tree that `specjax.drafts.shapes.Template` numbers, with a drafter whose likeliest token
        after t is t + 1, of probability 1/2, and then t + 2, of 1/4. The root is token 0. Scores are shown as probabilities::

            after level         0             1                     2
            tokens              1 2 0 0       2 3 3 4               4 5 3 4
            scores              1/2 1/4 0 0   1/4 1/8 1/8 1/16      1/16 1/32 1/8 1/16
            picked              0 1           2 0                   0 0
            frontier.tokens     1 2           3 2
            frontier.parents    0 0           1 0
            frontier.visible       0000 0000     0100 1000

        Level 0 has the root's children, and fillers without a score. Both are read: their parent is the root, and they have
        visible nothing else that was read. Of level 1 candidate 2 is read, node 4 with token 3: its parent is at place 1 of the
        frontier before, which is also the only place that it has visible. Beside it candidate 0 is read as a filler.
        """
        count, going = children.tokens.shape[1], growth.going
        if children.confidence is not None:
            assert isinstance(shape, Chain)
            going = going & (children.confidence[:, 0] >= shape.stop_below)

        def level(values: jax.Array, filler: Any) -> jax.Array:  # [B, n, k] -> [B, C]
            values = jnp.pad(values, ((0, 0), (0, width - count), (0, 0)), constant_values=filler)
            return values.reshape(batch, candidates)

        scores = jnp.where(growth.going[:, None, None], above[..., None] + children.scores, -jnp.inf)
        tokens, scores = level(children.tokens, 0), level(scores, -jnp.inf)
        picked = _pick(shape, scores, growth.depth)
        frontier = _next_frontier(growth, tokens, picked, branching)
        q = growth.q
        if q is not None and children.q is not None:
            q = q.at[growth.depth, :, :count].set(children.q)
        return replace(
            growth,
            depth=growth.depth + 1,
            tokens=growth.tokens.at[growth.depth].set(tokens),
            scores=growth.scores.at[growth.depth].set(scores),
            q=q,
            picked=growth.picked.at[growth.depth].set(picked),
            going=going,
            frontier=frontier,
        )

    def deepen(growth: _Growth) -> _Growth:
        logits, state = read(growth.frontier, growth.state)
        above = jnp.take_along_axis(growth.scores[growth.depth - 1], growth.picked[growth.depth - 1], axis=1)
        return offer(replace(growth, state=state), offered(logits, growth.depth), above)

    first = offered(logits if isinstance(logits, CandidateTokens) else logits[:, None], jnp.zeros((), jnp.int32))
    seed = _seed(shape, None if first.q is None else first.q.shape[-1], state, active)
    growth = offer(seed, first, jnp.zeros((batch, 1), jnp.float32))
    if shape.depth > 1 and in_loop:
        growth = _repeat(deepen, shape, growth)
    for _ in range(0 if in_loop else shape.depth - 1):
        growth = deepen(growth)
    assert isinstance(shape, DynamicTree | FixedShape)
    draft, places = _dynamic(shape, growth, root) if isinstance(shape, DynamicTree) else _fixed(shape, growth, root)
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
    """Draft a tree all of whose nodes of one depth expect the same: the drafter knows no token that it has drafted.

    So they offer the same children, which are taken from the vocabulary once for each depth. Drawn ones are drawn once for all
    nodes of a depth: a step of decoding follows one path, and meets each draw once. Nothing is read, so a dynamic tree holds
    the best of all paths that could be offered.

    Args:
        shape: of the draft.
        logits: ``[B, D, V]`` the drafter's at the root, and below it at each depth.
        root: ``[B]``.
        sampling: the rows' settings.
        keys: ``[D, B]``, as in `expand`; consumed.
        active: ``[B]`` bool, the rows that have not finished.
        vocabulary: of the logits, where it is not the target's.
    """
    batch, depth = logits.shape[:2]
    # The depths of a row are worked out as if they were rows.
    each = jax.tree.map(lambda values: jnp.repeat(values, depth, axis=0), sampling)
    depths = jnp.tile(jnp.arange(depth), batch)[:, None]
    flat = offered_by(shape, logits.reshape(batch * depth, 1, -1), depths, each, keys.T.reshape(-1), vocabulary)
    by_depth: CandidateTokens = jax.tree.map(lambda values: values.reshape(batch, depth, *values.shape[1:]), flat)

    def at(depth: jax.Array | int, nodes: int) -> CandidateTokens:
        def of_nodes(values: jax.Array) -> jax.Array:
            level = jnp.take(values, depth, axis=1)
            return jnp.broadcast_to(level, (batch, nodes, *level.shape[2:]))

        return jax.tree.map(of_nodes, by_depth)

    def read(frontier: Frontier, state: tuple[()]) -> tuple[CandidateTokens, tuple[()]]:
        return at(frontier.depth, frontier.tokens.shape[1]), state

    shape = shape.read_whole() if isinstance(shape, DynamicTree) else shape
    return expand(shape, read, at(0, 1), (), root, sampling, keys, active, vocabulary, in_loop=False)[0]


def _seed(shape: DraftShape, vocab: int | None, state: Any, active: jax.Array) -> _Growth:
    """Before anything is offered; ``vocab`` is None where tokens are chosen, not drawn."""
    batch = active.shape[0]
    width, candidates = shape.width, shape.width * shape.branching
    nothing = jnp.zeros((batch, width), jnp.int32)
    return _Growth(
        depth=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((shape.depth, batch, candidates), jnp.int32),
        scores=jnp.full((shape.depth, batch, candidates), -jnp.inf, jnp.float32),
        q=None if vocab is None else jnp.zeros((shape.depth, batch, width, vocab), jnp.float32),
        picked=jnp.zeros((shape.depth, batch, width), jnp.int32),
        going=active,
        frontier=Frontier(nothing, jnp.zeros((), jnp.int32), nothing, jnp.zeros((batch, width, shape.read_slots), bool)),
        state=state,
    )


def _repeat(deepen: Callable[[_Growth], _Growth], shape: DraftShape, growth: _Growth) -> _Growth:
    """``deepen`` until the draft is as deep as its shape, or, of a chain that may stop early, until the last row has stopped.

    Where the number of turns is known a GPU takes them without asking its host after each: so they are counted here, from 0,
    which compilers recognise.
    """
    may_stop = isinstance(shape, Chain) and shape.stop_below > 0

    def unfinished(carry: tuple[jax.Array, _Growth]) -> jax.Array:
        turn, growth = carry
        has_room = turn < shape.depth - 1
        return has_room & jnp.any(growth.going) if may_stop else has_room

    def body(carry: tuple[jax.Array, _Growth]) -> tuple[jax.Array, _Growth]:
        turn, growth = carry
        return turn + 1, deepen(growth)

    return jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), growth))[1]


def _next_frontier(growth: _Growth, tokens: jax.Array, picked: jax.Array, branching: int) -> Frontier:
    """The nodes to read next: those ``picked [B, F]`` of the newest level's candidates ``tokens [B, C]``."""
    newest = growth.frontier
    parents = picked // branching
    number = newest.offset + parents  # of the parents among the nodes read, if they are not the root
    own = (number[..., None] == jnp.arange(newest.visible.shape[-1])) & (growth.depth > 0)
    return Frontier(
        tokens=jnp.take_along_axis(tokens, picked, axis=1),
        depth=growth.depth + 1,
        parents=parents,
        visible=jnp.take_along_axis(newest.visible, parents[..., None], axis=1) | own,
    )


def _pick(shape: DraftShape, scores: jax.Array, level: jax.Array) -> jax.Array:
    """``[B, F]`` the candidates to read next, of a level with ``scores [B, C]``."""
    if isinstance(shape, DynamicTree):
        return jax.lax.top_k(scores, shape.width)[1]
    assert isinstance(shape, FixedShape)
    last = jnp.zeros((1, shape.width), jnp.int32)  # nothing is read below the last level
    picked = jnp.concatenate([jnp.asarray(shape.template.frontier), last])[level]
    return jnp.broadcast_to(picked, (scores.shape[0], shape.width))


def _fixed(shape: FixedShape, growth: _Growth, root: jax.Array) -> tuple[Draft, jax.Array | np.ndarray]:
    """The draft of a template."""
    template = shape.template

    def gather(values: jax.Array) -> jax.Array:  # [D, B, C] -> [B, N-1]
        return jnp.moveaxis(values, 0, 1).reshape(root.shape[0], -1)[:, template.source]

    q = None
    if growth.q is not None:
        # Node by node the q of its children; a leaf has none, and is given zeros.
        row = template.places + shape.width
        row[0] = 0  # the root's is the first row of the first level
        rows = jnp.moveaxis(growth.q, 0, 1).reshape(root.shape[0], shape.depth * shape.width, -1)
        has_child = np.isin(np.arange(shape.nodes), template.parents)
        q = jnp.where(has_child[None, :, None], rows[:, np.where(has_child, row, 0)], 0.0)
    stops_early = isinstance(shape, Chain) and shape.stop_below > 0
    may_lack_tokens = growth.q is not None and shape.branching > 1
    offered = jnp.pad(gather(growth.scores) > -jnp.inf, ((0, 0), (1, 0)), constant_values=True)
    draft = Draft.of_tree(
        tokens=jnp.concatenate([root[:, None], gather(growth.tokens)], axis=1),
        parents=template.parents,
        q=q,
        valid=offered if stops_early or may_lack_tokens else None,
    )
    # Where the loop ended early the newest level was never read.
    return draft, jnp.where(draft.depths < growth.depth, template.places, -1) if stops_early else template.places


def _dynamic(shape: DynamicTree, growth: _Growth, root: jax.Array) -> tuple[Draft, jax.Array]:
    """The best of all candidates, in the order in which they were offered: parents come before children.

    A child scores at most what its parent does and is offered later, so that of two equals the parent is kept.
    """
    batch, per_level = root.shape[0], shape.width * shape.branching
    scores, tokens = (jnp.moveaxis(values, 0, 1).reshape(batch, -1) for values in (growth.scores, growth.tokens))
    kept = jnp.sort(jax.lax.top_k(scores, shape.nodes - 1)[1], axis=1)  # [B, N-1]
    level, place = kept // per_level, kept % per_level
    picked = jnp.moveaxis(growth.picked, 0, 1)  # [B, D, F]

    # The candidate that each kept one hangs below, over all levels, and from it the number of the node.
    above = jnp.take_along_axis(picked.reshape(batch, -1), (level - 1) * shape.width + place // shape.branching, axis=1)
    above = above + (level - 1) * per_level
    is_parent = (kept[:, None, :] == above[:, :, None]) & (level > 0)[:, :, None]
    number = jnp.arange(1, shape.nodes)
    parents = jnp.sum(is_parent * number, axis=-1)

    own_level = jnp.take_along_axis(picked, level[:, :, None], axis=1)  # [B, N-1, F]
    was_read = (own_level == place[:, :, None]) & (level < shape.depth - 1)[:, :, None]
    places = jnp.max(jnp.where(was_read, level[:, :, None] * shape.width + jnp.arange(shape.width), -1), axis=-1)

    def with_root(values: jax.Array, at_root: Any) -> jax.Array:
        return jnp.concatenate([jnp.broadcast_to(at_root, (batch, 1)).astype(values.dtype), values], axis=1)

    return Draft.of_tree(
        tokens=with_root(jnp.take_along_axis(tokens, kept, axis=1), root[:, None]),
        parents=with_root(parents, -1),
        valid=with_root(jnp.take_along_axis(scores, kept, axis=1) > -jnp.inf, True),
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
    """A draft by a model that remembers the tokens before the root, and not the root yet.

    Args:
        model: the drafting model.
        cache: its cache, of the layers that run. It is only read.
        shape: of the draft.
        root: ``[B]``.
        sampling: the rows' settings.
        keys: ``[D, B]``, as in `expand`; consumed.
        active: ``[B]`` bool, the rows that have not finished.
        layers: as in `Target.run`.
    """
    at_root, new = model.score(root[:, None], cache, layers=layers)
    # The root has the first slot of the scratch, of which nothing was read yet.
    scratch = place_entries(model.new_scratch(root.shape[0], 1 + shape.read_slots, layers), new, 0, after=at_root.hidden)
    read = partial(read_nodes, model, cache, layers=layers)
    return expand(shape, read, at_root.logits[:, 0], scratch, root, sampling, keys, active)[0]


def read_nodes(
    model: Target, cache: Cache, frontier: Frontier, scratch: tuple[Entry, ...], layers: tuple[int, int] | None = None
) -> tuple[jax.Array, tuple[Entry, ...]]:
    """A `ReadFrontier` for a transformer: drafted nodes are remembered in scratch, and the cache is only read.

    The first slots of ``scratch`` may hold tokens that every node hangs below and that are not in the cache yet (the root):
    as many as it has more than the nodes to be read, `DraftShape.read_slots`. Node number i lies in the i-th slot after those.

    Args:
        model: the drafting model.
        cache: its cache, of the layers that run.
        frontier: the nodes.
        scratch: entries of what was read since, of the layers that run.
        layers: as in `Target.run`.
    """
    count, read_slots = frontier.tokens.shape[1], frontier.visible.shape[-1]
    above = slots_of(scratch) - read_slots
    visible = jnp.pad(frontier.visible, ((0, 0), (0, 0), (above, 0)), constant_values=True)
    output, new = model.score(
        frontier.tokens,
        cache,
        positions=jnp.broadcast_to(cache.length[:, None] + above + frontier.depth - 1, frontier.tokens.shape),
        mask=np.eye(count, dtype=bool)[None],
        scratch=[(scratch, visible)],
        layers=layers,
    )
    return output.logits, place_entries(scratch, new, above + frontier.offset, after=output.hidden)
