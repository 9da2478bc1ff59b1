"""One step of decoding to look at: what was drafted, and what the target accepted of it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.drafters.base import Drafter
from specjax.drafts.draft import Draft
from specjax.models.transformer import Target
from specjax.progress import track
from specjax.reports import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Snapshot:
    """One step of one row.

    Attributes:
        tokens: ``[N]`` the draft, its root first.
        parents: ``[N]``.
        valid: ``[N]`` bool, the nodes that were drafted.
        path: accepted nodes, the root first.
        bonus: the token that the target added after them.
    """

    tokens: np.ndarray
    parents: np.ndarray
    valid: np.ndarray
    path: tuple[int, ...]
    bonus: int

    def draw(self, tokenizer: Any) -> "Figure":
        """The tree with its tokens as text, the accepted path in green."""
        labels = [_label(tokenizer, int(token)) for token in self.tokens]
        return pictures.draw_draft(self.parents, self.path, labels, _label(tokenizer, self.bonus), self.valid)


def take_snapshot(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    options: GenerationOptions | None = None,
    steps: int = 16,
) -> Snapshot:
    """Of the first ``steps`` steps after ``prompt`` the one that accepted most, the earliest among equals.

    With the same ``options`` as `decoding.generate` it makes these steps too. None: greedy, and as many tokens as ``steps``
    may take.

    Raises:
        InputError: as `decoding.generate`.
    """
    if options is None:
        most = max(1, min(steps * (drafter.draft_shape.depth + 1), target.config.max_positions - len(prompt)))
        options = GenerationOptions(max_new_tokens=most)
    drafter, state = decoding.start(target, drafter, [prompt], options=options)
    best: Snapshot | None = None
    for _ in track(range(steps), "making the steps to draw"):
        state, watched = _step(target, drafter, state)
        draft, path, emitted, bonus, done = sharding.to_host(watched, target.mesh)
        if best is None or emitted[0] > len(best.path):
            best = _of_row(draft, path[0, : emitted[0]], bonus[0])
        if done[0]:
            break
    assert best is not None
    return best


@partial(jax.jit, donate_argnames="state")
def _step(target: Target, drafter: Drafter, state: decoding.DecodeState) -> tuple[decoding.DecodeState, tuple[Any, ...]]:
    """One step, and what the host reads of it: the draft, the accepted path, tokens emitted, the last of them, done."""
    state, info = decoding.step(target, drafter, state)
    return state, (replace(info.draft, q=None), info.path, info.emitted, state.roots, state.done)


def _of_row(draft: Draft, path: np.ndarray, bonus: np.integer) -> Snapshot:
    """Row 0; ``path`` is its accepted nodes."""
    valid = np.ones(draft.tokens.shape, bool) if draft.valid is None else np.asarray(draft.valid)
    return Snapshot(
        tokens=np.asarray(draft.tokens)[0],
        parents=np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[0],
        valid=valid[0],
        path=tuple(path.tolist()),
        bonus=int(bonus),
    )


def _label(tokenizer: Any, token: int) -> str:
    """A token as text that shows its spaces and line ends."""
    return tokenizer.decode([token]).replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or f"<{token}>"
