"""Gemma 4's assistants, for any target: a loss of tokens alone, over several draft steps.

Google publishes assistants but not their training. Here they are trained like EAGLE-3's drafter
(arXiv 2503.01840, training-time test): a chain is drafted from every position of a window at once,
along the text, and each step continues with the assistant's own states. Tokens of a draft do not
attend to each other, so a step is one pass over the window. One pass of the target gives both the
keys and values that the assistant reads and the distributions to learn.
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
from specjax.models.cache import Entries
from specjax.models.primitives import linear
from specjax.models.transformer import States, Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean, StudentInputs, TrainingMethod
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, compared, decayed, simulate
from specjax.training.objectives.windows import document_mask, positions, read


@dataclass(frozen=True)
class Gemma4AssistantTraining(TrainingMethod):
    """The sum over steps k of ``decay ** k`` times the cross entropy to the target's distribution.

    A head with centroids has a second term: the cross entropy to the target's distribution over the
    clusters. With it, the head learns which clusters to select.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target.
        hidden_size: the hidden size of the assistant; 0 for a quarter of the target's. With
            ``init_from``, leave out this field and the next four: the earlier assistant has them.
        intermediate_size: the size of the MLPs; 0 for four times the hidden size.
        layers: the number of layers; 0 for four. The last one reads the target's last layer with
            full attention, the others read its last layer with a sliding window.
        centroids: the number of clusters of the head, which must divide the target's vocabulary
            size; 0 for none.
        centroids_kept: the number of clusters whose tokens get logits.
        centroid_weight: the weight of the clusters' cross entropy.
        freeze_head: whether to freeze the head, which is the assistant's own embedding.
        steps: the number of draft steps.
        decay: the factor of the weight from one step to the next.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.methods import Gemma4AssistantTraining
        >>> Gemma4AssistantTraining(target="embedded").check(window=512)
        >>> Gemma4AssistantTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
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
        self.check_minimum(0, "hidden_size", "intermediate_size", "layers", "centroids")
        self.check_minimum(0, "centroid_weight")
        if self.layers > 4:
            raise ConfigError(f"method.layers={self.layers}: an assistant has at most 4")
        self.check_minimum(1, "steps")
        self.check_window(window, "steps")
        if self.decay <= 0:
            raise ConfigError(f"method.decay={self.decay}: must be above 0")

    def init(self, key: jax.Array, inputs: StudentInputs) -> Gemma4Assistant:
        target = inputs.frozen_target
        return Gemma4Assistant.init(target, key, config=self._shape(inputs, target))

    def _shape(self, inputs: StudentInputs, target: Target) -> AssistantConfig:
        names = {
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "layers": "num_layers",
        }
        sizes = {field: value for name, field in names.items() if (value := getattr(self, name))}
        if not inputs.init_from:
            clusters = {"centroids": self.centroids, "centroids_kept": self.centroids_kept}
            return Gemma4Assistant.config_for(target.config, **clusters, **sizes)
        if sizes or self.centroids:
            raise ConfigError(
                f"init_from={inputs.init_from!r}: its shape is kept; leave out method.hidden_size,"
                " method.intermediate_size, method.layers and method.centroids"
            )
        return Gemma4Assistant.checkpoint_format.read_config(open_drafter(inputs.init_from))

    def objective(self, student: Gemma4Assistant, batch: Batch, target: Target) -> Loss:
        """Return the loss in nats, and the metrics."""
        output, entries = read(target, batch)
        has_clusters = student.config.centroids > 0

        def labels_of(hidden: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            logits = target.head(hidden)
            return logits, cluster_logits(student, logits) if has_clusters else None

        def values_of(
            student: Gemma4Assistant,
            step: int,
            x: jax.Array,
            labels: tuple[jax.Array, jax.Array | None],
        ) -> jax.Array:
            target_logits, target_clusters = labels
            entropies = losses.soft_cross_entropy(target_logits, student.all_logits(x))
            if target_clusters is not None:
                clusters = linear(student.params, "centroids", x).astype(jnp.float32)
                entropies += self.centroid_weight * losses.soft_cross_entropy(
                    target_clusters, clusters
                )
            return entropies

        entropies = compared(
            student,
            draft_along(student, batch, target, output, entries, self.steps, remat=self.remat),
            values_of,
            (output.hidden,),
            labels_of,
            numbers=target.config.vocab_size,
            mesh=target.mesh,
        )
        return decayed(batch, entropies, lambda entropies, mask: entropies, self.decay)

    def evaluation(self, student: Gemma4Assistant, batch: Batch, target: Target) -> dict[str, Mean]:
        output, entries = read(target, batch)
        steps = draft_along(student, batch, target, output, entries, SIMULATED_STEPS)
        return simulate(target, output.hidden, batch, ((student.logits, x) for x in steps))

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path == "params.embed"


def cluster_logits(student: Gemma4Assistant, logits: jax.Array) -> jax.Array:
    """Return the logits ``[B, T, C]`` of the target's distribution over the clusters.

    The probability of a cluster is the sum of those of its tokens, by ``logits [B, T, V]``.
    """
    by_cluster = logits[..., student.params["order"]].reshape(
        *logits.shape[:-1], student.config.centroids, -1
    )
    return jax.nn.logsumexp(by_cluster, axis=-1)


def draft_along(
    student: Gemma4Assistant,
    batch: Batch,
    target: Target,
    output: States,
    entries: Entries,
    steps: int,
    *,
    remat: bool = False,
) -> Iterator[jax.Array]:
    """Yield the assistant's states ``[B, T, h]`` of each step, which its head reads.

    Chains are drafted from every position of the windows at once, along the text. At position t,
    the target has read the tokens up to t. Step k reads token t + 1 + k and the state of the step
    before, at first the target's state at t, and predicts token t + 2 + k. Its RoPE position is
    t + 1 in every step, counted from the first token of the document.

    Args:
        student: the assistant.
        batch: the windows.
        target: the target.
        output: the target's output at the windows.
        entries: the KV of the target's layers.
        steps: the number of steps.
        remat: whether to recompute a step's activations for the gradient, to save memory.
    """
    segments = batch["segments"][:, :-1]
    place, mask = positions(segments), document_mask(segments)

    def step(
        student: Gemma4Assistant, embedded: jax.Array, states: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def visible_piece(layer: int, window: int | None) -> Piece:
            near = (
                mask if window is None else mask & (1 + place[:, :, None] - place[:, None] < window)
            )
            return entries[layer], near

        return student.run(target, embedded, states, place + 1, visible_piece)

    step = jax.checkpoint(step) if remat else step
    states = output.hidden
    for depth in range(steps):
        embedded = target.embed(ahead(batch["tokens"], 1 + depth)[:, : place.shape[1]])
        x, states = step(student, embedded, states)
        yield x
