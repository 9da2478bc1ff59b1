"""The schemes that select which tokens stay in a compressed KV cache."""

from dataclasses import dataclass

from specjax.errors import InputError


@dataclass(frozen=True)
class Streaming:
    """The scheme that keeps the first tokens of a text and the newest ones.

    It is StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

    Attributes:
        sinks: the number of first tokens. They serve as attention sinks: heads put the attention
            there that they need nowhere else.

    Examples:
        >>> drafter = specjax.CompressedCache(budget=8, scheme=specjax.Streaming(sinks=2))
        >>> drafter.scheme.kept(drafter.budget)  # the other six slots have the newest tokens
        2
    """

    sinks: int = 4

    def check(self, budget: int) -> None:
        """Raise an InputError if a ``budget`` of slots is too small, or a setting is invalid."""
        if self.sinks < 0:
            raise InputError(f"sinks={self.sinks}: must not be negative")
        if budget <= self.sinks:
            raise InputError(
                f"budget={budget}: the {self.sinks} sinks and the newest token need"
                f" {self.sinks + 1}"
            )

    def kept(self, budget: int) -> int:
        """Return how many of ``budget`` slots are never replaced."""
        return self.sinks


@dataclass(frozen=True)
class SnapKV:
    """The scheme that keeps the newest tokens, and the prompt tokens with the most attention.

    The attention is that of the last tokens of the prompt (Li et al. 2024, arXiv 2404.14469).

    Attributes:
        window: the number of last tokens of the prompt whose attention counts, and the number of
            newest tokens that stay in the cache.
        pool: the number of tokens, odd, over which attention is averaged before the selection, so
            that neighbours stay together.

    Examples:
        >>> drafter = specjax.CompressedCache(budget=8, scheme=specjax.SnapKV(window=3))
        >>> drafter.scheme.kept(drafter.budget)  # chosen from the prompt
        5
    """

    window: int = 32
    pool: int = 5

    def check(self, budget: int) -> None:
        """Raise an InputError if a ``budget`` of slots is too small, or a setting is invalid."""
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise InputError(
                f"window={self.window}, pool={self.pool}: window must be at least 1, pool at least"
                " 1 and odd"
            )
        if budget <= self.window:
            raise InputError(
                f"budget={budget}: the window of {self.window} and one chosen token need"
                f" {self.window + 1}"
            )

    def kept(self, budget: int) -> int:
        """Return how many of ``budget`` slots are never replaced."""
        return budget - self.window


def check_own_cache(drafter: str, cache: Streaming | None, budget: int) -> None:
    """Raise an InputError if a drafter cannot use ``cache`` as the scheme of its own KV cache.

    Only `Streaming` works there: a drafter has no attention of the prompt for SnapKV to select by.
    """
    if cache is None:
        return
    if not isinstance(cache, Streaming):
        raise InputError(f"{drafter}(cache={cache!r}): give Streaming(), or None for a whole cache")
    cache.check(budget)


Scheme = Streaming | SnapKV
"""The scheme of a compressed KV cache.

Examples:
    >>> isinstance(specjax.SnapKV(), specjax.drafters.Scheme)
    True
"""
