"""Training of drafters that draft a block in one pass. Many blocks of a window are read at once.

A block belongs to a *place* t of a window, the position of the last token that the target has read.
Its anchor is token t + 1, and its other tokens are masks::

    position        t             t + 1     t + 2     t + 3
    token           last read     anchor    mask      mask
    predicts                                t + 2     t + 3
    depth d                                 1         2
    step, in `specjax.training.objectives.ahead`
                                            0         1

A drafter that predicts from its anchor, too (`DFlashConfig.from_anchor`), predicts t + 2 there, and
one token more. A block attends to the context up to t in its own document, and to itself, but to no
other block.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.config import ConfigError
from specjax.drafters.methods.dflash import DFlash
from specjax.models.attention import Piece, Shared
from specjax.models.cache import Entries
from specjax.models.transformer import States, Target
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean, StudentInputs, TrainingMethod, row_keys
from specjax.training.objectives.acceptance import (
    AcceptanceLoss,
    acceptance_loss_by_depth,
    acceptance_values,
    check_loss,
)
from specjax.training.objectives.ahead import (
    SIMULATED_STEPS,
    Labels,
    agreement,
    chain_metrics,
    counted,
    label_entropy,
)
from specjax.training.objectives.chunks import by_chunks, width_of
from specjax.training.objectives.unrolling import layer_sizes
from specjax.training.objectives.windows import positions, read

_NEVER = -1e9
"""The log-probability of an impossible token. It is finite, so that 0 times it is 0."""

_CHUNK = 32
"""The most blocks of each window that an evaluation, which has one per place, runs at once."""


@dataclass(frozen=True)
class BlockMethod(TrainingMethod):
    """A method that trains a `DFlash`, or a subclass, with the loss terms that `each` returns.

    Attributes:
        target: directory or hub id of the target.
        layers: the number of layers of the drafter.
        block_size: the number of tokens of a block, with the anchor.
        mask_token_id: the token that stands where nothing is drafted yet; -1 for the target's last
            token.
        taps: the target layers whose input the drafter reads. Empty: as many target layers as the
            drafter has layers, evenly spread.
        intermediate_size: the size of the drafter's MLPs; 0 for the target's.
        anchors: the number of blocks per window, at most one for each of its tokens. Their places
            are drawn at random in each step. If a window has fewer valid places, the other blocks
            are computed as well, but do not count.
        remat: whether to recompute activations for the gradient, to save memory.

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
        self.check_minimum(1, "layers", "anchors")
        if not 2 <= self.block_size < window:
            raise ConfigError(
                f"method.block_size={self.block_size}: must be at least 2, and below"
                f" data.window={window}"
            )
        # These are the target's size, and its last token.
        self.check_minimum(0, "intermediate_size")
        self.check_minimum(-1, "mask_token_id")

    def init(self, key: jax.Array, inputs: StudentInputs) -> DFlash:
        return self.kind.init(
            inputs.frozen_target,
            key,
            block_size=self.block_size,
            mask_token_id=None if self.mask_token_id < 0 else self.mask_token_id,
            taps=self.taps or None,
            num_layers=self.layers,
            **layer_sizes(self.intermediate_size),
            **self.options(),
        )

    def options(self) -> Mapping[str, Any]:
        """Return further options of the drafter's ``init``."""
        return {}

    def each(self, student: Any, target: Target, drafted: "DraftedBlocks") -> dict[str, jax.Array]:
        """Return values of each prediction by name, ``[B, A, D]`` each.

        It is called for some blocks at a time, so that the logits of all blocks are never in
        memory. It must treat all blocks alike.
        """
        raise NotImplementedError

    def terms(self, values: dict[str, jax.Array], valid: jax.Array) -> dict[str, jax.Array]:
        """Return the terms of the loss by name, ``[B, A, D]`` each. Their sum is minimized.

        Args:
            values: the results of `each` for all blocks. By default they are the terms.
            valid: ``[B, A, D]`` bool which predictions count.
        """
        return values

    def objective(self, student: Any, batch: Batch, target: Target) -> Loss:
        """Return the loss and the metrics.

        The loss is the sum of the terms over the predictions that count, divided by the number of
        all predictions (see `losses.mean_over_positions`).
        """
        output, _ = read(target, batch, student.taps(target.config))
        depth = student.config.depth
        valid = jnp.stack([counted(batch, step) for step in range(depth)], axis=-1)
        # A prediction counts only if all shallower ones of its block do.
        valid = jnp.cumprod(valid, axis=-1).astype(bool)
        places = draw_places(row_keys(batch), valid[..., 0], min(self.anchors, valid.shape[1]))
        states = read_blocks(student, target, batch, output, places, remat=self.remat)
        drafted = DraftedBlocks.at(places, batch, output, states, valid)
        values = by_chunks(
            lambda student, drafted: self.each(student, target, drafted),
            (drafted,),
            numbers=depth * target.config.vocab_size,
            mesh=target.mesh,
            student=student,
        )
        terms = self.terms(values, drafted.valid)
        rows = (valid.shape[0], -1)
        mask = drafted.valid.reshape(rows)
        means = {
            name: losses.mean_over_positions(term.reshape(rows), mask)
            for name, term in terms.items()
        }
        total = sum(means.values(), jnp.zeros(()))
        return total, {"loss": total} | (means if len(means) > 1 else {})

    def evaluation(self, student: Any, batch: Batch, target: Target) -> dict[str, Mean]:
        """Return the metrics of `chain_metrics`, of a block at every place."""
        output, _ = read(target, batch, student.taps(target.config))
        steps = jnp.arange(min(SIMULATED_STEPS, student.config.depth))

        def compare(
            places: jax.Array, states: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], ...]:
            # The positions at which the target predicts the token of each step.
            after = places[..., None] + 1 + steps
            states, hidden = states[:, :, : len(steps)], _take(output.hidden, after)
            predictions = self.expected(student, target, states, _take(batch["tokens"], after))
            return tuple(
                agreement(logits, target.head(hidden[:, :, step]))
                for step, logits in enumerate(predictions)
            )

        return chain_metrics(batch, at_all_places(compare, student, target, batch, output))

    def expected(
        self, student: Any, target: Target, states: jax.Array, before: jax.Array
    ) -> Iterator[jax.Array]:
        """Yield the logits ``[..., V]`` of each depth, for an evaluation.

        Args:
            student: the drafter.
            target: the target.
            states: ``[..., D, H]`` the states of the block.
            before: ``[..., D]`` the token before each prediction.
        """
        return (student.logits(target, states[..., depth, :]) for depth in range(states.shape[-2]))


@dataclass(frozen=True)
class TokenMethod(BlockMethod):
    """A block method with a loss of tokens, weighted by depth.

    For further fields see `BlockMethod`.

    Attributes:
        labels: the tokens of the text, as published, or the target's distribution.
        loss: the loss of a token: the cross entropy, as published, or a loss of acceptance (arXiv
            2602.23881).
        eta: the parameter of the hybrid loss, see `losses.hybrid`.
        gamma: depth d has the weight ``exp(-(d - 1) / gamma)``. The published values are 7 for
            blocks of 16 and 4 for blocks of 8. 0 gives all depths the same weight.
        dpace: the parameter alpha of D-PACE (see `dpace`), which replaces ``gamma``: each depth is
            weighted by how much the expected accepted length depends on it. The published value is
            0.5, and -1 turns it off. D-PACE uses exp(-cross entropy), which is the label's
            probability for the tokens of the text, or the acceptance probability if the loss is one
            of acceptance.
        input_embedding_scale: the factor of the embeddings of a block's tokens. This field,
            ``output_multiplier`` and ``final_logit_softcapping`` are stored in the drafter's
            config. A run that starts from a published drafter must repeat its values.
        output_multiplier: the factor of the drafter's logits. If it or ``final_logit_softcapping``
            differs from its default, the two replace the target's own scaling of logits.
        final_logit_softcapping: the bound of the drafter's logits after that factor. 0 for none,
            or for the target's if ``output_multiplier`` is 1.

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
                f"method.gamma={self.gamma}, method.dpace={self.dpace}: gamma must be at least 0,"
                " and dpace from 0 to 1, or -1 for none"
            )
        for name in ("input_embedding_scale", "output_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"method.{name}={getattr(self, name)}: must be a finite number above 0"
                )
        if not 0 <= self.final_logit_softcapping < math.inf:
            raise ConfigError(
                f"method.final_logit_softcapping={self.final_logit_softcapping}: must be a finite"
                " number above 0, or 0 for none"
            )
        check_loss(self.loss, "cross_entropy", self.eta)
        if self.loss == "acceptance" and self.labels == "text":
            raise ConfigError(
                "method.loss='acceptance', method.labels='text': this is the cross entropy; give"
                " labels='target'"
            )

    def options(self) -> Mapping[str, Any]:
        factors = {
            name: getattr(self, name) for name in ("input_embedding_scale", "output_multiplier")
        }
        return {
            "variant": factors | {"final_logit_softcapping": self.final_logit_softcapping or None}
        }

    def each(self, student: Any, target: Target, drafted: "DraftedBlocks") -> dict[str, jax.Array]:
        return self.token_values(student.logits(target, drafted.states), target, drafted)

    def terms(self, values: dict[str, jax.Array], valid: jax.Array) -> dict[str, jax.Array]:
        return {"token_loss": self.token_loss(values, valid)}

    def token_values(
        self, logits: jax.Array, target: Target, drafted: "DraftedBlocks"
    ) -> dict[str, jax.Array]:
        """Return what `token_loss` needs to know of ``logits [B, A, D, V]``."""
        if self.loss == "cross_entropy":
            expected = drafted.tokens if self.labels == "text" else target.head(drafted.hidden)
            return {"cross_entropy": label_entropy(self.labels, expected, logits)}
        if self.labels == "target":
            log_p = jax.nn.log_softmax(target.head(drafted.hidden))
        else:  # one-hot at the token of the text
            is_token = jnp.arange(logits.shape[-1]) == drafted.tokens[..., None]
            log_p = jnp.where(is_token, 0.0, _NEVER)
        return acceptance_values(self.loss, log_p, logits)

    def token_loss(self, values: dict[str, jax.Array], valid: jax.Array) -> jax.Array:
        """Return the weighted loss ``[B, A, D]`` from `token_values`."""
        if self.loss == "cross_entropy":
            entropy = values["cross_entropy"]
            return self.weighed(entropy, jnp.exp(-entropy), valid)
        loss = acceptance_loss_by_depth(self.loss, values, valid, self.eta)
        return self.weighed(loss, jnp.exp(values["log_acceptance"]), valid)

    def weighed(self, loss: jax.Array, right: jax.Array, valid: jax.Array) -> jax.Array:
        """Multiply losses ``[B, A, D]`` by the weights of their depths.

        D-PACE computes the weights from ``right [B, A, D]``: the probabilities of the labels, or
        those of acceptance.
        """
        weight = (
            dpace(right, valid, self.dpace)
            if self.dpace >= 0
            else weights_by_depth(loss.shape, self.gamma)
        )
        return weight * loss


@struct.dataclass
class DraftedBlocks:
    """The drafts of A blocks per window at D depths, and their labels.

    Attributes:
        states: ``[B, A, D, H]`` the drafter's states, which its head reads.
        hidden: ``[B, A, D, H]`` the target's hidden states, from which its head computes the
            distributions to learn.
        tokens: ``[B, A, D]`` the tokens of the text.
        before: ``[B, A, D]`` the token of the text just before each of ``tokens``.
        valid: ``[B, A, D]`` bool which predictions count.
    """

    states: jax.Array
    hidden: jax.Array
    tokens: jax.Array
    before: jax.Array
    valid: jax.Array

    @classmethod
    def at(
        cls, places: jax.Array, batch: Batch, output: States, states: jax.Array, valid: jax.Array
    ) -> "DraftedBlocks":
        """Collect the labels of blocks.

        Args:
            places: ``[B, A]`` the places of the blocks.
            batch: the windows.
            output: the target's output at the windows.
            states: ``[B, A, D, H]`` the drafter's states.
            valid: ``[B, T, D]`` bool which predictions count, for every place of the window.
        """
        depth = states.shape[2]
        # The positions at which the target predicts the token of each depth.
        after, tokens = places[..., None] + 1 + jnp.arange(depth), batch["tokens"]
        return cls(
            states,
            _take(output.hidden, after),
            _take(tokens, after + 1),
            _take(tokens, after),
            _take(valid, places),
        )


def _take(values: jax.Array, indices: jax.Array) -> jax.Array:
    """Take from ``values [B, T, ...]`` those at ``indices [B, ...]``, at most the last."""
    flat = jnp.minimum(indices, values.shape[1] - 1).reshape(indices.shape[0], -1)
    values_there = jax.vmap(lambda row, places: row[places])(values, flat)
    return values_there.reshape(*indices.shape, *values.shape[2:])


@shape_checked
def draw_places(keys: Any, valid: Bool[Array, "B T"], count: int) -> Int[Array, "B A"]:
    """Draw ``count`` distinct places of each window, valid ones first.

    ``keys [B]`` are consumed.
    """
    order = jax.vmap(lambda key: jax.random.uniform(key, valid.shape[1:]))(keys)
    order += jnp.where(valid, 0.0, 1.0)
    return jax.lax.top_k(-order, count)[1]


def read_blocks(
    student: DFlash,
    target: Target,
    batch: Batch,
    output: States,
    places: jax.Array,
    *,
    remat: bool = False,
) -> jax.Array:
    """Return the drafter's states ``[B, A, D, H]`` of the blocks at ``places [B, A]``.

    Many blocks are read in chunks, each by all layers. ``remat`` is as in `DFlash.run`.
    """
    context = student.context(student.features(output), positions(batch["segments"][:, :-1]))
    layer = student.config.layer
    # The activations of a block: the MLP's are the largest of each layer.
    numbers = student.config.block_size * layer.intermediate_size * layer.num_layers
    rows, count = places.shape
    is_whole = width_of(rows, count, numbers, student.mesh) >= count

    def read_chunk(trained: tuple[DFlash, Entries], places: jax.Array) -> jax.Array:
        student, context = trained
        # Chunks are recomputed as a whole for the gradient.
        return _read(student, target, batch, context, places, remat=remat and is_whole)

    return by_chunks(read_chunk, (places,), numbers, student.mesh, student=(student, context))


def _read(
    student: DFlash,
    target: Target,
    batch: Batch,
    context: Entries,
    places: jax.Array,
    *,
    remat: bool = False,
) -> jax.Array:
    """Return the states ``[B, A, D, H]`` of blocks. Each block is a row of the drafter's pass."""
    config = student.config
    size, (rows, blocks) = config.block_size, places.shape
    offset = np.arange(size)
    roots = jnp.take_along_axis(batch["tokens"], places + 1, axis=1)
    tokens = jnp.where(offset == 0, roots[..., None], config.mask_token_id).reshape(-1, size)
    last = places.reshape(-1, 1)  # [B * A, 1] also below: the place of each block
    anchors = last + 1
    in_document = positions(batch["segments"][:, :-1])
    last_position = jnp.take_along_axis(in_document, places, axis=1).reshape(-1, 1)
    first = last - last_position

    def visible_pieces(layer: int, window: int | None) -> tuple[jax.Array, Sequence[Piece]]:
        mask = jnp.asarray(student.sees(window, offset[:, None] - offset))
        # The places of the window, not the positions in the document: the context is the window.
        reach = student.reach(window, anchors + offset, anchors)
        since = first if reach is None else jnp.maximum(first, reach)
        return mask[None], [Shared(context[layer], since, last, student.mesh)]

    block_positions = last_position + 1 + offset
    states = student.run(
        target, tokens, block_positions, jnp.asarray(offset), visible_pieces, remat
    )
    return states.reshape(rows, blocks, size, -1)[:, :, size - config.depth :]


def at_all_places(
    function: Callable[[jax.Array, jax.Array], Any],
    student: DFlash,
    target: Target,
    batch: Batch,
    output: States,
) -> Any:
    """Return ``function(places, states)`` of a block at every place, for some places at a time.

    The arguments are ``[B, n]`` places and the drafter's states ``[B, n, D, H]`` of their blocks.
    The results are pytrees of arrays ``[B, n, ...]``; those of all places are ``[B, T, ...]``.
    """
    rows, count = output.hidden.shape[:2]
    index = jnp.broadcast_to(jnp.arange(count), (rows, count))
    context = student.context(student.features(output), positions(batch["segments"][:, :-1]))
    return by_chunks(
        lambda places: function(places, _read(student, target, batch, context, places)),
        (index,),
        numbers=min(SIMULATED_STEPS, student.config.depth) * target.config.vocab_size,
        mesh=target.mesh,
        widest=_CHUNK,
    )


@shape_checked
def weights_by_depth(shape: tuple[int, ...], gamma: float) -> Float[Array, "..."]:
    """Return the weights ``exp(-(d - 1) / gamma)`` of depths d, or 1 if ``gamma`` is 0.

    The last axis of ``shape`` is the depth.
    """
    depths = jnp.arange(shape[-1])
    return jnp.broadcast_to(jnp.exp(-depths / gamma) if gamma else jnp.ones(shape[-1]), shape)


@shape_checked
def dpace(
    right: Float[Array, "B A D"], valid: Bool[Array, "B A D"], alpha: float
) -> Float[Array, "B A D"]:
    """Return the weights of D-PACE: how much the expected accepted length depends on each token.

    The weight of depth j is w_j = sum over m >= j of the product over i <= m of q_i, where q is the
    probability of the label, smoothed towards 1 by alpha. The weights have no gradient.

    Args:
        right: the probability that the drafter gives to the label.
        valid: the predictions that count; all others are left out.
        alpha: 0 leaves the probabilities as they are, 1 makes them all 1.
    """
    smooth = jnp.where(valid, (1 - alpha) * right + alpha, 1.0)
    upto = jnp.where(valid, jnp.cumprod(smooth, axis=-1), 0.0)
    return jax.lax.stop_gradient(jnp.cumsum(upto[..., ::-1], axis=-1)[..., ::-1])
