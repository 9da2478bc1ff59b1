"""The base of drafters that wrap another drafter. It passes every hook on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from specjax.drafters.base import Committed, Drafter, DraftingReads, RemoteFeatures, State
from specjax.drafts.draft import Draft, Verdict
from specjax.models.cache import Entries, Entry, KVCache, PagedCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling


class Wrapper(Drafter[State]):
    """A drafter that wraps another drafter.

    Override the hooks that differ. All other hooks call the wrapped drafter.

    A subclass names the wrapped drafter by a field ``drafter``, or overrides `wrapped`. The state
    of the wrapped drafter is the field ``own`` of the wrapper's state. If it is stored elsewhere,
    override `own_state` and `with_own`.

    Examples:
        >>> from flax import struct
        >>> from specjax.drafters.wrapper import Wrapper
        >>> @struct.dataclass
        ... class Shorter(Wrapper):
        ...     drafter: specjax.PromptLookup
        ...     draft: specjax.Chain = struct.field(pytree_node=False, default=specjax.Chain(1))
        ...
        ...     @property
        ...     def wrapped(self):
        ...         return self.drafter.replace(draft=self.draft)
        ...
        ...     def own_state(self, state):
        ...         return state
        ...
        ...     def with_own(self, state, own):
        ...         return own
        ...
        ...     def start(self, target, batch, capacity):
        ...         return self.wrapped.start(target, batch, capacity)
        >>> result = specjax.generate(
        ...     target, Shorter(specjax.PromptLookup(draft=4)), prompts, max_new_tokens=8
        ... )
        >>> np.array_equal(result.tokens, plain.tokens)
        True
    """

    _takes_unions = True  # if the wrapped drafter does

    # --- hooks that find the wrapped drafter and its state ---

    @property
    def wrapped(self) -> Drafter[Any]:
        """The wrapped drafter, as the hooks call it."""
        return self.drafter  # pyright: ignore[reportAttributeAccessIssue]

    def own_state(self, state: State) -> Any:
        """Return the state of the wrapped drafter."""
        return state.own  # pyright: ignore[reportAttributeAccessIssue]

    def with_own(self, state: State, own: Any) -> State:
        """Return the wrapper's ``state`` with ``own`` as the state of the wrapped drafter."""
        return replace(state, own=own)  # pyright: ignore[reportArgumentType]

    # --- hooks ---

    @property
    def grows_trees(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.wrapped.grows_trees

    @property
    def max_positions(self) -> int | None:
        return self.wrapped.max_positions

    @property
    def node_counts(self) -> tuple[int, ...]:
        return self.wrapped.node_counts

    @property
    def part_names(self) -> tuple[str, ...]:
        return self.wrapped.part_names

    @property
    def drafts_elsewhere(self) -> bool:
        """False: a subclass must override it if the wrapper itself can run on another machine."""
        return False

    def fingerprint(self) -> str:
        return self.wrapped.fingerprint()

    def check(self, target: Target) -> None:
        self.wrapped.check(target)

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return self.wrapped.taps(config)

    def likely_tokens(self, config: ModelConfig) -> int:
        return self.wrapped.likely_tokens(config)

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return self.wrapped.reads(config)

    def start(self, target: Target, batch: int, capacity: int) -> State:
        """Return the state of the wrapper.

        There is no default: it must include the state that the wrapped drafter's `start` returns.
        """
        raise NotImplementedError

    def append_committed(self, target: Target, state: State, committed: Committed) -> State:
        return self.with_own(
            state, self.wrapped.append_committed(target, self.own_state(state), committed)
        )

    def remote_inputs(
        self, target: Target, output: States, entries: Sequence[Entry]
    ) -> dict[str, jax.Array]:
        return self.wrapped.remote_inputs(target, output, entries)

    def remote_entries(self, target: Target, arrays: Mapping[str, jax.Array]) -> Entries:
        return self.wrapped.remote_entries(target, arrays)

    def append_remote(self, target: Target, state: State, told: RemoteFeatures) -> State:
        return self.with_own(state, self.wrapped.append_remote(target, self.own_state(state), told))

    def append_unverified(
        self,
        target: Target,
        state: State,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        cache: Any = None,
    ) -> tuple[State, Entries]:
        wrapped_state, entries = self.wrapped.append_unverified(
            target, self.own_state(state), tokens, following, count, cache
        )
        return self.with_own(state, wrapped_state), entries

    def in_segment(self, state: State, segments: jax.Array) -> State:
        return self.with_own(state, self.wrapped.in_segment(self.own_state(state), segments))

    def prompts_read(
        self, target: Target, state: State, tokens: jax.Array, cache: KVCache | PagedCache
    ) -> State:
        return self.with_own(
            state, self.wrapped.prompts_read(target, self.own_state(state), tokens, cache)
        )

    def propose(
        self,
        target: Target,
        state: State,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        **cache: Any,
    ) -> tuple[Draft, State]:
        draft, wrapped_state = self.wrapped.propose(
            target, self.own_state(state), root, sampling, keys, active, **cache
        )
        return draft, self.with_own(state, wrapped_state)

    def after_merge(self, before: State, proposed: State, nodes: jax.Array) -> State:
        merged = self.wrapped.after_merge(self.own_state(before), self.own_state(proposed), nodes)
        return self.with_own(proposed, merged)

    def update(
        self, target: Target, state: State, draft: Draft, verdict: Verdict, committed: Committed
    ) -> State:
        return self.with_own(
            state, self.wrapped.update(target, self.own_state(state), draft, verdict, committed)
        )

    def to_prefix_state(self, state: State) -> Any:
        return self.wrapped.to_prefix_state(self.own_state(state))

    def from_prefix_state(self, fresh: State, kept: Any) -> State:
        return self.with_own(fresh, self.wrapped.from_prefix_state(self.own_state(fresh), kept))

    def drafting_reads(self, target: Target, state: State = (), cache: Any = ()) -> DraftingReads:  # pyright: ignore[reportArgumentType]
        wrapped_state = () if isinstance(state, tuple) and not state else self.own_state(state)
        return self.wrapped.drafting_reads(target, wrapped_state, cache)
