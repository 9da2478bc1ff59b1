"""The draft and the verdict of one step of decoding, for figures."""

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
        tokens: ``[N]`` the token ids of the draft, beginning with the root.
        parents: ``[N]`` the parent of each node.
        valid: ``[N]`` bool which nodes were drafted.
        path: the accepted nodes, beginning with the root.
        bonus: the bonus token.
        offered_by: for each node, the names of the parts that offered it; () without parts.
    """

    tokens: np.ndarray
    parents: np.ndarray
    valid: np.ndarray
    path: tuple[int, ...]
    bonus: int
    offered_by: tuple[tuple[str, ...], ...] = ()

    def draw(self, tokenizer: Any) -> "Figure":
        """Draw the tree with its tokens as text, and the accepted path in green.

        Of several drafters, their names are below the nodes that they offered.
        """
        labels = [_label(tokenizer, int(token)) for token in self.tokens]
        return pictures.draw_draft(
            self.parents,
            self.path,
            labels,
            _label(tokenizer, self.bonus),
            self.valid,
            notes=[" + ".join(names) for names in self.offered_by],
        )


def take_snapshot(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    options: GenerationOptions | None = None,
    steps: int = 16,
) -> Snapshot:
    """Return the step that accepts the most tokens, the first one among equals.

    Args:
        target: the target.
        drafter: the drafter.
        prompt: the token ids of the prompt.
        options: the options of generation, without a grammar. With the same options,
            `decoding.generate` does the same steps. None for greedy decoding with enough tokens for
            all steps.
        steps: the maximum number of steps after the prompt.

    Raises:
        InputError: An argument is invalid, as in `decoding.generate`.
    """
    if options is None:
        max_new_tokens = max(
            1,
            min(steps * (drafter.draft_shape.depth + 1), target.config.max_positions - len(prompt)),
        )
        options = GenerationOptions(max_new_tokens=max_new_tokens)
    options.check_has_no_grammar("take_snapshot")
    drafter, state = decoding.start(target, drafter, [prompt], options=options)
    best: Snapshot | None = None
    for _ in track(range(steps), "making the steps to draw"):
        state, watched = _step(target, drafter, state)
        draft, path, emitted, bonus, done = sharding.to_host(watched, target.mesh)
        if best is None or emitted[0] > len(best.path):
            best = _of_row(draft, path[0, : emitted[0]], bonus[0], drafter.part_names)
        if done[0]:
            break
    assert best is not None
    return best


@partial(jax.jit, donate_argnames="state")
def _step(
    target: Target, drafter: Drafter, state: decoding.DecodeState
) -> tuple[decoding.DecodeState, tuple[Any, ...]]:
    """Do one step.

    Returns:
        The state, and for the host: the draft, the accepted path, the number of emitted tokens, the
        last one of them, and whether the row is done.
    """
    state, info = decoding.step(target, drafter, state)
    return state, (replace(info.draft, q=None), info.path, info.emitted, state.roots, state.done)


def _of_row(
    draft: Draft, path: np.ndarray, bonus: np.integer, part_names: tuple[str, ...]
) -> Snapshot:
    """Return the snapshot of row 0, whose accepted nodes are ``path``."""
    offered_by = ()
    if draft.offered_by is not None:
        offered_by = tuple(
            tuple(name for name, offers in zip(part_names, node, strict=True) if offers)
            for node in np.asarray(draft.offered_by)[0]
        )
    valid = np.ones(draft.tokens.shape, bool) if draft.valid is None else np.asarray(draft.valid)
    return Snapshot(
        tokens=np.asarray(draft.tokens)[0],
        parents=np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[0],
        valid=valid[0],
        path=tuple(path.tolist()),
        bonus=int(bonus),
        offered_by=offered_by,
    )


def _label(tokenizer: Any, token: int) -> str:
    """Return a token as text in which spaces and line ends are visible."""
    return (
        tokenizer.decode([token]).replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
        or f"<{token}>"
    )
