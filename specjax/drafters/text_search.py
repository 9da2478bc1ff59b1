"""The text of each row as a drafter's state, and the search in it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Drafter, RemoteFeatures, append_tokens
from specjax.models.transformer import Target


@struct.dataclass
class RowTexts:
    """The text of each row.

    Attributes:
        tokens: ``[B, S]``, prompt and output so far; as the state of a drafter, without the root.
        lengths: ``[B]``, the number of tokens.
        segments: ``[B]`` int32, the segment of an index that each row searches, too; -1: none. None
            if the drafter has no such index.

    Examples:
        >>> from specjax.drafters.text_search import RowTexts
        >>> texts = RowTexts(jnp.array([[5, 7, 9, 5, 7, 0]]), jnp.array([5]))
        >>> texts.overlaps(longest=4).tolist()  # 5 7 stands before position 2
        [[0, 0, 2, 0, 0, 0]]
        >>> texts.copied(jnp.array([[2]]), depth=4).tolist()
        [[[9, 5, 7, 9]]]
    """

    tokens: jax.Array
    lengths: jax.Array
    segments: jax.Array | None = None

    @classmethod
    def empty(cls, batch: int, capacity: int, *, has_segments: bool = False) -> "RowTexts":
        """Return texts without a token, which search no segment."""
        segments = jnp.full(batch, -1, jnp.int32) if has_segments else None
        return cls(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32), segments)

    def append(self, tokens: jax.Array, count: jax.Array) -> "RowTexts":
        """Append the first ``count [B]`` of ``tokens [B, n]``."""
        return replace(
            self,
            tokens=append_tokens(self.tokens, self.lengths, tokens, count),
            lengths=self.lengths + count,
        )

    def with_root(self, root: jax.Array, active: jax.Array) -> "RowTexts":
        """Return the texts with the token ``root [B]`` at the end.

        In rows that are not ``active [B]`` its place is counted, but not written.
        """
        tokens = append_tokens(self.tokens, self.lengths, root[:, None], active)
        return replace(self, tokens=tokens, lengths=self.lengths + 1)

    def last(self, count: int) -> jax.Array:
        """Return the last tokens ``[B, count]``, the newest last; arbitrary before the text."""
        rows = jnp.arange(self.tokens.shape[0])[:, None]
        return self.tokens[rows, self.lengths[:, None] + jnp.arange(-count, 0)]

    def overlaps(self, longest: int) -> jax.Array:
        """Return how many tokens before each position equal the last tokens of the text.

        Args:
            longest: the largest number of tokens to compare.

        Returns:
            ``[B, S]`` int32; 0 from the end of the text on.
        """
        tokens, lengths = self.tokens, self.lengths
        width = tokens.shape[1]
        position = jnp.arange(width)[None]
        # -1 stands before each text, and equals no token.
        padded = jnp.pad(tokens, ((0, 0), (longest, 0)), constant_values=-1)
        last = self.last(longest)
        overlap = jnp.zeros_like(tokens)
        equal = jnp.ones(tokens.shape, bool)
        for back in range(1, longest + 1):
            # Slices are three times as fast as a roll on a CPU.
            before = padded[:, longest - back : longest - back + width]
            equal = equal & (before == last[:, longest - back, None])
            overlap = overlap + equal
        overlap = jnp.where(position < lengths[:, None], overlap, 0)
        return overlap

    def copied(self, starts: jax.Array, depth: int) -> jax.Array:
        """Return the ``depth`` tokens from each of ``starts [B, n]`` on, as ``[B, n, depth]``.

        The copy may reach the end of the text. It then starts again from its beginning, because a
        text that repeats itself has this period.
        """
        rows = jnp.arange(self.tokens.shape[0])[:, None, None]
        period = jnp.maximum(self.lengths[:, None] - starts, 1)[..., None]
        return self.tokens[rows, starts[..., None] + jnp.arange(depth) % period]


class TextSearch(Drafter[RowTexts]):
    """A drafter that searches the text of each row, and needs nothing else of the target.

    It also drafts elsewhere, where it has the committed tokens alone.
    """

    def start(self, target: Target, batch: int, capacity: int) -> RowTexts:
        return RowTexts.empty(batch, capacity)

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def append_remote(self, target: Target, state: RowTexts, told: RemoteFeatures) -> RowTexts:
        return state.append(told.tokens, told.count)
