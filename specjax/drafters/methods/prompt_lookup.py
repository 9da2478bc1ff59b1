"""Prompt lookup: propose the tokens that followed the same n-gram earlier in the text.

It is Saxena's prompt lookup decoding (2023). The search runs on the device, with static shapes.
"""

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.text_search import RowTexts, TextSearch
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, halvings
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

LONGEST_NGRAM = 64
"""The maximum of ``max_ngram``: the program has one comparison for each token of an n-gram."""


@struct.dataclass
class PromptLookup(TextSearch):
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

    def propose(
        self,
        target: Target,
        state: RowTexts,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, RowTexts]:
        texts = state.with_root(root, active)
        overlap = texts.overlaps(self.max_ngram)
        # Take the largest overlap, and among equals the latest position.
        position = jnp.arange(overlap.shape[1])
        best = jnp.argmax(overlap * len(position) + position * (overlap > 0), axis=1)[:, None]
        copied = texts.copied(best, self.draft_shape.depth)[:, 0]
        is_copied = jnp.take_along_axis(overlap, best, axis=1) > 0
        is_copied = jnp.broadcast_to(is_copied, copied.shape) & active[:, None]
        return Draft.chain(root, copied, valid=is_copied), state
