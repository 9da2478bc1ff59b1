"""The texts that have ended and are to be read once more. Plain Python, without JAX.

The next turn of a chat begins with the last prompt and its answer. The prompt's chunks are
prefixes, but the answer's entries are not: decoding wrote them, in calls of other shapes. They may
differ in their last bits from those that a prefill writes, and a text would depend on who was there
before. So the engine reads an ended text as if it were a prompt, chunk by chunk, while it has
nothing else to do. `specjax.serving.scheduler.Scheduler.next_rereads` has the rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.serving.pages import Prefix, Tenant

MAX_ENDED = 64
"""The largest number of ended texts that wait to be read once more."""


@dataclass(eq=False)
class EndedText:
    """A text that has ended.

    Attributes:
        tokens: its prompt and its output.
        tenant: whose text it is. Only requests of the same tenant share its prefixes.
        shard: the shard that has its prefixes.
        newest: the prefix of its chunk that was read once more last; None: there is none.
        read: the number of its first tokens up to the end of that chunk.
    """

    tokens: Sequence[int]
    tenant: Tenant
    shard: int
    newest: Prefix | None = None
    read: int = 0

    def begins(self, text: "EndedText") -> bool:
        """Return whether another text of the same tenant and shard begins with this one."""
        length = len(self.tokens)
        return (
            (self.tenant, self.shard) == (text.tenant, text.shard)
            and length <= len(text.tokens)
            # Most texts differ here, so that few are compared as a whole.
            and self.tokens[-1] == text.tokens[length - 1]
            and list(self.tokens) == list(text.tokens[:length])
        )


class EndedTexts:
    """The queue of ended texts, the oldest first.

    A text that a longer one begins with is left out, because the longer one has its chunks, too. If
    there are too many texts or tokens, the oldest texts are dropped.

    Examples:
        >>> from specjax.serving.ended_texts import EndedText, EndedTexts
        >>> from specjax.serving.pages import NO_TENANT
        >>> texts = EndedTexts()
        >>> for tokens in ([5, 6, 7], [8, 9], [5, 6, 7, 1, 2]):  # the last one is the next turn
        ...     texts.add(EndedText(tokens, NO_TENANT, shard=0))
        >>> len(texts), texts.first(shard=0).tokens
        (2, [8, 9])
    """

    def __init__(self, most: int = MAX_ENDED, most_tokens: int | None = None) -> None:
        """Make an empty queue.

        Args:
            most: the largest number of texts.
            most_tokens: the largest number of tokens of all texts together, apart from the newest
                text; None: no limit.
        """
        self._most, self._most_tokens = most, most_tokens
        self._texts: list[EndedText] = []

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: EndedText) -> None:
        """Add a text, and drop those that it makes superfluous."""
        if any(text.begins(queued) for queued in self._texts):
            return
        self._texts = [queued for queued in self._texts if not queued.begins(text)]
        self._texts.append(text)
        del self._texts[: -self._most]
        if self._most_tokens is not None:
            lengths = [len(queued.tokens) for queued in self._texts]
            while len(lengths) > 1 and sum(lengths) > self._most_tokens:
                del lengths[0], self._texts[0]

    def first(self, shard: int) -> EndedText | None:
        """Return the oldest text of a ``shard``, or None."""
        return next((text for text in self._texts if text.shard == shard), None)

    def remove(self, text: EndedText) -> None:
        """Remove a text of the queue."""
        self._texts.remove(text)

    def clear(self) -> None:
        """Remove all texts."""
        self._texts.clear()
