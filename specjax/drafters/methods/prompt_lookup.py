"""Prompt lookup: propose what followed the same words earlier in the text.

After Saxena's prompt lookup decoding (2023); here the search runs on the device with static shapes.
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
"""Each token of the suffix that is looked for is a comparison of its own in the compiled program."""


@struct.dataclass
class PromptLookupState:
    """Attributes:
    tokens: ``[B, S]`` prompt and output so far, without the root.
    lengths: ``[B]`` how many there are.
    """

    tokens: jax.Array
    lengths: jax.Array


@struct.dataclass
class PromptLookup(Drafter[PromptLookupState]):
    """Drafts by copying. The longest suffix of at most ``max_ngram`` tokens that occurs earlier wins; of its occurrences
    the latest. Without an occurrence nothing is drafted.

    Attributes:
        max_ngram: longest suffix to look for.
        draft: a `Chain`; how many tokens to copy.

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
        return (1, *halvings(self.draft_shape.nodes))  # 1: nothing was found

    def check(self, target: Target) -> None:
        if not 1 <= self.max_ngram <= LONGEST_NGRAM:
            raise InputError(f"PromptLookup(max_ngram={self.max_ngram}): must be from 1 to {LONGEST_NGRAM}")
        self.check_draft()

    def check_draft(self) -> None:
        """Refuse, with an InputError, a draft that copying cannot make."""
        if not isinstance(self.draft_shape, Chain):
            raise InputError(f"PromptLookup(draft={self.draft_shape}): prompt lookup copies one continuation; give a Chain")
        if self.draft_shape.stop_below:
            raise InputError(
                f"PromptLookup(draft=Chain(stop_below={self.draft_shape.stop_below:g})): copied tokens have no probability; "
                "leave it out"
            )

    def start(self, target: Target, batch: int, capacity: int) -> PromptLookupState:
        return PromptLookupState(tokens=jnp.zeros((batch, capacity), jnp.int32), lengths=jnp.zeros(batch, jnp.int32))

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def append_remote(self, target: Target, state: PromptLookupState, told: RemoteFeatures) -> PromptLookupState:
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
        tokens, lengths = append_tokens(state.tokens, state.lengths, root[:, None], active), state.lengths + 1
        rows = jnp.arange(tokens.shape[0])[:, None]
        position = jnp.arange(tokens.shape[1])[None]
        # overlap[b, i]: how many tokens before position i equal the text's last ones, up to max_ngram.
        overlap = jnp.zeros_like(tokens)
        equal = jnp.ones(tokens.shape, bool)
        for back in range(1, self.max_ngram + 1):
            suffix = tokens[rows, lengths[:, None] - back]  # wraps below 0, where `position >= back` fails
            equal = equal & (jnp.roll(tokens, back, axis=1) == suffix) & (position >= back)
            overlap = overlap + equal
        overlap = jnp.where(position < lengths[:, None], overlap, 0)
        # The largest overlap, and among equals the latest position.
        best = jnp.argmax(overlap * tokens.shape[1] + position * (overlap > 0), axis=1)[:, None]
        # What followed may end with the text itself: the copy then begins again, as a text that repeats itself does.
        period = jnp.maximum(lengths[:, None] - best, 1)
        source = best + jnp.arange(self.draft_shape.depth)[None] % period
        found = jnp.broadcast_to(overlap[rows, best] > 0, source.shape) & active[:, None]
        return Draft.chain(root, tokens[rows, source], valid=found), state
