"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): all depths of a draft from one pass.

At place t of a window, the target has read the tokens up to t. The pair of the feature of t and
token t + 1 predicts token t + 2. The placeholder at depth d predicts token t + 2 + d; it attends to
the same tokens as place t, and to the placeholders before it. Drafts of K tokens from every place
would cost K times as much as one. So places are drawn at random (conditional drop-token sampling):
all have depth 0, and a share of those that have depth d also has depth d + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.features import Past
from specjax.drafters.methods.peagle import PEagle
from specjax.models.cache import Entries
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean, StudentInputs, row_keys
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, counted, simulate
from specjax.training.objectives.chunks import by_chunks
from specjax.training.objectives.draft_vocabulary import (
    DraftLabels,
    Eagle3Method,
    token_loss,
    token_values,
)
from specjax.training.objectives.windows import document_mask, positions, read


@dataclass(frozen=True)
class PEagleTraining(Eagle3Method):
    """The loss at every depth of every place that was drawn, all with equal weight.

    Published drafters are trained with a frozen head. For further fields see `Eagle3Method`.

    Attributes:
        name: the name of the method.
        layers: the number of layers of the drafter.
        mask_token_id: the token that stands where nothing is drafted yet; -1 for the target's last
            token.
        depths: the number of depths that are trained.
        kept: depth d is trained at the share ``kept ** d`` of the places ...
        kept_at_least: ... or at this share, if it is larger.

    Examples:
        >>> from specjax.training.methods import PEagleTraining
        >>> PEagleTraining(target="embedded").check(window=512)
        >>> PEagleTraining(target="embedded", depths=4).places(window=10)
        (10, 7, 4, 3)
        >>> PEagleTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["peagle"] = "peagle"
    layers: int = 4
    mask_token_id: int = -1
    depths: int = 8
    kept: float = 0.7
    kept_at_least: float = 0.2

    def check(self, window: int) -> None:
        super().check(window)
        self.check_minimum(1, "depths")
        # -1 is the target's last token.
        self.check_minimum(-1, "mask_token_id")
        if not (0 < self.kept <= 1 and 0 <= self.kept_at_least <= 1):
            raise ConfigError(
                f"method.kept={self.kept}, method.kept_at_least={self.kept_at_least}: must be above"
                " 0 and from 0, up to 1"
            )
        self.check_window(window, "depths", further=1)

    def init(self, key: jax.Array, inputs: StudentInputs) -> PEagle:
        target = inputs.frozen_target
        if self.mask_token_id >= target.config.vocab_size:
            raise ConfigError(
                f"method.mask_token_id={self.mask_token_id}: the target has"
                f" {target.config.vocab_size} tokens"
            )
        return PEagle.init(
            target,
            key,
            self.depths,
            mask_token_id=None if self.mask_token_id < 0 else self.mask_token_id,
            **self.options(inputs),
        )

    def places(self, window: int) -> tuple[int, ...]:
        """Return the number of places of a window at which each depth is trained.

        These numbers are static, because they are shapes of arrays. If fewer places count, the rest
        is filled with places that do not count.
        """
        shares = [max(self.kept**depth, self.kept_at_least) for depth in range(self.depths)]
        return tuple(max(int(window * share), 1) for share in shares)

    def objective(self, student: PEagle, batch: Batch, target: Target) -> Loss:
        """Return the loss, and the metrics.

        The divisor is the number of all places of all depths, counted or not, which is the same in
        every batch. Places at which the target's likeliest token cannot be drafted do not count.
        The metric ``loss_d`` is the mean loss of depth d over the places that count.
        """
        labels = DraftLabels.of(student, target, batch)
        rows, window = labels.log_total.shape
        sizes = self.places(window)

        def values_of(
            student: PEagle, states: jax.Array, hidden: jax.Array, log_total: jax.Array
        ) -> dict[str, jax.Array]:
            logits = student.logits(target, states)
            return token_values(self.loss, labels.logits(hidden), log_total, logits)

        def loss_of(
            states: jax.Array, at: jax.Array, counts: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            """Return the loss of one depth, divided by all places and by those that count.

            The states predict the target's distributions ``at [B, m]``.
            """
            mask = counts & _take(labels.can_be_drafted, at)
            values = by_chunks(
                values_of,
                (states, _take(labels.hidden, at), _take(labels.log_total, at)),
                numbers=student.config.draft_vocab_size,
                mesh=target.mesh,
                student=student,
            )
            loss_of_token = token_loss(self.loss, values, mask, self.eta)
            return losses.mean_over_positions(loss_of_token, mask), losses.mean_over_labels(
                loss_of_token, mask
            )

        every = jnp.broadcast_to(jnp.arange(window), (rows, window))
        drawn_places, reach = draw(batch, sizes[1:])
        depths = read_depths(
            student, target, batch, labels.features, drawn_places, sizes[1:], remat=self.remat
        )
        total, metrics = jnp.zeros(()), {}
        for depth, (size, states) in enumerate(zip(sizes, depths, strict=True)):
            places, counts = (
                (drawn_places[:, :size], reach[:, :size] >= depth)
                if depth
                else (every, counted(batch, 0))
            )
            # Clamped, because places beyond the window do not count.
            at = jnp.minimum(places + 1 + depth, window - 1)
            mean, loss_of_depth = loss_of(states, at, counts)
            total += mean * (size / sum(sizes))
            metrics[f"loss_{depth}"] = loss_of_depth
        return total, {"loss": total, **metrics}

    def evaluation(self, student: PEagle, batch: Batch, target: Target) -> dict[str, Mean]:
        """Return the metrics of `simulate`, from every place to every depth."""
        output, _ = read(target, batch, student.taps(target.config))
        window = output.hidden.shape[1]
        every = jnp.broadcast_to(jnp.arange(window), output.hidden.shape[:2])
        sizes = (window,) * (SIMULATED_STEPS - 1)
        depths = read_depths(student, target, batch, student.features(output), every, sizes)
        predictions = ((partial(student.logits, target), states) for states in depths)
        return simulate(target, output.hidden, batch, predictions, student.vocabulary(target))


def draw(batch: Batch, sizes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Draw the places that have depths beyond 0. The batch's key is consumed.

    A place with depth d has all depths below d as well, because its placeholders attend to each
    other. One random order of the places serves all depths: the first places that count at a depth
    are a uniform sample of those that count. A place does not count if its prediction belongs to
    another document or lies beyond the window.

    Args:
        batch: the windows.
        sizes: the number of places of depths 1, 2 and so on, in descending order.

    Returns:
        ``[B, m]`` the places of each window, with m the first of ``sizes``, and ``[B, m]`` the
        deepest depth of each. The deepest places come first, so the places of every depth stand at
        the beginning, followed by others if they are fewer than its size.
    """
    window = batch["loss_mask"].shape[1:]
    noise = jax.vmap(lambda key: jax.random.uniform(key, window))(row_keys(batch))
    order = jnp.argsort(noise, axis=1)
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
    """Yield the drafter's states of each depth: ``[B, T, H]`` of all places, then ``[B, m, H]``.

    In one pass over all places of all depths, (t, d) would attend to (t', d') of its document if
    d' = 0 and t' <= t, or if t' = t and d' <= d. That mask would be several windows long and wide,
    and nearly empty. So the depths are run one after the other. Each attends to the text through a
    mask as wide as the window, and to the single entry of its place at each depth in between.

    Args:
        student: the drafter.
        target: the target, whose embedding is used if the drafter has none.
        batch: the windows.
        features: ``[B, T, H]`` the feature of each token.
        places: ``[B, m]`` the places that have depths beyond 0.
        sizes: how many of the places, counted from the first, have depths 1, 2 and so on, in
            descending order.
        remat: whether to recompute a depth's activations for the gradient, to save memory.
    """
    rows, window = features.shape[:2]
    run = jax.checkpoint(type(student).run) if remat else type(student).run
    segments = batch["segments"][:, :-1]
    mask, every = document_mask(segments), positions(segments)
    drawn_positions = _take(every, places)
    embedded = student.embed(target, ahead(batch["tokens"], 1)[:, :window])
    states, text = run(student, features, embedded, every, mask, ((),) * student.sizes.num_layers)
    yield states
    mask = _take(mask, places)
    # The entries of depths 1 and beyond, by layer.
    between: list[Entries] = [() for _ in text]
    for depth, size in enumerate(sizes, 1):
        between = jax.tree.map(lambda part, size=size: part[:, :, :size], between)
        at = drawn_positions[:, :size] + depth
        past: Past = tuple(
            (
                (entry, student.in_window(layer, mask[:, :size], at, every)),
                *((placeholder, None) for placeholder in placeholders),
            )
            for layer, (entry, placeholders) in enumerate(zip(text, between, strict=True))
        )
        states, new = run(
            student,
            *student.placeholders(target, rows, size),
            at,
            None,
            past,
        )
        yield states
        between = [(*entries, entry) for entries, entry in zip(between, new, strict=True)]


def _take(values: jax.Array, at: jax.Array) -> jax.Array:
    """Take from ``values [B, T, ...]`` those at the positions ``at [B, m]``: ``[B, m, ...]``."""
    return jnp.take_along_axis(values, at.reshape(*at.shape, *(1,) * (values.ndim - 2)), axis=1)
