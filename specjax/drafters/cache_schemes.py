"""Which tokens a cache of few slots keeps."""

from dataclasses import dataclass

from specjax.errors import InputError


@dataclass(frozen=True)
class Streaming:
    """Keeps the first tokens of a text and the newest (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).

    Attributes:
        sinks: the first tokens, to which attention goes that has nowhere else to go.

    Examples:
        >>> drafter = specjax.CompressedCache(budget=8, scheme=specjax.Streaming(sinks=2))
        >>> drafter.scheme.kept(drafter.budget)  # the others hold the newest tokens
        2
    """

    sinks: int = 4

    def check(self, budget: int) -> None:
        """Refuse, with an InputError, a ``budget`` of slots that is too small."""
        if self.sinks < 0:
            raise InputError(f"sinks={self.sinks}: must not be negative")
        if budget <= self.sinks:
            raise InputError(f"budget={budget}: the {self.sinks} sinks and the newest token need {self.sinks + 1}")

    def kept(self, budget: int) -> int:
        """How many of ``budget`` slots are not replaced."""
        return self.sinks


@dataclass(frozen=True)
class SnapKV:
    """Keeps those tokens of the prompt to which its last tokens attend most, and the newest (Li et al. 2024, arXiv 2404.14469).

    Attributes:
        window: the prompt's last tokens, whose attention counts; and how many of the newest tokens are kept.
        pool: tokens, odd, over which attention is averaged before the choice, so that neighbours are kept together.

    Examples:
        >>> drafter = specjax.CompressedCache(budget=8, scheme=specjax.SnapKV(window=3))
        >>> drafter.scheme.kept(drafter.budget)  # chosen from the prompt
        5
    """

    window: int = 32
    pool: int = 5

    def check(self, budget: int) -> None:
        """Refuse, with an InputError, a ``budget`` of slots that is too small."""
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise InputError(f"window={self.window}, pool={self.pool}: window must be at least 1, pool at least 1 and odd")
        if budget <= self.window:
            raise InputError(f"budget={budget}: the window of {self.window} and one chosen token need {self.window + 1}")

    def kept(self, budget: int) -> int:
        """How many of ``budget`` slots are not replaced."""
        return budget - self.window


def check_own_cache(drafter: str, cache: Streaming | None, budget: int) -> None:
    """Refuse, with an InputError, what a drafter cannot keep its own entries by: it has no prompt's attention to choose by."""
    if cache is None:
        return
    if not isinstance(cache, Streaming):
        raise InputError(f"{drafter}(cache={cache!r}): give Streaming(), or None for a whole cache")
    cache.check(budget)


Scheme = Streaming | SnapKV
"""Which tokens a compressed cache keeps.

Examples:
    >>> isinstance(specjax.SnapKV(), specjax.drafters.Scheme)
    True
"""
