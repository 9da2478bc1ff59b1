"""Several drafters that draft one tree together.

No drafter is the best for every text. If an agent repeats a file, prompt lookup copies it; if it
thinks, a trained drafter predicts it. Instead of choosing one drafter for each step, all of them
draft below the same root, and one pass of the target verifies the union of their trees.
"""

from dataclasses import InitVar, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Committed, Drafter, DraftingReads, LikelyTokens
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import DraftShape, UnionTree
from specjax.drafts.union import merge
from specjax.errors import InputError
from specjax.models.cache import KVCache, PagedCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling

PartStates = tuple[Any, ...]
"""The state of each part."""


@struct.dataclass
class Together(Drafter[PartStates]):
    """Several drafters, the *parts*, whose drafts are merged into one tree without duplicates.

    Every part drafts below the same root, and no part knows of the others. In a single step, with
    coupled sampling or greedily, the union accepts at least as many tokens as each part alone would
    with its share of the nodes. (Over a whole text this need not hold: after another number of
    tokens the next step begins elsewhere.)

    The union has no q, because its tokens come from different distributions. Coupled sampling needs
    none. With the rules for independent random numbers it is verified by
    `specjax.decoding.verification.matching`, and the parts choose their likeliest tokens instead of
    drawing them.

    If a batch fills fewer nodes than there is room for, the step runs with the smallest of three
    compiled numbers of nodes that holds them. So a part that offers nothing costs little. A part
    with no slots does not draft, and keeps its state up to date.

    Attributes:
        parts: the drafters, in the order of their nodes.
        slots: the maximum number of nodes of each part, one number for each. None: as many as the
            part drafts. It sets ``draft``.
        draft: a `UnionTree` with the shape and the slots of each part, which replaces the shapes of
            the parts. By default it has the shapes that the parts have. With any other shape the
            first part drafts this shape, alone, and the other parts keep their states up to date:
            an engine can turn to such a draft under load.

    Examples:
        >>> drafter = specjax.Together(
        ...     (specjax.EarlyExit(1, draft=2), specjax.PromptLookup(draft=4)), slots=(2, 4)
        ... )
        >>> drafter.draft_shape.nodes  # the root, 2 and 4
        7
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
        >>> offered = result.stats.accepted_by.sum(axis=0)  # accepted tokens, by part
        >>> offered.shape, bool(offered.max() <= result.stats.accepted.sum())
        ((2,), True)
    """

    parts: tuple[Drafter, ...]
    slots: InitVar[tuple[int, ...] | None] = None
    draft: DraftShape | int | None = struct.field(pytree_node=False, default=None)  # pyright: ignore[reportIncompatibleVariableOverride]

    _takes_unions = True

    def __post_init__(self, slots: tuple[int, ...] | None) -> None:
        if slots is not None or self.draft is None:
            shapes = (
                self.draft.shapes
                if isinstance(self.draft, UnionTree)
                else tuple(part.draft_shape for part in self.parts)
            )
            object.__setattr__(self, "draft", UnionTree(shapes, slots))
        super().__post_init__()

    # --- the parts, as they draft ---

    @property
    def drafting(self) -> tuple[Drafter, ...]:
        """The parts that draft now, the first alone or those with slots, with their shapes."""
        shape = self.draft_shape
        shapes = shape.shapes if isinstance(shape, UnionTree) else (shape,)
        return tuple(
            self.parts[index]
            if self.parts[index].draft_shape == shapes[index]
            else replace(self.parts[index], draft=shapes[index])  # pyright: ignore[reportArgumentType] - every drafter is a dataclass
            for index in self._drafting_indices
            if index < len(self.parts)  # `check` refuses a shape of more parts
        )

    @property
    def _drafting_indices(self) -> tuple[int, ...]:
        """The indices of the parts that draft now."""
        shape = self.draft_shape
        slots = shape.slots if isinstance(shape, UnionTree) else (1,)
        return tuple(index for index, slot in enumerate(slots or ()) if slot)

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(type(part).__name__ for part in self.parts)

    @property
    def grows_trees(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].grows_trees

    @property
    def max_positions(self) -> int | None:
        return min(
            (part.max_positions for part in self.parts if part.max_positions is not None),
            default=None,
        )

    @property
    def node_counts(self) -> tuple[int, ...]:
        shape = self.draft_shape
        if not isinstance(shape, UnionTree):
            return self.drafting[0].node_counts
        assert shape.slots is not None
        # With equal drafts, or with parts that offer nothing, there are no more nodes than in the
        # shortest draft of one part.
        least = max(
            1 + min(part.node_counts[0] - 1, slot, shape.nodes - 1)
            for part, slot in zip(self.drafting, filter(None, shape.slots), strict=True)
        )
        return tuple(sorted({least, (least + shape.nodes + 1) // 2, shape.nodes}))

    def check(self, target: Target) -> None:
        shape = self.draft_shape
        if isinstance(shape, UnionTree) and len(shape.shapes) != len(self.parts):
            raise InputError(
                f"draft={shape}: it has {len(shape.shapes)} parts, but there are"
                f" {len(self.parts)} drafters; give one shape for each"
            )
        indices = self._drafting_indices
        idle = (part for index, part in enumerate(self.parts) if index not in indices)
        for part in (*self.drafting, *idle):
            part.check(target)

    # --- what the parts need of the target ---

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return _union(part.taps(config) for part in self.parts)

    def likely_tokens(self, config: ModelConfig) -> int:
        return max(part.likely_tokens(config) for part in self.parts)

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return _union(part.reads(config) for part in self.drafting)

    def _states_for(self, part: Drafter, config: ModelConfig, output: States) -> States:
        """Return the target's states with the taps of one part alone."""
        taps = self.taps(config)
        chosen = [taps.index(layer) for layer in part.taps(config)]
        if len(chosen) == len(taps):
            return output
        return replace(output, taps=output.taps[:, :, jnp.array(chosen, jnp.int32)])

    def _committed_for(self, part: Drafter, config: ModelConfig, committed: Committed) -> Committed:
        count, likely = part.likely_tokens(config), committed.likely
        if likely is not None:
            likely = (
                LikelyTokens(likely.tokens[..., :count], likely.logprobs[..., :count])
                if count
                else None
            )
        return replace(
            committed, output=self._states_for(part, config, committed.output), likely=likely
        )

    # --- hooks ---

    def start(self, target: Target, batch: int, capacity: int) -> PartStates:
        return tuple(part.start(target, batch, capacity) for part in self.parts)

    def append_committed(
        self, target: Target, state: PartStates, committed: Committed
    ) -> PartStates:
        return tuple(
            part.append_committed(
                target, part_state, self._committed_for(part, target.config, committed)
            )
            for part, part_state in zip(self.parts, state, strict=True)
        )

    def in_segment(self, state: PartStates, segments: jax.Array) -> PartStates:
        return tuple(
            part.in_segment(part_state, segments)
            for part, part_state in zip(self.parts, state, strict=True)
        )

    def prompts_read(
        self, target: Target, state: PartStates, tokens: jax.Array, cache: KVCache | PagedCache
    ) -> PartStates:
        return tuple(
            part.prompts_read(target, part_state, tokens, cache)
            for part, part_state in zip(self.parts, state, strict=True)
        )

    def propose(
        self,
        target: Target,
        state: PartStates,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        cache: Any = None,
    ) -> tuple[Draft, PartStates]:
        drafting, shape, reads = self.drafting, self.draft_shape, self.reads(target.config)
        places = self._drafting_indices
        before = [state[place] for place in places]
        if isinstance(shape, UnionTree) and not sampling.coupled:
            # A merged draft has no q. A chosen token is accepted more often than a drawn one then.
            sampling = replace(sampling, greedy=True)
        drafts, proposed = [], []
        for part, part_state in zip(drafting, before, strict=True):
            layers = [reads.index(layer) for layer in part.reads(target.config)]
            caches = {"cache": cache.of_layers(layers)} if layers else {}
            part_keys = keys[: part.draft_shape.depth]
            draft, after = part.propose(
                target, part_state, root, sampling, part_keys, active, **caches
            )
            drafts.append(draft)
            proposed.append(after)
        if isinstance(shape, UnionTree):
            assert shape.slots is not None
            merged, indices = merge(drafts, tuple(filter(None, shape.slots)), shape.most)
            offered_by = merged.offered_by
            assert offered_by is not None
        else:
            merged = drafts[0]
            first = jnp.arange(merged.tokens.shape[1], dtype=jnp.int32)
            indices = (jnp.broadcast_to(first, merged.tokens.shape),)
            offered_by = jnp.pad(merged.drafted, ((0, 0), (1, 0)))[..., None]
        by_all = jnp.zeros((*merged.tokens.shape, len(self.parts)), bool)
        merged = replace(merged, offered_by=by_all.at[..., jnp.array(places)].set(offered_by))
        states = list(state)
        for place, part, part_state, after, part_nodes in zip(
            places, drafting, before, proposed, indices, strict=True
        ):
            states[place] = part.after_merge(part_state, after, part_nodes)
        return merged, tuple(states)

    def update(
        self,
        target: Target,
        state: PartStates,
        draft: Draft,
        verdict: Verdict,
        committed: Committed,
    ) -> PartStates:
        return tuple(
            part.update(
                target,
                part_state,
                draft,
                verdict,
                self._committed_for(part, target.config, committed),
            )
            for part, part_state in zip(self.parts, state, strict=True)
        )

    def to_prefix_state(self, state: PartStates) -> PartStates:
        return tuple(
            part.to_prefix_state(part_state)
            for part, part_state in zip(self.parts, state, strict=True)
        )

    def from_prefix_state(self, fresh: PartStates, kept: Any) -> PartStates:
        return tuple(
            part.from_prefix_state(part_state, prefix)
            for part, part_state, prefix in zip(self.parts, fresh, kept, strict=True)
        )

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of all parts. Parts differ in depth, so all are those of a step."""
        drafting = self.drafting
        states = [state[index] if state else () for index in self._drafting_indices]
        reads = [
            part.drafting_reads(target, part_state, cache)
            for part, part_state in zip(drafting, states, strict=True)
        ]
        return DraftingReads(
            step=tuple(
                ((read.level,) * part.draft_shape.depth, read.step)
                for part, read in zip(drafting, reads, strict=True)
            )
        )


def _union(layers: Any) -> tuple[int, ...]:
    return tuple(sorted({layer for of_part in layers for layer in of_part}))
