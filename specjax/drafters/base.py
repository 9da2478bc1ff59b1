"""What a drafter is, and what it is told of."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafts import tree
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models.cache import Entry, KVCache, PagedCache, empty_entries
from specjax.models.config import ModelConfig
from specjax.models.quantized_cache import dequantize
from specjax.models.transformer import States, Target
from specjax.reprs import OneLine
from specjax.sampling import RowSampling


@struct.dataclass
class Committed:
    """Tokens that have just been committed, T a row, as a drafter is told of them. What lies beyond ``count`` is filler.

    Attributes:
        tokens: ``[B, T]``.
        following: ``[B, T]`` the token after each: the next of ``tokens``, and after the last the row's new root.
        output: the target's at each token: ``hidden [B, T, H]`` and the asked ``taps [B, T, n, H]``.
        entries: what each of the target's layers remembers of the tokens, ``[B, heads, T, dim]`` each part. Of a prompt a layer
            with a state gives the state after the tokens instead (see `specjax.models.states.State`).
        count: ``[B]`` how many of them count.
        cache: the target's, in pages or not, in which they are the newest ``count`` entries. To be read, not kept.

    Examples:
        >>> from specjax.drafters.base import Committed
        >>> output, entries = target.score(prompts)
        >>> count = jnp.array([6, 2])
        >>> cache = target.new_cache(batch=2, capacity=16).append(
        ...     entries, count, after=output.hidden
        ... )
        >>> committed = Committed(
        ...     tokens=jnp.asarray(prompts),
        ...     following=jnp.roll(jnp.asarray(prompts), -1, axis=1),
        ...     output=output.states,
        ...     entries=entries,
        ...     count=count,
        ...     cache=cache,
        ... )
        >>> newest = committed.newest(output.hidden, before=jnp.zeros((2, 16)))
        >>> np.array_equal(newest[1], output.hidden[1, 1])
        True
    """

    tokens: jax.Array
    following: jax.Array
    output: States
    entries: tuple[Entry, ...]
    count: jax.Array
    cache: KVCache | PagedCache

    def newest(self, states: jax.Array, before: jax.Array) -> jax.Array:
        """``[B, H]`` of ``states [B, T, H]`` those of each row's newest token; ``before [B, H]`` where none counts."""
        return newest_of(states, self.count, before)


def newest_of(states: jax.Array, count: jax.Array, before: jax.Array) -> jax.Array:
    """``[B, H]`` of ``states [B, T, H]`` the last of the first ``count [B]``; ``before [B, H]`` where none counts."""
    last = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(states, last, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, newest.astype(before.dtype), before)


@struct.dataclass
class RemoteFeatures:
    """What a drafter hears of committed tokens, T a row: also one that runs on another machine than the target.

    Attributes:
        tokens: ``[B, T]``.
        following: ``[B, T]`` the token after each, as in `Committed`.
        arrays: what `Drafter.remote_inputs` made of the target's pass over them, each ``[B, T, …]``.
        count: ``[B]`` how many of them count.

    Examples:
        >>> from specjax.drafters.base import RemoteFeatures
        >>> drafter = specjax.Eagle3.init(target, jax.random.key(1))
        >>> output, entries = target.read(prompts, taps=drafter.taps(target.config))
        >>> told = RemoteFeatures(
        ...     tokens=prompts,
        ...     following=jnp.roll(prompts, -1, axis=1),
        ...     arrays=drafter.remote_inputs(target, output, entries),  # on the server
        ...     count=jnp.array([5, 5]),
        ... )
        >>> state = drafter.start(target, batch=2, capacity=32)
        >>> state = drafter.append_remote(target, state, told)  # on the client
        >>> state.cache.length.tolist()
        [5, 5]
    """

    tokens: jax.Array
    following: jax.Array
    arrays: dict[str, jax.Array]
    count: jax.Array


@dataclass(frozen=True)
class DraftingReads:
    """Arrays that drafting must read, in any pytrees: what a step of decoding costs at least is computed from them.

    Attributes:
        level: in every level of a draft.
        step: once for all of its levels together.
    """

    level: Any = ()
    step: Any = ()


RULES_PAGE = "docs/extend/drafter.md"
"""The page of the documentation with the rules for drafters, which errors name."""

_OLD_METHODS = {
    "absorb": "append_committed",
    "tell": "remote_inputs",
    "hear": "append_remote",
    "entries_told": "remote_entries",
    "assume": "append_unverified",
    "at_border": "to_prefix_state",
    "from_border": "from_prefix_state",
}
"""Methods of drafters by their old names."""

State = TypeVar("State")
"""What a drafter remembers of a batch: any pytree. Its leaves all have the row axis first, ``[B, …]``, so that a row can be
replaced by another request at any time."""


def check_is_pytree(drafter: "Drafter") -> None:
    """Refuse, with an InputError, a drafter whose class was not decorated, so that JAX does not know its fields."""
    if jax.tree_util.all_leaves([drafter]):
        raise _broken(drafter, "is no pytree: decorate its class with flax.struct.dataclass")


def start_drafter(drafter: "Drafter", target: Target, batch: int, capacity: int) -> Any:
    """What `Drafter.start` returns, once it is seen to have the row axis first.

    Raises:
        InputError: it breaks that rule; says where.
    """
    state = drafter.start(target, batch, capacity)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (batch,):
            place = f"start(){jax.tree_util.keystr(path)}"
            raise _broken(drafter, f"{place} has shape {list(jnp.shape(leaf))}: every array of its state has the rows first")
    return state


def check_proposal(drafter: "Drafter", proposal: Any, batch: int) -> tuple[Draft, Any]:
    """The draft and the state that `Drafter.propose` returned, once they are seen to have the right form. Looks at no values.

    Raises:
        InputError: they break a rule; says which.
    """
    if not (isinstance(proposal, tuple) and len(proposal) == 2 and isinstance(proposal[0], Draft)):
        raise _broken(drafter, f"propose() returns {type(proposal).__name__}: return a Draft and the state")
    draft, shape = proposal[0], drafter.draft_shape
    if not jnp.issubdtype(draft.tokens.dtype, jnp.integer):
        raise _broken(
            drafter, f"propose() drafts tokens of type {draft.tokens.dtype}: token ids are whole numbers, such as int32"
        )
    if draft.tokens.ndim != 2 or draft.tokens.shape[0] != batch:
        raise _broken(drafter, f"propose() drafts tokens {list(draft.tokens.shape)}: they are [B, N], and B is {batch} here")
    if draft.depth > shape.depth:
        advice = "" if draft.grown is None or draft.levels is not None else ", and a tree that grows names its levels"
        raise _broken(
            drafter, f"propose() drafts {draft.depth} deep, but draft={shape!r}: drafts have the depth of that shape{advice}"
        )
    return proposal


def _broken(drafter: "Drafter", rule: str) -> InputError:
    return InputError(f"{type(drafter).__name__}: {rule} (see {RULES_PAGE})")


class Drafter(OneLine, Generic[State]):
    """Proposes tokens for the target to check. Subclass it as a ``flax.struct.dataclass``; every method is pure.

    Attributes:
        draft: the shape of its drafts; ``draft=4`` is a chain of 4. Read it as `draft_shape`.
        grows_trees: whether it drafts any shape of `specjax.drafts.shapes`, and not chains alone.

    Examples:
        >>> from flax import struct
        >>> from specjax.drafters import Draft, Drafter
        >>> @struct.dataclass
        ... class RepeatLast(Drafter):
        ...     draft: specjax.Chain = struct.field(
        ...         pytree_node=False, default=specjax.Chain(3)
        ...     )
        ...
        ...     def propose(self, target, state, root, sampling, keys, active):
        ...         drafted = jnp.repeat(root[:, None], self.draft_shape.depth, axis=1)
        ...         return Draft.chain(root, drafted), state
        >>> drafter = RepeatLast()
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    draft: DraftShape | int
    grows_trees: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a method that is defined under its old name serve under the new one, with a warning; and the other way round."""
        super().__init_subclass__(**options)
        own: dict[str, Any] = {}
        for base in reversed(cls.__mro__):  # those that are drafters have been looked at
            if base is cls or not issubclass(base, Drafter):
                own |= vars(base)
        for old, new in _OLD_METHODS.items():
            if old in own and new not in own:
                warnings.warn(f"{cls.__name__}.{old} has a new name: call it {new}", DeprecationWarning, stacklevel=2)
                setattr(cls, new, own[old])
            elif new in own and old not in own:
                setattr(cls, old, own[new])  # for a subclass that asks for `super()` by the old name
        cls._complete_class(own)

    @classmethod
    def _complete_class(cls, own: Mapping[str, Any]) -> None:
        """Finish a new subclass, of which ``own`` holds what the class itself and its mixins define."""

    def __post_init__(self) -> None:
        """What was given as ``draft`` becomes a shape: equal drafters are equal, however their shape was said."""
        if not hasattr(self, "draft"):
            raise _broken(self, "has no field draft, the shape of its drafts: declare one with a default, such as Chain(4)")
        if not isinstance(self.draft, DraftShape):
            object.__setattr__(self, "draft", as_shape(self.draft))

    @property
    def draft_shape(self) -> DraftShape:
        """``draft``, once the drafter is made: a shape, also where a number was given."""
        assert isinstance(self.draft, DraftShape)
        return self.draft

    def check(self, target: Target) -> None:
        """Refuse, with an InputError that names what is wrong, a target that this drafter cannot serve. Runs on the host."""

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers of a target so configured whose input `States.taps` is to hold, ascending."""
        return ()

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers of a target so configured whose committed entries `propose` reads, ascending.

        Where there are any, it is given the target's cache of exactly these, as the keyword ``cache``. To be read, not kept.
        """
        return ()

    @property
    def max_positions(self) -> int | None:
        """The longest text, in tokens, that it can draft for; None where there is no limit beyond the target's."""
        return None

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Numbers of nodes, ascending, that a step on a CPU is compiled for; it takes the smallest that holds every row's
        draft. Elsewhere a step has room for the largest."""
        return self.draft_shape.node_counts

    def start(self, target: Target, batch: int, capacity: int) -> State:
        """The state of ``batch`` rows of which nothing has been committed yet.

        Args:
            target: the target model.
            batch: B.
            capacity: most tokens that a row may come to hold, its root included.
        """
        return ()  # pyright: ignore[reportReturnType]

    def append_committed(self, target: Target, state: State, committed: Committed) -> State:
        """The state after ``committed``: called for every chunk of the prompts, and from `update` after every verdict.

        A prompt's last token is its first root, so of a prompt of n tokens n - 1 are appended. By default this is
        `append_remote` of its own `remote_inputs`; override it in a drafter that needs what lies in the target's memory.
        """
        arrays = self.remote_inputs(target, committed.output, committed.entries)
        return self.append_remote(target, state, RemoteFeatures(committed.tokens, committed.following, arrays, committed.count))

    # --- drafting on another machine than the target's: `append_committed` in two halves ---

    @property
    def drafts_elsewhere(self) -> bool:
        """Whether it can draft on another machine than the target's, from `remote_inputs` alone."""
        return False

    def fingerprint(self) -> str:
        """By which the two machines can tell whether they have the same drafter; empty where tokens are all that it is told."""
        return ""

    def remote_inputs(self, target: Target, output: States, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        """Return what `append_remote` needs of the target's pass over T tokens, by name, each ``[B, T, …]``.

        It is the half of `append_committed` that is done where the target is. Nothing, where the tokens say it all.

        Args:
            target: the target model.
            output: the target's at each token.
            entries: what each of its layers remembers of the tokens.
        """
        return {}

    def remote_entries(self, target: Target, arrays: Mapping[str, jax.Array]) -> tuple[Entry, ...]:
        """Return the entries of the target's layers that it `reads`, out of what it was sent; see `remote_entry_arrays`."""
        reads = self.reads(target.config)
        names = [[f"layer{layer}.{part}" for part in range(len(target.config.entry_parts(layer)))] for layer in reads]
        return tuple(tuple(jnp.swapaxes(arrays[name], 1, 2) for name in each) for each in names)

    def append_remote(self, target: Target, state: State, told: RemoteFeatures) -> State:
        """Return the state after committed tokens with their `remote_inputs`: the half that is done where the drafter is.

        Of the target it may use the embedding, the final norm, the head, and the layers that it `reads`.
        """
        return state

    def append_unverified(
        self, target: Target, state: State, tokens: jax.Array, following: jax.Array, count: jax.Array, cache: Any = None
    ) -> tuple[State, tuple[Entry, ...]]:
        """The state as if the first ``count [B]`` of ``tokens [B, T]`` were committed, and the target had said nothing of them.

        So a drafter goes on while it waits for a verdict, or without the target. It is never called where the target is.

        Args:
            target: as in `append_remote`.
            state: to go on from. It stays as it is, to come back to.
            tokens: the first is the root that `propose` would be given.
            following: ``[B, T]`` the token after each.
            count: how many count.
            cache: of the target's layers that it `reads`, as in `propose`.

        Returns:
            The state; and for each of these layers the entries of the tokens, which the drafter has worked out itself.
        """
        return self.append_remote(target, state, RemoteFeatures(tokens, following, {}, count)), ()

    def prompts_read(self, target: Target, state: State, tokens: jax.Array, cache: KVCache | PagedCache) -> State:
        """The state once the prompts have been read to their ends.

        Args:
            target: the target model.
            state: as the last `append_committed` returned it.
            tokens: ``[B, P]`` the prompts, of which the first ``cache.length`` tokens have been read.
            cache: the target's. To be read, not kept.
        """
        return state

    def propose(
        self,
        target: Target,
        state: State,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, State]:
        """Draft below ``root [B]``; consumes ``keys [D, B]``, one for each level and row.

        Rows that are not ``active [B]`` have finished: what they draft does not matter, and nothing may wait for them.
        Tokens that are drawn are drawn from exactly the ``q`` handed over. Where ``sampling.coupled``, nothing is drawn: add
        `position_noise` of the level's keys, the target's own, to log q, and offer the largest. An autoregressive drafter
        leaves all that, and the shape of the tree, to `specjax.drafters.expansion.expand`.

        Returns:
            The draft, and the state for `update`, which may hold what drafting has worked out.
        """
        raise NotImplementedError

    def update(self, target: Target, state: State, draft: Draft, verdict: Verdict, committed: Committed) -> State:
        """The state after ``verdict``, of the same structure as `start` made.

        Override it in a drafter that knows more than ``committed`` says: of the accepted path it has entries of its own, say.

        Args:
            target: the target model.
            state: as `propose` returned it.
            draft: what was proposed.
            verdict: what was accepted of it; ``count`` is 0 in rows that have finished.
            committed: the accepted path, the root first: D + 1 tokens of which ``verdict.count`` count.
        """
        return self.append_committed(target, state, committed)

    def to_prefix_state(self, state: State) -> Any:
        """What another text that begins alike must be given of a state, at the end of a whole chunk of a prompt.

        Caches in pages come without their pages. Override it, and `from_prefix_state`, where a state holds more than such a
        text needs.
        """
        return state

    def from_prefix_state(self, fresh: State, kept: Any) -> State:
        """The state of a text that goes on from what `to_prefix_state` kept of another one; ``fresh`` is as `start` made it."""
        return kept

    def drafting_reads(self, target: Target, state: State = (), cache: Any = ()) -> DraftingReads:
        """What must be read to draft once: weights, and what is remembered. A drafter without either reads nothing.

        Args:
            target: the target model; its arrays, and all others, may be shapes.
            state: as `start` makes it; without it the weights alone count.
            cache: by layer the target's entries, or the state of a layer that keeps one; likewise.
        """
        return DraftingReads()


for _old, _new in _OLD_METHODS.items():
    setattr(Drafter, _old, vars(Drafter)[_new])


def remote_input_shapes(drafter: "Drafter[Any]", target: Target) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a drafter on another machine is sent of one token, by name; see `Drafter.remote_inputs`.

    Args:
        drafter: any.
        target: all of it, or the parts that a client has.

    Examples:
        >>> from specjax.drafters.base import remote_input_shapes
        >>> remote_input_shapes(specjax.Eagle3.init(target, jax.random.key(1)), target)
        {'features': (16,)}
    """
    config = target.config
    layers = [config.entry_parts(layer) for layer in range(config.num_layers)]

    def tell() -> dict[str, jax.Array]:
        hidden = jnp.zeros((1, 1, config.hidden_size))
        taps = jnp.zeros((1, 1, len(drafter.taps(config)), config.hidden_size))
        return drafter.remote_inputs(target, States(hidden=hidden, taps=taps), empty_entries(layers, batch=1, slots=1))

    return {name: array.shape[2:] for name, array in jax.eval_shape(tell).items()}


def remote_entry_arrays(entries: Sequence[Entry], layers: Sequence[int]) -> dict[str, jax.Array]:
    """``[B, T, heads, dim]`` of each part of the entries of ``layers``, by name, for `Drafter.remote_inputs`."""
    parts = [(layer, index, part) for layer in layers for index, part in enumerate(entries[layer])]
    return {f"layer{layer}.{index}": jnp.swapaxes(dequantize(part), 1, 2) for layer, index, part in parts}


_OLD_FUNCTIONS = {"shapes_told": remote_input_shapes, "told_entries": remote_entry_arrays}


def __getattr__(name: str) -> Any:
    if (renamed := _OLD_FUNCTIONS.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} has a new name: {renamed.__name__}", DeprecationWarning, stacklevel=2)
    return renamed


def check_mesh(mesh: Mesh | None, target: Target) -> None:
    """Refuse, with an InputError, a drafter on another ``mesh`` than its target."""
    if mesh != target.mesh:
        raise InputError(f"drafter is on mesh={mesh} and target on {target.mesh}: load both with the same mesh")


def append_tokens(tokens: jax.Array, lengths: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """``tokens [B, S]``, or ``[B, S, …]`` of what belongs to them, with the first ``count [B]`` of ``new [B, n, …]`` written at
    ``lengths [B]``; the rest is dropped."""
    step = jnp.arange(new.shape[1])[None]
    slots = jnp.where(step < count[:, None], lengths[:, None] + step, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], slots].set(new, mode="drop")


@struct.dataclass
class NoDraft(Drafter[tuple[()]]):
    """Plain autoregressive decoding: a tree that is a root and nothing else.

    Examples:
        >>> from specjax.drafters import NoDraft
        >>> result = specjax.generate(target, NoDraft(), prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # what ``drafter=None`` means
        True
    """

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _RootOnly()

    def propose(
        self, target: Target, state: tuple[()], root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, tuple[()]]:
        return Draft.of_tree(root[:, None], tree.chain_parents(1)), state


class _RootOnly(DraftShape):
    depth, nodes, branching, width = 0, 1, 0, 0
