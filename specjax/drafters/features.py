"""Drafting from what the target thinks: what EAGLE-1, EAGLE-2, HASS and EAGLE-3 have in common.

Such a drafter reads *pairs*. The pair of position t is a *feature*, made from the target's hidden states at t, and the token
after it, t + 1. From the pairs up to t it predicts token t + 2. While it drafts, the target has not read the newest tokens, and
there are no features of them: the state that the drafter itself came to at t then takes the place of the next one. After the
verdict the pairs of the accepted tokens are read again with the target's features, and those alone are kept.
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.draft import Draft
from specjax.drafters.base import Drafter, Seen
from specjax.drafters.expansion import Frontier, Vocabulary, expand
from specjax.errors import InputError
from specjax.models.cache import Entry, KVCache, empty_entries, place_entries
from specjax.models.config import ModelConfig
from specjax.models.layers import Piece
from specjax.models.params import Params
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling
from specjax.tree import Shape


def layer_like(config: ModelConfig, **sizes: Any) -> ModelConfig:
    """The shape of a drafter's one layer for a target of ``config``: a plain Llama layer of its sizes, but for ``sizes``."""
    switches = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False, "tie_embeddings": False}
    plain = {"model_type": "llama", "num_layers": 1, "mla": None, "moe": None} | switches
    return replace(config, **(plain | _plain_heads(config) | sizes))


def _plain_heads(config: ModelConfig) -> dict[str, int]:
    """Heads of ordinary attention where the target's are latent, and too many for one layer: of the size of its values, as many
    as fit the hidden size, in up to 8 groups. For DeepSeek-V3 that is 56 heads of 128 and 8 key/value heads."""
    if config.mla is None:
        return {}
    head_dim = config.mla.v_head_dim + config.mla.v_head_dim % 2
    heads = max(config.hidden_size // head_dim, 1)
    kv_heads = max(count for count in range(1, 9) if heads % count == 0)
    return {"head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}


@struct.dataclass
class FeatureState:
    """Attributes:
    cache: of the pairs that were read with the target's features; slot t holds the pair of position t.
    newest: ``[B, H]`` the drafter's state at each row's newest pair.
    """

    cache: KVCache
    newest: jax.Array


class FeatureDrafter(Drafter):
    """A drafter that is fed by the target's features. Subclasses say what a feature is, and how pairs are read.

    Attributes:
        params: its own parameters; ``embed``, if it is among them, takes the place of the target's embedding.
        draft: the shape of its drafts, any of `specjax.tree`.
        mesh: where the params live; None is the default device.
    """

    params: Params
    draft: Shape
    mesh: Mesh | None
    grows_trees: ClassVar[bool] = True

    # --- what a subclass says ---

    @property
    def sizes(self) -> ModelConfig:
        """The shape of its own layers. ``vocab_size`` is the target's."""
        raise NotImplementedError

    @property
    def target_hidden_size(self) -> int:
        """Of the target's states that it reads."""
        return self.sizes.hidden_size

    def features(self, output: Output) -> jax.Array:
        """``[B, T, H]`` the features in the target's ``output`` at T tokens."""
        raise NotImplementedError

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: tuple[tuple[Piece, ...], ...],
    ) -> tuple[jax.Array, tuple[Entry, ...]]:
        """Read T pairs.

        Args:
            states: ``[B, T, H]`` of each pair the feature, or the state of the drafter that takes its place.
            embedded: ``[B, T, H]`` the embeddings of the pairs' tokens.
            positions: ``[B, T]``.
            mask: ``[B|1, T, T]`` bool, which pairs of the call see each other; None: each sees itself alone.
            past: for each layer, the pieces that the pairs see beside each other (see `layers.attend`).

        Returns:
            The drafter's state ``[B, T, H]`` at each pair, and each layer's entries of the call.
        """
        raise NotImplementedError

    def logits(self, target: Target, states: jax.Array) -> jax.Array:
        """``[..., Vd]`` float32, what the drafter expects after pairs at which it came to ``states [..., H]``."""
        raise NotImplementedError

    def vocabulary(self, target: Target) -> Vocabulary | None:
        """The tokens that it can draft; None is the target's vocabulary."""
        return None

    # --- what follows ---

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        """``[B, T, H]`` the embeddings of ``tokens``."""
        return self.params["embed"][tokens] if "embed" in self.params else target.embed(tokens)

    def check(self, target: Target) -> None:
        name, own = type(self).__name__, self.sizes
        if own.vocab_size != target.config.vocab_size:
            raise InputError(
                f"drafter: this {name} was made for a target with a vocabulary of {own.vocab_size} tokens, and target has "
                f"{target.config.vocab_size}: give the target that it was trained with"
            )
        if self.target_hidden_size != target.config.hidden_size:
            raise InputError(
                f"drafter: this {name} reads a target of hidden size {self.target_hidden_size}, and target has "
                f"{target.config.hidden_size}: give the target that it was trained with"
            )
        vocabulary = self.vocabulary(target)
        self.draft.check(own.vocab_size if vocabulary is None else vocabulary.ids.shape[0])
        if self.mesh != target.mesh:
            raise InputError(f"drafter is on mesh={self.mesh} and target on {target.mesh}: load both with the same mesh")

    def start(self, target: Target, batch: int, capacity: int) -> FeatureState:
        entries = self._empty(batch, capacity)
        cache = KVCache(layers=entries, length=jnp.zeros(batch, jnp.int32))
        return FeatureState(cache=cache, newest=self._by_row(jnp.zeros((batch, self.sizes.hidden_size), self._dtype)))

    def absorb(self, target: Target, state: FeatureState, seen: Seen) -> FeatureState:
        count = seen.tokens.shape[1]
        positions = state.cache.length[:, None] + jnp.arange(count)[None]
        causal = jnp.tril(jnp.ones((1, count, count), bool))
        past = tuple(((entry, state.cache.committed[:, None]),) for entry in state.cache.layers)
        states, new = self.run(self.features(seen.output), self.embed(target, seen.following), positions, causal, past)
        last = jnp.maximum(seen.count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(states, last, axis=1)[:, 0]
        return FeatureState(
            cache=state.cache.append(new, seen.count, after=states),
            newest=self._by_row(jnp.where(seen.count[:, None] > 0, newest.astype(state.newest.dtype), state.newest)),
        )

    def propose(
        self,
        target: Target,
        state: FeatureState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, FeatureState]:
        # The root's own pair was read when the root was committed: `newest` is the state there.
        def read(
            frontier: Frontier, carried: tuple[tuple[Entry, ...], jax.Array]
        ) -> tuple[jax.Array, tuple[tuple[Entry, ...], jax.Array]]:
            scratch, above = carried
            states = jnp.take_along_axis(above, frontier.parents[..., None], axis=1)
            positions = jnp.broadcast_to(state.cache.length[:, None] + frontier.depth - 1, frontier.tokens.shape)
            committed = state.cache.committed[:, None]
            past = tuple(
                ((kept, committed), (drafted, frontier.seen)) for kept, drafted in zip(state.cache.layers, scratch, strict=True)
            )
            states, new = self.run(states, self.embed(target, frontier.tokens), positions, None, past)
            return self.logits(target, states), (place_entries(scratch, new, frontier.offset), states)

        above = jnp.broadcast_to(state.newest[:, None], (root.shape[0], self.draft.width, state.newest.shape[-1]))
        carried = (self._empty(root.shape[0], self.draft.read_slots), above)
        logits = self.logits(target, state.newest)
        draft, _, _ = expand(self.draft, read, logits, carried, root, sampling, keys, active, self.vocabulary(target))
        return draft, state

    @property
    def _dtype(self) -> Any:
        return self.params["fc"].dtype

    def _empty(self, batch: int, slots: int) -> tuple[Entry, ...]:
        sizes = self.sizes
        return empty_entries(
            sizes.entry_parts, layers=sizes.num_layers, batch=batch, slots=slots, dtype=self._dtype, mesh=self.mesh
        )

    def _by_row(self, x: jax.Array) -> jax.Array:
        return sharding.constrain(x, ("batch", *(None,) * (x.ndim - 1)), {}, self.mesh)
