"""Drafts from earlier text: what followed the last tokens earlier, here or in other texts.

The last tokens of a row are searched in its own text and in a `SuffixIndex` of other texts. The
drafts are trees of what followed them. See Oliaro et al. 2024, arXiv 2411.04975, who keep suffix
trees on the host. Here the search runs on the device, with static shapes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.candidates import NO_CANDIDATE, CandidateTokens, ranked
from specjax.drafters.continuations import Continuations
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.suffix_index import (
    CONTEXT_LENGTHS,
    LONGEST_CONTEXT,
    SHORTEST_CONTEXT,
    SuffixIndex,
)
from specjax.drafters.text_search import RowTexts, TextSearch
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, SampledTree, halvings
from specjax.drafts.union import merge
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

OWN_OCCURRENCES = 4
"""The number of occurrences in the row's own text that count: the latest ones."""

MOST_SAMPLES = 64
"""The largest number of occurrences in the index that count: memory grows with its square."""

_Paths = tuple[jax.Array, jax.Array]
"""Of the nodes of a frontier, the occurrences that go on as they do, and the shares below them."""


@struct.dataclass
class Suffix(TextSearch):
    """A drafter that copies what followed the text's last tokens earlier.

    It searches the last 16 tokens, the last 15, and so on down to 2: in the row's own text, and in
    the texts of ``index`` and of ``answers``. Up to five groups of occurrences count: those of the
    longest context in the row's own text; and for each index those of the longest context, and
    those of the next shorter context that occurs more often. `Continuations.next_tokens` has the
    share of each token among them, which estimates how likely it is accepted. Longer contexts win.
    If nothing has occurred, it drafts nothing.

    Attributes:
        index: the other texts; None: only the row's own text is searched. Another index of the same
            capacity needs no compilation: ``drafter.replace(index=…)``.
        answers: other texts with a segment for each owner, such as the earlier answers of a
            server's tenants; None: there are none. A row searches the segment that `in_segment`
            gives it, and at first none: only an engine with ``earlier_answers`` calls that.
        least_share: a path is drafted only if the product of its shares is at least this. From 0
            to 1.
        samples: the number of occurrences in the index that count, for each of the two contexts.
            From 1 to `MOST_SAMPLES`.
        draft: the shape of the drafts: any but a `SampledTree`, because tokens are looked up and
            not sampled.

    Examples:
        >>> drafter = specjax.Suffix.of_texts([[5, 7, 9, 4]], draft=specjax.DynamicTree(2, 3, 6))
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    index: SuffixIndex | None = None
    answers: SuffixIndex | None = struct.field(default=None, kw_only=True)
    least_share: float = struct.field(pytree_node=False, default=0.1)
    samples: int = struct.field(pytree_node=False, default=8)
    draft: DraftShape | int = struct.field(
        pytree_node=False, default=DynamicTree(top_k=3, depth=8, nodes=16)
    )
    grows_trees: ClassVar[bool] = True

    @classmethod
    def of_texts(
        cls, texts: Sequence[Sequence[int]], capacity: int | None = None, **fields: Any
    ) -> "Suffix":
        """Return a drafter with an index of some texts.

        Args:
            texts: the token ids of each text.
            capacity: as in `SuffixIndex.of`.
            fields: the other attributes.
        """
        return cls(SuffixIndex.of(texts, capacity), **fields)

    @property
    def node_counts(self) -> tuple[int, ...]:
        # 1 is the root alone, if nothing has occurred. The nodes that are not drafted come last.
        return (1, *halvings(self.draft_shape.nodes))

    def check(self, target: Target) -> None:
        if not 0 <= self.least_share <= 1:
            raise InputError(f"Suffix(least_share={self.least_share}): must be from 0 to 1")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise InputError(f"Suffix(samples={self.samples}): must be from 1 to {MOST_SAMPLES}")
        vocab = target.config.vocab_size
        for name, index in (("index", self.index), ("answers", self.answers)):
            if index is not None and (largest := int(index.largest)) >= vocab:
                raise InputError(
                    f"Suffix({name}=…): its largest token id is {largest}, but the target has"
                    f" {vocab} tokens; give texts of the target's own tokenizer"
                )
        self.check_draft()

    def check_draft(self) -> None:
        """Raise an InputError if the draft has another shape than the drafter can make."""
        if isinstance(self.draft_shape, SampledTree):
            raise InputError(
                f"Suffix(draft={self.draft_shape}): its tokens are looked up and not sampled; give"
                " a Chain, a StaticTree or a DynamicTree"
            )

    def start(self, target: Target, batch: int, capacity: int) -> RowTexts:
        return RowTexts.empty(batch, capacity, has_segments=self.answers is not None)

    def in_segment(self, state: RowTexts, segments: jax.Array) -> RowTexts:
        return state if self.answers is None else replace(state, segments=segments)

    def propose(
        self,
        target: Target,
        state: RowTexts,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, RowTexts]:
        shape, vocab = self.draft_shape, target.config.vocab_size
        after = self.continuations(state.with_root(root, active))
        bound = jnp.float32(self.least_share)

        def children(
            members: jax.Array,
            path_shares: jax.Array,
            depth: jax.Array | int,
            path: jax.Array | None,
        ) -> tuple[CandidateTokens, jax.Array]:
            """Return the children of nodes, and the share ``[B, F, G * K]`` of each path there."""
            tokens, shares = after.next_tokens(members, depth)
            path_shares = path_shares[..., None] * shares
            tokens = jnp.where((path_shares >= bound) & (shares > 0), tokens, NO_CANDIDATE)
            # There must be as many candidates as a node may have children.
            lack = ((0, 0), (0, 0), (0, max(shape.branching - tokens.shape[-1], 0)))
            candidates = ranked(
                shape,
                jnp.pad(tokens, lack, constant_values=NO_CANDIDATE),
                jnp.pad(jnp.log(jnp.maximum(shares, 1e-30)), lack, constant_values=-jnp.inf),
                depth,
                sampling,
                keys[depth],
                vocab,
                path,
            )
            return candidates, jnp.where(tokens == NO_CANDIDATE, 0.0, path_shares)

        def read(frontier: Frontier, before: _Paths) -> tuple[CandidateTokens, _Paths]:
            members, shares = before[0], before[1]
            parents = frontier.parents[..., None]
            at_parents = jnp.take_along_axis(members, parents, axis=1)
            is_next = after.at(frontier.depth - 1)[:, None] == frontier.tokens[..., None]
            is_next &= (frontier.tokens >= 0)[..., None]
            members = at_parents & is_next
            path_shares = jnp.where(is_next, jnp.take_along_axis(shares, parents, axis=1), 0.0)
            at_nodes = jnp.max(path_shares, axis=-1)
            below, path_shares = children(members, at_nodes, frontier.depth, frontier.path)
            return below, (members, path_shares)

        members = after.all_members()
        first, shares = children(members, jnp.ones(members.shape[:2]), 0, None)
        # The levels are a loop, in which the root's values have the shape of a frontier's. Only the
        # first of them is read.
        widened = (members.shape[0], shape.width, members.shape[2])
        state_at_root = jnp.broadcast_to(members, widened), jnp.broadcast_to(shares, widened)
        draft, _, _ = expand(shape, read, first, state_at_root, root, sampling, keys, active)
        # Rows that have finished draft nothing, so that fewer nodes are computed.
        exists = (draft.tokens != NO_CANDIDATE) & active[:, None]
        exists = exists.at[:, 0].set(True)  # the root
        valid = exists if draft.valid is None else exists & draft.valid
        draft = replace(draft, tokens=jnp.maximum(draft.tokens, 0), valid=valid)
        if not isinstance(shape, Chain):
            # The nodes that are not drafted go to the end, so that fewer nodes are computed.
            draft = replace(merge([draft], [shape.nodes - 1])[0], offered_by=None)
        return draft, state

    def continuations(self, texts: RowTexts) -> Continuations:
        """Return what followed the last tokens of each text earlier, for the draft's depth."""
        depth = self.draft_shape.depth
        groups = [_in_own_text(texts, depth)]
        if self.index is not None:
            groups += _in_index(self.index, texts, None, self.samples, depth)
        if self.answers is not None:
            groups += _in_index(self.answers, texts, texts.segments, self.samples, depth)
        return Continuations.joined(groups)


def _in_own_text(texts: RowTexts, depth: int) -> Continuations:
    """Return what followed the latest occurrences of the longest context in each row's own text."""
    overlap = texts.overlaps(LONGEST_CONTEXT)
    context = jnp.max(overlap, axis=1)
    context = jnp.where(context >= SHORTEST_CONTEXT, context, 0)[:, None]
    is_match = (overlap == context) & (context > 0)
    position = jnp.arange(overlap.shape[1])
    starts, before = [], jnp.full(context.shape, len(position))
    for _ in range(OWN_OCCURRENCES):  # faster than a top-k
        is_earlier = is_match & (position < before)
        before = jnp.max(jnp.where(is_earlier, position, -1), axis=1, keepdims=True)
        starts.append(before)
    starts = jnp.concatenate(starts, axis=1)
    tokens = texts.copied(jnp.maximum(starts, 0), depth)
    return Continuations(jnp.where(starts[..., None] >= 0, tokens, -1)[:, None], context)


def _in_index(
    index: SuffixIndex, texts: RowTexts, segments: jax.Array | None, samples: int, depth: int
) -> list[Continuations]:
    """Return what followed the longest context in an index, and the next that occurs more often."""
    first, count = index.matches(texts.last(LONGEST_CONTEXT), texts.lengths, segments)
    sizes = jnp.array(CONTEXT_LENGTHS)
    groups, fewest = [], jnp.zeros((first.shape[0], 1), jnp.int32)
    for _ in range(2):
        # The longest context that occurs more often than the one before: argmax takes the first.
        is_more = count > fewest
        place = jnp.argmax(is_more, axis=1)[:, None]
        exists = jnp.any(is_more, axis=1)
        fewest = jnp.where(exists[:, None], jnp.take_along_axis(count, place, axis=1), fewest)
        context = jnp.where(exists, sizes[place[:, 0]], 0)
        following, _ = index.following(
            jnp.take_along_axis(first, place, axis=1)[:, 0],
            jnp.where(exists, fewest[:, 0], 0),
            context,
            samples,
            depth,
        )
        groups.append(Continuations(following[:, None], context[:, None]))
    return groups
