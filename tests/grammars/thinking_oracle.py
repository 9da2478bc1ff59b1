"""Decoding under a thinking budget in the slowest and most obvious way.

For each token the whole text is read again from its prompt on, and the thoughts in it are searched
for without an automaton.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.grammars.oracle import Oracle


def thought_of(
    prompt: Sequence[int], output: Sequence[int], begin: Sequence[int], end: Sequence[int]
) -> tuple[bool, list[int], int]:
    """Return where a text stands.

    Returns:
        Whether it is inside a thought, its tokens since it is there or is not, and how many of
        these are output.
    """
    is_inside, since, count = False, [], 0
    for index, token in enumerate([*prompt, *output]):
        since.append(int(token))
        count += index >= len(prompt)
        mark = list(end if is_inside else begin)
        if since[-len(mark) :] == mark:
            is_inside, since, count = not is_inside, [], 0
    return is_inside, since, count


def forced_token(
    prompt: Sequence[int],
    output: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    budget: int | None,
) -> int | None:
    """Return the only token that may follow; None: any may."""
    is_inside, since, count = thought_of(prompt, output, begin, end)
    if budget is None or not is_inside or count < budget:
        return None
    matched = max(n for n in range(len(end)) if n == 0 or since[-n:] == list(end[:n]))
    return int(end[matched])


class ThinkingOracle(Oracle):
    """The target, a thinking budget, perhaps a grammar, and sampling parameters, for one text.

    Args:
        target: the target.
        begin: the tokens that begin a thought.
        end: the tokens that end it.
        budget: the budget; None: there is none.
        stop_ids: the tokens that end the text.
        compiler: the compiler of the grammar.
        grammar: the grammar; None: there is none.
        setting: sampling parameters by name.
    """

    def __init__(
        self,
        target: Any,
        begin: Sequence[int],
        end: Sequence[int],
        budget: int | None,
        stop_ids: Sequence[int],
        compiler: Any = None,
        grammar: Any = None,
        **setting: Any,
    ) -> None:
        self._has_grammar = grammar is not None
        if self._has_grammar:
            super().__init__(target, compiler, grammar, stop_ids, **setting)
        else:
            self._target, self._vocab = target, target.config.vocab_size
            self._stop_ids, self._setting = list(stop_ids), setting
        self.law, self._prompt = (begin, end, budget), []

    def legal(self, output: Sequence[int]) -> np.ndarray:
        """Return ``[V]`` bool, what may follow an output."""
        legal = super().legal(output) if self._has_grammar else np.ones(self._vocab, bool)
        token = forced_token(self._prompt, output, *self.law)
        return legal if token is None else legal & (np.arange(self._vocab) == token)

    def probabilities(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """Return ``[V]`` the distribution of the next token."""
        self._prompt = prompt
        return super().probabilities(prompt, output)
