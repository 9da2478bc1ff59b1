"""The drafts of a client that have no verdict yet, one below the other.

A *stretch* is a draft and the likeliest path through it. The first stretch follows the newest
committed token, and is what the client sends. While it waits for the verdict, the client drafts on:
the second stretch follows the last token of the first stretch's path, and so on. All paths together
are the text as the drafter alone would generate it. When the verdict comes, the client keeps the
drafts that follow the accepted tokens, and can send the next one at once.
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
        path: the tokens of the path, without the root.
    """

    tree: Tree
    path: tuple[int, ...]


class Speculation:
    """The drafts of one text that have no verdict yet, and the drafter's state.

    Attributes:
        tokens: the prompt and the committed tokens. The list belongs to the caller, who extends it
            before `commit`.
        heard: how many of these tokens the drafter's state includes for good, either with the
            target's hidden states or with simulated ones.
        stretches: the drafts; see the module.
    """

    def __init__(self, device: ClientDevice, settings: Settings, tokens: list[int]) -> None:
        """Start with an empty state of the drafter."""
        self.tokens = tokens
        self.stretches: list[Stretch] = []
        self._device, self._settings = device, settings
        self.heard = 0
        self._state: Known = device.start()
        # The state after all tokens and paths, with simulated hidden states, and its number of
        # tokens. The next stretch continues from it.
        self._simulated: tuple[Known, int] | None = None

    @property
    def path(self) -> tuple[int, ...]:
        """The text after the committed tokens, as the drafter alone generates it."""
        return tuple(token for stretch in self.stretches for token in stretch.path)

    def append_remote(
        self, tokens: Sequence[int], following: Sequence[int], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Append tokens with the target's hidden states.

        Args:
            tokens: ``[T]`` token ids, which follow the first ``heard`` tokens.
            following: ``[T]`` the token after each.
            arrays: the hidden states by name, ``[T, …]`` each.
        """
        # The simulation continued from the state before, without these hidden states.
        self._simulated = None
        self._state = self._device.append_remote(self._state, tokens, following, arrays)
        self.heard += len(tokens)

    def append_unverified(self, tokens: Sequence[int], following: Sequence[int]) -> None:
        """Append tokens for good whose hidden states the target will never send."""
        self._simulated = None
        self._state = self._device.append_unverified(self._state, tokens, following)
        self.heard += len(tokens)

    def draft(self, depth: int) -> None:
        """Draft one more stretch, which follows the last one's path."""
        self.stretches.append(self._below(self.path, depth))

    def redraft(self, depth: int) -> None:
        """Discard all stretches, and draft one that follows the newest committed token.

        The draft uses all hidden states that have arrived by now.
        """
        self.stretches = []
        self._simulated = None
        self.draft(depth)

    def _below(self, path: tuple[int, ...], depth: int) -> Stretch:
        text = (*self.tokens, *path)
        state, count = self._simulated or (self._state, self.heard)
        if len(text) - 1 > count:  # the state never includes the last token, which is the root
            state = self._device.append_unverified(state, text[count:-1], text[count + 1 :])
            self._simulated = state, len(text) - 1
        tree = self._device.propose(state, text[-1], len(text), self._settings, depth)
        return Stretch(tree, tree.path)

    def commit(self, emitted: Sequence[int]) -> bool:
        """Keep the drafts that follow the emitted tokens, and return whether there are any.

        `tokens` ends with the emitted tokens already.
        """
        self._simulated = None
        self.stretches = _after(self.stretches, emitted)
        return bool(self.stretches)

    def to_send(self, nodes: int, depth: int, *, as_chain: bool) -> Tree:
        """Return the draft to send.

        Args:
            nodes: the maximum number of nodes, with the root.
            depth: the maximum depth.
            as_chain: whether to send the likeliest path alone. Otherwise the draft is the trees of
                all stretches, one below the other.
        """
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
    """Return the parts of the stretches that follow the last emitted token."""
    if not stretches:
        return []
    (first, *rest), is_likeliest = stretches, True
    tree, path = first.tree, first.path
    for token in emitted:
        # This is the end of the likeliest path, where the next stretch begins.
        while not path and is_likeliest and rest:
            (following, *rest) = rest
            tree, path = following.tree, following.path
        below = tree.below(token)
        if below is None:
            return []
        is_likeliest = is_likeliest and token == path[0]
        tree = below
        path = path[1:] if is_likeliest else below.path
    remaining = [Stretch(tree, path), *(rest if is_likeliest else [])]
    while remaining and not remaining[0].path:  # a root alone is no draft
        remaining.pop(0)
    return remaining
