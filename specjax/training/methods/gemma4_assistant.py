"""Gemma 4's assistants, for any target: tokens alone, over the steps that the assistant will take.

Google publishes assistants and not how they were trained. Here they learn as EAGLE-3's drafter does (arXiv 2503.01840, its
training-time test): a chain is drafted from every position of a window at once, along the text, and each step goes on with the
assistant's own states. No token of a draft sees another, so a step is one pass over the window, and the keys and values that it
reads come from the same pass of the target that gives the distributions to learn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.methods.gemma4_assistant import AssistantConfig, Gemma4Assistant
from specjax.drafters.trained import open_drafter
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.primitives import linear
from specjax.models.transformer import Output, Target
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs, TrainingMethod
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, decayed, simulate
from specjax.training.objectives.windows import document_mask, score


@dataclass(frozen=True)
class Gemma4AssistantTraining(TrainingMethod):
    """The sum over steps k of ``decay ** k`` times the cross entropy to the target's distribution.

    A head with centroids learns two things: the logits of all tokens, and, by their cross entropy to the target's distribution
    over the clusters, which clusters to look at.

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        hidden_size: of the assistant; 0 is a quarter of the target's. With ``init_from`` this and the next four stay as they
            are: its shape is the earlier one's.
        intermediate_size: of its MLPs; 0 is four times its hidden size.
        layers: how many; 0 is four. The last one reads the target's last full layer, the others its last one with a window.
        centroids: clusters of its head, which must divide the target's vocabulary; 0: none.
        centroids_kept: of these, those whose tokens have logits.
        centroid_weight: of the clusters' cross entropy.
        freeze_head: leave the head, its own embedding, as it begins.
        steps: of drafting.
        decay: of the later steps' weight.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from specjax.training.methods import Gemma4AssistantTraining
        >>> Gemma4AssistantTraining(target="embedded").check(window=512)
        >>> Gemma4AssistantTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["gemma4_assistant"] = "gemma4_assistant"
    target: str = ""
    hidden_size: int = 0
    intermediate_size: int = 0
    layers: int = 0
    centroids: int = 0
    centroids_kept: int = 32
    centroid_weight: float = 1.0
    freeze_head: bool = False
    steps: int = 7
    decay: float = 0.8
    remat: bool = False
    best_by: ClassVar[str] = "acceptance_length"

    def check(self, window: int) -> None:
        super().check(window)
        for name in ("hidden_size", "intermediate_size", "layers", "centroids"):
            if getattr(self, name) < 0:
                raise ConfigError(f"method.{name}={getattr(self, name)}: must be at least 0")
        if self.layers > 4:
            raise ConfigError(f"method.layers={self.layers}: an assistant has at most 4")
        if self.steps < 1:
            raise ConfigError(f"method.steps={self.steps}: must be at least 1")
        if self.steps + 1 >= window:
            raise ConfigError(f"method.steps={self.steps}: data.window={window} is too short; give at least steps + 2")
        if self.decay <= 0 or self.centroid_weight < 0:
            raise ConfigError(
                f"method.decay={self.decay}, method.centroid_weight={self.centroid_weight}: must be above 0, and at least 0"
            )

    def init(self, key: jax.Array, given: StudentInputs) -> Gemma4Assistant:
        target = given.frozen_target
        return Gemma4Assistant.init(target, key, config=self._shape(given, target))

    def _shape(self, given: StudentInputs, target: Target) -> AssistantConfig:
        names = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "layers": "num_layers"}
        sizes = {field: value for name, field in names.items() if (value := getattr(self, name))}
        if not given.init_from:
            kept = {"centroids": self.centroids, "centroids_kept": self.centroids_kept}
            return Gemma4Assistant.config_for(target.config, **kept, **sizes)
        if sizes or self.centroids:
            raise ConfigError(
                f"init_from={given.init_from!r}: its shape is kept; leave out method.hidden_size, method.intermediate_size, "
                "method.layers and method.centroids"
            )
        return Gemma4Assistant.checkpoint_format.read_config(open_drafter(given.init_from))

    def objective(self, student: Gemma4Assistant, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats."""
        assert target is not None
        output, entries = score(target, batch)
        of_clusters = cluster_logits(student, output.logits) if student.config.centroids else None

        def loss_of(x: jax.Array, mask: jax.Array) -> jax.Array:
            each = losses.soft_cross_entropy(output.logits, student.all_logits(x))
            if of_clusters is not None:
                ours = linear(student.params, "centroids", x).astype(jnp.float32)
                each += self.centroid_weight * losses.soft_cross_entropy(of_clusters, ours)
            return losses.mean_over_positions(each, mask)

        steps = draft_along(student, batch, target, output, entries, self.steps, remat=self.remat)
        return decayed(batch, steps, jax.checkpoint(loss_of) if self.remat else loss_of, self.decay)

    def evaluation(self, student: Gemma4Assistant, batch: Batch, target: Target | None) -> Metrics:
        assert target is not None
        output, entries = score(target, batch)
        steps = draft_along(student, batch, target, output, entries, SIMULATED_STEPS)
        return simulate(output, batch, (student.logits(x) for x in steps))

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path == "params.embed"


def cluster_logits(student: Gemma4Assistant, logits: jax.Array) -> jax.Array:
    """``[B, T, C]`` logarithms of the clusters' shares of the distribution that ``logits [B, T, V]`` stand for, but for a
    constant."""
    by_cluster = logits[..., student.params["order"]].reshape(*logits.shape[:-1], student.config.centroids, -1)
    return jax.nn.logsumexp(by_cluster, axis=-1)


def draft_along(
    student: Gemma4Assistant,
    batch: Batch,
    target: Target,
    output: Output,
    entries: tuple[Entry, ...],
    steps: int,
    *,
    remat: bool = False,
) -> Iterator[jax.Array]:
    """Chains from every token of the windows at once, along the text: ``[B, T, h]`` of each step, what the assistant's head
    reads.

    At place t the target has read the tokens up to t. Step k reads token t + 1 + k and the state of the step before it, at
    first the target's own at t, and predicts token t + 2 + k; its position is t + 1, whatever the step.

    Args:
        student: the assistant.
        batch: the windows.
        target: the target.
        output: its output at the windows.
        entries: what its layers keep of them.
        steps: how many.
        remat: whether a step's inner values are worked out again for the gradient, and not kept.
    """
    index = jnp.broadcast_to(jnp.arange(output.hidden.shape[1]), output.hidden.shape[:2])
    positions, read = index + 1, document_mask(batch["segments"][:, :-1])

    def step(student: Gemma4Assistant, embedded: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        def seen(layer: int, back: int | None) -> Piece:
            near = read if back is None else read & (positions[:, :, None] - index[:, None] < back)
            return entries[layer], near

        return student.run(target, embedded, states, positions, seen)

    step = jax.checkpoint(step) if remat else step
    states = output.hidden
    for number in range(steps):
        x, states = step(student, target.embed(ahead(batch["tokens"], 1 + number)[:, : index.shape[1]]), states)
        yield x
