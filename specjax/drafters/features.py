"""Drafting from the target's hidden states: what EAGLE-1, EAGLE-2, HASS, EAGLE-3 and multi-token prediction have in common.

Such a drafter reads *pairs*. The pair of position t is a *feature*, made from the target's hidden states at t, and the token
after it, t + 1. From the pairs up to t it predicts token t + 2. While it drafts, the target has not read the newest tokens, and
there are no features of them: the state that the drafter itself came to at t then takes the place of the next one. After the
verdict the pairs of the accepted tokens are read again with the target's features, and those alone are kept.

EAGLE has one *module* that does this. Multi-token prediction has several, in a row: in place of the feature of t, module m
(from 0) reads the state of module m - 1 at t - 1. So it needs no feature that is younger than t - m: the first m tokens of a
draft have none, and module m reads them as it reads the text. Beyond, the last module goes on with its own states.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.drafters.base import RemoteFeatures, check_mesh, newest_of
from specjax.drafters.candidates import Vocabulary
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.trained import TrainedDrafter
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Entry, KVCache, empty_entries, place_entries
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling


@struct.dataclass
class FeatureState:
    """Attributes:
    cache: of the pairs that were read with the target's features, module by module; slot t holds the pair of position t.
    newest: ``[B, M, H]`` each module's state at each row's newest pair.
    """

    cache: KVCache
    newest: jax.Array


class FeatureDrafter(TrainedDrafter[FeatureState]):
    """A drafter that is fed by the target's features. Subclasses say what a feature is, and how pairs are read.

    Attributes:
        params: its own parameters; ``embed``, if it is among them, takes the place of the target's embedding.
        draft: the shape of its drafts, any of `specjax.drafts.shapes`.
        mesh: where the params live; None is the default device.
    """

    params: Params
    draft: DraftShape | int
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

    def features(self, output: States, entries: Sequence[Entry] = ()) -> jax.Array:
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
            past: for each of its layers, the pieces that the pairs see beside each other (see `attention.attend`).
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
        self.draft_shape.check(own.vocab_size if vocabulary is None else vocabulary.ids.shape[0])
        check_mesh(self.mesh, target)

    def start(self, target: Target, batch: int, capacity: int) -> FeatureState:
        cache = KVCache(layers=self._empty(batch, capacity, self.modules), length=jnp.zeros(batch, jnp.int32))
        newest = jnp.zeros((batch, self.modules, self.sizes.hidden_size), self._dtype)
        return FeatureState(cache=cache, newest=self._by_row(newest))

    @property
    def drafts_elsewhere(self) -> bool:
        return self.modules == 1

    def remote_inputs(self, target: Target, output: States, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        return {"features": self.features(output, entries)}

    def append_remote(self, target: Target, state: FeatureState, told: RemoteFeatures) -> FeatureState:
        count = told.tokens.shape[1]
        positions = state.cache.length[:, None] + jnp.arange(count)[None]
        embedded, states = self.embed(target, told.following), told.arrays["features"].astype(self._dtype)
        causal = jnp.tril(jnp.ones((1, count, count), bool))
        newest, new, first_states = [], [], []
        for module in range(self.modules):
            if module:
                states = jnp.concatenate([state.newest[:, module - 1, None].astype(states.dtype), states[:, :-1]], axis=1)
            past = self._past(state.cache, module)
            states, entries = self.run(states, embedded, positions, visible_in(module, positions, causal), past, module)
            newest.append(newest_of(states, told.count, state.newest[:, module]))
            new += entries
            first_states.append(states[:, 0])
        cache = state.cache.append(new, told.count, after=sum(first_states[1:], first_states[0]))
        return FeatureState(cache=cache, newest=self._by_row(jnp.stack(newest, axis=1)))

    def append_unverified(
        self,
        target: Target,
        state: FeatureState,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[FeatureState, tuple[Entry, ...]]:
        """As while drafting, its own state takes the place of the feature: so the pairs are read one after another."""
        assert self.modules == 1

        def read(state: FeatureState, pair: tuple[jax.Array, jax.Array]) -> tuple[FeatureState, None]:
            token, counts = pair
            positions = state.cache.length[:, None]
            embedded = self.embed(target, token[:, None])
            states, entries = self.run(state.newest, embedded, positions, None, self._past(state.cache, 0))
            newest = jnp.where(counts[:, None, None] > 0, states.astype(state.newest.dtype), state.newest)
            return FeatureState(cache=state.cache.append(entries, counts, after=states), newest=newest), None

        is_assumed = (jnp.arange(tokens.shape[1])[:, None] < count).astype(jnp.int32)
        state, _ = jax.lax.scan(read, state, (following.T, is_assumed))
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
        """See `Drafter.propose`. Which state each module reads, in place of a feature, and at which position.

        An example with M = 3 modules. The target has read n tokens, those at positions 0 to n - 1; the root is the token at n,
        and a node of depth d the token at n + d. Its pair is that of position n + d - 1, and the root's is that of n - 1, which
        was read by all modules when the root was committed: ``newest`` holds their states there. Then, level by level:

            node, its pair     module 0   module 1 reads        module 2 reads        its children come from
            root,    n - 1     newest     newest                newest                module 0, at n - 1
            depth 1, n         -          module 0's at n - 1   module 1's at n - 1   module 1, at n
            depth 2, n + 1     -          -                     module 1's at n       module 2, at n + 1
            depth 3, n + 2     -          -                     module 2's at n + 1   module 2, at n + 2
            depth d, n + d - 1 -          -                     module 2's at n + d - 2, and so on

        A module reads what the one before it came to at the position before. Module 0 has nothing to read below the root, for
        there the target's features end; and so module 1 has nothing from depth 2 on, and every module but the last ends one
        level after the one before it. Module 2, the last, would end after depth 2: from there it reads its own state at the
        position before. With one module, which is the last, that begins at depth 1: so EAGLE drafts.
        """
        # Module 0 reads features alone: a draft needs it no more, unless it is the last one.
        layers, last, batch = self.sizes.num_layers, self.modules - 1, root.shape[0]
        modules = range(min(1, last), self.modules)
        depths = jnp.arange(self.draft_shape.read_slots) // self.draft_shape.width + 1  # of the nodes in scratch

        def read(
            frontier: Frontier, carried: tuple[tuple[Entry, ...], jax.Array]
        ) -> tuple[jax.Array, tuple[tuple[Entry, ...], jax.Array]]:
            scratch, states = carried
            above = jnp.take_along_axis(states, frontier.parents[..., None, None], axis=1)  # [B, F, M, H]
            embedded = self.embed(target, frontier.tokens)
            positions = jnp.broadcast_to(state.cache.length[:, None] + frontier.depth - 1, frontier.tokens.shape)

            def read_with(module: int, states: jax.Array) -> tuple[jax.Array, tuple[Entry, ...]]:
                kept, at = self._past(state.cache, module), (module - modules.start) * layers
                # As in the cache: the first pairs of a text are nothing to look at.
                visible = frontier.visible & (state.cache.length[:, None] + depths - 1 >= module)[:, None]
                drafted = scratch[at : at + layers]
                past = tuple((*pieces, (entry, visible)) for pieces, entry in zip(kept, drafted, strict=True))
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

        above = jnp.broadcast_to(state.newest[:, None], (batch, self.draft_shape.width, *state.newest.shape[1:]))
        carried = (self._empty(batch, self.draft_shape.read_slots, len(modules)), above)
        logits = self.logits(target, state.newest[:, 0])
        draft, _, _ = expand(self.draft_shape, read, logits, carried, root, sampling, keys, active, self.vocabulary(target))
        return draft, state

    def _past(self, cache: KVCache, module: int) -> tuple[tuple[Piece, ...], ...]:
        """What ``module`` sees of the cache, by layer."""
        layers = self.sizes.num_layers
        since = jnp.full((1, 1), module)
        of_module = range(module * layers, (module + 1) * layers)
        return tuple((Filled.of(cache, layer, since, self.mesh),) for layer in of_module)

    def _empty(self, batch: int, slots: int, modules: int) -> tuple[Entry, ...]:
        sizes = self.sizes
        layers = [sizes.entry_parts(layer) for layer in range(sizes.num_layers)] * modules
        return empty_entries(layers, batch=batch, slots=slots, dtype=self._dtype, mesh=self.mesh)

    def _by_row(self, x: jax.Array) -> jax.Array:
        return sharding.constrain(x, ("batch", *(None,) * (x.ndim - 1)), {}, self.mesh)


def visible_in(module: int, positions: jax.Array, causal: jax.Array) -> jax.Array:
    """``[B|1, T, T]`` bool, which pairs see each other in ``module``.

    The first pairs of a text have no state of the module before that could be read in place of a feature: they are visible to
    nobody but themselves.

    Args:
        module: its number.
        positions: ``[B, T]`` how far each pair is from the beginning of its text.
        causal: ``[B|1, T, T]`` bool, which pairs a model would see.
    """
    return causal if module == 0 else causal & ((positions >= module)[:, None] | jnp.eye(positions.shape[1], dtype=bool))


def _zeros_of(run: Callable[..., Any], *arguments: jax.Array) -> Any:
    """Zeros in the shape of what ``run`` would give."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, *arguments))
