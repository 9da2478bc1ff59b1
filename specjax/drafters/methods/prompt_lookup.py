"""Prompt lookup: propose the tokens that followed the same n-gram earlier in the text.

It is Saxena's prompt lookup decoding (2023). The search runs on the device, with static shapes.
"""

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Drafter, RemoteFeatures, append_tokens
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, halvings
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

LONGEST_NGRAM = 64
"""The maximum of ``max_ngram``: the program has one comparison for each token of an n-gram."""


@struct.dataclass
class PromptLookupState:
    """The text of each row.

    Attributes:
        tokens: ``[B, S]``, prompt and output so far, without the root.
        lengths: ``[B]``, the number of tokens.
    """

    tokens: jax.Array
    lengths: jax.Array


@struct.dataclass
class PromptLookup(Drafter[PromptLookupState]):
    """A drafter that copies earlier tokens of the text.

    It searches the longest suffix of the text, of at most ``max_ngram`` tokens, that occurs earlier
    as well, and copies what followed its latest occurrence. If there is none, it drafts nothing.

    Attributes:
        max_ngram: the maximum length of the suffix.
        draft: a `Chain`, the number of tokens to copy.

    Examples:
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    max_ngram: int = struct.field(pytree_node=False, default=3)
    draft: Chain | int = struct.field(pytree_node=False, default=Chain(8))

    @property
    def node_counts(self) -> tuple[int, ...]:
        # 1 is the root alone, if no suffix occurs earlier.
        return (1, *halvings(self.draft_shape.nodes))

    def check(self, target: Target) -> None:
        if not 1 <= self.max_ngram <= LONGEST_NGRAM:
            raise InputError(
                f"PromptLookup(max_ngram={self.max_ngram}): must be from 1 to {LONGEST_NGRAM}"
            )
        self.check_draft()

    def check_draft(self) -> None:
        """Raise an InputError unless the draft is a chain without ``stop_below``."""
        if not isinstance(self.draft_shape, Chain):
            raise InputError(
                f"PromptLookup(draft={self.draft_shape}): prompt lookup copies one continuation;"
                " give a Chain"
            )
        if self.draft_shape.stop_below:
            raise InputError(
                f"PromptLookup(draft=Chain(stop_below={self.draft_shape.stop_below:g})): copied"
                " tokens have no probability; leave it out"
            )

    def start(self, target: Target, batch: int, capacity: int) -> PromptLookupState:
        return PromptLookupState(
            tokens=jnp.zeros((batch, capacity), jnp.int32), lengths=jnp.zeros(batch, jnp.int32)
        )

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def append_remote(
        self, target: Target, state: PromptLookupState, told: RemoteFeatures
    ) -> PromptLookupState:
        return PromptLookupState(
            tokens=append_tokens(state.tokens, state.lengths, told.tokens, told.count),
            lengths=state.lengths + told.count,
        )

    def propose(
        self,
        target: Target,
        state: PromptLookupState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, PromptLookupState]:
        tokens = append_tokens(state.tokens, state.lengths, root[:, None], active)
        lengths = state.lengths + 1
        rows = jnp.arange(tokens.shape[0])[:, None]
        position = jnp.arange(tokens.shape[1])[None]
        # overlap[b, i]: the number of tokens right before position i that equal the text's last
        # tokens, up to max_ngram.
        overlap = jnp.zeros_like(tokens)
        equal = jnp.ones(tokens.shape, bool)
        for back in range(1, self.max_ngram + 1):
            # A negative index wraps around, and `position >= back` discards what it finds.
            suffix = tokens[rows, lengths[:, None] - back]
            equal = equal & (jnp.roll(tokens, back, axis=1) == suffix) & (position >= back)
            overlap = overlap + equal
        overlap = jnp.where(position < lengths[:, None], overlap, 0)
        # Take the largest overlap, and among equals the latest position.
        best = jnp.argmax(overlap * tokens.shape[1] + position * (overlap > 0), axis=1)[:, None]
        # The continuation may reach the end of the text. The copy then starts again from its
        # beginning, because a text that repeats itself has this period.
        period = jnp.maximum(lengths[:, None] - best, 1)
        source = best + jnp.arange(self.draft_shape.depth)[None] % period
        is_copied = jnp.broadcast_to(overlap[rows, best] > 0, source.shape) & active[:, None]
        return Draft.chain(root, tokens[rows, source], valid=is_copied), state
