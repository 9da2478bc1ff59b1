"""The computations of a client: the drafter's state of one text, and drafts.

Every function is compiled for a few sizes only.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.client.trees import Tree
from specjax.drafters.base import Drafter, RemoteFeatures, remote_input_shapes
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.cache import KVCache
from specjax.models.quantized_cache import is_part, quantized_as
from specjax.models.transformer import Target
from specjax.progress import track
from specjax.sampling import RowSampling, position_keys
from specjax.sampling_params import SamplingParams

ALONE = 8
"""The number of tokens that the drafter generates at a time while no answer comes."""

WIDTHS = (8, 64)
"""The numbers of tokens that one compiled call appends. More tokens take several calls."""


@struct.dataclass
class Known:
    """A drafter's state of one text.

    Attributes:
        drafter: the state of the drafter.
        cache: the KV cache of the target layers that the drafter reads; None if it reads none.
    """

    drafter: Any
    cache: KVCache | None


@struct.dataclass
class Settings:
    """The sampling parameters of one text.

    Attributes:
        key: the random key of the text.
        sampling: the sampling parameters of one row.
    """

    key: jax.Array
    sampling: RowSampling

    @classmethod
    def of(cls, params: SamplingParams) -> "Settings":
        """Return the settings that a server derives from the same parameters.

        So both sides draw with the same random numbers.
        """
        return cls(
            key=jax.random.fold_in(params.make_key(), 0), sampling=params.rows_of_any_kind(1)
        )


class ClientDevice:
    """A drafter with the parts of the target that it needs, and its compiled functions.

    Attributes:
        target: the parts of the target.
        drafter: the drafter; `shapes` has its draft shapes.
        shapes: the draft shapes that `propose` supports, by depth.
        alone: a special depth for `propose`: the chain of `ALONE` tokens that the drafter generates
            while no answer comes.
        capacity: the maximum number of tokens of a text, with those of drafts.
        hears: the hidden states that the drafter needs: name and shape of one token.

    Examples:
        >>> from specjax.client.device import ClientDevice, Settings
        >>> drafter = specjax.DraftModel.init(target, jax.random.key(1), num_layers=1)
        >>> device = ClientDevice(target, drafter, [specjax.Chain(3)], capacity=32)
        >>> state = device.append_remote(device.start(), [5, 3], [3, 1], {})
        >>> settings = Settings.of(specjax.SamplingParams())
        >>> tree = device.propose(state, root=1, length=3, settings=settings, depth=3)
        >>> tree.root, tree.depth
        (1, 3)
    """

    alone: ClassVar[int] = -1

    def __init__(
        self, target: Target, drafter: Drafter, shapes: Sequence[DraftShape], capacity: int
    ) -> None:
        """Prepare the functions. Each is compiled at its first call, or by `warm_up`."""
        if not drafter.drafts_elsewhere:
            raise InputError(
                f"drafter: {type(drafter).__name__} needs the target itself while it drafts, which"
                " a client does not have; give Mixture of Attentions, EAGLE, EAGLE-3, a draft"
                " model or prompt lookup"
            )
        drafter.check(target)
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.shapes = {
            shape.depth: shape for shape in sorted(shapes, key=lambda shape: shape.depth)
        }
        self._drafters = {
            depth: _with_draft(drafter, shape) for depth, shape in self.shapes.items()
        }
        self._drafters[self.alone] = _with_draft(drafter, Chain(ALONE))
        self.hears = remote_input_shapes(drafter, target)

    def start(self) -> Known:
        """Return the state of an empty text."""
        return _start(self.target, self.drafter, capacity=self.capacity)

    def append_remote(
        self,
        state: Known,
        tokens: Sequence[int],
        following: Sequence[int],
        arrays: Mapping[str, np.ndarray],
    ) -> Known:
        """Return the state after committed tokens whose hidden states the server has sent.

        Args:
            state: the state before.
            tokens: ``[T]`` token ids.
            following: ``[T]`` the token after each.
            arrays: the hidden states by name, ``[T, …]`` each.
        """
        for start, width in _pieces(len(tokens)):
            piece = slice(start, start + width)
            padded_arrays = {name: _padded(array[piece], width) for name, array in arrays.items()}
            padded = _padded_tokens(tokens[piece], following[piece], width)
            state = _append_remote(self.target, self.drafter, state, *padded, padded_arrays)
        return state

    def append_unverified(
        self, state: Known, tokens: Sequence[int], following: Sequence[int]
    ) -> Known:
        """Return the state after tokens without hidden states; see `Drafter.append_unverified`."""
        for start, width in _pieces(len(tokens)):
            piece = slice(start, start + width)
            padded = _padded_tokens(tokens[piece], following[piece], width)
            state = _append_unverified(self.target, self.drafter, state, *padded)
        return state

    def propose(self, state: Known, root: int, length: int, settings: Settings, depth: int) -> Tree:
        """Return a draft that follows a text of ``length`` tokens, the last of which is the root.

        ``depth`` is a key of `shapes`, or `alone`.
        """
        tokens, parents, valid = _propose(
            self.target,
            self._drafters[depth],
            state,
            np.array([root], np.int32),
            np.int32(length),
            settings,
        )
        return Tree.of(*(np.asarray(array)[0] for array in (tokens, parents, valid)))

    def warm_up(self) -> None:
        """Compile all functions, with a progress bar."""
        state, settings = self.start(), Settings.of(SamplingParams())
        jobs: list[Any] = []
        for width in WIDTHS:
            arrays = {
                name: np.zeros((width, *shape), np.float32) for name, shape in self.hears.items()
            }
            jobs.append(partial(self.append_remote, state, [0] * width, [0] * width, arrays))
            jobs.append(partial(self.append_unverified, state, [0] * width, [0] * width))
        jobs += [partial(self.propose, state, 0, 1, settings, depth) for depth in self._drafters]
        for job in track(jobs, "compiling the drafter"):
            jax.block_until_ready(job())


def _with_draft(drafter: Drafter, shape: DraftShape) -> Drafter:
    return drafter.replace(draft=shape)  # pyright: ignore[reportAttributeAccessIssue]


def _pieces(count: int) -> list[tuple[int, int]]:
    """Return for each call where its tokens begin, and the width that it is compiled for."""
    pieces, start = [], 0
    while start < count:
        width = next((width for width in WIDTHS if width >= count - start), WIDTHS[-1])
        pieces.append((start, width))
        start += width
    return pieces


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    """Pad ``[T, …]`` values with zeros to ``[1, width, …]``."""
    values = np.asarray(values)
    return np.pad(values, [(0, width - len(values)), *((0, 0),) * (values.ndim - 1)])[None]


def _padded_tokens(
    tokens: Sequence[int], following: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, following and count as `_append_remote` and `_append_unverified` take them."""
    padded, padded_following = (
        _padded(np.array(ids, np.int32), width) for ids in (tokens, following)
    )
    return padded, padded_following, np.array([len(tokens)], np.int32)


@partial(jax.jit, static_argnames="capacity")
def _start(target: Target, drafter: Drafter, *, capacity: int) -> Known:
    layers = drafter.reads(target.config)
    cache = target.new_cache(1, capacity).of_layers(layers) if layers else None
    return Known(drafter=drafter.start(target, 1, capacity), cache=cache)


# Nothing is donated here and below: `Speculation` keeps the state after the committed tokens, and
# simulates the tokens after them more than once.
@jax.jit
def _append_remote(
    target: Target,
    drafter: Drafter,
    state: Known,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    arrays: dict[str, jax.Array],
) -> Known:
    cache = state.cache
    if cache is not None:
        # Nothing in this program reads the cache before the write, so there is nothing to wait for.
        entries = _as(cache, drafter.remote_entries(target, arrays))
        cache = cache.append(entries, count, after=count)
    features = RemoteFeatures(tokens, following, arrays, count)
    return Known(drafter=drafter.append_remote(target, state.drafter, features), cache=cache)


@jax.jit
def _append_unverified(
    target: Target,
    drafter: Drafter,
    state: Known,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
) -> Known:
    drafter_state, entries = drafter.append_unverified(
        target, state.drafter, tokens, following, count, state.cache
    )
    cache = state.cache
    if cache is not None:
        cache = cache.append(_as(cache, entries), count, after=jax.tree.leaves(entries)[0][:, 0, 0])
    return Known(drafter=drafter_state, cache=cache)


def _as(cache: KVCache, entries: Any) -> Any:
    """Convert entries to the types of a cache, which may be quantized."""
    return jax.tree.map(quantized_as, entries, cache.layers, is_leaf=is_part)


@jax.jit
def _propose(
    target: Target,
    drafter: Drafter,
    state: Known,
    root: jax.Array,
    length: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the tokens, the parents and the validity of a draft's nodes, ``[1, N]`` each."""
    # The first drafted token has position `length`, and the same random key as in the server.
    keys = position_keys(
        settings.key[None], length + jnp.arange(drafter.draft_shape.depth)[:, None]
    )
    cache = {} if state.cache is None else {"cache": state.cache}
    draft, _ = drafter.propose(
        target, state.drafter, root, settings.sampling, keys, jnp.ones(1, bool), **cache
    )
    # A fixed shape has one topology for all rows, without a row axis.
    parents = jnp.broadcast_to(jnp.asarray(draft.parents, jnp.int32), draft.tokens.shape)
    valid = jnp.ones(draft.tokens.shape, bool) if draft.valid is None else draft.valid
    return draft.tokens, parents, valid
