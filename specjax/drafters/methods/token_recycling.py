"""Token recycling: propose the tokens that the target has lately held likely after the same token.

See Luo et al. 2024, arXiv 2408.08696. A step scores many drafted tokens and rejects most of them.
What the target holds likely after each of them is computed anyway, and usually dropped. Here it is
stored in an *adjacency table*, which has the k likeliest next tokens after each token, and the next
draft is a tree whose children are looked up there. Nothing is trained, and drafting reads no
weights.

Every row has a table of its own, so what is drafted for a text does not depend on other texts of
the batch, or on other users of a server. When a text begins the table is empty, or has what
followed each token in the earlier answers of the same tenant, if an engine keeps them.
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sharding
from specjax.drafters.base import Committed, Drafter
from specjax.drafters.candidates import NO_CANDIDATE, CandidateTokens, ranked
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.suffix_index import NO_TOKEN, SuffixIndex
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, SampledTree, halvings
from specjax.errors import InputError
from specjax.models.cache import KVCache, PagedCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

MOST_SUCCESSORS = 64
"""The maximum of ``successors``: a table of a large vocabulary would take gigabytes."""

NO_SUCCESSOR = NO_CANDIDATE
"""The id in an empty place of a table."""


@struct.dataclass
class AdjacencyTable:
    """The likely next tokens after each token, for each row.

    All tokens of a list are different, and empty places come last.

    Attributes:
        tokens: ``[B, V, k]`` int32, the next tokens, the likeliest first; `NO_SUCCESSOR` if a place
            is empty.
        logprobs: ``[B, V, k]`` float32, the target's log-probability of each when it was stored; an
            estimate for tokens that come from a prompt. -inf if a place is empty.
    """

    tokens: jax.Array
    logprobs: jax.Array

    def after(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the lists ``[B, n, k]`` of next tokens and of log-probabilities.

        ``tokens [B, n]`` may have `NO_SUCCESSOR`, after which nothing comes.
        """
        rows = jnp.arange(tokens.shape[0])[:, None]
        entry = rows, jnp.maximum(tokens, 0)
        nothing = (tokens == NO_SUCCESSOR)[..., None]
        return (
            jnp.where(nothing, NO_SUCCESSOR, self.tokens[entry]),
            jnp.where(nothing, -jnp.inf, self.logprobs[entry]),
        )

    def put(
        self, tokens: jax.Array, likely: jax.Array, logprobs: jax.Array, wins: jax.Array
    ) -> "AdjacencyTable":
        """Return the table with new lists ``likely [B, n, k]`` after ``tokens [B, n]``.

        Only those of ``wins [B, n]`` are stored. They must have different tokens in each row.
        """
        rows = jnp.arange(tokens.shape[0])[:, None]
        entry = rows, jnp.where(wins, tokens, self.tokens.shape[1])  # outside: dropped
        return AdjacencyTable(
            tokens=self.tokens.at[entry].set(likely, mode="drop"),
            logprobs=self.logprobs.at[entry].set(logprobs, mode="drop"),
        )


@struct.dataclass
class TokenRecycling(Drafter[AdjacencyTable]):
    """A drafter that looks up what the target held likely before.

    After every step it stores the target's likeliest next tokens after each node of the draft,
    accepted or not. In a prompt it stores which tokens follow each token. After a token that has
    not occurred it drafts nothing.

    Differs from the paper in two ways. The table has probabilities beside the tokens, so that
    dynamic trees can grow where the target was certain, and coupled sampling can choose the tokens
    that the target is likely to draw. And the table belongs to one text, and not to all texts: of
    earlier answers it has the tokens that followed each other, and not those that were rejected.

    Attributes:
        successors: the number of next tokens that are stored for each token, k. A row stores 8 k
            bytes for each token of the vocabulary.
        draft: the shape of the drafts: any but a `SampledTree`, because tokens are looked up and
            not sampled. No node has more than ``successors`` children.
        answers: other texts with a segment for each owner, such as the earlier answers of a
            server's tenants; None: there are none. A row's table begins with the pairs of tokens
            in the segment that `in_segment` gives it: only an engine with ``earlier_answers``
            gives one.

    Examples:
        >>> drafter = specjax.TokenRecycling(draft=specjax.DynamicTree(top_k=3, depth=3, nodes=8))
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    successors: int = struct.field(pytree_node=False, default=8)
    draft: DraftShape | int = struct.field(
        pytree_node=False, default=DynamicTree(top_k=8, depth=6, nodes=48)
    )
    answers: SuffixIndex | None = struct.field(default=None, kw_only=True)
    grows_trees: ClassVar[bool] = True

    @property
    def node_counts(self) -> tuple[int, ...]:
        shape = self.draft_shape
        # 1 is the root alone, if nothing is known after it.
        return (1, *halvings(shape.nodes)) if isinstance(shape, Chain) else shape.node_counts

    def check(self, target: Target) -> None:
        if not 1 <= self.successors <= MOST_SUCCESSORS:
            raise InputError(
                f"TokenRecycling(successors={self.successors}): must be from 1 to {MOST_SUCCESSORS}"
            )
        self.check_draft()

    def check_draft(self) -> None:
        """Raise an InputError if the draft has another shape than the drafter can make."""
        if isinstance(self.draft_shape, SampledTree):
            raise InputError(
                f"TokenRecycling(draft={self.draft_shape}): its tokens are looked up and not"
                " sampled; give a StaticTree or a DynamicTree"
            )
        if self.draft_shape.branching > self.successors:
            raise InputError(
                f"TokenRecycling(draft={self.draft_shape}): a node has"
                f" {self.draft_shape.branching} children, but successors={self.successors}; give"
                f" successors={self.draft_shape.branching}"
            )

    def likely_tokens(self, config: ModelConfig) -> int:
        return min(self.successors, config.vocab_size)

    def start(self, target: Target, batch: int, capacity: int) -> AdjacencyTable:
        shape = batch, target.config.vocab_size, self.likely_tokens(target.config)

        def empty(value: float, dtype: Any) -> jax.Array:
            return sharding.constrain(
                jnp.full(shape, value, dtype), ("batch", None, None), {}, target.mesh
            )

        return AdjacencyTable(empty(NO_SUCCESSOR, jnp.int32), empty(-jnp.inf, jnp.float32))

    def in_segment(self, state: AdjacencyTable, segments: jax.Array) -> AdjacencyTable:
        if self.answers is None:
            return state
        tokens = self.answers.tokens_of(segments)
        following = jnp.roll(tokens, -1, axis=1)
        is_pair = (tokens != NO_TOKEN) & (following != NO_TOKEN)
        # Without answers nothing is sorted.
        return jax.lax.cond(
            jnp.any(is_pair),
            lambda: _with_pairs(state, tokens, following, is_pair),
            lambda: state,
        )

    def prompts_read(
        self,
        target: Target,
        state: AdjacencyTable,
        tokens: jax.Array,
        cache: KVCache | PagedCache,
    ) -> AdjacencyTable:
        # All at once at the end, and not chunk by chunk: so a prefix that is shared with another
        # request needs no table of its own.
        were_read = _first(cache.length, tokens.shape[1])
        return _with_pairs(state, tokens, jnp.roll(tokens, -1, axis=1), were_read)

    def propose(
        self,
        target: Target,
        state: AdjacencyTable,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, AdjacencyTable]:
        shape, vocab = self.draft_shape, target.config.vocab_size

        def children(
            tokens: jax.Array, depth: jax.Array | int, path: jax.Array | None
        ) -> CandidateTokens:
            likely, logprobs = state.after(tokens)
            return ranked(shape, likely, logprobs, depth, sampling, keys[depth], vocab, path)

        def read(frontier: Frontier, _: Any) -> tuple[CandidateTokens, tuple[()]]:
            return children(frontier.tokens, frontier.depth, frontier.path), ()

        first = children(root[:, None], 0, None)
        # Reading is a lookup, so the levels need not be a loop.
        draft, _, _ = expand(shape, read, first, (), root, sampling, keys, active, in_loop=False)
        exists = draft.tokens != NO_SUCCESSOR
        valid = exists if draft.valid is None else exists & draft.valid
        return replace(draft, tokens=jnp.maximum(draft.tokens, 0), valid=valid), state

    def update(
        self,
        target: Target,
        state: AdjacencyTable,
        draft: Draft,
        verdict: Verdict,
        committed: Committed,
    ) -> AdjacencyTable:
        likely = committed.likely
        if likely is None:  # the tokens were committed while the drafter was paused
            are_valid = _first(committed.count, committed.tokens.shape[1])
            return _with_pairs(state, committed.tokens, committed.following, are_valid)
        was_read = jnp.pad(draft.drafted, ((0, 0), (1, 0)), constant_values=True)
        # A row that has finished keeps its table. NaN: not read, or an error of the target.
        was_read &= (verdict.count > 0)[:, None] & ~jnp.any(jnp.isnan(likely.logprobs), axis=-1)
        wins = _newest_of_each_token(draft.tokens, was_read, verdict)
        return state.put(draft.tokens, likely.tokens, likely.logprobs, wins)

    def to_prefix_state(self, state: AdjacencyTable) -> tuple[()]:
        return ()  # `prompts_read` computes the table from the tokens

    def from_prefix_state(self, fresh: AdjacencyTable, kept: Any) -> AdjacencyTable:
        return fresh


def _newest_of_each_token(tokens: jax.Array, was_read: jax.Array, verdict: Verdict) -> jax.Array:
    """Return which of the nodes ``[B, N]`` have the list to store for their token.

    If a token occurs several times in a draft, an accepted node is preferred to a rejected one,
    then the deeper of two accepted ones, and then the later of two rejected ones.
    """
    node = jnp.arange(tokens.shape[1])
    depth = jnp.arange(verdict.path.shape[1])
    is_accepted = depth < verdict.count[:, None]
    at_depth = (verdict.path[:, None] == node[:, None]) & is_accepted[:, None]  # [B, N, D+1]
    rank = jnp.max(jnp.where(at_depth, len(node) + depth, node[:, None]), axis=-1)
    same = (tokens[:, :, None] == tokens[:, None]) & was_read[:, None]
    return was_read & ~jnp.any(same & (rank[:, None] > rank[:, :, None]), axis=-1)


def _first(count: jax.Array, size: int) -> jax.Array:
    """Return a mask ``[B, size]`` of the first ``count [B]`` places of each row."""
    return jnp.arange(size) < count[:, None]


def _with_pairs(
    table: AdjacencyTable, tokens: jax.Array, following: jax.Array, are_valid: jax.Array
) -> AdjacencyTable:
    """Return the table after ``following [B, T]`` came after ``tokens [B, T]`` in the text.

    Pairs count where ``are_valid [B, T]`` says so. The newest followers of a token become the first
    of its list. The target's probability of a follower is not known, and is taken for 1/2. So the
    table is the same whether pairs are added one by one or together.
    """
    vocab, size = table.tokens.shape[1:]
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    tokens = jnp.where(are_valid, tokens, vocab)
    # Sort the pairs, equal ones next to each other and the newest of them first.
    token, follower, age = jax.lax.sort((tokens, following, -index), dimension=1, num_keys=3)
    is_repeated = (token == _before(token, 1)) & (follower == _before(follower, 1))
    # Sort the newest of each pair by age. The followers of a token now stand in a row.
    token, is_repeated, _, follower = jax.lax.sort(
        (token, is_repeated.astype(jnp.int32), age, follower), dimension=1, num_keys=3
    )
    is_first = (token != _before(token, 1)) & (token < vocab)

    def place(rank: int) -> jax.Array:
        belongs = (_after(token, rank) == token) & (_after(is_repeated, rank) == 0)
        return jnp.where(belongs, _after(follower, rank), NO_SUCCESSOR)

    new = jnp.stack([place(rank) for rank in range(size)], axis=-1)
    old, old_logprobs = table.after(jnp.where(token < vocab, token, NO_SUCCESSOR))
    is_known = jnp.any(old[..., None] == new[..., None, :], axis=-1)
    both = jnp.concatenate([new, jnp.where(is_known, NO_SUCCESSOR, old)], axis=-1)
    logprobs = jnp.concatenate([jnp.full(new.shape, jnp.log(0.5)), old_logprobs], axis=-1)
    # Empty places go to the end, and all others keep their order.
    order = jnp.argsort(both == NO_SUCCESSOR, axis=-1, stable=True)[..., :size]
    likely = jnp.take_along_axis(both, order, axis=-1)
    logprobs = jnp.take_along_axis(logprobs, order, axis=-1)
    logprobs = jnp.where(likely == NO_SUCCESSOR, -jnp.inf, logprobs)
    return table.put(token, likely, logprobs, is_first)


def _before(values: jax.Array, steps: int) -> jax.Array:
    """Return what stands ``steps`` earlier in each row of ``values [B, T]``; -1 before the row."""
    return jnp.pad(values, ((0, 0), (steps, 0)), constant_values=-1)[:, : values.shape[1]]


def _after(values: jax.Array, steps: int) -> jax.Array:
    """Return what stands ``steps`` later in each row of ``values [B, T]``; -1 after the row."""
    return jnp.pad(values, ((0, 0), (0, steps)), constant_values=-1)[:, steps:]
