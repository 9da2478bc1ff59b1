"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): all depths of a draft at once, the deeper ones at fewer places.

At place t of a window the target has read the tokens up to t. The pair of t, its feature and the token t + 1, predicts the
token t + 2; the placeholder d places further on predicts the token t + 2 + d, from what is seen at t and the placeholders
between. Drafts of K tokens from every place would be K times the work of one layer over the window. So places are drawn
(conditional drop-token sampling): all have depth 0, and of those that have depth d a share goes on to depth d + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.methods.peagle import PEagle
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs, TrainingMethod
from specjax.training.objectives.acceptance import AcceptanceLoss, check_loss
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, counted, simulate
from specjax.training.objectives.draft_vocabulary import most_frequent, token_loss, wanted
from specjax.training.objectives.unrolling import layer_sizes
from specjax.training.objectives.windows import document_mask, forward


@dataclass(frozen=True)
class PEagleTraining(TrainingMethod):
    """The cross entropy to the target's distribution at every depth of every place that was drawn, all of equal weight.

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        draft_vocab_size: tokens that the drafter can draft, the most frequent of those it is trained on; 0 is all.
        intermediate_size: of the drafter's MLPs; 0 is the target's.
        layers: of the drafter.
        mask_token_id: the token that stands where nothing has been drafted yet; -1: the target's last.
        taps: layers of the target whose input it reads; empty: low, middle and high.
        norm_before_residual: see `Eagle3Config`, as the next two.
        norm_before_fc: one norm over all taps.
        fc_norm: a norm for each tap.
        freeze_head: leave the head as it begins, the target's own of the tokens that can be drafted. Published ones are.
        depths: tokens of a draft that are learnt.
        kept: depth d is learnt at a share ``kept ** d`` of the places ...
        kept_at_least: ... or at this one, where that is more.
        loss: of a token: the cross entropy, as published, or one of the losses of acceptance (arXiv 2602.23881).
        eta: of the hybrid one, see `losses.hybrid`.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from specjax.training.methods import PEagleTraining
        >>> PEagleTraining(target="embedded").check(window=512)
        >>> PEagleTraining(target="embedded", depths=4).places(window=10)
        (10, 7, 4, 3)
        >>> PEagleTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["peagle"] = "peagle"
    target: str = ""
    draft_vocab_size: int = 0
    intermediate_size: int = 0
    layers: int = 4
    mask_token_id: int = -1
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    freeze_head: bool = False
    depths: int = 8
    kept: float = 0.7
    kept_at_least: float = 0.2
    loss: Literal["cross_entropy"] | AcceptanceLoss = "cross_entropy"
    eta: float = 3.0
    remat: bool = False
    best_by: ClassVar[str] = "acceptance_length"

    def check(self, window: int) -> None:
        super().check(window)
        if self.depths < 1 or self.layers < 1:
            raise ConfigError(f"method.depths={self.depths}, method.layers={self.layers}: must be at least 1")
        if self.draft_vocab_size < 0 or self.intermediate_size < 0 or self.mask_token_id < -1:
            raise ConfigError(
                f"method.draft_vocab_size={self.draft_vocab_size}, method.intermediate_size={self.intermediate_size}, "
                f"method.mask_token_id={self.mask_token_id}: must be at least 0, which is as many as the target has, and at "
                "least -1, which is the target's last token"
            )
        if not (0 < self.kept <= 1 and 0 <= self.kept_at_least <= 1):
            raise ConfigError(
                f"method.kept={self.kept}, method.kept_at_least={self.kept_at_least}: must be above 0 and from 0, up to 1"
            )
        if self.depths >= window:
            raise ConfigError(f"method.depths={self.depths}: data.window={window} is too short; give at least depths + 1")
        check_loss(self.loss, "cross_entropy", self.eta)

    def init(self, key: jax.Array, given: StudentInputs) -> PEagle:
        target = given.frozen_target
        if self.mask_token_id >= target.config.vocab_size:
            raise ConfigError(f"method.mask_token_id={self.mask_token_id}: the target has {target.config.vocab_size} tokens")
        return PEagle.init(
            target,
            key,
            self.depths,
            mask_token_id=None if self.mask_token_id < 0 else self.mask_token_id,
            ids=most_frequent(given.counts, self.draft_vocab_size) if self.draft_vocab_size else None,
            taps=self.taps or None,
            variant={name: getattr(self, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm")},
            **layer_sizes(self.intermediate_size),
            num_layers=self.layers,
        )

    def places(self, window: int) -> tuple[int, ...]:
        """At how many places of a window each depth is learnt: numbers known beforehand, for arrays are made of them. Where
        fewer places count, the rest is filled with others, which are not."""
        shares = [max(self.kept**depth, self.kept_at_least) for depth in range(self.depths)]
        return tuple(max(int(window * share), 1) for share in shares)

    def objective(self, student: PEagle, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats, or as the loss comes, divided by all places of all depths, as many in every batch, counted or not.

        Places at which the target's likeliest token cannot be drafted do not count. ``loss_d`` is that of depth d alone, by the
        places that count.
        """
        assert target is not None
        output = forward(target, batch, student.taps(target.config))
        theirs, can_be_drafted = wanted(student, target, output)
        log_total = jax.nn.logsumexp(output.logits, axis=-1)
        rows, window = output.hidden.shape[:2]
        sizes = self.places(window)
        can_be_drafted = jnp.broadcast_to(can_be_drafted, (rows, window))

        def loss_of(states: jax.Array, at: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Of states that predict what the target expects ``at [B, m]``."""
            mask = counts & _take(can_be_drafted, at)
            logits = student.logits(target, states)
            each = token_loss(self.loss, _take(theirs, at), _take(log_total, at), logits, mask, self.eta)
            return losses.mean_over_positions(each, mask), losses.mean_over_labels(each, mask)

        loss_of = jax.checkpoint(loss_of) if self.remat else loss_of
        every = jnp.broadcast_to(jnp.arange(window), (rows, window))
        drawn, reach = draw(batch, sizes[1:])
        depths = read_depths(student, target, batch, student.features(output), drawn, sizes[1:], remat=self.remat)
        total, metrics = jnp.zeros(()), {}
        for depth, (size, states) in enumerate(zip(sizes, depths, strict=True)):
            places, counts = (drawn[:, :size], reach[:, :size] >= depth) if depth else (every, counted(batch, 0))
            at = jnp.minimum(places + 1 + depth, window - 1)  # what lies beyond the window does not count
            mean, alone = loss_of(states, at, counts)
            total += mean * (size / sum(sizes))
            metrics[f"loss_{depth}"] = alone
        return total, {"loss": total, **metrics}

    def evaluation(self, student: PEagle, batch: Batch, target: Target | None) -> Metrics:
        """From every place, to every depth."""
        assert target is not None
        output = forward(target, batch, student.taps(target.config))
        window = output.hidden.shape[1]
        every = jnp.broadcast_to(jnp.arange(window), output.hidden.shape[:2])
        sizes = (window,) * (SIMULATED_STEPS - 1)
        depths = read_depths(student, target, batch, student.features(output), every, sizes)
        return simulate(output, batch, (student.logits(target, states) for states in depths), student.vocabulary(target))

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path == "params.lm_head"


def draw(batch: Batch, sizes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The places that have depths beyond 0, ``sizes`` of them at depths 1, 2 and so on; consumes the batch's key.

    A place that has a depth has all those before it, for its placeholders see each other. One random order serves all depths:
    the first of those that count are a fair sample of them, and the first of these that count deeper are one again. No place
    counts whose prediction is of another document than the place, or beyond the window.

    Args:
        batch: the windows.
        sizes: none larger than the one before.

    Returns:
        ``[B, m]`` as many places of each window as the first of ``sizes``, those that reach deepest first; and ``[B, m]`` how
        deep each reaches. So the places of every depth stand at the beginning; where they are fewer than its size, others
        follow.
    """
    order = jnp.argsort(jax.random.uniform(batch["key"], batch["loss_mask"].shape), axis=1)
    alive, reach = jnp.ones(order.shape, bool), jnp.zeros(order.shape, jnp.int32)
    for depth, size in enumerate(sizes, 1):
        alive &= _take(counted(batch, depth), order)
        alive &= jnp.cumsum(alive, axis=1) <= size
        reach += alive
    deepest = jnp.argsort(-reach, axis=1)[:, : max(sizes, default=0)]
    return _take(order, deepest), _take(reach, deepest)


def read_depths(
    student: PEagle,
    target: Target,
    batch: Batch,
    features: jax.Array,
    places: jax.Array,
    sizes: Sequence[int],
    *,
    remat: bool = False,
) -> Iterator[jax.Array]:
    """The drafter's states at each depth: ``[B, T, H]`` of all places of the windows, then of some ``[B, m, H]``.

    Written as one pass over all places of all depths, (t, d) would see (t', d') of its document where d' = 0 and t' <= t, or
    t' = t and d' <= d: a mask of several windows' length each way, of which nearly all is empty. Here a depth is run after the
    one before it. It sees the text through a mask as wide as the window, and of each depth between the one entry of its place.

    Args:
        student: the drafter.
        target: whose embedding is used, where the drafter has none.
        batch: the windows.
        features: ``[B, T, H]`` at each token.
        places: ``[B, m]`` that have depths beyond 0.
        sizes: how many of these, the first ones, have depth 1, depth 2 and so on; none more than the one before.
        remat: whether a depth's inner values are worked out again for the gradient, and not kept.
    """
    rows, window = features.shape[:2]
    run = jax.checkpoint(type(student).run) if remat else type(student).run
    every, read = jnp.broadcast_to(jnp.arange(window), (rows, window)), document_mask(batch["segments"][:, :-1])
    embedded = student.embed(target, ahead(batch["tokens"], 1)[:, :window])
    states, text = run(student, features, embedded, every, read, ((),) * student.sizes.num_layers)
    yield states
    read = _take(read, places)
    between: list[tuple[Entry, ...]] = [() for _ in text]  # by layer, the entries of the depths from 1 on
    for depth, size in enumerate(sizes, 1):
        between = jax.tree.map(lambda part, size=size: part[:, :, :size], between)
        past: tuple[tuple[Piece, ...], ...] = tuple(
            ((entry, read[:, :size]), *((one, None) for one in entries)) for entry, entries in zip(text, between, strict=True)
        )
        states, new = run(student, *student.placeholders(target, rows, size), places[:, :size] + depth, None, past)
        yield states
        between = [(*entries, entry) for entries, entry in zip(between, new, strict=True)]


def _take(values: jax.Array, at: jax.Array) -> jax.Array:
    """``[B, m, ...]`` of ``values [B, T, ...]`` those ``at [B, m]``."""
    return jnp.take_along_axis(values, at.reshape(*at.shape, *(1,) * (values.ndim - 2)), axis=1)
