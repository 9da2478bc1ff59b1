"""What a drafter is, and the two messages between drafting and verification."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.cache import KVCache
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling, argmax, draw, probabilities, split_keys
from specjax.tree import Chain, chain_parents


@struct.dataclass
class Draft:
    """A proposed tree of tokens. Node 0 is the root: the newest committed token.

    Attributes:
        tokens: ``[B, N]`` token ids, the root's first.
        parents: ``[N]``, parents before children, ``parents[0] = -1``. A numpy array, known before tracing, where the
            shape of the tree is fixed: masks then fold into constants.
        q: ``[B, N, V]`` float32, for each node the distribution that its child was drawn from: exactly that one, in the same
            dtype and with the same warping. Ignored at nodes without a child. None where tokens were chosen, not drawn.
        valid: ``[B, N]`` bool, the nodes that this row really drafted; a row may draft fewer than the shape has room for.
            None is all. A node that is not valid is never accepted, and neither is anything below it.
    """

    tokens: jax.Array
    parents: np.ndarray
    q: jax.Array | None = None
    valid: jax.Array | None = None

    @classmethod
    def chain(cls, root: jax.Array, drafted: jax.Array, q: jax.Array | None = None, valid: jax.Array | None = None) -> "Draft":
        """A chain below ``root [B]``: ``drafted [B, D]``, with ``q [B, D, V]`` and ``valid [B, D]`` of the drafted tokens."""
        tokens = jnp.concatenate([root[:, None], drafted], axis=1)
        if q is not None:
            q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))  # the last node has no child
        if valid is not None:
            valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
        return cls(tokens=tokens, parents=chain_parents(tokens.shape[1]), q=q, valid=valid)

    @property
    def is_chain(self) -> bool:
        """Whether it is known before tracing that the tree has one branch."""
        return isinstance(self.parents, np.ndarray) and np.array_equal(self.parents, chain_parents(len(self.parents)))

    def first(self, nodes: int) -> "Draft":
        """The first ``nodes`` nodes of a chain."""
        return Draft(
            tokens=self.tokens[:, :nodes],
            parents=self.parents[:nodes],
            q=None if self.q is None else self.q[:, :nodes],
            valid=None if self.valid is None else self.valid[:, :nodes],
        )

    @property
    def drafted(self) -> jax.Array:
        """``[B, N-1]`` bool, the nodes below the root that this row drafted."""
        if self.valid is None:
            return jnp.ones((self.tokens.shape[0], self.tokens.shape[1] - 1), bool)
        return self.valid[:, 1:]

    @property
    def length(self) -> jax.Array:
        """``[B]`` number of tokens that the row drafted."""
        return jnp.sum(self.drafted, axis=1)


@struct.dataclass
class Verdict:
    """What verification decided.

    Attributes:
        path: ``[B, D+1]`` int32 nodes of the accepted path, the root first; meaningful below ``count``.
        count: ``[B]`` int32 nodes on that path, the root included. One node, one emitted token: the accepted drafts and then
            ``token``, so this is also the number of tokens emitted. 0 where the row has finished and emits nothing.
        token: ``[B]`` int32, the last emitted token: the bonus that the target adds after the accepted path.
    """

    path: jax.Array
    count: jax.Array
    token: jax.Array

    def emitted(self, draft: Draft) -> jax.Array:
        """``[B, D+1]`` the emitted tokens in order; meaningful below ``count``."""
        following = jnp.roll(self.path, -1, axis=1)
        drafted = jnp.take_along_axis(draft.tokens, following, axis=1)
        last = jnp.arange(self.path.shape[1])[None] == self.count[:, None] - 1
        return jnp.where(last, self.token[:, None], drafted)


class Drafter:
    """Proposes tokens for the target to check. Subclass it as a ``flax.struct.dataclass``; every method is pure.

    Attributes:
        draft: the shape of its drafts, such as `specjax.Chain`.
        taps: layers of the target whose input `Output.taps` is to hold in `prefill` and `update`.
        borrows_cache: the state has a field ``cache``, None except while `propose` runs: there it holds the target's cache,
            to be read anywhere below ``length`` and written anywhere else, and returned in the new state.
    """

    draft: Any
    taps: tuple[int, ...] = ()
    borrows_cache: ClassVar[bool] = False

    def check(self, target: Target) -> None:
        """Refuse, with an InputError that names what is wrong, a target that this drafter cannot serve. Runs on the host."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of nodes, ascending, that a step is compiled for; it takes the smallest that holds every row's draft."""
        return self.draft.widths

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> Any:
        """The state after the prompts.

        Args:
            target: the target model.
            tokens: ``[B, P]`` prompts, right-padded.
            lengths: ``[B]``, at least 1. The last token of a prompt is the first root.
            output: the target's over the prompts; without logits.
            cache: the target's, with ``lengths - 1`` committed slots.
        """
        raise NotImplementedError

    def propose(self, target: Target, state: Any, root: jax.Array, sampling: RowSampling, keys: jax.Array) -> tuple[Draft, Any]:
        """Draft below ``root [B]``; consumes the row keys ``[B]``.

        Tokens that are drawn are drawn from exactly the ``q`` handed over (see `propose_token`).
        """
        raise NotImplementedError

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, output: Output, cache: KVCache) -> Any:
        """The state after ``verdict``.

        Args:
            target: the target model.
            state: as `propose` returned it.
            draft: what was proposed.
            verdict: what was accepted of it.
            output: the target's over the draft's nodes, without logits; nodes that no row drafted may hold zeros.
            cache: the target's, the accepted path already committed.
        """
        raise NotImplementedError


def append(tokens: jax.Array, lengths: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """``tokens [B, S]`` with the first ``count [B]`` of ``new [B, n]`` written at ``lengths [B]``; the rest is dropped."""
    step = jnp.arange(new.shape[1])[None]
    slots = jnp.where(step < count[:, None], lengths[:, None] + step, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], slots].set(new, mode="drop")


def propose_token(logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The next drafted token of each row ``[B]``, and the ``q [B, V]`` it was drawn from; consumes the row keys.

    Args:
        logits: ``[B, V]`` the drafter's.
        sampling: the rows' settings. When all are greedy the token is the argmax, and q is None: chosen, not drawn.
        keys: ``[B]``.
    """
    if sampling.greedy:
        return argmax(logits), None
    q = probabilities(logits, sampling)
    return draw(q, keys), q


@struct.dataclass
class _Drafting:
    """A chain while it grows.

    Attributes:
        depth: scalar, tokens so far.
        tokens: ``[D, B]``.
        q: ``[D, B, V]``, or None.
        drafted: ``[D, B]`` bool, the tokens that count.
        going: ``[B]`` bool, rows that draft on.
        cache: without each row's newest token.
    """

    depth: jax.Array
    tokens: jax.Array
    q: jax.Array | None
    drafted: jax.Array
    going: jax.Array
    cache: KVCache


def extend_chain(
    model: Target,
    logits: jax.Array,
    cache: KVCache,
    draft: Chain,
    sampling: RowSampling,
    keys: jax.Array,
    layers: int | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, KVCache]:
    """Draft a chain, one forward of ``model`` (its first ``layers``) for every token but the first.

    Rows whose draft has ended (see `Chain`) wait for the others; the loop ends with the last of them.

    Args:
        model: the drafting model.
        logits: ``[B, V]`` its logits at the root.
        cache: its cache, the root included.
        draft: the shape, of D tokens.
        sampling: the rows' settings.
        keys: ``[B]``, consumed.
        layers: as in `Target.forward`.

    Returns:
        ``[B, D]`` tokens; their ``q [B, D, V]`` or None; ``[B, D]`` which of them count, None if all do; and the cache,
        in which each row's last token is missing.
    """
    step_keys = split_keys(keys, draft.length)

    def record(state: _Drafting, logits: jax.Array) -> _Drafting:
        token, q = propose_token(logits, sampling, step_keys[state.depth])
        going = state.going
        if draft.stop_below:
            going = going & (_confidence(logits, q, token, sampling) >= draft.stop_below)
        return _Drafting(
            depth=state.depth + 1,
            tokens=state.tokens.at[state.depth].set(token),
            q=None if q is None or state.q is None else state.q.at[state.depth].set(q),
            drafted=state.drafted.at[state.depth].set(state.going),
            going=going,
            cache=state.cache,
        )

    def unfinished(state: _Drafting) -> jax.Array:
        return (state.depth < draft.length) & jnp.any(state.going)

    def extend(state: _Drafting) -> _Drafting:
        newest = state.tokens[state.depth - 1]
        output, cache = model.forward(newest[:, None], state.cache, layers=layers)
        assert output.logits is not None and cache is not None
        return record(replace(state, cache=cache.keep(None, jnp.ones_like(newest))), output.logits[:, 0])

    batch, vocab = logits.shape
    state = _Drafting(
        depth=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((draft.length, batch), jnp.int32),
        q=None if sampling.greedy else jnp.zeros((draft.length, batch, vocab), jnp.float32),
        drafted=jnp.zeros((draft.length, batch), bool),
        going=jnp.ones(batch, bool),
        cache=cache,
    )
    state = jax.lax.while_loop(unfinished, extend, record(state, logits))
    q = None if state.q is None else jnp.moveaxis(state.q, 0, 1)
    return state.tokens.T, q, state.drafted.T if draft.stop_below else None, state.cache


def _confidence(logits: jax.Array, q: jax.Array | None, token: jax.Array, sampling: RowSampling) -> jax.Array:
    """``[B]`` the probability of ``token [B]``: as it was drawn; for greedy rows, whose q is one-hot, at temperature 1."""
    chosen = jnp.exp(_at(logits, token) - jax.nn.logsumexp(logits, axis=-1))
    return chosen if q is None else jnp.where(sampling.temperature == 0, chosen, _at(q, token))


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, token[:, None], axis=1)[:, 0]


@struct.dataclass
class NoDraft(Drafter):
    """Plain autoregressive decoding: a tree that is a root and nothing else."""

    @property
    def draft(self) -> Any:
        return _RootOnly()

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> tuple[()]:
        return ()

    def propose(self, target: Target, state: Any, root: jax.Array, sampling: RowSampling, keys: jax.Array) -> tuple[Draft, Any]:
        return Draft(tokens=root[:, None], parents=chain_parents(1)), state

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, output: Output, cache: KVCache) -> Any:
        return state


class _RootOnly:
    depth = 0
    nodes = 1
    widths = (1,)
