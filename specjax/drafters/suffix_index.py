"""A suffix index: find where the last tokens of a text occur in other texts, and what follows.

The texts stand one after the other in one array, and a second array has their positions in the
order of the tokens from there on (a *suffix array*). So all occurrences of some tokens are
neighbours in that order, and a binary search finds the first and the last of them. Occurrences with
the same continuation are neighbours, too.

The host sorts once, see `SuffixIndex.on_host`, and inserts what is added later, see
`SuffixIndex.with_texts`. The device searches for all rows and all lengths together, in shapes that
depend on the capacity alone. So texts may be added within the capacity without another compilation.

An index may have several *segments*, each with texts of its own. A search is in one of them, and
finds nothing of the others.

The idea of drafting from a suffix tree is from Oliaro et al. 2024, arXiv 2411.04975.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.errors import InputError

LONGEST_CONTEXT = 16
"""The largest number of tokens that are searched."""

SHORTEST_CONTEXT = 2
"""The smallest number of tokens that are searched: almost any single token occurs somewhere."""

CONTEXT_LENGTHS = tuple(range(LONGEST_CONTEXT, SHORTEST_CONTEXT - 1, -1))
"""The numbers of tokens that are searched, the longest first."""

SORTED_TOKENS = 2 * LONGEST_CONTEXT
"""The number of tokens by which positions are sorted: a context, and as many tokens after it."""

MOST_INSERTED = 1 / 16
"""The largest share of positions that are inserted. If more are new, all are sorted.

Of a million tokens, inserting this share takes as long as sorting all.
"""

LARGEST_TOKEN = 2**31 - 1
"""The largest token id that the arrays hold."""

NO_TOKEN = -1
"""The id in the array of tokens after the end of a text. No token has it."""


@struct.dataclass
class SuffixIndex:
    """The tokens of some texts, and their positions in the order of what follows.

    Attributes:
        tokens: ``[T * M]`` int32, the tokens of T segments, one after the other. Each has its
            texts, with `NO_TOKEN` after each text and up to the end of the segment. M is the
            capacity of a segment plus one.
        order: ``[T * M]`` int32, for each segment the positions of its tokens in ``tokens``, sorted
            by the `SORTED_TOKENS` tokens from there on. Among equals the earlier position is first.
        sizes: ``[T]`` int32, the number of tokens of each segment: so many of its ``order`` are
            valid.
        largest: a scalar int32, the largest token id; `NO_TOKEN` if there is no token.

    Examples:
        >>> from specjax.drafters.suffix_index import SuffixIndex
        >>> index = SuffixIndex.of([[5, 7, 8], [5, 7, 9, 5, 7, 8]])
        >>> contexts, lengths = jnp.zeros((1, 16), jnp.int32).at[0, -2:].set([5, 7]), jnp.array([2])
        >>> first, count = index.matches(contexts, lengths)
        >>> count[0, -1]  # how often the last two tokens occur
        Array(3, dtype=int32)
        >>> following, exists = index.following(first[:, -1], count[:, -1], 2, samples=4, depth=2)
        >>> following[0].tolist(), exists[0].tolist()
        ([[8, -1], [8, -1], [9, 5], [-1, -1]], [True, True, True, False])
    """

    tokens: jax.Array
    order: jax.Array
    sizes: jax.Array
    largest: jax.Array

    @classmethod
    def empty(cls, segments: int, capacity: int) -> "SuffixIndex":
        """Return an index without texts, for `put`.

        Args:
            segments: the number of segments, T.
            capacity: the number of tokens that each has room for, as in `of`.
        """
        count = segments * (capacity + 1)
        return cls(
            jnp.full(count, NO_TOKEN, jnp.int32),
            jnp.zeros(count, jnp.int32),
            jnp.zeros(segments, jnp.int32),
            jnp.int32(NO_TOKEN),
        )

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], capacity: int | None = None) -> "SuffixIndex":
        """Return an index with a single segment on the default device.

        The arguments and errors are those of `on_host`.
        """
        return jax.tree.map(jnp.asarray, cls.on_host(texts, capacity))

    @classmethod
    def on_host(cls, texts: Sequence[Sequence[int]], capacity: int | None = None) -> "SuffixIndex":
        """Sort the positions of some texts, and return them as numpy arrays.

        The index has a single segment.

        Args:
            texts: the token ids of each text.
            capacity: the number of tokens that there is room for, of which each text needs one more
                than it has. None: as many as the texts need. Indices of the same capacity share
                their compiled programs.

        Raises:
            InputError: The texts do not fit, or have an id that is no token.
        """
        tokens = _joined(texts)
        capacity = max(len(tokens), 1) if capacity is None else capacity
        if not len(tokens) <= capacity < 2**31 - 1:
            raise InputError(
                f"capacity={capacity}: the texts need {len(tokens)} tokens, with one for the end of"
                " each; give at least this number, below 2**31 - 1"
            )
        return cls._of_order(tokens, _order_of(tokens), capacity)

    @classmethod
    def _of_order(cls, tokens: np.ndarray, order: np.ndarray, capacity: int) -> "SuffixIndex":
        """Return an index of tokens and their sorted positions, which has one segment."""
        sizes = np.array([len(order)], np.int32)
        largest = tokens.max(initial=NO_TOKEN)
        index = cls(tokens, order, sizes, largest)  # pyright: ignore[reportArgumentType]
        return index.padded(capacity)

    def with_texts(self, texts: Sequence[Sequence[int]], begin: int, end: int) -> "SuffixIndex":
        """Return this index without its first texts, and with other texts behind its last ones.

        The result is that of `on_host`. But positions that are sorted already stay so: the first
        texts are in no window of a later position. Only positions near the end, whose windows reach
        into the new texts, and those of the new texts are sorted, and inserted among the rest. If
        they are more than `MOST_INSERTED` of all positions, all are sorted.

        Args:
            texts: the token ids of each text that is added.
            begin: the first place in ``tokens`` that stays: the beginning of a text.
            end: the place behind the last text that stays and its end. It equals ``begin`` if none
                stays.

        Returns:
            An index in numpy arrays, without room for more. This one must be `on_host`, too.

        Raises:
            InputError: A text has an id that is no token.

        Examples:
            >>> from specjax.drafters.suffix_index import SuffixIndex
            >>> index = SuffixIndex.on_host([[5, 7], [5, 7, 8]])
            >>> index = index.with_texts([[6, 5]], begin=3, end=7)
            >>> index.tokens.tolist(), index.order[: index.sizes[0]].tolist()
            ([5, 7, 8, -1, 6, 5, -1, -1], [5, 0, 4, 1, 2])
        """
        stored, order = np.asarray(self.tokens[begin:end]), np.asarray(self.order[: self.sizes[0]])
        tokens = np.concatenate([stored, _joined(texts)])
        # The windows of the positions before this one end before the new texts.
        first = max(len(stored) - SORTED_TOKENS, 0)
        if len(tokens) - first > MOST_INSERTED * len(tokens):
            order = _order_of(tokens)
        else:
            order = order - np.int32(begin)
            order = order[(order >= 0) & (order < first)]
            order = _merged(tokens, order, _order_of(tokens[first:]) + np.int32(first))
        return SuffixIndex._of_order(tokens, order, max(len(tokens), 1))

    @property
    def capacity(self) -> int:
        """The number of tokens that each segment has room for."""
        return self.tokens.shape[0] // self.sizes.shape[0] - 1

    def padded(self, capacity: int) -> "SuffixIndex":
        """Return an index `on_host` of a single segment with room for more tokens."""
        of_tokens, of_order = (capacity + 1 - len(part) for part in (self.tokens, self.order))
        return SuffixIndex(
            tokens=np.pad(self.tokens, (0, of_tokens), constant_values=NO_TOKEN),  # pyright: ignore[reportArgumentType]
            order=np.pad(self.order, (0, of_order)),  # pyright: ignore[reportArgumentType]
            sizes=self.sizes,
            largest=self.largest,
        )

    def tokens_of(self, segments: jax.Array) -> jax.Array:
        """Return the tokens ``[B, M]`` of ``segments [B]``; `NO_TOKEN` everywhere for segment -1.

        Examples:
            >>> from specjax.drafters.suffix_index import SuffixIndex
            >>> index = SuffixIndex.empty(segments=2, capacity=4)
            >>> index = index.put(1, SuffixIndex.of([[5, 7]], capacity=4))
            >>> index.tokens_of(jnp.array([1, -1])).tolist()
            [[5, 7, -1, -1, -1], [-1, -1, -1, -1, -1]]
        """
        by_segment = self.tokens.reshape(len(self.sizes), -1)
        tokens = by_segment[jnp.maximum(segments, 0)]
        return jnp.where(segments[:, None] >= 0, tokens, NO_TOKEN)

    def put(self, segment: jax.Array | int, texts: "SuffixIndex") -> "SuffixIndex":
        """Return the index with other texts in a ``segment``.

        Args:
            segment: the number of the segment, from 0.
            texts: an index with a single segment of the same capacity.

        Examples:
            >>> from specjax.drafters.suffix_index import SuffixIndex
            >>> index = SuffixIndex.empty(segments=3, capacity=8)
            >>> index = index.put(1, SuffixIndex.of([[5, 7, 8]], capacity=8))
            >>> contexts = jnp.zeros((2, 16), jnp.int32).at[:, -2:].set([5, 7])
            >>> _, count = index.matches(contexts, jnp.array([2, 2]), segments=jnp.array([0, 1]))
            >>> count[:, -1].tolist()
            [0, 1]
        """
        begin = segment * (self.capacity + 1)
        update = jax.lax.dynamic_update_slice_in_dim
        return SuffixIndex(
            tokens=update(self.tokens, texts.tokens, begin, 0),
            order=update(self.order, texts.order + begin, begin, 0),
            sizes=update(self.sizes, texts.sizes, segment, 0),
            largest=jnp.maximum(self.largest, texts.largest),
        )

    def matches(
        self, contexts: jax.Array, lengths: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Find the occurrences of the last tokens of each row, for each of `CONTEXT_LENGTHS`.

        Args:
            contexts: ``[B, LONGEST_CONTEXT]``, the last tokens of each row, the newest last.
            lengths: ``[B]``, the number of tokens of the row: only so many of ``contexts`` count.
            segments: ``[B]`` int32, the segment that is searched for each row; negative: none.
                None: the first one.

        Returns:
            ``[B, L]`` the first of the occurrences in ``order``, and ``[B, L]`` their number, for
            each of the L context lengths.
        """
        sizes = np.array(CONTEXT_LENGTHS)
        place = np.arange(LONGEST_CONTEXT)
        # Left-aligned: [B, L, 1, LONGEST_CONTEXT], of which the first `sizes` count.
        patterns = contexts[:, np.minimum(LONGEST_CONTEXT - sizes[:, None] + place, place[-1])]
        patterns, counts = patterns[:, :, None], (place < sizes[:, None])[:, None]
        # The last token of each segment is NO_TOKEN, which differs from every token of a pattern.
        # What stands behind it does not matter then.
        last = self.tokens.shape[0] - 1
        # The first difference decides: it outweighs all later ones together.
        weights = jnp.where(counts, 2 ** place[::-1], 0).astype(jnp.int32)
        # Two searches: the first position that is not less than the pattern, and the first that is
        # greater.
        is_below = jnp.array([0, 1])

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            position = self.order[middle][..., None] + place
            signs = jnp.sign(self.tokens[jnp.minimum(position, last)] - patterns)
            is_right = jnp.sum(signs * weights, axis=-1) < is_below
            is_open = low < high
            return (
                jnp.where(is_open & is_right, middle + 1, low),
                jnp.where(is_open & ~is_right, middle, high),
            )

        if segments is None:
            segments = jnp.zeros(contexts.shape[0], jnp.int32)
        begin = jnp.maximum(segments, 0) * (self.capacity + 1)
        size = jnp.where(segments >= 0, self.sizes[segments], 0)
        bounds = jnp.broadcast_to(begin[:, None, None], (contexts.shape[0], len(sizes), 2))
        steps = (self.capacity + 1).bit_length()
        low, _ = jax.lax.fori_loop(0, steps, halve, (bounds, bounds + size[:, None, None]))
        fits = sizes <= lengths[:, None]
        return low[..., 0], jnp.where(fits, low[..., 1] - low[..., 0], 0)

    def following(
        self,
        first: jax.Array,
        count: jax.Array,
        length: jax.Array | int,
        samples: int,
        depth: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Return what follows some occurrences of each row, sorted by it.

        If there are more than ``samples`` occurrences, these are taken at equal distances in the
        order of what follows. So the share of each continuation among them differs from its share
        of all occurrences by less than ``1 / samples``.

        Args:
            first: ``[B]``, the first occurrence, from `matches`.
            count: ``[B]``, the number of occurrences.
            length: ``[B]``, the number of tokens of the context.
            samples: the number of occurrences to take, K.
            depth: the number of tokens to return after each, D.

        Returns:
            The tokens ``[B, K, D]``, with `NO_TOKEN` from the end of the text on. And ``[B, K]``
            bool, which of the occurrences exist.
        """
        sample = jnp.arange(samples)
        exists = sample < count[:, None]
        # floor(sample * count / samples), in a way that does not overflow.
        step, rest = count[:, None] // samples, count[:, None] % samples
        spread = sample * step + sample * rest // samples
        index = first[:, None] + jnp.where(count[:, None] > samples, spread, sample)
        position = self.order[jnp.where(exists, index, 0)] + jnp.reshape(length, (-1, 1))
        position = position[..., None] + jnp.arange(depth)
        following = self.tokens[jnp.minimum(position, self.tokens.shape[0] - 1)]
        goes_on = jnp.cumsum(following == NO_TOKEN, axis=-1) == 0
        return jnp.where(goes_on & exists[..., None], following, NO_TOKEN), exists


def _beyond(token: int) -> InputError:
    return InputError(f"texts: the token id {token}; give ids from 0 to {LARGEST_TOKEN}")


def _joined(texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the checked tokens of some texts as int32, with `NO_TOKEN` after each text."""
    try:
        parts = [part for text in texts for part in (np.asarray(text, np.int64), [NO_TOKEN])]
    except OverflowError as error:  # an id that needs more than 64 bits
        ids = (int(token) for text in texts for token in text)
        raise _beyond(next(it for it in ids if not 0 <= it <= LARGEST_TOKEN)) from error
    joined = np.concatenate([*parts, np.array([], np.int64)])
    if np.sum(joined != NO_TOKEN) != len(joined) - len(texts) or joined.min(initial=0) < NO_TOKEN:
        raise InputError(
            f"texts: the smallest token id is {joined.min()}, or there is {NO_TOKEN}; ids begin"
            " at 0"
        )
    largest = joined.max(initial=NO_TOKEN)
    if largest > LARGEST_TOKEN:
        raise _beyond(int(largest))
    return joined.astype(np.int32)


def _order_of(tokens: np.ndarray) -> np.ndarray:
    """Return the sorted positions without those of ends of texts, where no search begins."""
    order = sorted_positions(tokens)
    return order[tokens[order] != NO_TOKEN]


def _merged(tokens: np.ndarray, order: np.ndarray, inserted: np.ndarray) -> np.ndarray:
    """Merge sorted positions with other sorted ones, all of which are behind them in ``tokens``."""
    beyond = np.full(SORTED_TOKENS, NO_TOKEN - 1, np.int32)  # it sorts before all tokens
    windows = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([tokens, beyond]), SORTED_TOKENS
    )
    patterns, rows = windows[inserted], np.arange(len(inserted))
    # For each pattern the number of windows that are not greater. Of equals, the earlier position
    # is first, and that is never the inserted one.
    low, high = np.zeros(len(inserted), np.int64), np.full(len(inserted), len(order))
    for _ in range(len(order).bit_length()):
        middle = (low + high) // 2
        compared = windows[order[np.minimum(middle, len(order) - 1)]]
        difference = np.argmax(compared != patterns, axis=1)  # the first one decides
        is_right = compared[rows, difference] <= patterns[rows, difference]
        is_open = low < high
        low = np.where(is_open & is_right, middle + 1, low)
        high = np.where(is_open & ~is_right, middle, high)
    merged = np.empty(len(order) + len(inserted), np.int32)
    is_inserted = np.zeros(len(merged), bool)
    is_inserted[low + rows] = True
    merged[is_inserted], merged[~is_inserted] = inserted, order
    return merged


def roomy_capacity(count: int) -> int:
    """Return a capacity for ``count`` tokens that texts of nearly the same size share.

    It is rounded up to an eighth of a power of two, so at most an eighth of it is added. A small
    edit of a text then rarely needs another compilation.

    Examples:
        >>> from specjax.drafters.suffix_index import roomy_capacity
        >>> [roomy_capacity(count) for count in (5, 1024, 1025, 1_000_000)]
        [1024, 1024, 1152, 1048576]
    """
    count = max(count, 1024)
    step = 2 ** ((count - 1).bit_length() - 4)
    return -(-count // step) * step


def sorted_positions(tokens: np.ndarray) -> np.ndarray:
    """Sort the positions of ``tokens [n]`` by the `SORTED_TOKENS` tokens from there on.

    Among equals the earlier position is first. What is beyond the end sorts before all tokens.

    It doubles the number of tokens in each pass (Manber and Myers 1990): the rank of a position by
    2 w tokens follows from its rank by w tokens, and from that of the position w further.

    Examples:
        >>> from specjax.drafters.suffix_index import sorted_positions
        >>> sorted_positions(np.array([3, 1, 3, 1])).tolist()
        [3, 1, 2, 0]
    """
    count = len(tokens)
    ranks = tokens.astype(np.int64) - NO_TOKEN + 1  # 0 is what is beyond the end
    order, width = np.arange(count), 1
    while width < SORTED_TOKENS and count > 0:
        behind = np.zeros_like(ranks)
        behind[:-width] = ranks[width:]
        most = int(ranks.max()) + 1
        keys = ranks * most + behind
        if most * most * count < 2**63:
            # With the position in the key, numpy's fastest sort will do: no two keys are equal.
            keys, order = np.divmod(np.sort(keys * count + np.arange(count)), count)
        else:
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
        ranks[order] = np.cumsum(np.diff(keys, prepend=keys[0] - 1) != 0)
        if ranks[order[-1]] == count:  # all positions differ already
            break
        width *= 2
    return order.astype(np.int32)
