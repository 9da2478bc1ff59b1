"""What a client believes of the text that is not committed yet: its drafts, one below the other.

A *stretch* is a draft and the likeliest path through it. The first stretch hangs below the newest committed token; it is what
is sent. While the verdict is under way the client drafts on: the second stretch hangs below the last token of the first one's
path, and so forth. All paths together are the text as the drafter alone would write it. When the verdict comes, what it
confirms is kept: a draft below the right token, though drafted before the token was known, is the next to be sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.client.device import ClientDevice, Known, Settings
from specjax.client.trees import Tree


@dataclass(frozen=True)
class Stretch:
    """A draft, and the likeliest path through it.

    Attributes:
        tree: the draft.
        path: tokens below its root.
    """

    tree: Tree
    path: tuple[int, ...]


class Speculation:
    """Of one text.

    Attributes:
        tokens: the prompt and what is committed; the caller's list, which it extends before `commit`.
        heard: how many of them the drafter knows: it was told something of them, or assumes them for good.
        stretches: see the module.
    """

    def __init__(self, device: ClientDevice, settings: Settings, tokens: list[int]) -> None:
        """Nothing is known yet."""
        self.tokens = tokens
        self.stretches: list[Stretch] = []
        self._device, self._settings = device, settings
        self.heard = 0
        self._known: Known = device.start()
        self._assumed: tuple[Known, int] | None = None  # and what it would know if so many tokens were heard

    @property
    def path(self) -> tuple[int, ...]:
        """The text after the committed tokens, as the drafter alone writes it."""
        return tuple(token for stretch in self.stretches for token in stretch.path)

    def append_remote(self, tokens: Sequence[int], following: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        """The target has told something of ``tokens``, which follow those that are heard."""
        self._known, self._assumed = self._device.append_remote(self._known, tokens, following, arrays), None
        self.heard += len(tokens)

    def append_unverified(self, tokens: Sequence[int], following: Sequence[int]) -> None:
        """Go on, for good, after ``tokens`` of which the target will tell nothing."""
        self._known, self._assumed = self._device.append_unverified(self._known, tokens, following), None
        self.heard += len(tokens)

    def draft(self, depth: int) -> None:
        """Draft one more stretch, below the last one's path."""
        self.stretches.append(self._below(self.path, depth))

    def redraft(self, depth: int) -> None:
        """Draft anew below the newest committed token, by all that was told by now."""
        self.stretches = []
        self._assumed = None
        self.draft(depth)

    def _below(self, path: tuple[int, ...], depth: int) -> Stretch:
        text = (*self.tokens, *path)
        known, count = self._assumed or (self._known, self.heard)
        if len(text) - 1 > count:  # all but the last token, which is the root
            known = self._device.append_unverified(known, text[count:-1], text[count + 1 :])
            self._assumed = known, len(text) - 1
        tree = self._device.propose(known, text[-1], len(text), self._settings, depth)
        return Stretch(tree, tree.path)

    def commit(self, emitted: Sequence[int]) -> bool:
        """``emitted`` tokens, which `tokens` has now, were committed. Whether a draft is left below the last of them."""
        self._assumed = None
        self.stretches = _after(self.stretches, emitted)
        return bool(self.stretches)

    def to_send(self, nodes: int, depth: int, *, as_chain: bool) -> Tree:
        """The draft for the server, of at most so many ``nodes`` and so deep: the likeliest path alone, or the stretches' trees
        one below the other."""
        if as_chain:
            return Tree.chain(self.tokens[-1], self.path[: min(depth, nodes - 1)])
        first, *rest = self.stretches
        tree = first.tree
        for stretch in rest:
            if len(tree.path) >= depth:
                break
            tree = tree.joined(stretch.tree)
        return tree.cut(nodes, depth)


def _after(stretches: list[Stretch], emitted: Sequence[int]) -> list[Stretch]:
    """What is left of ``stretches`` below the last of the ``emitted`` tokens."""
    if not stretches:
        return []
    (first, *rest), is_likeliest = stretches, True
    tree, path = first.tree, first.path
    for token in emitted:
        while not path and is_likeliest and rest:  # at the end of the likeliest path, where the next stretch begins
            (following, *rest) = rest
            tree, path = following.tree, following.path
        below = tree.below(token)
        if below is None:
            return []
        is_likeliest = is_likeliest and token == path[0]
        tree = below
        path = path[1:] if is_likeliest else below.path
    kept = [Stretch(tree, path), *(rest if is_likeliest else [])]
    while kept and not kept[0].path:  # a root alone is no draft
        kept.pop(0)
    return kept
