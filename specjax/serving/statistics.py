"""The counters of an engine, for metrics and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.decoding.stats import Stats
from specjax.serving.clients import ClientStatistics


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine is doing, and what it has done.

    Attributes:
        waiting: requests that have no row.
        running: rows in which a text is generated.
        free_pages: pages that could be taken now, those of shared prefixes that nobody holds among them.
        pages: in all.
        prompt_tokens_read: tokens of prompts that were computed.
        prompt_tokens_shared: tokens of prompts that another request's pages held already.
        preemptions: how often a text had to give up its row for lack of pages.
        decode_calls: so far.
        generated: tokens.
        drafted_steps: steps of rows in which something was drafted.
        drafted: tokens.
        accepted: of those, emitted.
        accepted_at: of those, by depth: the first is below the root.
        draft: the one that was used last.
        drafts: what the choice of drafts goes by, `DraftChoice.table`.
        clients: what rows of clients have come to. None of it is in the other numbers, but for prompts and pages.
        compiled: programs that are compiled.
        programs: in all.

    Examples:
        >>> from specjax.serving import Engine
        >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
        ...     generation = engine.submit(prompts[0].tolist(), max_new_tokens=8).result()
        >>> statistics = engine.statistics
        >>> statistics.running, statistics.prompt_tokens_read  # the last token is read by decoding
        (0, 5)
    """

    waiting: int
    running: int
    free_pages: int
    pages: int
    prompt_tokens_read: int
    prompt_tokens_shared: int
    preemptions: int
    decode_calls: int
    generated: int
    drafted_steps: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    draft: str
    drafts: list[dict[str, object]]
    clients: ClientStatistics
    compiled: int
    programs: int


def copies_of(stats: Stats) -> Any:
    """Return copies of the arrays in ``stats``, on the host, which may be written to."""
    return Stats(*map(np.array, vars(stats).values()))  # pyright: ignore[reportArgumentType]


def difference(stats: Any, before: Any, rows: Sequence[int]) -> Any:
    """Return what ``stats`` count in ``rows`` beyond what they counted ``before``."""
    return Stats(*(now[rows] - earlier[rows] for now, earlier in zip(vars(stats).values(), vars(before).values(), strict=True)))
