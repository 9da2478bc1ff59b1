"""The contract of a drafter, `Drafter`, and the data that its hooks receive."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafts import tree
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import DraftShape, UnionTree
from specjax.errors import InputError
from specjax.models.cache import Entries, Entry, KVCache, PagedCache, empty_entries
from specjax.models.config import ModelConfig
from specjax.models.quantized_cache import dequantize
from specjax.models.transformer import States, Target
from specjax.pytree_class import KeyedByClass
from specjax.reprs import OneLine
from specjax.sampling import RowSampling, likeliest


@struct.dataclass
class LikelyTokens:
    """The tokens that the target holds likeliest after each of some nodes.

    Attributes:
        tokens: ``[B, N, k]`` int32, the token ids, the likeliest first.
        logprobs: ``[B, N, k]`` float32, their log-probabilities at temperature 1, without
            penalties and biases.

    Examples:
        >>> from specjax.drafters.base import LikelyTokens
        >>> likely = LikelyTokens.of(jnp.log(jnp.array([[[0.5, 0.125, 0.375]]])), count=2)
        >>> likely.tokens.tolist(), jnp.exp(likely.logprobs).tolist()
        ([[[0, 2]]], [[[0.5, 0.375]]])
    """

    tokens: jax.Array
    logprobs: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, count: int) -> "LikelyTokens":
        """Return the ``count`` likeliest tokens of ``logits [B, N, V]``."""
        logits = logits.astype(jnp.float32)
        best, tokens = likeliest(logits, count)
        return cls(tokens, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


@struct.dataclass
class Committed:
    """Newly committed tokens, T per row, as a drafter receives them.

    Slots from ``count`` on are filler.

    Attributes:
        tokens: ``[B, T]``, the token ids.
        following: ``[B, T]``, the token after each of ``tokens``. After the last one that is the
            row's new root.
        output: the target's states at each token: ``hidden [B, T, H]``, and ``taps [B, T, n, H]``
            for the layers that `Drafter.taps` requests.
        entries: the KV entries of the tokens in each target layer, each part
            ``[B, heads, T, dim]``. In a prompt, a layer with a recurrent state has the state after
            the tokens instead (see `specjax.models.states.State`).
        count: ``[B]``, the number of valid tokens of each row.
        cache: the target's cache, paged or not. The tokens are its newest ``count`` entries. A
            drafter may read it, but must not keep a reference to it.
        likely: the target's likeliest next tokens after each of the draft's N nodes, accepted or
            not, if the drafter requests them (`Drafter.likely_tokens`). The log-probabilities are
            NaN after nodes that the target has not read. None in a prompt, and for tokens that were
            committed while the drafter was paused.

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
    entries: Entries
    count: jax.Array
    cache: KVCache | PagedCache
    likely: LikelyTokens | None = None

    def newest(self, states: jax.Array, before: jax.Array) -> jax.Array:
        """Return the states ``[B, H]`` at each row's newest valid token.

        Args:
            states: ``[B, T, H]``, the states at all tokens.
            before: ``[B, H]``, the result for rows without a valid token.
        """
        return newest_of(states, self.count, before)


def newest_of(states: jax.Array, count: jax.Array, before: jax.Array) -> jax.Array:
    """Return the states ``[B, H]`` at the last of each row's first ``count [B]`` tokens.

    Args:
        states: ``[B, T, H]``, the states at all tokens.
        count: ``[B]``, the number of valid tokens.
        before: ``[B, H]``, the result for rows whose count is 0.
    """
    last = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(states, last, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, newest.astype(before.dtype), before)


@struct.dataclass
class RemoteFeatures:
    """Committed tokens, T per row, and what `Drafter.remote_inputs` selects of the target's output.

    A drafter on another machine than the target receives nothing else.

    Attributes:
        tokens: ``[B, T]``, the token ids.
        following: ``[B, T]``, the token after each, as in `Committed`.
        arrays: the arrays that `Drafter.remote_inputs` has made of the target's pass, each
            ``[B, T, …]``.
        count: ``[B]``, the number of valid tokens of each row.

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
    """The arrays that drafting must read, as pytrees.

    They give a lower bound on the time of a step.

    Attributes:
        level: the arrays that every level of a draft reads.
        step: the arrays that are read once for all levels together.
    """

    level: Any = ()
    step: Any = ()


RULES_PAGE = "docs/extend/drafter.md"
"""The page of the documentation with the rules for drafters. Error messages name it."""

_OLD_METHODS = {
    "absorb": "append_committed",
    "tell": "remote_inputs",
    "hear": "append_remote",
    "entries_told": "remote_entries",
    "assume": "append_unverified",
    "at_border": "to_prefix_state",
    "from_border": "from_prefix_state",
}
"""The old names of methods of drafters, with the new name of each."""

State = TypeVar("State")
"""The memory of a drafter for a batch: any pytree.

All leaves have the row axis first, ``[B, …]``, so that another request can take over a row at any
time.
"""


def check_is_pytree(drafter: "Drafter") -> None:
    """Raise an InputError if the class of a drafter is not decorated.

    JAX would not know its fields.
    """
    if jax.tree_util.all_leaves([drafter]):
        raise _broken(
            drafter, "the drafter is no pytree: decorate its class with flax.struct.dataclass"
        )


def start_drafter(drafter: "Drafter", target: Target, batch: int, capacity: int) -> Any:
    """Return the result of `Drafter.start`, after a check that all arrays have the row axis first.

    Raises:
        InputError: An array of the state has another first axis. The message says which array.
    """
    state = drafter.start(target, batch, capacity)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (batch,):
            name = f"start(){jax.tree_util.keystr(path)}"
            raise _broken(
                drafter,
                f"{name} has shape {list(jnp.shape(leaf))}: each array of the state must have rows"
                " first",
            )
    return state


def check_proposal(drafter: "Drafter", proposal: Any, batch: int) -> tuple[Draft, Any]:
    """Return the draft and the state of `Drafter.propose`, after a check of their form.

    Values are not checked, so the function can run while JAX traces.

    Raises:
        InputError: The draft or the state breaks a rule. The message says which one.
    """
    if not (isinstance(proposal, tuple) and len(proposal) == 2 and isinstance(proposal[0], Draft)):
        raise _broken(
            drafter, f"propose() returns {type(proposal).__name__}: return a Draft and the state"
        )
    draft, shape = proposal[0], drafter.draft_shape
    if not jnp.issubdtype(draft.tokens.dtype, jnp.integer):
        raise _broken(
            drafter,
            f"propose() drafts tokens of type {draft.tokens.dtype}: token ids must be integers,"
            " such as int32",
        )
    if draft.tokens.ndim != 2 or draft.tokens.shape[0] != batch:
        raise _broken(
            drafter,
            f"propose() drafts tokens {list(draft.tokens.shape)}: they must be [B, N], with"
            f" B={batch}",
        )
    if draft.depth > shape.depth:
        if draft.grown is None or draft.levels is not None:
            advice = ""
        else:
            advice = ", and a dynamic tree must state its levels"
        raise _broken(
            drafter,
            f"propose() drafts {draft.depth} deep, but draft={shape!r}: drafts must have that"
            f" depth{advice}",
        )
    return proposal


def _broken(drafter: "Drafter", rule: str) -> InputError:
    return InputError(f"{type(drafter).__name__}: {rule} (see {RULES_PAGE})")


class Drafter(OneLine, KeyedByClass, Generic[State]):
    """The base of all drafters, which propose tokens for the target to check.

    Decorate a subclass with ``flax.struct.dataclass``. Every method is a pure function.

    Attributes:
        draft: the shape of the drafts; ``draft=4`` is a chain of 4. Use `draft_shape` to read it.
        grows_trees: whether the drafter supports every shape of `specjax.drafts.shapes`, and not
            chains alone.

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
    _takes_unions: ClassVar[bool] = False  # whether ``draft`` may be a `UnionTree`

    def __init_subclass__(cls, **options: Any) -> None:
        """Register a subclass: make each renamed method available under its old and its new name.

        A method that is defined under its old name causes a DeprecationWarning.
        """
        super().__init_subclass__(**options)
        defined: dict[str, Any] = {}
        # Base classes that are drafters have passed here themselves.
        for base in reversed(cls.__mro__):
            if base is cls or not issubclass(base, Drafter):
                defined |= vars(base)
        for old, new in _OLD_METHODS.items():
            if old in defined and new not in defined:
                warnings.warn(
                    f"{cls.__name__}.{old} has a new name: call it {new}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                setattr(cls, new, defined[old])
            elif new in defined and old not in defined:
                setattr(cls, old, defined[new])  # a subclass may call super() under the old name
        cls._complete_class(defined)

    @classmethod
    def _complete_class(cls, defined: Mapping[str, Any]) -> None:
        """Finish a new subclass.

        ``defined`` maps names to the members of the class itself and of its mixins.
        """

    def __post_init__(self) -> None:
        """Convert ``draft`` to a shape.

        So ``draft=4`` and ``draft=Chain(4)`` make equal drafters.
        """
        super().__post_init__()
        if not hasattr(self, "draft"):
            raise _broken(
                self,
                "the class has no field draft, a shape of drafts: declare one with a default, such"
                " as Chain(4)",
            )
        if not isinstance(self.draft, DraftShape):
            object.__setattr__(self, "draft", as_shape(self.draft))
        if isinstance(self.draft, UnionTree) and not self._takes_unions:
            raise InputError(
                f"draft={self.draft}: {type(self).__name__} is one drafter, and drafts one shape;"
                " for several drafters use specjax.Together"
            )

    @property
    def draft_shape(self) -> DraftShape:
        """The shape of the drafts: ``draft``, as a shape even if the user has given a number."""
        assert isinstance(self.draft, DraftShape)
        return self.draft

    def check(self, target: Target) -> None:
        """Raise an InputError if this drafter cannot serve ``target``. It runs on the host."""

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the target layers whose input `States.taps` must hold, ascending."""
        return ()

    def likely_tokens(self, config: ModelConfig) -> int:
        """Return the number of tokens that `Committed.likely` must hold for each node.

        With 0 it is None. The target computes the logits of all nodes in any case, so that the
        tokens cost little.
        """
        return 0

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the target layers whose committed KV entries `propose` reads, ascending.

        If there are any, `propose` receives the target's cache of exactly these layers as the
        keyword ``cache``. It may read the cache, but must not keep a reference to it.
        """
        return ()

    @property
    def max_positions(self) -> int | None:
        """The longest text in tokens that the drafter supports; None if there is no limit."""
        return None

    @property
    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes, ascending, for which a step is compiled on a CPU.

        A step runs with the smallest that holds the draft of every row. On accelerators every step
        has room for the largest.
        """
        return self.draft_shape.node_counts

    @property
    def part_names(self) -> tuple[str, ...]:
        """The name of each drafter whose tokens are counted separately; () if there are no parts.

        See `Draft.offered_by`.
        """
        return ()

    def start(self, target: Target, batch: int, capacity: int) -> State:
        """Return the state of ``batch`` rows without committed tokens.

        Args:
            target: the target model.
            batch: the number of rows, B.
            capacity: the maximum number of tokens of a row, its root included.
        """
        return ()  # pyright: ignore[reportReturnType]

    def append_committed(self, target: Target, state: State, committed: Committed) -> State:
        """Return the state after ``committed``.

        It is called for every chunk of the prompts, and by `update` after every verdict. The last
        token of a prompt is its first root, so n - 1 tokens of a prompt of n tokens are appended.

        The default passes the drafter's own `remote_inputs` to `append_remote`. Override it in a
        drafter that needs the target's cache.
        """
        arrays = self.remote_inputs(target, committed.output, committed.entries)
        return self.append_remote(
            target,
            state,
            RemoteFeatures(committed.tokens, committed.following, arrays, committed.count),
        )

    # --- drafting on another machine than the target: the two halves of `append_committed` ---

    @property
    def drafts_elsewhere(self) -> bool:
        """True if the drafter can run on another machine, from `remote_inputs` alone."""
        return False

    def fingerprint(self) -> str:
        """Return a hash of the weights, which client and server compare.

        It is empty for a drafter that needs tokens alone.
        """
        return ""

    def remote_inputs(
        self, target: Target, output: States, entries: Sequence[Entry]
    ) -> dict[str, jax.Array]:
        """Return the part of the target's pass over T tokens that `append_remote` needs.

        It is the half of `append_committed` that runs on the target's machine.

        Args:
            target: the target model.
            output: the target's states at each token.
            entries: the KV entries of the tokens in each target layer.

        Returns:
            The arrays by name, each ``[B, T, …]``. It is empty for a drafter that needs tokens
            alone.
        """
        return {}

    def remote_entries(self, target: Target, arrays: Mapping[str, jax.Array]) -> Entries:
        """Return the KV entries of the target layers that the drafter `reads`, one for each layer.

        ``arrays`` are those of `remote_inputs`, in which `remote_entry_arrays` has packed them.
        """
        reads = self.reads(target.config)
        names = [
            [f"layer{layer}.{part}" for part in range(len(target.config.entry_parts(layer)))]
            for layer in reads
        ]
        return tuple(tuple(jnp.swapaxes(arrays[name], 1, 2) for name in parts) for parts in names)

    def append_remote(self, target: Target, state: State, told: RemoteFeatures) -> State:
        """Return the state after committed tokens, which come with their `remote_inputs`.

        It is the half of `append_committed` that runs on the drafter's machine. Of the target it
        may use the embedding, the final norm, the head and the layers that the drafter `reads`.
        """
        return state

    def append_unverified(
        self,
        target: Target,
        state: State,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        cache: Any = None,
    ) -> tuple[State, Entries]:
        """Return the state as if the first ``count [B]`` of ``tokens [B, T]`` were committed.

        With it a client drafts on while it waits for a verdict, or without the target. The target's
        output at these tokens is not available. On the target's machine it is never called.

        Args:
            target: the target model, as in `append_remote`.
            state: the state to start from. It must stay valid, because the client may return to it.
            tokens: ``[B, T]``; the first is the root that `propose` would receive.
            following: ``[B, T]``, the token after each.
            count: ``[B]``, the number of valid tokens.
            cache: the cache of the target layers that the drafter `reads`, as in `propose`.

        Returns:
            The state, and for each of these layers the KV entries of the tokens as the drafter
            itself has computed them.
        """
        return self.append_remote(target, state, RemoteFeatures(tokens, following, {}, count)), ()

    def in_segment(self, state: State, segments: jax.Array) -> State:
        """Return the state of rows that draft from earlier answers, too.

        An engine with ``earlier_answers`` calls it for a new row, before its prompt is read. It
        changes something only for drafters with a field ``answers``, such as `specjax.Suffix`: the
        engine sets it to the index of these answers, a `SuffixIndex`.

        Args:
            state: a state of rows without committed tokens.
            segments: ``[B]`` int32, the segment of the index of answers for each row; -1: none.
        """
        return state

    def prompts_read(
        self, target: Target, state: State, tokens: jax.Array, cache: KVCache | PagedCache
    ) -> State:
        """Return the state at the end of prefill, when the prompts have been read to their ends.

        Args:
            target: the target model.
            state: the state from the last `append_committed`.
            tokens: ``[B, P]``, the prompts; their first ``cache.length`` tokens have been read.
            cache: the target's cache. The drafter may read it, but must not keep a reference to it.
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
        """Draft below ``root [B]``.

        Consumes ``keys [D, B]``, one for each level and row. Rows that are not ``active [B]`` have
        finished: their drafts are ignored, and no loop may run on for their sake.

        Drawn tokens must come from exactly the ``q`` in the draft. With ``sampling.coupled``
        nothing is drawn: add `position_noise` of the level's keys, which the target uses too, to
        log q, and offer the tokens with the largest sums. An autoregressive drafter leaves all of
        this, and the shape of the tree, to `specjax.drafters.expansion.expand`.

        Returns:
            The draft, and the state for `update`. The state may hold results of drafting.
        """
        raise NotImplementedError

    def after_merge(self, before: State, proposed: State, nodes: jax.Array) -> State:
        """Return the state for `update` if the draft was merged with those of other drafters.

        The merged draft has M nodes. `update` receives it in place of the drafter's own, and the
        accepted path may have nodes that the drafter has not drafted. The default forgets the
        results of drafting. Override it in a drafter that can use them for its own nodes.

        Args:
            before: the state before `propose`.
            proposed: the state from `propose`.
            nodes: ``[B, M]``, the index of each node of the merged draft in the drafter's own
                draft; -1 if the drafter has not drafted it. The root is 0.
        """
        return before

    def update(
        self, target: Target, state: State, draft: Draft, verdict: Verdict, committed: Committed
    ) -> State:
        """Return the state after ``verdict``, with the structure of `start`.

        Override it in a drafter that knows more than ``committed``, for instance one that has
        computed KV entries of the accepted path while drafting.

        Args:
            target: the target model.
            state: the state from `propose`.
            draft: the draft from `propose`, or the one that it was merged into (`after_merge`).
            verdict: the accepted path; ``count`` is 0 in rows that have finished.
            committed: the accepted path with the root first: D + 1 tokens, ``verdict.count`` of
                them valid.
        """
        return self.append_committed(target, state, committed)

    def to_prefix_state(self, state: State) -> Any:
        """Return the part of a state that another request with the same prefix needs.

        It is called at the end of a full chunk of a prompt. Paged caches come without their pages.
        Override it, together with `from_prefix_state`, if the state holds more than such a request
        needs.
        """
        return state

    def from_prefix_state(self, fresh: State, kept: Any) -> State:
        """Return the state of a request that continues from a shared prefix.

        Args:
            fresh: an empty state, from `start`.
            kept: the prefix state, which `to_prefix_state` has made for another request.
        """
        return kept

    def drafting_reads(self, target: Target, state: State = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays that one draft must read: weights, caches and states.

        Args:
            target: the target model. Its arrays, like all others, may be shapes
                (`jax.ShapeDtypeStruct`).
            state: a state from `start`; without it the weights alone count.
            cache: for each layer the target's KV entries, or its recurrent state. Without it the
                weights alone count.
        """
        return DraftingReads()


for _old, _new in _OLD_METHODS.items():
    setattr(Drafter, _old, vars(Drafter)[_new])


def remote_input_shapes(drafter: "Drafter[Any]", target: Target) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a drafter on another machine receives for one token, by name.

    See `Drafter.remote_inputs`.

    Args:
        drafter: any drafter.
        target: the whole target, or the parts that a client has.

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
        return drafter.remote_inputs(
            target, States(hidden=hidden, taps=taps), empty_entries(layers, batch=1, slots=1)
        )

    return {name: array.shape[2:] for name, array in jax.eval_shape(tell).items()}


def remote_entry_arrays(entries: Sequence[Entry], layers: Sequence[int]) -> dict[str, jax.Array]:
    """Pack the KV entries of ``layers`` by name, for `Drafter.remote_inputs`.

    Each array is ``[B, T, heads, dim]``, in full precision. `Drafter.remote_entries` unpacks them.
    """
    parts = [(layer, index, part) for layer in layers for index, part in enumerate(entries[layer])]
    return {
        f"layer{layer}.{index}": jnp.swapaxes(dequantize(part), 1, 2)
        for layer, index, part in parts
    }


_OLD_FUNCTIONS = {"shapes_told": remote_input_shapes, "told_entries": remote_entry_arrays}


def __getattr__(name: str) -> Any:
    if (renamed := _OLD_FUNCTIONS.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} has a new name: {renamed.__name__}", DeprecationWarning, stacklevel=2
    )
    return renamed


def check_mesh(mesh: Mesh | None, target: Target) -> None:
    """Raise an InputError if a drafter is on another ``mesh`` than its target."""
    if mesh != target.mesh:
        raise InputError(
            f"drafter is on mesh={mesh} and target on {target.mesh}: load both with the same mesh"
        )


def zeros_of(run: Callable[..., Any], *arguments: jax.Array) -> Any:
    """Return zeros in the shape of the result of ``run``."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, *arguments)
    )


def tokens_at(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the tokens at ``positions [B, n]`` of ``tokens [B, P]``; arbitrary ones beyond P."""
    return jnp.take_along_axis(tokens, jnp.clip(positions, 0, tokens.shape[1] - 1), axis=1)


def append_tokens(
    tokens: jax.Array, lengths: jax.Array, new: jax.Array, count: jax.Array
) -> jax.Array:
    """Write the first ``count [B]`` of ``new`` into the rows of ``tokens``, from ``lengths`` on.

    Args:
        tokens: ``[B, S]``, or ``[B, S, …]`` for data that belongs to tokens.
        lengths: ``[B]``, the index of the first slot to write.
        new: ``[B, n, …]``.
        count: ``[B]``, the number of valid tokens of ``new``; the rest is dropped.
    """
    step = jnp.arange(new.shape[1])[None]
    # Filler is sent to a slot behind the last one, where mode="drop" discards it.
    slots = jnp.where(step < count[:, None], lengths[:, None] + step, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], slots].set(new, mode="drop")


@struct.dataclass
class NoDraft(Drafter[tuple[()]]):
    """Plain autoregressive decoding: every draft is a root and nothing else.

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
        self,
        target: Target,
        state: tuple[()],
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, tuple[()]]:
        return Draft.of_tree(root[:, None], tree.chain_parents(1)), state


class _RootOnly(DraftShape):
    depth, nodes, branching, width = 0, 1, 0, 0
