"""Drafting from what the target thinks: what EAGLE-1, EAGLE-2, HASS, EAGLE-3 and multi-token prediction have in common.

Such a drafter reads *pairs*. The pair of position t is a *feature*, made from the target's hidden states at t, and the token
after it, t + 1. From the pairs up to t it predicts token t + 2. While it drafts, the target has not read the newest tokens, and
there are no features of them: the state that the drafter itself came to at t then takes the place of the next one. After the
verdict the pairs of the accepted tokens are read again with the target's features, and those alone are kept.

EAGLE has one *module* that does this. Multi-token prediction has several, in a row: in place of the feature of t, module m
(from 0) reads the state of module m - 1 at t - 1. So it needs no feature that is younger than t - m: the first m tokens of a
draft have none, and module m reads them as it reads the text. Beyond, the last module goes on with its own states.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.draft import Draft
from specjax.drafters.base import Drafter, Seen, check_mesh
from specjax.drafters.expansion import Frontier, Vocabulary, expand
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Entry, KVCache, empty_entries, place_entries
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling
from specjax.tree import Shape


def layer_like(config: ModelConfig, **sizes: Any) -> ModelConfig:
    """The shape of a drafter's one layer for a target of ``config``: a plain Llama layer of its sizes, but for ``sizes``."""
    switches = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False, "tie_embeddings": False}
    plain = {"model_type": "llama", "num_layers": 1, "mla": None, "moe": None}
    plain |= switches | {"sliding_window": None, "windowed_layers": ()}
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
    cache: of the pairs that were read with the target's features, module by module; slot t holds the pair of position t.
    newest: ``[B, M, H]`` each module's state at each row's newest pair.
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
        """The shape of its own layers, those of one module. ``vocab_size`` is the target's."""
        raise NotImplementedError

    @property
    def modules(self) -> int:
        """How many modules it has, M."""
        return 1

    @property
    def target_hidden_size(self) -> int:
        """Of the target's states that it reads."""
        return self.sizes.hidden_size

    def features(self, output: Output, entries: Sequence[Entry] = ()) -> jax.Array:
        """``[B, T, H]`` the features in the target's ``output`` at T tokens, and in what its layers remember of them."""
        raise NotImplementedError

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: tuple[tuple[Piece, ...], ...],
        module: int = 0,
    ) -> tuple[jax.Array, tuple[Entry, ...]]:
        """Read T pairs with one module.

        Args:
            states: ``[B, T, H]`` of each pair the feature, or the state of the drafter that takes its place.
            embedded: ``[B, T, H]`` the embeddings of the pairs' tokens.
            positions: ``[B, T]``.
            mask: ``[B|1, T, T]`` bool, which pairs of the call see each other; None: each sees itself alone.
            past: for each of its layers, the pieces that the pairs see beside each other (see `layers.attend`).
            module: its number.

        Returns:
            The module's state ``[B, T, H]`` at each pair, and each layer's entries of the call.
        """
        raise NotImplementedError

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        """``[..., Vd]`` float32, what is expected after pairs at which ``module`` came to ``states [..., H]``."""
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
        check_mesh(self.mesh, target)

    def start(self, target: Target, batch: int, capacity: int) -> FeatureState:
        cache = KVCache(layers=self._empty(batch, capacity, self.modules), length=jnp.zeros(batch, jnp.int32))
        newest = jnp.zeros((batch, self.modules, self.sizes.hidden_size), self._dtype)
        return FeatureState(cache=cache, newest=self._by_row(newest))

    def absorb(self, target: Target, state: FeatureState, seen: Seen) -> FeatureState:
        count = seen.tokens.shape[1]
        positions = state.cache.length[:, None] + jnp.arange(count)[None]
        embedded, states = self.embed(target, seen.following), self.features(seen.output, seen.entries)
        causal = jnp.tril(jnp.ones((1, count, count), bool))
        newest, new, first_states = [], [], []
        for module in range(self.modules):
            if module:
                states = jnp.concatenate([state.newest[:, module - 1, None].astype(states.dtype), states[:, :-1]], axis=1)
            past = self._past(state.cache, module)
            states, entries = self.run(states, embedded, positions, seen_by(module, positions, causal), past, module)
            newest.append(seen.newest(states, state.newest[:, module]))
            new += entries
            first_states.append(states[:, 0])
        cache = state.cache.append(new, seen.count, after=sum(first_states[1:], first_states[0]))
        return FeatureState(cache=cache, newest=self._by_row(jnp.stack(newest, axis=1)))

    def propose(
        self,
        target: Target,
        state: FeatureState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, FeatureState]:
        # The root's own pair was read when the root was committed: `newest` is the state there. Module 0 reads features alone,
        # and a draft needs it no more, unless it is the last one, which goes on with its own states.
        layers, last, batch = self.sizes.num_layers, self.modules - 1, root.shape[0]
        modules = range(min(1, last), self.modules)
        depths = jnp.arange(self.draft.read_slots) // self.draft.width + 1  # of the nodes in scratch

        def read(
            frontier: Frontier, carried: tuple[tuple[Entry, ...], jax.Array]
        ) -> tuple[jax.Array, tuple[tuple[Entry, ...], jax.Array]]:
            scratch, states = carried
            above = jnp.take_along_axis(states, frontier.parents[..., None, None], axis=1)  # [B, F, M, H]
            embedded = self.embed(target, frontier.tokens)
            positions = jnp.broadcast_to(state.cache.length[:, None] + frontier.depth - 1, frontier.tokens.shape)

            def read_with(module: int, states: jax.Array) -> tuple[jax.Array, tuple[Entry, ...]]:
                kept, at = self._past(state.cache, module), (module - modules.start) * layers
                # As in the cache: the first pairs of a text are nothing to be seen.
                seen = frontier.seen & (state.cache.length[:, None] + depths - 1 >= module)[:, None]
                drafted = scratch[at : at + layers]
                past = tuple((*pieces, (entry, seen)) for pieces, entry in zip(kept, drafted, strict=True))
                return self.run(states, embedded, positions, None, past, module)

            # Below a node of depth d the draft goes on with module d, or the last one. Only it and those after it are run.
            reached, new = [above[:, :, module] for module in range(modules.start)], []
            for module in modules:
                if module == last:
                    before = jnp.where(frontier.depth > last, above[:, :, last], above[:, :, last - 1])
                    at_module, entries = read_with(module, before)
                else:
                    run = partial(read_with, module)
                    needed, before = frontier.depth <= module, above[:, :, module - 1]
                    at_module, entries = jax.lax.cond(needed, run, partial(_zeros_of, run), before)
                reached.append(at_module.astype(states.dtype))
                new += entries
            current = jnp.minimum(frontier.depth, last)
            of_modules = jnp.stack(reached, axis=2)
            logits = self.logits(target, jnp.take(of_modules, current, axis=2), current)
            return logits, (place_entries(scratch, new, frontier.offset, after=of_modules), of_modules)

        above = jnp.broadcast_to(state.newest[:, None], (batch, self.draft.width, *state.newest.shape[1:]))
        carried = (self._empty(batch, self.draft.read_slots, len(modules)), above)
        logits = self.logits(target, state.newest[:, 0])
        draft, _, _ = expand(self.draft, read, logits, carried, root, sampling, keys, active, self.vocabulary(target))
        return draft, state

    def _past(self, cache: KVCache, module: int) -> tuple[tuple[Piece, ...], ...]:
        """What ``module`` sees of the cache, by layer."""
        layers = self.sizes.num_layers
        since = jnp.full((1, 1), module)
        entries = cache.layers[module * layers : (module + 1) * layers]
        return tuple((Filled(entry, cache.filled, since, self.mesh),) for entry in entries)

    @property
    def _dtype(self) -> Any:
        return next(leaf.dtype for leaf in jax.tree.leaves(self.params) if jnp.issubdtype(leaf.dtype, jnp.floating))

    def _empty(self, batch: int, slots: int, modules: int) -> tuple[Entry, ...]:
        sizes = self.sizes
        return empty_entries(
            sizes.entry_parts,
            layers=modules * sizes.num_layers,
            batch=batch,
            slots=slots,
            dtype=self._dtype,
            mesh=self.mesh,
        )

    def _by_row(self, x: jax.Array) -> jax.Array:
        return sharding.constrain(x, ("batch", *(None,) * (x.ndim - 1)), {}, self.mesh)


def seen_by(module: int, places: jax.Array, causal: jax.Array) -> jax.Array:
    """``[B|1, T, T]`` bool, which pairs see each other in ``module``.

    The first pairs of a text have no state of the module before that could be read in place of a feature: they are seen by
    nobody but themselves.

    Args:
        module: its number.
        places: ``[B, T]`` how far each pair is from the beginning of its text.
        causal: ``[B|1, T, T]`` bool, which pairs a model would see.
    """
    return causal if module == 0 else causal & ((places >= module)[:, None] | jnp.eye(places.shape[1], dtype=bool))


def _zeros_of(run: Callable[..., Any], *arguments: jax.Array) -> Any:
    """Zeros in the shape of what ``run`` would give."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, *arguments))
