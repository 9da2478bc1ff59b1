"""The position of one text in its grammar, and the masks of tokens that are legal there."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.errors import GrammarError, GrammarLimitError, InputError
from specjax.grammars.check_process import first_line

STEP_SECONDS = 0.04
"""The CPU time that one row's masks of a step may take."""

TOKEN_SECONDS, EXTRA_SECONDS = 0.01, 0.5
"""The CPU time that a text's masks may take in all: for each token, and once."""

_LIMIT = re.compile(
    "items; max is|Too many items|too many states|too many expressions|fuel exhausted"
)
"""What llguidance's errors say where a limit of `ROW_LIMITS` is exceeded."""

_ALL = np.uint32(0xFFFFFFFF)


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask for a vocabulary."""
    return -(-vocab_size // 32)


def has_bit(words: np.ndarray, token: int) -> bool:
    """Return whether a mask ``words [ceil(V / 32)]`` allows a token."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


class Matcher:
    """The position of one text in its grammar. It belongs to one row and one thread.

    Args:
        matcher: llguidance's matcher, at the beginning of a text.
        vocab_size: the number of tokens of the target, V.
        end_ids: the tokens that llguidance takes for ends of the text.
        stop_token_ids: the tokens that end this text. They are legal where the text is complete.
        validates: whether to check each token of a mask. llguidance's masks are wrong where the
            tokenizer has no token for a byte that the grammar forces.
        compiled: the `specjax.grammars.CompiledGrammar` that makes the matcher.

    Attributes:
        seconds: the CPU time that this matcher has taken.

    Examples:
        >>> import specjax
        >>> generate = specjax.load("embedded")
        >>> compiled = generate.grammar_compiler.compile(specjax.Choice(["yes", "no"]))
        >>> matcher = compiled.matcher(stop_token_ids=(0,))
        >>> y, n = generate.tokenizer.convert_tokens_to_ids(["y", "n"])
        >>> masks, illegal = matcher.masks([5, y, n, y], [-1, 0, 0, 1], [True] * 4)
        >>> masks.shape, illegal  # both are legal below the root; another y below y is not
        ((4, 96), 1)
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        validates: bool = False,
        compiled: Any = None,
    ) -> None:
        """Start at the beginning of a text."""
        self.compiled = compiled
        self._validates = validates
        self._matcher = matcher
        self._words = mask_words(vocab_size)
        self._stop_ids, self._end_ids = frozenset(stop_token_ids), frozenset(end_ids)
        # Few words have such tokens, and the others need no work.
        never = _bits([*end_ids, *stop_token_ids], self._words)
        stops = _bits(stop_token_ids, self._words)
        self._never = [(word, ~never[word]) for word in np.flatnonzero(never).tolist()]
        self._stops = [(word, stops[word]) for word in np.flatnonzero(stops).tolist()]
        self._has_ended = False
        self.seconds, self._tokens, self._deadline = 0.0, 0, math.inf
        self._draft_seconds = self._clock = 0.0
        self._address = 0

    def begin_step(self) -> None:
        """Limit the time until the next call: a later mask raises GrammarLimitError.

        The limit is `STEP_SECONDS`, or less if the text has used up `TOKEN_SECONDS` for each of
        its tokens and `EXTRA_SECONDS`. It is CPU time, which does not depend on other processes.
        """
        in_all = EXTRA_SECONDS + TOKEN_SECONDS * self._tokens
        self._deadline = min(self.seconds + STEP_SECONDS, in_all)

    @property
    def is_complete(self) -> bool:
        """True if the text so far satisfies the grammar."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """True if no token can follow: a stop token has come, or there is none that could come."""
        return self._has_ended or (self._matcher.is_stopped() and not self._stop_ids)

    @property
    def is_stuck(self) -> bool:
        """True if the text must go on, and no token is legal.

        The grammar needs a stop token as text, or bytes for which the tokenizer has no token.
        """
        return not (self.is_over or self.is_complete or self.mask().any())

    def stuck_error(self, rows: Sequence[int], result: Any = None) -> GrammarError:
        """Return the error for texts in ``rows`` that are stuck, with the batch's ``result``."""
        return GrammarError(rows, result)

    @property
    def draft_seconds(self) -> float:
        """The CPU time of the masks of the newest draft."""
        return self._draft_seconds

    @property
    def has_grammar(self) -> bool:
        """True if the text has a grammar. A `specjax.grammars.BudgetMatcher` may have none."""
        return True

    @property
    def free_tokens(self) -> int:
        """The number of next tokens that are certainly legal whatever they are."""
        return 0

    @property
    def leaving_rate(self) -> float | None:
        """The chance that a token is not legal if it is drawn freely; None: it must be measured."""
        return None

    def append(self, tokens: Sequence[int]) -> None:
        """Advance over committed tokens.

        Raises:
            RuntimeError: a token is not legal. Verification never emits such a token.
            GrammarLimitError: the grammar has become too complex.
        """
        started = time.thread_time()
        for token in map(int, tokens):
            if token in self._stop_ids:
                self._has_ended = True
                break
            if self._matcher.try_consume_tokens([token]) != 1:
                self._check()
                raise RuntimeError(f"token {token} is not legal")
            self._tokens += 1
        self.seconds += time.thread_time() - started

    def read(self, tokens: Sequence[int]) -> None:
        """Advance over tokens that may not be the engine's own. Each must be in its mask.

        `append` takes every tokenization of forced text.

        Raises:
            RuntimeError: a token is not legal.
            GrammarLimitError: the grammar has become too complex, or the text takes more than
                `EXTRA_SECONDS` of CPU time.
        """
        for token in map(int, tokens):
            is_forced = token not in self._stop_ids and self._matcher.compute_ff_bytes()
            if is_forced and not self._allows(token):
                raise RuntimeError(f"token {token} is not legal")
            self.append([token])
            if self.seconds > EXTRA_SECONDS:
                raise GrammarLimitError(f"{self.seconds:.2g} s for {self._tokens} tokens")

    def mask(self) -> np.ndarray:
        """Return ``[ceil(V / 32)]`` uint32, the bits of the legal tokens, lowest bit first.

        Raises:
            GrammarLimitError: the grammar has become too complex.
        """
        masks = np.zeros((1, self._words), np.uint32)
        self._start_masks(masks)
        self._write_mask(masks, 0)
        return masks[0]

    def _start_masks(self, masks: np.ndarray) -> None:
        """Prepare to write ``masks [N, ceil(V / 32)]``, and to measure the time of that."""
        self._address = masks.ctypes.data  # numpy takes as long for it as for half a mask
        self._clock = time.thread_time()

    def _write_mask(self, masks: np.ndarray, node: int) -> None:
        """Write the bits of the legal tokens into the mask of a node."""
        self._check()
        bits = masks[node]
        address = self._address + node * masks.strides[0]
        self._matcher.unsafe_compute_mask_ptr(address, bits.nbytes)
        for word, clear in self._never:
            bits[word] &= clear
        if self._validates and not self._matcher.is_error():
            bits &= _bits([t for t in _ids(bits) if self._takes(t)], self._words)
        self._count_seconds()
        self._check()
        if self._stops and self.is_complete:
            for word, stop_bits in self._stops:
                bits[word] |= stop_bits

    def _count_seconds(self) -> None:
        """Add the CPU time since the last call, or since `_start_masks`."""
        now = time.thread_time()
        self.seconds += now - self._clock
        self._clock = now

    def _check(self) -> None:
        """Raise GrammarLimitError if llguidance has met a limit, or the time is over.

        Raises:
            GrammarLimitError: as above.
            InputError: llguidance has failed in another way.
        """
        if self._matcher.is_error():
            reason = first_line(self._matcher.get_error())
            if _LIMIT.search(reason):
                raise GrammarLimitError(reason)
            raise InputError(
                f"grammar: the text cannot go on, as its grammar fails here ({reason}); change the"
                " grammar"
            )
        if self.seconds > self._deadline:
            raise GrammarLimitError(f"{self.seconds:.2g} s for {self._tokens} tokens")

    def _takes(self, token: int) -> bool:
        """Return whether llguidance accepts a token next."""
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._matcher.rollback(1)
        return True

    def masks(
        self, tokens: Sequence[int], parents: Sequence[int], drafted: Sequence[bool]
    ) -> tuple[np.ndarray, int]:
        """Return the masks of the legal tokens after each node of a draft.

        Args:
            tokens: ``[N]`` the token of each node. The root is the newest committed token.
            parents: ``[N]`` the index of each node's parent, which is smaller; -1 for the root.
            drafted: ``[N]`` whether the node exists. The root always does.

        Returns:
            ``[N, ceil(V / 32)]`` uint32, and the number of nodes that are not legal. Nodes below
            such a node, and below a stop token, are never reached; their bits are all 1.
        """
        masks = np.full((len(tokens), self._words), _ALL)
        return masks, self.write_masks(masks, tokens, parents, drafted)

    def write_masks(
        self,
        masks: np.ndarray,
        tokens: Sequence[int],
        parents: Sequence[int],
        drafted: Sequence[bool],
    ) -> int:
        """Write the masks of `masks`, and return the number of nodes that are not legal.

        ``masks [N, ceil(V / 32)]`` is uint32 and contiguous. The words of nodes that are never
        reached do not change.
        """
        count = len(tokens)
        children: list[list[int]] = [[] for _ in range(count)]
        for node in range(1, count):
            if drafted[node]:
                children[parents[node]].append(node)
        illegal = 0

        def visit(node: int) -> None:
            nonlocal illegal
            self._write_mask(masks, node)
            for child in children[node]:
                token = int(tokens[child])
                if not has_bit(masks[node], token):
                    illegal += 1
                elif token not in self._stop_ids:
                    if self._matcher.try_consume_tokens([token]) != 1:  # its mask was wrong
                        self._check()
                        illegal += 1
                        continue
                    visit(child)
                    self._matcher.rollback(1)

        before = self.seconds
        self._start_masks(masks)
        if not self._has_ended:
            visit(0)
        self._count_seconds()
        self._draft_seconds = self.seconds - before
        return illegal

    def count_legal(self, tokens: Sequence[int]) -> int:
        """Return how many ``tokens`` could follow, up to the first that is not in its mask.

        Only a legal stop token may be the last; nothing is legal after it. The position does not
        change. If the check takes half of `STEP_SECONDS`, the tokens after it do not count.

        Raises:
            GrammarLimitError: the grammar has become too complex.
        """
        legal = consumed = 0
        if self._has_ended:
            return 0
        before, started = self.seconds, time.thread_time()
        for token in map(int, tokens):
            if token in self._stop_ids:
                legal += self.is_complete
                break
            if time.thread_time() - started > STEP_SECONDS / 2:
                break  # a shorter call has the same text, and one that exceeds a limit has none
            # Where bytes are forced, llguidance takes every tokenisation, but its mask holds the
            # canonical one alone. Elsewhere it takes the tokens of its mask.
            if (self._validates or self._matcher.compute_ff_bytes()) and not self._allows(token):
                break
            if token in self._end_ids or self._matcher.try_consume_tokens([token]) != 1:
                break
            legal, consumed = legal + 1, consumed + 1
        if consumed:
            self._matcher.rollback(consumed)
        # The masks have added their own time already.
        self.seconds = before + time.thread_time() - started
        self._check()
        return legal

    def _allows(self, token: int) -> bool:
        """Return whether a token is in the mask."""
        return has_bit(self.mask(), token)

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that the grammar forces to come next; often none.

        They are llguidance's canonical tokens. If the text ends after them, a stop token follows.
        """
        if self._has_ended:
            return []
        started = time.thread_time()
        tokens = list(self._matcher.compute_ff_tokens())[:most]
        if len(tokens) < most and self._stop_ids:
            consumed = self._matcher.try_consume_tokens(tokens) if tokens else 0
            if consumed == len(tokens) and self._matcher.is_stopped():
                tokens.append(min(self._stop_ids))
            if consumed:
                self._matcher.rollback(consumed)
        self.seconds += time.thread_time() - started
        return tokens


def _ids(words: np.ndarray) -> list[int]:
    """Return the token ids whose bits are set in ``words``."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def _bits(ids: Sequence[int], words: int) -> np.ndarray:
    """Return ``[words]`` uint32 with the bits of those ``ids`` that are in range."""
    flags = np.zeros(words * 32, bool)
    flags[[i for i in ids if 0 <= i < len(flags)]] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
