"""Training drafters that write a block in one pass: many blocks hang from places of one window, and are read at once.

A block belongs to a *place* t of a window, the newest token that the target has read there. Its anchor is the token t + 1, and
at depth d, from 1, it predicts the token t + 1 + d; in the words of `ahead`, that is the prediction of step d - 1 at t. It sees
the context up to t, of its own document, and itself; no other block.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.config import ConfigError
from specjax.drafters.methods.dflash import DFlash
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.transformer import Output, Target
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs, TrainingMethod
from specjax.training.objectives.acceptance import AcceptanceLoss, acceptance_loss_by_depth, check_loss
from specjax.training.objectives.ahead import SIMULATED_STEPS, Labels, ahead, counted, simulate
from specjax.training.objectives.unrolling import layer_sizes
from specjax.training.objectives.windows import document_mask, score

_NEVER = -1e9
"""The log-probability of what never happens: finite, so that 0 times it is 0."""

_CHUNK = 32
"""Blocks of a window that an evaluation reads at a time: it has one for every place, and they take much memory together."""


@dataclass(frozen=True)
class BlockMethod(TrainingMethod):
    """A method that trains a `DFlash`, or one with heads. What it minimises is `each`.

    Attributes:
        target: directory or hub id of the target.
        layers: of the drafter.
        block_size: tokens of a block, the anchor included.
        mask_token_id: the token that stands where nothing is drafted yet; -1: the target's last.
        taps: layers of the target whose input it reads; empty: one for each of its layers, spread over the target.
        intermediate_size: of its MLPs; 0 is the target's.
        anchors: blocks of a window, at places that are drawn for each step; at most as many as the window has tokens.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from dataclasses import dataclass
        >>> from typing import Literal
        >>> from specjax.training.objectives.blocks import BlockMethod
        >>> @dataclass(frozen=True)
        ... class Agreement(BlockMethod):
        ...     name: Literal["agreement"] = "agreement"
        ...
        ...     def each(self, student, target, drafted):
        ...         q = jax.nn.softmax(student.logits(target, drafted.states))
        ...         p = jax.nn.softmax(target.head(drafted.hidden))
        ...         return {"refused": 1 - jnp.minimum(p, q).sum(axis=-1)}
        >>> Agreement(target="embedded", block_size=8).check(window=512)
    """

    target: str = ""
    layers: int = 5
    block_size: int = 16
    mask_token_id: int = -1
    taps: tuple[int, ...] = ()
    intermediate_size: int = 0
    anchors: int = 512
    remat: bool = False
    best_by: ClassVar[str] = "acceptance_length"
    kind: ClassVar[type[DFlash]] = DFlash

    def check(self, window: int) -> None:
        super().check(window)
        if self.layers < 1 or self.anchors < 1:
            raise ConfigError(f"method.layers={self.layers}, method.anchors={self.anchors}: must be at least 1")
        if not 2 <= self.block_size < window:
            raise ConfigError(f"method.block_size={self.block_size}: must be at least 2, and below data.window={window}")
        if self.intermediate_size < 0 or self.mask_token_id < -1:
            raise ConfigError(
                f"method.intermediate_size={self.intermediate_size}, method.mask_token_id={self.mask_token_id}: must be at "
                "least 0, which is the target's, and at least -1, which is the target's last token"
            )

    def init(self, key: jax.Array, given: StudentInputs) -> DFlash:
        return self.kind.init(
            given.frozen_target,
            key,
            block_size=self.block_size,
            mask_token_id=None if self.mask_token_id < 0 else self.mask_token_id,
            taps=self.taps or None,
            num_layers=self.layers,
            **layer_sizes(self.intermediate_size),
            **self.options(),
        )

    def options(self) -> Mapping[str, Any]:
        """Further options of the drafter's ``init``."""
        return {}

    def each(self, student: Any, target: Target, drafted: "DraftedBlocks") -> dict[str, jax.Array]:
        """The terms of the loss, ``[B, A, D]`` each in nats or as they come, by name. Their sum is minimised."""
        raise NotImplementedError

    def objective(self, student: Any, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """The sum of the terms. It is divided by all places of all blocks, counted or not."""
        assert target is not None
        output, _ = score(target, batch, student.taps(target.config))
        depth = student.config.depth
        valid = jnp.stack([counted(batch, step) for step in range(depth)], axis=-1)
        valid = jnp.cumprod(valid, axis=-1).astype(bool)  # what follows a hole is not drafted from here
        places = draw_places(batch["key"], valid[..., 0], min(self.anchors, valid.shape[1]))
        read = partial(read_blocks, student, target, batch, output)
        states = (jax.checkpoint(read) if self.remat else read)(places)
        drafted = DraftedBlocks.at(places, batch, output, states, valid)
        terms = self.each(student, target, drafted)
        rows = (valid.shape[0], -1)
        mask = drafted.valid.reshape(rows)
        means = {name: losses.mean_over_positions(term.reshape(rows), mask) for name, term in terms.items()}
        total = sum(means.values(), jnp.zeros(()))
        return total, {"loss": total} | (means if len(means) > 1 else {})

    def evaluation(self, student: Any, batch: Batch, target: Target | None) -> Metrics:
        assert target is not None
        output, _ = score(target, batch, student.taps(target.config))
        states = read_everywhere(student, target, batch, output)
        steps, count = min(SIMULATED_STEPS, student.config.depth), states.shape[1]
        before = jnp.stack([ahead(batch["tokens"], 1 + step)[:, :count] for step in range(steps)], axis=-1)
        return simulate(output, batch, self.expected(student, target, states[:, :, :steps], before))

    def expected(self, student: Any, target: Target, states: jax.Array, before: jax.Array) -> Iterator[jax.Array]:
        """``[..., V]`` at each depth, of ``states [..., D, H]``, where the tokens ``before [..., D]`` each are known."""
        return (student.logits(target, states[..., depth, :]) for depth in range(states.shape[-2]))


@dataclass(frozen=True)
class TokenMethod(BlockMethod):
    """One that learns the tokens of a block, weighed by depth. Further fields: `BlockMethod`.

    Attributes:
        labels: the text's own tokens, as published, or the target's distribution.
        loss: of a token: the cross entropy, as published, or one of the losses of acceptance (arXiv 2602.23881).
        eta: of the hybrid one, see `losses.hybrid`.
        gamma: depth d weighs ``exp(-(d - 1) / gamma)``; published are 7 for blocks of 16 and 4 for blocks of 8. 0: all alike.
        input_embedding_scale: factor of the embeddings of a block's tokens. This and the next two are the drafter's; a run that
            begins with a published one must name what it has.
        output_multiplier: factor of the drafter's logits; with the next field it takes the place of the target's own.
        final_logit_softcapping: bound of the drafter's logits after that factor; 0: none.
        dpace: weigh the depths by D-PACE with this number in place of ``gamma``; published is 0.5. -1: do not. What it goes by
            is the label's probability, or the chance of acceptance where that is the loss.

    Examples:
        >>> from specjax.training.objectives.blocks import TokenMethod
        >>> method = TokenMethod(target="embedded", gamma=2.0)
        >>> every = jnp.ones((1, 1, 3))
        >>> method.weighed(every, right=every, valid=every > 0)[0, 0]  # exp(-d / 2)
        Array([1.        , 0.60653067, 0.36787945], dtype=float32)
    """

    labels: Labels = "text"
    loss: Literal["cross_entropy"] | AcceptanceLoss = "cross_entropy"
    eta: float = 3.0
    gamma: float = 7.0
    dpace: float = -1.0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    def check(self, window: int) -> None:
        super().check(window)
        if self.gamma < 0 or not (self.dpace == -1 or 0 <= self.dpace <= 1):
            raise ConfigError(
                f"method.gamma={self.gamma}, method.dpace={self.dpace}: must be at least 0, and from 0 to 1, or -1 for none"
            )
        for name in ("input_embedding_scale", "output_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"method.{name}={getattr(self, name)}: must be a finite number above 0")
        if not 0 <= self.final_logit_softcapping < math.inf:
            raise ConfigError(
                f"method.final_logit_softcapping={self.final_logit_softcapping}: must be a finite number above 0, or 0 for none"
            )
        check_loss(self.loss, "cross_entropy", self.eta)
        if self.loss == "acceptance" and self.labels == "text":
            raise ConfigError(
                "method.loss='acceptance', method.labels='text': of one token that is the cross entropy; give labels='target'"
            )

    def options(self) -> Mapping[str, Any]:
        factors = {name: getattr(self, name) for name in ("input_embedding_scale", "output_multiplier")}
        return {"variant": factors | {"final_logit_softcapping": self.final_logit_softcapping or None}}

    def token_loss(self, logits: jax.Array, target: Target, drafted: "DraftedBlocks") -> jax.Array:
        """``[B, A, D]`` the weighed loss of ``logits [B, A, D, V]``."""
        log_q = jax.nn.log_softmax(logits)
        if self.loss == "cross_entropy":
            if self.labels == "target":
                entropy = -jnp.sum(jax.nn.softmax(target.head(drafted.hidden)) * log_q, axis=-1)
            else:
                entropy = -jnp.take_along_axis(log_q, drafted.tokens[..., None], axis=-1)[..., 0]
            return self.weighed(entropy, jnp.exp(-entropy), drafted.valid)
        if self.labels == "target":
            log_p = jax.nn.log_softmax(target.head(drafted.hidden))
        else:  # the distribution that has nothing but the text's token
            log_p = jnp.where(jnp.arange(log_q.shape[-1]) == drafted.tokens[..., None], 0.0, _NEVER)
        loss = acceptance_loss_by_depth(self.loss, log_p, log_q, drafted.valid, self.eta)
        return self.weighed(loss, jnp.exp(losses.log_acceptance(log_p, log_q)), drafted.valid)

    def weighed(self, loss: jax.Array, right: jax.Array, valid: jax.Array) -> jax.Array:
        """Losses ``[B, A, D]`` times the weights of their depths; D-PACE's go by the chances ``right [B, A, D]``."""
        weight = dpace(right, valid, self.dpace) if self.dpace >= 0 else falling(loss.shape, self.gamma)
        return weight * loss


@dataclass(frozen=True)
class DraftedBlocks:
    """What is drafted in A blocks a window at D depths, and what it should be.

    Attributes:
        states: ``[B, A, D, H]`` what the drafter's head reads.
        hidden: ``[B, A, D, H]`` the target's states there, of which its head makes the distributions to learn.
        tokens: ``[B, A, D]`` the text's.
        before: ``[B, A, D]`` the text's token before each.
        valid: ``[B, A, D]`` bool, what counts.
    """

    states: jax.Array
    hidden: jax.Array
    tokens: jax.Array
    before: jax.Array
    valid: jax.Array

    @classmethod
    def at(cls, places: jax.Array, batch: Batch, output: Output, states: jax.Array, valid: jax.Array) -> "DraftedBlocks":
        """Of blocks at ``places [B, A]`` that came to ``states``; ``valid [B, T, D]`` says where predictions count."""
        depth = states.shape[2]
        after = places[..., None] + 1 + jnp.arange(depth)  # the target reads these, and expects what stands one further on

        def take(values: jax.Array, where: jax.Array) -> jax.Array:
            where = jnp.minimum(where, values.shape[1] - 1).reshape(where.shape[0], -1)
            found = jax.vmap(lambda row, places: row[places])(values, where)
            return found.reshape(*after.shape, *values.shape[2:])

        tokens = batch["tokens"]
        counts = jax.vmap(lambda row, places: row[places])(valid, places)
        return cls(states, take(output.hidden, after), take(tokens, after + 1), take(tokens, after), counts)


@shape_checked
def draw_places(key: Any, valid: Bool[Array, "B T"], count: int) -> Int[Array, "B A"]:
    """``count`` different places of each window, those that are ``valid`` before all others; consumes ``key``."""
    order = jax.random.uniform(key, valid.shape) + jnp.where(valid, 0.0, 1.0)
    return jax.lax.top_k(-order, count)[1]


def read_blocks(student: DFlash, target: Target, batch: Batch, output: Output, places: jax.Array) -> jax.Array:
    """``[B, A, D, H]`` what the drafter's head reads at each depth of the blocks at ``places [B, A]``."""
    segments = batch["segments"][:, :-1]
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    context = student.context(student.features(output), index)
    return _read(student, target, batch, context, places)


def _read(student: DFlash, target: Target, batch: Batch, context: tuple[Entry, ...], places: jax.Array) -> jax.Array:
    config = student.config
    size, (rows, blocks) = config.block_size, places.shape
    anchors = jnp.repeat(places + 1, size, axis=1)  # [B, N], of each of the N = A * size tokens of blocks
    place = np.tile(np.arange(size), blocks)
    is_anchor, own_block = jnp.asarray(place == 0), np.arange(blocks * size) // size
    roots = jnp.take_along_axis(batch["tokens"], anchors, axis=1)
    tokens = jnp.where(is_anchor, roots, config.mask_token_id)
    positions = anchors + place
    read = jnp.take_along_axis(document_mask(batch["segments"][:, :-1]), jnp.repeat(places, size, axis=1)[..., None], axis=1)
    alike, back = own_block[:, None] == own_block, place[:, None] - place

    def seen(number: int, window: int | None) -> tuple[jax.Array, Sequence[Piece]]:
        mask = alike & student.sees(window, back)
        since, visible = student.reach(window, positions, anchors), read
        if since is not None:
            visible = visible & (jnp.arange(read.shape[2]) >= since[..., None])
        return jnp.asarray(mask)[None], [(context[number], visible)]

    states = student.run(target, tokens, positions, jnp.asarray(place), seen).reshape(rows, blocks, size, -1)
    return states[:, :, size - config.depth :]


def read_everywhere(student: DFlash, target: Target, batch: Batch, output: Output) -> jax.Array:
    """``[B, T, D, H]`` as `read_blocks`, of a block at every place; some at a time."""
    rows, count = output.hidden.shape[:2]
    index = jnp.broadcast_to(jnp.arange(count), (rows, count))
    context = student.context(student.features(output), index)
    width = min(_CHUNK, count)
    starts = jnp.arange(0, count, width)
    # The last places are read twice where the chunks do not fit.
    places = jnp.minimum(starts[:, None] + jnp.arange(width), count - 1)
    chunks = jax.lax.map(
        lambda chunk: _read(student, target, batch, context, jnp.broadcast_to(chunk, (rows, width))), places
    )  # [chunks, B, width, D, H]
    return jnp.moveaxis(chunks, 0, 1).reshape(rows, -1, *chunks.shape[3:])[:, :count]


@shape_checked
def falling(shape: tuple[int, ...], gamma: float) -> Float[Array, "..."]:
    """Weights ``exp(-(d - 1) / gamma)`` of the depths d, the last of the axes; all 1 where ``gamma`` is 0."""
    depths = jnp.arange(shape[-1])
    return jnp.broadcast_to(jnp.exp(-depths / gamma) if gamma else jnp.ones(shape[-1]), shape)


@shape_checked
def dpace(right: Float[Array, "B A D"], valid: Bool[Array, "B A D"], alpha: float) -> Float[Array, "B A D"]:
    """D-PACE's weights: how much of the expected length of a draft hangs on each of its tokens.

    With q the chance of the ``right`` token, moved towards 1 by ``alpha``, a depth weighs the sum of the products of all q up
    to it and beyond: w_j = sum over m >= j of the product over i <= m of q_i. No gradient flows through it.

    Args:
        right: the probability that the drafter gives the label.
        valid: what counts; the rest has no part in it.
        alpha: 0 takes the chances as they are, 1 makes all 1.
    """
    smooth = jnp.where(valid, (1 - alpha) * right + alpha, 1.0)
    upto = jnp.where(valid, jnp.cumprod(smooth, axis=-1), 0.0)
    return jax.lax.stop_gradient(jnp.cumsum(upto[..., ::-1], axis=-1)[..., ::-1])
