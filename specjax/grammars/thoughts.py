"""The position of a text in its thoughts, and the tokens that a thinking budget leaves legal.

A thought begins after a sequence of tokens and ends with another one. With a budget, all tokens are
legal while the thought has fewer tokens than the budget. Then its end alone is: token by token, the
rest of the end sequence. If the thought's last tokens are a beginning of that sequence, the longest
such beginning counts, and the rest follows it. After the end all tokens are legal again, and a
later thought has the whole budget.

The state of a text depends on its tokens alone, so it is computed along each path of a draft.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specjax.arguments import is_whole
from specjax.errors import InputError, ThinkingBudgetError
from specjax.grammars.matcher import Matcher, has_bit, mask_words


class ThoughtState(NamedTuple):
    """The state of a text with thoughts, after some of its tokens.

    Attributes:
        is_inside: whether the text is inside a thought.
        count: the number of tokens since the thought began; 0 outside.
        matched: the number of tokens of the next sequence that are written already: of the end
            inside a thought, of the beginning outside.
    """

    is_inside: bool = False
    count: int = 0
    matched: int = 0


@dataclass(frozen=True)
class ThoughtTokens:
    """The tokens that begin and end a thought.

    Attributes:
        begin_ids: the tokens after which a thought begins, at least one.
        end_ids: the tokens with which it ends, at least one.
        answer_ids: the tokens that begin an answer in a prompt. Only what follows the last of them
            decides whether a prompt ends inside a thought. Empty, or missing from the prompt: the
            whole prompt decides.

    Raises:
        InputError: a sequence is empty or has something else than token ids.

    Examples:
        >>> from specjax.grammars import ThoughtTokens
        >>> thought = ThoughtTokens(begin_ids=(7,), end_ids=(8, 9))
        >>> thought.after([1, 7, 2, 8])  # inside a thought, with half of its end
        ThoughtState(is_inside=True, count=2, matched=1)
        >>> thought.after([1, 7, 2, 8, 9])
        ThoughtState(is_inside=False, count=0, matched=0)
    """

    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the sequences, and store tuples of Python numbers."""
        for name in ("begin_ids", "end_ids", "answer_ids"):
            ids: Any = getattr(self, name)
            is_list = isinstance(ids, list | tuple | np.ndarray)
            if not is_list or not all(is_whole(it) and it >= 0 for it in list[Any](ids)):
                raise InputError(f"{name}={ids!r}: give a sequence of token ids, such as (7,)")
            if name != "answer_ids" and not len(ids):
                raise InputError(f"{name}=(): give at least one token id")
            object.__setattr__(self, name, tuple(int(token) for token in ids))

    @cached_property
    def _borders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _borders(self.begin_ids), _borders(self.end_ids)

    def step(self, state: ThoughtState, token: int) -> ThoughtState:
        """Return the state after one more token."""
        sequence = self.end_ids if state.is_inside else self.begin_ids
        matched = _extended(sequence, self._borders[state.is_inside], state.matched, token)
        if matched == len(sequence):
            return ThoughtState(not state.is_inside)
        return ThoughtState(state.is_inside, state.count + state.is_inside, matched)

    def after(self, tokens: Iterable[int], state: ThoughtState = ThoughtState()) -> ThoughtState:
        """Return the state after some tokens. At first the text is outside of a thought."""
        for token in tokens:
            state = self.step(state, int(token))
        return state

    def start(self, prompt: Sequence[int]) -> ThoughtState:
        """Return the state in which the text after a prompt starts.

        If the prompt ends inside a thought, the count starts at 0 there.

        Examples:
            >>> from specjax.grammars import ThoughtTokens
            >>> thought = ThoughtTokens(begin_ids=(7,), end_ids=(8,), answer_ids=(1, 2))
            >>> thought.start([1, 2, 7, 5, 5])
            ThoughtState(is_inside=True, count=0, matched=0)
            >>> thought.start([7, 5, 1, 2])  # the token 7 is not in the answer
            ThoughtState(is_inside=False, count=0, matched=0)
        """
        tokens, size = [int(token) for token in prompt], len(self.answer_ids)
        begin = 0
        if size:
            last, answer = self.answer_ids[-1], list(self.answer_ids)
            ends = (end for end in range(len(tokens), size - 1, -1) if tokens[end - 1] == last)
            begin = next((end for end in ends if tokens[end - size : end] == answer), 0)
        return self.after(tokens[begin:])._replace(count=0)

    def check(self, vocab_size: int) -> None:
        """Refuse, with an InputError, tokens that a vocabulary of this size does not have."""
        for name in ("begin_ids", "end_ids"):
            if bad := [token for token in getattr(self, name) if token >= vocab_size]:
                raise InputError(
                    f"{name}={bad}: outside the vocabulary of {vocab_size} tokens; give ids of the"
                    " target's tokenizer"
                )


class BudgetMatcher(Matcher):
    """The position of one text under a thinking budget, and in its grammar if it has one.

    A token is legal if the budget and the grammar allow it. The matcher belongs to one row and one
    thread.

    Args:
        thought: the tokens that begin and end a thought.
        budget: the largest number of tokens of a thought before its end is forced.
        prompt: the tokens before the text.
        vocab_size: the number of tokens of the target, V.
        stop_token_ids: the tokens that end this text.
        inner: the matcher of the text's grammar, at the beginning of the text; None without one.

    Attributes:
        thought: the tokens that begin and end a thought.
        budget: the budget.
        state: the state of the text.

    Examples:
        >>> from specjax.grammars import BudgetMatcher, ThoughtTokens
        >>> thought = ThoughtTokens(begin_ids=(7,), end_ids=(8, 9))
        >>> matcher = BudgetMatcher(thought, budget=2, prompt=[1], vocab_size=16)
        >>> matcher.append([3, 7, 4])
        >>> matcher.free_tokens, matcher.forced(most=8)
        (1, [])
        >>> matcher.append([5])
        >>> matcher.forced(most=8), matcher.mask().tolist()
        ([8, 9], [256])
    """

    def __init__(
        self,
        thought: ThoughtTokens,
        budget: int,
        prompt: Sequence[int],
        vocab_size: int,
        stop_token_ids: Sequence[int] = (),
        inner: Matcher | None = None,
    ) -> None:
        """Start after the prompt."""
        self.thought, self.budget, self.state = thought, budget, thought.start(prompt)
        self._inner, self._stops = inner, frozenset(stop_token_ids)
        self._words, self._is_ended = mask_words(vocab_size), False
        # Texts that share it share their measured rates of illegal tokens.
        self.compiled: Any = thought if inner is None else inner.compiled

    def begin_step(self) -> None:
        """Limit the grammar's time until the next call, see `Matcher.begin_step`."""
        if self._inner is not None:
            self._inner.begin_step()

    @property
    def draft_seconds(self) -> float:
        """The CPU time of the grammar's masks of the newest draft."""
        return 0.0 if self._inner is None else self._inner.draft_seconds

    @property
    def has_grammar(self) -> bool:
        """True if the text has a grammar, too."""
        return self._inner is not None

    @property
    def is_complete(self) -> bool:
        """True if the text so far satisfies its grammar, or has none."""
        return self._inner is None or self._inner.is_complete

    @property
    def is_over(self) -> bool:
        """True if no token can follow: a stop token has come, or the grammar's text has ended."""
        return self._is_ended or (self._inner is not None and self._inner.is_over)

    @property
    def is_stuck(self) -> bool:
        """True if the text must go on, and the grammar and the budget allow no common token."""
        if self.is_over or self._inner is None:
            return False
        if self._forced_token(self.state) is None:
            return self._inner.is_stuck
        return not self.mask().any()

    def stuck_error(self, rows: Sequence[int], result: Any = None) -> InputError:
        """Return the error for a text that is stuck, see `Matcher.stuck_error`."""
        token = self._forced_token(self.state)
        if token is None:
            return super().stuck_error(rows, result)
        return ThinkingBudgetError(rows, token, result)

    @property
    def free_tokens(self) -> int:
        """The number of next tokens that are legal whatever they are."""
        if self._is_ended or self._inner is not None:
            return 0
        if self.state.is_inside:
            return max(0, self.budget - self.state.count)
        return len(self.thought.begin_ids) - self.state.matched + self.budget

    @property
    def leaving_rate(self) -> float | None:
        """The chance that a free token is not legal, where the budget's end tells it; else None."""
        if not self.state.is_inside or self._inner is not None:
            return None
        return 1 / (self.free_tokens + 1)

    def append(self, tokens: Sequence[int]) -> None:
        """Advance over committed tokens.

        Raises:
            RuntimeError: a token is not legal. Verification never emits such a token.
            GrammarLimitError: the grammar has become too complex.
        """
        if self._inner is not None:
            self._inner.append(tokens)
        for token in map(int, tokens):
            forced = self._forced_token(self.state)
            if forced is not None and token != forced:
                raise RuntimeError(f"token {token} is not legal: the thought must end")
            if token in self._stops:
                self._is_ended = True
                break
            self.state = self.thought.step(self.state, token)

    def mask(self) -> np.ndarray:
        """Return ``[ceil(V / 32)]`` uint32, the bits of the legal tokens, lowest bit first."""
        all_legal = np.full(self._words, np.uint32(0xFFFFFFFF))
        bits = all_legal if self._inner is None else self._inner.mask()
        self._restrict(bits, self.state)
        return bits

    def _restrict(self, bits: np.ndarray, state: ThoughtState) -> None:
        """Clear the bits of the tokens that the budget does not allow in a state."""
        token = self._forced_token(state)
        if token is not None:
            word = bits[token >> 5] & np.uint32(1 << (token & 31))
            bits[:] = 0
            bits[token >> 5] = word

    def _forced_token(self, state: ThoughtState) -> int | None:
        """Return the only token that the budget allows in a state; None: it allows all."""
        if not state.is_inside or state.count < self.budget:
            return None
        return self.thought.end_ids[state.matched]

    def write_masks(
        self,
        masks: np.ndarray,
        tokens: Sequence[int],
        parents: Sequence[int],
        drafted: Sequence[bool],
    ) -> int:
        """Write the masks of `masks`, and return the number of nodes that are not legal."""
        if self._is_ended:
            return 0
        if self._inner is not None:
            self._inner.write_masks(masks, tokens, parents, drafted)
        states: list[ThoughtState | None] = [None] * len(tokens)  # None: it is never reached
        illegal = 0
        for node, token in enumerate(map(int, tokens)):
            if node == 0:
                state = self.state
            else:
                above = states[parents[node]]
                if above is None or not drafted[node]:
                    continue
                if not has_bit(masks[parents[node]], token):
                    illegal += 1
                    continue
                if token in self._stops:
                    continue
                state = self.thought.step(above, token)
            states[node] = state
            if self._inner is None:
                masks[node] = 0xFFFFFFFF
            self._restrict(masks[node], state)
        return illegal

    def count_legal(self, tokens: Sequence[int]) -> int:
        """Return how many ``tokens`` could follow, up to the first that is not legal."""
        if self._is_ended:
            return 0
        most = len(tokens) if self._inner is None else self._inner.count_legal(tokens)
        state = self.state
        for index, token in enumerate(map(int, tokens[:most])):
            if self._forced_token(state) not in (None, token):
                return index
            if token in self._stops:
                return index + 1
            state = self.thought.step(state, token)
        return most

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that the budget or the grammar forces to come next."""
        if self._is_ended:
            return []
        if self._forced_token(self.state) is not None:
            return list(self.thought.end_ids[self.state.matched :][:most])
        return [] if self._inner is None else self._inner.forced(most)


@dataclass(frozen=True)
class ThinkingBudget:
    """The largest number of tokens of each thought of a text.

    Attributes:
        tokens: the number of tokens after the beginning of a thought, after which its end is
            forced; 0 ends it at once. The tokens of the end do not count, except those that the
            text had written before the budget was used up.
        thought: the tokens that begin and end a thought; or their two texts, which `encoded`
            turns into tokens. None: `encoded` takes those of the tokenizer.

    Raises:
        InputError: a value has a wrong type or is out of range.

    Examples:
        >>> import specjax
        >>> from specjax.grammars import ThoughtTokens
        >>> budget = specjax.ThinkingBudget(100, ThoughtTokens(begin_ids=(7,), end_ids=(8, 9)))
        >>> budget.matcher(prompt=[5, 7], vocab_size=16).free_tokens
        100
        >>> specjax.ThinkingBudget(-1)
        Traceback (most recent call last):
        specjax.errors.InputError: thinking_budget=-1: must be a whole number, at least 0, ...
    """

    tokens: int
    thought: ThoughtTokens | tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_budget(self.tokens)
        object.__setattr__(self, "tokens", int(self.tokens))
        if self.thought is None or isinstance(self.thought, ThoughtTokens):
            return
        object.__setattr__(self, "thought", check_texts(self.thought))

    def with_thought(self, thought: ThoughtTokens) -> "ThinkingBudget":
        """Return the same budget with these tokens of thoughts."""
        return replace(self, thought=thought)

    def check(self, vocab_size: int) -> ThoughtTokens:
        """Return the tokens of thoughts, after a check that a vocabulary of this size has them.

        Raises:
            InputError: they are texts, or are not in the vocabulary.
        """
        if not isinstance(self.thought, ThoughtTokens):
            raise InputError(
                f"thinking_budget={self!r}: give it token ids, with"
                " specjax.grammars.ThoughtTokens(begin_ids, end_ids)"
            )
        self.thought.check(vocab_size)
        return self.thought

    def check_can_end(self, bias: np.ndarray, words: Sequence[Sequence[int]]) -> None:
        """Refuse biases that ban a token of the end, which could then not be forced.

        Args:
            bias: ``[V]`` what is added to the logits; -inf bans a token.
            words: banned words of several tokens.

        Raises:
            InputError: a token of the end is banned, or is the last one of a banned word.
        """
        assert isinstance(self.thought, ThoughtTokens)
        last = {word[-1] for word in words}
        for token in self.thought.end_ids:
            if np.isneginf(bias[token]) or token in last:
                raise InputError(
                    f"thinking_budget={self.tokens}: token {token}, which ends a thought, may be"
                    " banned by logit_bias, allowed_token_ids or bad_words; allow it, or leave out"
                    " the budget"
                )

    def matcher(
        self,
        prompt: Sequence[int],
        vocab_size: int,
        stop_token_ids: Sequence[int] = (),
        inner: Matcher | None = None,
    ) -> BudgetMatcher:
        """Return a matcher for one text after a prompt. The arguments are `BudgetMatcher`'s.

        Raises:
            InputError: the tokens of thoughts are texts, or are not in the vocabulary.
        """
        thought = self.check(vocab_size)
        return BudgetMatcher(thought, self.tokens, prompt, vocab_size, stop_token_ids, inner)


def check_budget(tokens: Any) -> None:
    """Refuse, with an InputError, a budget that is not a number of tokens.

    Examples:
        >>> from specjax.grammars.thoughts import check_budget
        >>> check_budget(0)
        >>> check_budget(2.5)
        Traceback (most recent call last):
        specjax.errors.InputError: thinking_budget=2.5: must be a whole number, at least 0, ...
    """
    if isinstance(tokens, bool) or not is_whole(tokens) or tokens < 0:
        raise InputError(
            f"thinking_budget={tokens!r}: must be a whole number, at least 0, or None for no budget"
        )


def check_texts(texts: Any) -> tuple[str, str]:
    """Return the two texts that begin and end a thought.

    Raises:
        InputError: the value is something else.

    Examples:
        >>> from specjax.grammars.thoughts import check_texts
        >>> check_texts(["<think>", "</think>"])
        ('<think>', '</think>')
    """
    pair = list(texts) if isinstance(texts, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(it, str) and it for it in pair):
        raise InputError(
            f"thought_tokens={texts!r}: give the two texts that begin and end a thought, such as"
            ' ("<think>", "</think>")'
        )
    return pair[0], pair[1]


def _borders(sequence: Sequence[int]) -> tuple[int, ...]:
    """Return for each prefix of a sequence the length of its longest proper prefix that ends it.

    It is the failure function of Knuth, Morris and Pratt.
    """
    borders = [0] * len(sequence)
    for end in range(1, len(sequence)):
        borders[end] = _extended(sequence, borders, borders[end - 1], sequence[end])
    return tuple(borders)


def _extended(sequence: Sequence[int], borders: Sequence[int], matched: int, token: int) -> int:
    """Return the longest prefix of a sequence that a text ends with after one more token.

    ``matched`` is its length before the token, and is shorter than the sequence.
    """
    while matched and sequence[matched] != token:
        matched = borders[matched - 1]
    return matched + (sequence[matched] == token)
