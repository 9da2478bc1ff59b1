"""Mixture of Attentions (Zimmer et al. 2024, arXiv 2410.03804): drafts of all lengths in one pass.

While it drafts, the drafter has summaries of the tokens before the root, but none of the root and
of the drafted tokens. So the training cuts a window into blocks, and treats each as a draft whose
root is its first token. A token attends to the summaries of the tokens before its block, and by
self-attention to all tokens before it. One pass over the window trains drafts of all lengths up to
that of a block, whereas EAGLE-3 and HASS read the window again for every drafted token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.config import ConfigError
from specjax.drafters.methods.mixture_of_attentions import MixtureOfAttentions
from specjax.models.cache import Entries
from specjax.models.transformer import States, Target
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean, StudentInputs, TrainingMethod, row_keys
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, simulate
from specjax.training.objectives.chunks import by_chunks
from specjax.training.objectives.unrolling import layer_sizes
from specjax.training.objectives.windows import document_mask, positions, read


@dataclass(frozen=True)
class MoATraining(TrainingMethod):
    """The cross entropy to the target's distribution, and SmoothL1 to the target's hidden states.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target.
        tli: the number of the target's last layers that complete a prediction (target layer
            inference).
        lsa: whether the drafter has layer self-attention. Without it, the summary of a token is the
            target's last hidden state.
        intermediate_size: the size of the drafter's MLPs; 0 for 3/7 of the target's.
        shortest_block: the minimum number of tokens of a block; the length is random per window.
        longest_block: the maximum number of tokens of a block.
        staircase_until: the share of the training in which some windows hide the tokens before a
            block from self-attention: all windows at the start, then fewer and fewer. So the
            drafter learns to use the summaries.
        token_weight: the weight of the cross entropy.
        feature_weight: the weight of SmoothL1.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.methods import MoATraining
        >>> MoATraining(target="embedded").check(window=512)
        >>> MoATraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["moa"] = "moa"
    target: str = ""
    tli: int = 0
    lsa: bool = True
    intermediate_size: int = 0
    shortest_block: int = 6
    longest_block: int = 14
    staircase_until: float = 0.5
    token_weight: float = 1.0
    feature_weight: float = 0.1
    remat: bool = False
    best_by: ClassVar[str] = "acceptance_length"

    def check(self, window: int) -> None:
        super().check(window)
        if not 1 <= self.shortest_block <= self.longest_block <= window:
            raise ConfigError(
                f"method.shortest_block={self.shortest_block},"
                f" method.longest_block={self.longest_block}: must be from 1 to"
                f" data.window={window}, and the longest no shorter than the shortest"
            )
        if not 0 <= self.staircase_until <= 1:
            raise ConfigError(
                f"method.staircase_until={self.staircase_until}: must be a share of the training,"
                " from 0 to 1"
            )
        self.check_minimum(0, "tli", "intermediate_size")

    def init(self, key: jax.Array, inputs: StudentInputs) -> MixtureOfAttentions:
        sizes = layer_sizes(self.intermediate_size)
        return MixtureOfAttentions.init(
            inputs.frozen_target, key, tli=self.tli, lsa=self.lsa, **sizes
        )

    def objective(self, student: MixtureOfAttentions, batch: Batch, target: Target) -> Loss:
        """Return the loss in nats, and the metrics.

        With target layer inference, the states that enter the target's last layers are compared as
        well.
        """
        first = student.tli_layers(target)[0]
        output, entries = read(target, batch, taps=(first,) if self.tli else ())
        length, staircase = self.draw(row_keys(batch), batch["progress"])
        draft = jax.checkpoint(draft_blocks) if self.remat else draft_blocks
        hidden, attended = draft(
            student, batch, target, output, entries, block_starts(batch, length), staircase
        )
        mask = batch["loss_mask"]
        entropies = by_chunks(
            lambda hidden, expected: losses.soft_cross_entropy(
                target.head(expected), target.head(hidden)
            ),
            (hidden, output.hidden),
            numbers=target.config.vocab_size,
            mesh=target.mesh,
        )
        token = losses.mean_over_positions(entropies, mask)
        feature = losses.mean_over_positions(losses.smooth_l1(hidden, output.hidden), mask)
        if self.tli:
            feature += losses.mean_over_positions(
                losses.smooth_l1(attended, output.taps[:, :, 0]), mask
            )
        loss = self.token_weight * token + self.feature_weight * feature
        return loss, {"loss": loss, "token_loss": token, "feature_loss": feature}

    def draw(self, keys: jax.Array, progress: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw the block length of each window, and whether it is a staircase.

        ``keys [B]`` are consumed.

        Returns:
            ``[B]`` the length of the blocks, and ``[B]`` bool whether self-attention sees the block
            alone.
        """

        def draw_row(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            length_key, staircase_key = jax.random.split(key)
            length = jax.random.randint(length_key, (), self.shortest_block, self.longest_block + 1)
            return length, jax.random.uniform(staircase_key)

        length, draws = jax.vmap(draw_row)(keys)
        # The lower bound stands for 0, with which there is no staircase from the first step on.
        share = jnp.maximum(1 - progress / max(self.staircase_until, 1e-6), 0)
        return length, draws < share

    def evaluation(
        self, student: MixtureOfAttentions, batch: Batch, target: Target
    ) -> dict[str, Mean]:
        output, entries = read(target, batch)
        states = draft_everywhere(student, batch, target, output, entries, SIMULATED_STEPS)
        # `simulate` expects the predictions of the draft with root t + 1 at position t.
        predictions = ((target.head, ahead(hidden, 1)) for hidden in states)
        return simulate(target, output.hidden, batch, predictions)


@shape_checked
def block_starts(batch: Batch, length: Int[Array, " B"]) -> Int[Array, "B T"]:
    """Return for each token the position at which its block begins.

    Blocks have ``length`` tokens, counted from the first token of a document, or fewer at its end.
    Every token of a prompt is a block of its own, because prompts are not drafted. A token belongs
    to an answer if it is a label under the loss mask.
    """
    segments, mask = batch["segments"][:, :-1], batch["loss_mask"]
    index = jnp.arange(segments.shape[1])[None]
    is_prompt = jnp.pad(~mask[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    begins = is_prompt | (positions(segments) % length[:, None] == 0)
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


@shape_checked
def block_masks(
    segments: Int[Array, "B T"], starts: Int[Array, "B T"]
) -> tuple[Bool[Array, "B T T"], Bool[Array, "B T T"]]:
    """Return two masks over the tokens of the same document.

    The first selects the tokens before a token's block, the second those of its block up to itself.
    """
    visible = document_mask(segments)
    before = jnp.arange(segments.shape[1])[None, None] < starts[:, :, None]
    return visible & before, visible & ~before


def draft_blocks(
    student: MixtureOfAttentions,
    batch: Batch,
    target: Target,
    output: States,
    entries: Entries,
    starts: jax.Array,
    staircase: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draft at every token of the windows, as if the first token of its block were the root.

    Args:
        student: the drafter.
        batch: the windows.
        target: the target.
        output: the target's output at the windows.
        entries: the KV of the target's layers.
        starts: see `block_starts`.
        staircase: ``[B]`` bool windows in which self-attention sees the block alone.

    Returns:
        ``[B, T, H]`` the states that the target's head reads, and ``[B, T, H]`` the states after
        cross-attention.
    """
    segments = batch["segments"][:, :-1]
    verified, drafted = block_masks(segments, starts)
    place = positions(segments)
    summaries = student.cross_attention_entries(student.summarise(output, entries), place)
    visible = drafted | (verified & ~staircase[:, None, None])
    x, _ = student.self_attend(target.embed(batch["tokens"][:, :-1]), place, visible)
    attended = student.cross_attend(x, place, (summaries, verified))
    first, last = student.tli_layers(target)
    hidden, _ = student.run_tli_layers(
        target, attended, place, drafted, scratch=[(entries[first:last], verified)]
    )
    return hidden, attended


def draft_everywhere(
    student: MixtureOfAttentions,
    batch: Batch,
    target: Target,
    output: States,
    entries: Entries,
    steps: int,
) -> Iterator[jax.Array]:
    """Yield the states ``[B, T, H]`` of each step, which the target's head reads.

    Chains are drafted from every position of the windows at once, along the text. At step k, the
    draft with root t predicts token t + k + 1.
    """
    segments = batch["segments"][:, :-1]
    count = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(count), segments.shape)
    verified, place = block_masks(segments, index)[0], positions(segments)
    summaries = student.cross_attention_entries(student.summarise(output, entries), place)
    states, _ = student.self_attend(
        target.embed(batch["tokens"][:, :-1]), place, document_mask(segments)
    )
    first, last = student.tli_layers(target)
    scratch: list[tuple[Entries, jax.Array | None]] = [(entries[first:last], verified)]
    alone = jnp.eye(count, dtype=bool)[None]
    for step in range(steps):
        attended = student.cross_attend(ahead(states, step), place + step, (summaries, verified))
        hidden, new = student.run_tli_layers(target, attended, place + step, alone, scratch=scratch)
        yield hidden
        # There is no mask, because each draft attends to its own tokens of earlier steps alone.
        scratch.append((new, None))
