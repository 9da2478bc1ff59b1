"""What a client computes: what its drafter knows of the text, and drafts. Everything for one text, compiled for a few sizes."""

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
"""Tokens that the drafter writes at a time while no answer comes."""

WIDTHS = (8, 64)
"""Numbers of tokens that are heard or assumed at once. More go by several calls."""


@struct.dataclass
class Known:
    """What a drafter knows of one text.

    Attributes:
        drafter: its state.
        cache: of the target's layers that it reads; None where it reads none.
    """

    drafter: Any
    cache: KVCache | None


@struct.dataclass
class Settings:
    """How a text is drawn.

    Attributes:
        key: the text's random key.
        sampling: of one row.
    """

    key: jax.Array
    sampling: RowSampling

    @classmethod
    def of(cls, params: SamplingParams) -> "Settings":
        """Return what a server makes of the same parameters, so that both sides draw with the same random numbers."""
        return cls(key=jax.random.fold_in(params.make_key(), 0), sampling=params.rows_of_any_kind(1))


class ClientDevice:
    """A drafter with the parts of the target that it needs, and its programs.

    Attributes:
        target: the parts.
        drafter: with any draft.
        shapes: drafts that can be asked for, by depth.
        alone: the depth of the chain by which the drafter writes alone, as `propose` is given it: -1.
        capacity: most tokens of a text, what is only assumed included.
        hears: arrays that the drafter must be told of each token, with the shape of one token.

    Examples:
        >>> from specjax.client.device import ClientDevice, Settings
        >>> drafter = specjax.DraftModel.init(target, jax.random.key(1), num_layers=1)
        >>> device = ClientDevice(target, drafter, [specjax.Chain(3)], capacity=32)
        >>> known = device.append_remote(device.start(), [5, 3], [3, 1], {})
        >>> settings = Settings.of(specjax.SamplingParams())
        >>> tree = device.propose(known, root=1, length=3, settings=settings, depth=3)
        >>> tree.root, tree.depth
        (1, 3)
    """

    alone: ClassVar[int] = -1

    def __init__(self, target: Target, drafter: Drafter, shapes: Sequence[DraftShape], capacity: int) -> None:
        """Nothing is compiled before `warm_up`, or the first call."""
        if not drafter.drafts_elsewhere:
            raise InputError(
                f"drafter: {type(drafter).__name__} needs the target itself while it drafts, which a client does not have: "
                "give Mixture of Attentions, EAGLE, EAGLE-3, a draft model or prompt lookup"
            )
        drafter.check(target)
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.shapes = {shape.depth: shape for shape in sorted(shapes, key=lambda shape: shape.depth)}
        self._drafters = {depth: _with_draft(drafter, shape) for depth, shape in self.shapes.items()}
        self._drafters[self.alone] = _with_draft(drafter, Chain(ALONE))
        self.hears = remote_input_shapes(drafter, target)

    def start(self) -> Known:
        """Nothing is known."""
        return _start(self.target, self.drafter, capacity=self.capacity)

    def append_remote(
        self, known: Known, tokens: Sequence[int], following: Sequence[int], arrays: Mapping[str, np.ndarray]
    ) -> Known:
        """What is known after committed ``tokens``, with the token ``following`` each and what was told of them, ``[T, …]``."""
        for start, width in _pieces(len(tokens)):
            piece = slice(start, start + width)
            told = {name: _padded(array[piece], width) for name, array in arrays.items()}
            padded = _padded_tokens(tokens[piece], following[piece], width)
            known = _append_remote(self.target, self.drafter, known, *padded, told)
        return known

    def append_unverified(self, known: Known, tokens: Sequence[int], following: Sequence[int]) -> Known:
        """What would be known after ``tokens`` of which nothing was told; see `Drafter.append_unverified`."""
        for start, width in _pieces(len(tokens)):
            piece = slice(start, start + width)
            padded = _padded_tokens(tokens[piece], following[piece], width)
            known = _append_unverified(self.target, self.drafter, known, *padded)
        return known

    def propose(self, known: Known, root: int, length: int, settings: Settings, depth: int) -> Tree:
        """A draft of a ``depth`` that is among `shapes`, below the ``root`` of a text of ``length`` tokens."""
        tokens, parents, valid = _propose(
            self.target, self._drafters[depth], known, np.array([root], np.int32), np.int32(length), settings
        )
        return Tree.of(*(np.asarray(each)[0] for each in (tokens, parents, valid)))

    def warm_up(self) -> None:
        """Compile everything, with a bar."""
        known, settings = self.start(), Settings.of(SamplingParams())
        jobs: list[Any] = []
        for width in WIDTHS:
            told = {name: np.zeros((width, *shape), np.float32) for name, shape in self.hears.items()}
            jobs.append(partial(self.append_remote, known, [0] * width, [0] * width, told))
            jobs.append(partial(self.append_unverified, known, [0] * width, [0] * width))
        jobs += [partial(self.propose, known, 0, 1, settings, depth) for depth in self._drafters]
        for job in track(jobs, "compiling the drafter"):
            jax.block_until_ready(job())


def _with_draft(drafter: Drafter, shape: DraftShape) -> Drafter:
    return drafter.replace(draft=shape)  # pyright: ignore[reportAttributeAccessIssue]


def _pieces(count: int) -> list[tuple[int, int]]:
    """Where each call begins, and the tokens that it is compiled for."""
    pieces, start = [], 0
    while start < count:
        width = next((width for width in WIDTHS if width >= count - start), WIDTHS[-1])
        pieces.append((start, width))
        start += width
    return pieces


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    """``values [T, …]`` with zeros, ``[1, width, …]``."""
    values = np.asarray(values)
    return np.pad(values, [(0, width - len(values)), *((0, 0),) * (values.ndim - 1)])[None]


def _padded_tokens(tokens: Sequence[int], following: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, following and count, as `_append_remote` and `_append_unverified` take them."""
    padded, after = (_padded(np.array(each, np.int32), width) for each in (tokens, following))
    return padded, after, np.array([len(tokens)], np.int32)


@partial(jax.jit, static_argnames="capacity")
def _start(target: Target, drafter: Drafter, *, capacity: int) -> Known:
    layers = drafter.reads(target.config)
    cache = target.new_cache(1, capacity).of_layers(layers) if layers else None
    return Known(drafter=drafter.start(target, 1, capacity), cache=cache)


@jax.jit
def _append_remote(
    target: Target,
    drafter: Drafter,
    known: Known,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    arrays: dict[str, jax.Array],
) -> Known:
    cache = known.cache
    if cache is not None:
        cache = cache.append(_as(cache, drafter.remote_entries(target, arrays)), count, after=count)
    return Known(
        drafter=drafter.append_remote(target, known.drafter, RemoteFeatures(tokens, following, arrays, count)), cache=cache
    )


@jax.jit
def _append_unverified(
    target: Target, drafter: Drafter, known: Known, tokens: jax.Array, following: jax.Array, count: jax.Array
) -> Known:
    state, entries = drafter.append_unverified(target, known.drafter, tokens, following, count, known.cache)
    cache = known.cache
    if cache is not None:
        cache = cache.append(_as(cache, entries), count, after=jax.tree.leaves(entries)[0][:, 0, 0])
    return Known(drafter=state, cache=cache)


def _as(cache: KVCache, entries: Any) -> Any:
    """``entries`` in the type of a ``cache``."""
    return jax.tree.map(quantized_as, entries, cache.layers, is_leaf=is_part)


@jax.jit
def _propose(
    target: Target, drafter: Drafter, known: Known, root: jax.Array, length: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, parents and which nodes are there, ``[1, N]`` each. The first drafted token is number ``length`` of its text."""
    keys = position_keys(settings.key[None], length + jnp.arange(drafter.draft_shape.depth)[:, None])
    given = {} if known.cache is None else {"cache": known.cache}
    draft, _ = drafter.propose(target, known.drafter, root, settings.sampling, keys, jnp.ones(1, bool), **given)
    parents = jnp.broadcast_to(jnp.asarray(draft.parents, jnp.int32), draft.tokens.shape)
    valid = jnp.ones(draft.tokens.shape, bool) if draft.valid is None else draft.valid
    return draft.tokens, parents, valid
