"""Self-speculation with a compressed cache (MagicDec, Sadhukhan et al. 2024, arXiv 2408.11049).

The target drafts for itself, with a small part of its cache. So a drafted token costs a read of the
target's weights, but hardly any keys and values. With long contexts and many rows most of the time
goes to reading keys and values. There a drafted token costs far less than a step of the target, and
the advantage grows with the number of rows.
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Committed, Drafter, DraftingReads
from specjax.drafters.cache_schemes import Scheme, SnapKV, Streaming
from specjax.drafters.expansion import draft_with
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.attention import attention_paid
from specjax.models.cache import KVCache, PagedCache, RingCache
from specjax.models.layers import normed, queries
from specjax.models.rope import rotations
from specjax.models.transformer import Target, in_window
from specjax.sampling import RowSampling


@struct.dataclass
class CompressedCache(Drafter[RingCache]):
    """A drafter that is the target itself with a small cache.

    It has no weights of its own. Rows that are shorter than the budget keep all tokens, and their
    drafts are exactly the target's tokens. After every verdict the keys and values of the accepted
    tokens are copied from the target's pass. Layers with a sliding window see the whole small
    cache, so for a target with such layers the drafts are slightly worse.

    Attributes:
        budget: the number of slots of a row in each layer.
        scheme: the scheme that selects the tokens, `Streaming` or `SnapKV`.
        draft: the shape of the drafts, any of `specjax.drafts.shapes`.

    Examples:
        >>> drafter = specjax.CompressedCache(budget=8, scheme=specjax.SnapKV(window=3))
        >>> drafter.check(target)  # `generate` does this too
        >>> print(drafter.draft_shape)
        chain of 4
        >>> specjax.CompressedCache(budget=4).check(target)
        Traceback (most recent call last):
        specjax.errors.InputError: budget=4: the 4 sinks and the newest token need 5
    """

    budget: int = struct.field(pytree_node=False, default=256)
    scheme: Scheme = struct.field(pytree_node=False, default=Streaming())
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(4))
    grows_trees: ClassVar[bool] = True

    def check(self, target: Target) -> None:
        if not isinstance(self.scheme, Streaming | SnapKV):
            raise InputError(
                f"CompressedCache(scheme={self.scheme!r}): give Streaming() or SnapKV()"
            )
        self.scheme.check(self.budget)
        if target.config.mla is not None:
            raise InputError(
                f"CompressedCache(scheme={self.scheme}): the target ({target.config.model_type})"
                " stores latents, which are small already, and not keys and values: give a target"
                " with ordinary attention, or another drafter"
            )
        if target.config.layers_with_states:
            raise InputError(
                f"CompressedCache(scheme={self.scheme}): layers of the target"
                f" ({target.config.model_type}) have a recurrent state, which cannot be compressed:"
                " give a target with ordinary attention, or another drafter"
            )

    def start(self, target: Target, batch: int, capacity: int) -> RingCache:
        return target.new_ring(batch, self.budget, self.scheme.kept(self.budget))

    def prompts_read(
        self, target: Target, state: RingCache, tokens: jax.Array, cache: KVCache | PagedCache
    ) -> RingCache:
        length = cache.length
        if isinstance(self.scheme, SnapKV):
            state = replace(
                state, base=jnp.where(length > self.budget, length - self.scheme.window, state.kept)
            )
        slots = jnp.clip(state.positions_by_slot(length), 0, cache.capacity - 1)
        if isinstance(self.scheme, Streaming) or self.budget >= tokens.shape[1]:
            return replace(state, layers=cache.gather(slots), length=length)
        attention = _paid_by_last(target, tokens, cache, self.scheme.window)
        layers = []
        for layer, entry in enumerate(cache.layers):
            if not entry:  # this layer reads the entries of another one
                layers.append(entry)
                continue
            chosen = choose(
                attention[layer], length - self.scheme.window, state.kept, self.scheme.pool
            )
            newest = jnp.broadcast_to(slots[:, None], (*chosen.shape[:2], self.budget))
            compressed = jnp.concatenate([chosen, newest[..., state.kept :]], axis=-1)
            positions = jnp.where((length > self.budget)[:, None, None], compressed, newest)
            layers += cache.of_layers((layer,)).gather(positions)
        return replace(state, layers=tuple(layers), length=length)

    def propose(
        self,
        target: Target,
        state: RingCache,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, RingCache]:
        return draft_with(target, state, self.draft_shape, root, sampling, keys, active), state

    def update(
        self, target: Target, state: RingCache, draft: Draft, verdict: Verdict, committed: Committed
    ) -> RingCache:
        return state.append(committed.entries, committed.count, after=committed.output.hidden)

    def to_prefix_state(self, state: RingCache) -> tuple[()]:
        return ()  # `prompts_read` computes the state from the target's cache

    def from_prefix_state(self, fresh: RingCache, kept: Any) -> RingCache:
        return fresh

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of a level: the target's weights and the small cache."""
        return DraftingReads(level=(target.weights_of_pass, state))


def _paid_by_last(
    target: Target, tokens: jax.Array, cache: KVCache | PagedCache, count: int
) -> dict[int, jax.Array]:
    """Return the attention that the last ``count`` tokens pay to the slots before them.

    It is ``[B, kv_heads, S]`` for each layer that has entries, summed over all layers that read the
    entries.
    """
    config = target.config
    # Read these tokens again, with a cache that ends before them.
    before = replace(cache, length=jnp.maximum(cache.length - count, 0))
    positions = before.length[:, None] + jnp.arange(count)[None]
    last = jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
    _, entering, new_entries = target.run(
        target.embed(last), before, tokens=last, taps=range(config.num_layers)
    )
    causal = jnp.tril(jnp.ones((1, count, count), bool))

    attention: dict[int, jax.Array] = {}
    for i in config.layers_with_entries:
        params = target.params["layers"][i]
        sizes, source = config.of_layer(i), config.entries_of(i)
        turn = rotations(sizes.rope, sizes.head_dim, positions)
        q = queries(params, sizes, normed(params, "input_norm", sizes, entering[:, :, i]), turn)
        window = config.window_of(i)
        filled = target.cache_piece(before, source, positions, window)
        visible = in_window(causal, positions, window, config.windows_aligned)
        options = {
            "scale": sizes.attention_scale,
            "sinks": params.get("sinks"),
            "cap": sizes.score_cap,
        }
        share = attention_paid(q, filled, [(new_entries[source], visible)], **options)
        attention[source] = attention[source] + share if source in attention else share
    return attention


def choose(share: jax.Array, before: jax.Array, count: int, pool: int) -> jax.Array:
    """Return the positions that get the most attention, ``[B, kv_heads, count]``, ascending.

    Args:
        share: ``[B, kv_heads, S]``, the attention paid to each position.
        before: ``[B]``, the end of the positions to choose from. Positions from it on are ignored.
        count: the number of positions to choose.
        pool: the number of neighbours over which ``share`` is averaged first, with zeros beyond the
            ends.
    """
    is_choice = jnp.arange(share.shape[-1]) < before[:, None, None]
    share = jnp.where(is_choice, share, 0.0)
    pooled = jax.lax.reduce_window(share, 0.0, jax.lax.add, (1, 1, pool), (1, 1, 1), "SAME") / pool
    _, chosen = jax.lax.top_k(jnp.where(is_choice, pooled, -1.0), count)
    return jnp.sort(chosen, axis=-1)
