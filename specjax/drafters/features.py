"""The base of drafters that read the target's hidden states: EAGLE-1, EAGLE-2, HASS, EAGLE-3, MTP.

Such a drafter reads *pairs*. The pair of position t consists of a *feature*, which is made from the
target's hidden states at t, and of the next token, at t + 1. From the pairs up to t the drafter
predicts token t + 2. While it drafts, the target has not read the newest tokens, so they have no
features. The drafter's own state at position t then takes the place of the feature of t + 1. After
the verdict the pairs of the accepted tokens are read again with the target's features, and only
these stay in the cache.

EAGLE has one *module* of this kind. Multi-token prediction (MTP) has several in a row. Module m
(from 0) reads the state of module m - 1 at t - 1 in place of the feature of t, or, in MiMo-V2, the
feature of t - m itself. So it needs no feature after t - m, and it can read the first m drafted
tokens of a draft in the same way as the text. Beyond them the last module continues with its own
states.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sharding
from specjax.drafters.base import RemoteFeatures, check_mesh, newest_of, zeros_of
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.trained import TrainedDrafter
from specjax.drafts.draft import Draft
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Entries, Entry, KVCache, empty_entries, place_entries
from specjax.models.config import ModelConfig
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling


@struct.dataclass
class FeatureState:
    """The memory of a drafter that reads features.

    Attributes:
        cache: the cache of the pairs that were read with the target's features, module by module.
            Slot t has the pair of position t.
        newest: ``[B, M, Hs]``, the state of each module at the newest pair of each row.
    """

    cache: KVCache
    newest: jax.Array


Past = tuple[tuple[Piece, ...], ...]
"""What each layer attends to beside the new pairs."""


class FeatureDrafter(TrainedDrafter[FeatureState]):
    """A drafter that reads the target's features.

    A subclass defines the feature and the network that reads pairs.

    Attributes:
        params: the parameters. If they have an ``embed``, it replaces the target's embedding.
        draft: the shape of the drafts, any of `specjax.drafts.shapes`.
        mesh: the mesh of the parameters; None is the default device.
    """

    grows_trees: ClassVar[bool] = True

    # --- methods that a subclass must or may override ---

    @property
    def sizes(self) -> ModelConfig:
        """The configuration of the layers of one module. Its ``vocab_size`` is the target's."""
        return self.config.layer

    @property
    def modules(self) -> int:
        """The number of modules, M."""
        return 1

    @property
    def target_hidden_size(self) -> int:
        """The size of the target's hidden states."""
        return self.sizes.hidden_size

    @property
    def state_size(self) -> int:
        """The size of a state of the drafter, Hs; by default that of its layers."""
        return self.sizes.hidden_size

    def features(self, output: States, entries: Sequence[Entry] = ()) -> jax.Array:
        """Return the features ``[B, T, H]`` of T tokens, by default the target's hidden states.

        Args:
            output: the target's states at the tokens.
            entries: the KV entries of the tokens in each target layer.
        """
        return output.hidden

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: Past,
        module: int = 0,
    ) -> tuple[jax.Array, Entries]:
        """Read T pairs with one module.

        Args:
            states: for each pair the feature, ``[B, T, H]``, or the drafter's own state in its
                place, ``[B, T, Hs]``.
            embedded: ``[B, T, H]``, the embeddings of the pairs' tokens.
            positions: ``[B, T]``, the RoPE positions.
            mask: ``[B|1, T, T]`` bool, which pairs of this call see each other; None: each sees
                itself alone.
            past: for each layer, the pieces of the past that the pairs attend to as well (see
                `attention.attend`).
            module: the index of the module.

        Returns:
            The module's state ``[B, T, Hs]`` at each pair, and the KV entries of the pairs in each
            layer.
        """
        raise NotImplementedError

    def in_window(
        self,
        layer: int,
        mask: jax.Array | None,
        positions: jax.Array,
        of_pairs: jax.Array | None = None,
    ) -> jax.Array | None:
        """Return the part of a mask inside the window of a layer; all if it has none.

        Every mask between pairs of a text needs this; `_past` does it for the cache. Pairs that
        see themselves alone have no mask.

        Args:
            layer: the index of the layer in a module.
            mask: ``[B|1, T, S]`` bool, which of S pairs each of T pairs sees, or None.
            positions: ``[B, T]``, the positions of the T pairs.
            of_pairs: ``[B, S]``, the positions of the S pairs; None: the same pairs.
        """
        window = self.sizes.window_of(layer)
        if window is None or mask is None:
            return mask
        of_keys = positions if of_pairs is None else of_pairs
        return mask & (positions[:, :, None] - of_keys[:, None] < window)

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        """Return the float32 logits ``[..., Vd]`` for the ``states [..., Hs]`` of ``module``.

        The default is those of the target's head.
        """
        return target.head(states)

    # --- the drafter that follows from them ---

    def check(self, target: Target) -> None:
        name, sizes = type(self).__name__, self.sizes
        if sizes.vocab_size != target.config.vocab_size:
            raise InputError(
                f"drafter: this {name} was made for a target with a vocabulary of"
                f" {sizes.vocab_size} tokens, but target has {target.config.vocab_size}: give the"
                " target that it was trained with"
            )
        if self.target_hidden_size != target.config.hidden_size:
            raise InputError(
                f"drafter: this {name} reads a target of hidden size {self.target_hidden_size}, but"
                f" target has {target.config.hidden_size}: give the target that it was trained with"
            )
        vocabulary = self.vocabulary(target)
        self.draft_shape.check(sizes.vocab_size if vocabulary is None else vocabulary.ids.shape[0])
        window = sizes.sliding_window
        if sizes.windowed_layers and window is not None and self.draft_shape.depth > window:
            raise InputError(
                f"draft={self.draft}: it is {self.draft_shape.depth} deep, but layers of this"
                f" drafter see only the newest {window} pairs; give a draft of at most that depth"
            )
        check_mesh(self.mesh, target)

    def start(self, target: Target, batch: int, capacity: int) -> FeatureState:
        cache = KVCache(
            layers=self._empty(batch, capacity, self.modules), length=jnp.zeros(batch, jnp.int32)
        )
        newest = jnp.zeros((batch, self.modules, self.state_size), self._dtype)
        return FeatureState(cache=cache, newest=self._by_row(newest))

    @property
    def drafts_elsewhere(self) -> bool:
        return self.modules == 1

    def remote_inputs(
        self, target: Target, output: States, entries: Sequence[Entry]
    ) -> dict[str, jax.Array]:
        return {"features": self.features(output, entries)}

    def append_remote(
        self, target: Target, state: FeatureState, told: RemoteFeatures
    ) -> FeatureState:
        count = told.tokens.shape[1]
        positions = state.cache.length[:, None] + jnp.arange(count)[None]
        embedded = self.embed(target, told.following)
        states = told.arrays["features"].astype(self._dtype)
        causal = jnp.tril(jnp.ones((1, count, count), bool))
        newest_states, new_entries, first_pair_states = [], [], []
        for module in range(self.modules):
            # Module m pairs the token with the state of module m - 1 at the position before. At the
            # first position of this call that state comes from the call before.
            if module:
                states = jnp.concatenate(
                    [state.newest[:, module - 1, None].astype(states.dtype), states[:, :-1]], axis=1
                )
            past = self._past(state.cache, module, positions)
            states, entries = self.run(
                states, embedded, positions, visible_in(module, positions, causal), past, module
            )
            newest_states.append(newest_of(states, told.count, state.newest[:, module]))
            new_entries += entries
            first_pair_states.append(states[:, 0])
        # The write waits until every module has read the cache: the sum depends on all of them.
        all_read = sum(first_pair_states[1:], first_pair_states[0])
        cache = state.cache.append(new_entries, told.count, after=all_read)
        return FeatureState(cache=cache, newest=self._by_row(jnp.stack(newest_states, axis=1)))

    def append_unverified(
        self,
        target: Target,
        state: FeatureState,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[FeatureState, Entries]:
        """Append tokens with the drafter's own state in place of the feature, as while drafting.

        Each pair needs the state at the pair before, so the pairs are read one after another.
        """
        assert self.modules == 1

        def read(
            state: FeatureState, pair: tuple[jax.Array, jax.Array]
        ) -> tuple[FeatureState, None]:
            token, counts = pair
            positions = state.cache.length[:, None]
            embedded = self.embed(target, token[:, None])
            states, entries = self.run(
                state.newest, embedded, positions, None, self._past(state.cache, 0, positions)
            )
            is_valid = counts[:, None, None] > 0
            newest = jnp.where(is_valid, states.astype(state.newest.dtype), state.newest)
            cache = state.cache.append(entries, counts, after=states)
            return FeatureState(cache=cache, newest=newest), None

        counts = (jnp.arange(tokens.shape[1])[:, None] < count).astype(jnp.int32)  # 0: padding
        state, _ = jax.lax.scan(read, state, (following.T, counts))
        return state, ()

    def propose(
        self,
        target: Target,
        state: FeatureState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, FeatureState]:
        """Draft a tree; see `Drafter.propose`.

        The table shows which state each module reads in place of a feature, and at which position,
        for M = 3 modules. The target has read n tokens, at positions 0 to n - 1. The root is the
        token at n, and a node of depth d is the token at n + d. The pair of such a node has
        position n + d - 1. The pair of the root has position n - 1; all modules have read it when
        the root was committed, and ``newest`` has their states there. Then, level by level::

            node, its pair     module 0  module 1 reads       module 2 reads       children are from
            root,    n - 1     newest    newest               newest               module 0 at n - 1
            depth 1, n         -         module 0's at n - 1  module 1's at n - 1  module 1 at n
            depth 2, n + 1     -         -                    module 1's at n      module 2 at n + 1
            depth 3, n + 2     -         -                    module 2's at n + 1  module 2 at n + 2
            depth d, n + d - 1 -         -                    module 2's at n + d - 2, and so on

        A module reads the state of the module before it at the position before. Below the root
        there are no features of the target, so module 0 has nothing to read. So module 1 has
        nothing to read from depth 2 on, and each module but the last ends one level after the
        module before it. The last module, here module 2, would end after depth 2. From there on it
        reads its own state at the position before. A drafter with one module does so from depth 1
        on: that is how EAGLE drafts.
        """
        # Module 0 reads nothing but features, so drafting does not run it, unless it is the last.
        layers, last, batch = self.sizes.num_layers, self.modules - 1, root.shape[0]
        modules = range(min(1, last), self.modules)
        # The depths of the nodes in the scratch.
        depths = jnp.arange(self.draft_shape.read_slots) // self.draft_shape.width + 1

        def read(
            frontier: Frontier, carried: tuple[Entries, jax.Array]
        ) -> tuple[jax.Array, tuple[Entries, jax.Array]]:
            scratch, states = carried
            # ``[B, F, M, Hs]`` the states of each node's parent, by module.
            above = jnp.take_along_axis(states, frontier.parents[..., None, None], axis=1)
            embedded = self.embed(target, frontier.tokens)
            positions = jnp.broadcast_to(
                state.cache.length[:, None] + frontier.depth - 1, frontier.tokens.shape
            )

            def read_with(module: int, states: jax.Array) -> tuple[jax.Array, Entries]:
                # No window ends within a draft (see `check`), so all nodes above are visible.
                cached = self._past(state.cache, module, positions)
                first_layer = (module - modules.start) * layers
                # As in the cache, the first pairs of a text are hidden (see `visible_in`).
                has_state = state.cache.length[:, None] + depths - 1 >= module
                visible = frontier.visible & has_state[:, None]
                drafted = scratch[first_layer : first_layer + layers]
                past = tuple(
                    (*pieces, (entry, visible))
                    for pieces, entry in zip(cached, drafted, strict=True)
                )
                return self.run(states, embedded, positions, None, past, module)

            # The children of a node of depth d come from module d, or from the last module. The
            # modules before it have nothing to read here, and do not run.
            module_states, new = [above[:, :, module] for module in range(modules.start)], []
            for module in modules:
                if module == last:
                    before = jnp.where(
                        frontier.depth > last, above[:, :, last], above[:, :, last - 1]
                    )
                    at_module, entries = read_with(module, before)
                else:
                    # A conditional, so that the weights of a module without input are not read.
                    run = partial(read_with, module)
                    needed, before = frontier.depth <= module, above[:, :, module - 1]
                    at_module, entries = jax.lax.cond(needed, run, partial(zeros_of, run), before)
                module_states.append(at_module.astype(states.dtype))
                new += entries
            current = jnp.minimum(frontier.depth, last)
            of_modules = jnp.stack(module_states, axis=2)
            logits = self.logits(target, jnp.take(of_modules, current, axis=2), current)
            scratch = place_entries(scratch, new, frontier.offset, after=of_modules)
            return logits, (scratch, of_modules)

        above = jnp.broadcast_to(
            state.newest[:, None], (batch, self.draft_shape.width, *state.newest.shape[1:])
        )
        carried = (self._empty(batch, self.draft_shape.read_slots, len(modules)), above)
        logits = self.logits(target, state.newest[:, 0])
        draft, _, _ = expand(
            self.draft_shape,
            read,
            logits,
            carried,
            root,
            sampling,
            keys,
            active,
            self.vocabulary(target),
        )
        return draft, state

    def _past(self, cache: KVCache, module: int, positions: jax.Array) -> Past:
        """Return the part of the cache that ``module`` attends to, layer by layer.

        ``positions [B, T]`` are those of the queries, which decide what a window hides.
        """

        def past_of(layer: int) -> tuple[Piece, ...]:
            if not self.sizes.has_mixer(layer):
                return ()
            since, window = jnp.full((1, 1), module), self.sizes.window_of(layer)
            if window is not None:
                since = jnp.maximum(positions - window + 1, since)
            index = module * self.sizes.num_layers + layer
            return (Filled.of(cache, index, since, self.mesh),)

        return tuple(past_of(layer) for layer in range(self.sizes.num_layers))

    def _empty(self, batch: int, slots: int, modules: int) -> Entries:
        sizes = self.sizes
        layers = [sizes.entry_parts(layer) for layer in range(sizes.num_layers)] * modules
        return empty_entries(layers, batch=batch, slots=slots, dtype=self._dtype, mesh=self.mesh)

    def _by_row(self, x: jax.Array) -> jax.Array:
        return sharding.constrain(x, ("batch", *(None,) * (x.ndim - 1)), {}, self.mesh)


def visible_in(module: int, positions: jax.Array, causal: jax.Array) -> jax.Array:
    """Return which pairs see each other in ``module``, as ``[B|1, T, T]`` bool.

    The first ``module`` pairs of a text have no state of the module before that could replace a
    feature. So no other pair may see them.

    Args:
        module: the index of the module.
        positions: ``[B, T]``, the position of each pair in its text.
        causal: ``[B|1, T, T]`` bool, the mask of the first module.
    """
    if module == 0:
        return causal
    # A hidden pair still sees itself.
    itself = jnp.eye(positions.shape[1], dtype=bool)
    return causal & ((positions >= module)[:, None] | itself)
