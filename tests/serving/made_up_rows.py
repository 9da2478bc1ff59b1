"""Rows of an engine that compute nothing: the next token is a hash of the text before it.

Their events are held back until `MadeUpRows.speak` is called.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.sampling_params import SamplingParams
from specjax.serving.clients import DraftVerified, RowDropped, RowFeatures, RowReady

VOCABULARY, STOP = 50, 49
NODES, DEPTH = 16, 5


def next_token(text: Sequence[int]) -> int:
    """Return the target's next token after a text."""
    return hashlib.sha256(np.asarray(text, "<i4").tobytes()).digest()[0] % (VOCABULARY - 1)


def whole(prompt: Sequence[int], limit: int) -> list[int]:
    """Return a prompt and its text, generated without drafts."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        text.append(next_token(text))
    return text


def told_of(text: Sequence[int]) -> list[float]:
    """Return what a client receives for the last token of a text."""
    return [float(next_token([*text, 1])), float(len(text))]


class MadeUpRow:
    """A client's row."""

    def __init__(
        self, engine: "MadeUpRows", tokens: list[int], limit: int, listener: Callable[[Any], None]
    ) -> None:
        self.engine, self.tokens, self.limit, self.listener = engine, tokens, limit, listener
        self.is_away = self.is_closed = self.is_dropped = False
        self.owner = self.tenant = ""

    def say(self, event: Any) -> None:
        self.engine.held.append((self, event))

    def verify(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        if self.is_dropped:
            return  # the caller does not know yet that it was dropped
        assert not self.is_closed
        if len(tokens) > NODES:
            raise InputError(f"tokens: {len(tokens)} nodes")
        assert tokens[0] == self.tokens[-1]
        assert parents[0] == -1
        self.engine.verified += 1
        start, node, accepted = len(self.tokens), 0, []
        while True:
            token, over = next_token(self.tokens), ""
            self.tokens.append(token)
            if len(self.tokens) == self.limit:
                over = "length"
            children = [
                i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token
            ]
            if over or not children:
                break
            node = children[0]
            accepted.append(node)
        arrays = self.engine.arrays(self.tokens, start - 1, start + len(accepted))
        self.say(DraftVerified(tuple(accepted), token, arrays, over, 0.001))

    def close(self) -> None:
        self.is_closed = True


class MadeUpRows:
    """The rows of a made-up engine.

    Attributes:
        rows: all rows that were opened.
        held: the events that were not sent yet, each with its row.
        verified: the number of verified drafts.
        tells: whether clients receive hidden states.
        error: raised when a row is opened, if it is not None.
    """

    def __init__(self, tells: bool = True, chunk: int = 3) -> None:
        self.tells, self.chunk = tells, chunk
        self.error: Exception | None = None
        self.rows: list[MadeUpRow] = []
        self.held: list[tuple[MadeUpRow, Any]] = []
        self.verified = 0

    def arrays(self, text: Sequence[int], start: int, stop: int) -> dict[str, np.ndarray]:
        """Return what a client receives for the tokens from ``start`` to before ``stop``."""
        if not self.tells:
            return {}
        rows = [told_of(text[: i + 1]) for i in range(start, stop)]
        return {"hidden": np.array(rows, np.float32).reshape(-1, 2)}

    def open_row(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        prompt_length: int,
        known: int,
        listener,
        owner: str = "",
        tenant: str = "",
        compiled_grammar: Any = None,
    ):
        if self.error is not None:
            raise self.error
        if max(tokens) >= VOCABULARY:
            raise InputError(f"tokens: {max(tokens)} is no token")
        row = MadeUpRow(self, list(tokens), prompt_length + params.max_new_tokens, listener)
        row.owner, row.tenant = owner, tenant
        self.rows.append(row)
        for start in range(0, len(tokens) - 1, self.chunk):
            stop = min(start + self.chunk, len(tokens) - 1)
            if self.tells and stop > (start := max(start, known)):
                row.say(RowFeatures(start, stop - start, self.arrays(tokens, start, stop)))
        row.say(RowReady(len(tokens)))
        return row

    def drop(self, row: MadeUpRow) -> None:
        """Give the row to another request."""
        row.say(RowDropped("the row was given to others"))
        row.is_closed = row.is_dropped = True

    def speak(self, count: int = 10**9) -> None:
        """Send the first ``count`` held events, or all of them.

        A closed row sends only that it was dropped.
        """
        count = min(count, len(self.held))
        for row, event in self.held[:count]:
            if not row.is_closed or isinstance(event, RowDropped):
                row.listener(event)
        del self.held[:count]
