"""Decoding that is forced to a recorded text, with real drafters and the real loop.

The target's likeliest token is the recorded one wherever the text before is the recorded text. So
greedy verification accepts the longest path of a draft that equals the recorded text. In every step
the parts of a union also draft alone, from the same state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from benchmarks.agent_session.answers import CAPACITY, Answer, earlier_texts
from specjax import decoding
from specjax.decoding.state import DecodeState
from specjax.drafters import Drafter
from specjax.drafters.methods.suffix import Suffix
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafters.together import Together
from specjax.drafts.draft import Draft
from specjax.models.transformer import Output, Target

ROWS = 20
INDEXED = 40 * (CAPACITY + 1)
"""The number of tokens of earlier turns that there is room for."""
STEPS = 16
"""The number of steps in a compiled program."""


@struct.dataclass
class RecordedTarget(Target):
    """A target whose likeliest next token is that of a recorded text, as long as it follows it.

    After other tokens its logits are those of the model.

    Attributes:
        texts: ``[B, S]`` int32, the recorded text of each row, its prompt included.
    """

    texts: jax.Array | None = None

    def score(self, tokens: jax.Array, cache: Any = None, **options: Any) -> tuple[Output, Any]:
        """Return the result of `Target.score` with the recorded tokens as the likeliest."""
        output, new = super().score(tokens, cache, **options)
        assert self.texts is not None
        logits, (rows, length) = output.logits, self.texts.shape
        positions = jnp.broadcast_to(options["positions"], tokens.shape)
        equal = tokens == jnp.take_along_axis(
            self.texts, jnp.minimum(positions, length - 1), axis=1
        )
        mask = jnp.broadcast_to(options["mask"], (rows, *tokens.shape[1:], tokens.shape[1]))
        follows = jnp.all(equal[:, None] | ~mask, axis=-1)
        following = jnp.take_along_axis(self.texts, jnp.minimum(positions + 1, length - 1), axis=1)
        # Just above the likeliest, so that the other tokens keep their probabilities.
        raised = jnp.max(logits, axis=-1) + 1
        old = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        place = jnp.arange(rows)[:, None], jnp.arange(tokens.shape[1]), following
        logits = logits.at[place].set(jnp.where(follows, raised, old))
        return replace(output, logits=logits), new


def accepted_of(
    draft: Draft, slots: int, texts: jax.Array, positions: jax.Array, most: jax.Array
) -> jax.Array:
    """Return how many tokens of the first ``slots`` nodes of a draft follow the recorded text.

    Args:
        draft: the draft, below the root at ``positions [B]``.
        slots: the number of nodes below the root that count.
        texts: ``[B, S]``, the recorded texts.
        positions: ``[B]``, the position of the root.
        most: ``[B]``, the number of tokens that the text goes on for.
    """
    depths = jnp.broadcast_to(jnp.asarray(draft.depths), draft.tokens.shape)
    place = jnp.minimum(positions[:, None] + depths, texts.shape[1] - 1)
    offered = draft.drafted & (jnp.cumsum(draft.drafted, axis=1) <= slots)
    is_right = draft.tokens == jnp.take_along_axis(texts, place, axis=1)
    is_right &= jnp.pad(offered, ((0, 0), (1, 0)), constant_values=True)
    mask = jnp.asarray(draft.mask)
    on_path = jnp.all(is_right[:, None] | ~mask, axis=-1)
    return jnp.minimum(jnp.max(jnp.where(on_path, depths, 0), axis=1), most)


def scored_whole(draft: Draft) -> Draft:
    """Return a draft all of whose nodes are scored in every step.

    The time is not measured here, and otherwise a program is compiled for each number of nodes.
    """
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    return replace(draft, topology=None, grown=parents, levels=draft.depth, is_packed=False)


@struct.dataclass
class StepRecord:
    """The numbers of a step, ``[B]`` each.

    Attributes:
        active: whether the row has not ended before.
        emitted: the emitted tokens.
        accepted: the accepted tokens among them.
        alone: ``[B, P]``, what each part would have had accepted from the same state, alone.
    """

    active: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    alone: jax.Array


def drafted_alone(
    target: RecordedTarget, drafter: Together, state: DecodeState, keys: jax.Array
) -> jax.Array:
    """Return ``[B, P]``, the accepted tokens of each part with its share of the slots."""
    shape: Any = drafter.draft_shape
    assert target.texts is not None
    counts = []
    for part, part_state, slots in zip(drafter.drafting, state.drafter, shape.shares, strict=True):
        depth = part.draft_shape.depth
        draft, _ = part.propose(
            target, part_state, state.roots, state.next_sampling, keys[:depth], ~state.done
        )
        most = state.max_lengths - state.lengths
        counts.append(accepted_of(draft, slots, target.texts, state.lengths - 1, most))
    return jnp.stack(counts, axis=-1)


@partial(jax.jit, donate_argnames="state")
def run_steps(
    target: RecordedTarget, drafter: Drafter, state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Run `STEPS` steps; return the state and the records ``[STEPS, B]``."""

    def one(state: DecodeState, _: None) -> tuple[DecodeState, StepRecord]:
        keys = jnp.broadcast_to(
            jax.random.key(0), (drafter.draft_shape.depth, state.lengths.shape[0])
        )
        alone = jnp.zeros((state.lengths.shape[0], 0), jnp.int32)
        if isinstance(drafter, Together):
            alone = drafted_alone(target, drafter, state, keys)
        draft, state = decoding.propose_step(target, drafter, state)
        draft = scored_whole(draft)
        state, info = decoding.advance(target, drafter, state, draft)
        return state, StepRecord(info.active, info.emitted, info.accepted, alone)

    return jax.lax.scan(one, state, None, length=STEPS)


@dataclass
class ForcedResult:
    """The result of an answer.

    Attributes:
        tokens: the emitted tokens.
        steps: the steps.
        by_part: accepted tokens that each part offered; empty without parts.
        only_by_part: those that no other part offered.
        alone: the accepted tokens of each part in all steps, alone, with its share.
        worse_steps: the number of steps in which a part alone would have had more accepted.
    """

    tokens: int
    steps: int
    by_part: list[int]
    only_by_part: list[int]
    alone: list[int]
    worse_steps: int

    @property
    def per_step(self) -> float:
        """The mean number of emitted tokens of a step."""
        return self.tokens / self.steps


def indices_of(answers: Sequence[Answer]) -> dict[int, SuffixIndex]:
    """Return an index of the earlier turns for each turn, on the host.

    All have the same capacity, so that sessions share their programs.
    """
    turns = sorted({answer.turn for answer in answers})
    return {turn: SuffixIndex.on_host(earlier_texts(answers, turn), INDEXED) for turn in turns}


def with_answers(drafter: Drafter, index: SuffixIndex) -> Drafter:
    """Return a drafter whose suffix parts search ``index``, if they search earlier answers."""
    if isinstance(drafter, Together):
        return replace(drafter, parts=tuple(with_answers(part, index) for part in drafter.parts))
    if isinstance(drafter, Suffix) and drafter.answers is not None:
        return replace(drafter, answers=index)
    return drafter


def run_answers(
    target: RecordedTarget,
    drafter: Drafter,
    answers: Sequence[Answer],
    indices: dict[int, SuffixIndex],
    capacity: int = CAPACITY,
) -> list[ForcedResult]:
    """Decode all answers with a drafter, each forced to its text.

    Args:
        target: the target, without texts.
        drafter: the drafter.
        answers: the answers.
        indices: of `indices_of`.
        capacity: the number of tokens of the longest row.

    Raises:
        RuntimeError: A decoded text differs from the recorded one.
    """
    order = sorted(range(len(answers)), key=lambda index: len(answers[index].output))
    results: dict[int, ForcedResult] = {}
    for first in range(0, len(order), ROWS):
        chosen = order[first : first + ROWS]
        filled = [answers[index] for index in (chosen + chosen[:1] * ROWS)[:ROWS]]
        rows = _run_rows(target, drafter, filled, indices, capacity)
        results |= dict(zip(chosen, rows, strict=False))
    return [results[index] for index in range(len(answers))]


def _run_rows(
    target: RecordedTarget,
    drafter: Drafter,
    answers: Sequence[Answer],
    indices: dict[int, SuffixIndex],
    capacity: int,
) -> list[ForcedResult]:
    # The indices of the rows, one segment for each.
    of_rows = [indices[answer.turn] for answer in answers]
    room = of_rows[0].capacity
    index = SuffixIndex.empty(len(answers), room)
    for row, texts in enumerate(of_rows):
        index = index.put(row, texts)
    drafter = with_answers(drafter, index)
    texts = np.zeros((len(answers), capacity + 1), np.int32)
    for row, answer in enumerate(answers):
        text = answer.prompt + answer.output
        texts[row, : len(text)] = text
    lengths = np.array([len(answer.prompt) for answer in answers])
    outputs = np.array([len(answer.output) for answer in answers])
    target = replace(target, texts=jnp.asarray(texts))
    prompts = np.where(np.arange(capacity) < lengths[:, None], texts[:, :capacity], 0)
    options = decoding.GenerationOptions(max_new_tokens=outputs, eos_token_ids=())
    started, state = decoding.start(target, drafter, prompts, lengths, options, capacity=capacity)
    segments = jnp.where(jnp.array([part.sizes[0] > 0 for part in of_rows]), jnp.arange(ROWS), -1)
    state = replace(state, drafter=started.in_segment(state.drafter, segments))
    records = []
    while not bool(jnp.all(state.done)):
        state, record = run_steps(target, started, state)
        records.append(jax.tree.map(np.asarray, record))
    if not np.array_equal(
        np.where(np.arange(capacity) < (lengths + outputs)[:, None], state.tokens, 0),
        texts[:, :capacity],
    ):
        raise RuntimeError("a decoded text differs from the recorded one")
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *records)
    stats = jax.tree.map(np.asarray, state.stats)
    results = []
    for row in range(len(answers)):
        active = joined.active[:, row]
        accepted, alone = joined.accepted[active, row], joined.alone[active, row]
        results.append(
            ForcedResult(
                tokens=int(joined.emitted[active, row].sum()),
                steps=int(active.sum()),
                by_part=stats.accepted_by[row].tolist(),
                only_by_part=stats.accepted_only_by[row].tolist(),
                alone=alone.sum(axis=0).tolist(),
                worse_steps=int(np.any(alone > accepted[:, None], axis=1).sum()),
            )
        )
    return results
