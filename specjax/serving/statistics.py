"""The counters of an engine, for metrics and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.decoding.stats import Stats
from specjax.serving.clients import ClientStatistics
from specjax.serving.row_kinds import CONTEXTS, REGIONS, RowKind
from specjax.serving.totals import KindCounts


@dataclass(frozen=True)
class PartStatistics:
    """The counters of one part of a drafter that has parts (`specjax.drafters.Together`).

    Attributes:
        name: the class of the part.
        drafted: drafted tokens that the part offered.
        accepted: tokens among them that were accepted and emitted.
        accepted_only: those that no other part offered.
    """

    name: str
    drafted: int
    accepted: int
    accepted_only: int


@dataclass(frozen=True)
class EngineStatistics:
    """The counters of an engine since it was made, and its state at one moment.

    Attributes:
        waiting: requests that wait for a row.
        running: rows in which a text is generated.
        free_pages: pages that can be allocated now, including those of prefixes that no row uses.
        pages: all pages.
        prompt_tokens_read: prompt tokens that were computed.
        prompt_tokens_shared: prompt tokens that prefix caching saved.
        tokens_reread: tokens of ended texts that were read once more, so that a chat's next turn
            shares them.
        preemptions: how often a request was preempted for lack of pages.
        decode_calls: decode calls.
        generated: generated tokens.
        drafted_steps: steps with a draft, counted per row.
        drafted: drafted tokens.
        accepted: drafted tokens that were accepted and emitted.
        accepted_at: ``accepted`` by depth; the first number is that of the root's children.
        parts: the counters of each part of the drafter; () if it has no parts.
        draft: the draft that the newest decode call used.
        drafts: the measurements that the choice of a draft depends on, see `DraftChoice.table`.
        kinds: the counters of texts by region and range of context lengths. Their sums are
            ``generated``, ``drafted_steps``, ``drafted`` and ``accepted``.
        forced_tokens: tokens that grammars forced, drafted without a drafter and emitted.
        illegal_nodes: drafted nodes of masked steps that their grammar did not allow.
        mask_seconds: the seconds in which the host made masks, and checked the tokens of calls
            without masks.
        restored_rows: how often a row left its grammar in a call without masks and was put back.
        clients: the counters of the rows of clients that draft. The other counters leave these rows
            out, except for prompts and pages.
        compiled: programs that are compiled.
        programs: all programs.

    Examples:
        >>> from specjax.serving import Engine
        >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
        ...     generation = engine.submit(prompts[0].tolist(), max_new_tokens=8).result()
        >>> statistics = engine.statistics
        >>> statistics.running, statistics.prompt_tokens_read  # the last token is read by decoding
        (0, 5)
        >>> statistics.regions["answer"].generated, statistics.context_lengths["256"].generated
        (8, 8)
    """

    waiting: int
    running: int
    free_pages: int
    pages: int
    prompt_tokens_read: int
    prompt_tokens_shared: int
    tokens_reread: int
    preemptions: int
    decode_calls: int
    generated: int
    drafted_steps: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    parts: tuple[PartStatistics, ...]
    draft: str
    drafts: list[dict[str, object]]
    kinds: dict[RowKind, KindCounts]
    forced_tokens: int
    illegal_nodes: int
    mask_seconds: float
    restored_rows: int
    clients: ClientStatistics
    compiled: int
    programs: int

    @property
    def regions(self) -> dict[str, KindCounts]:
        """The counters by region: "thinking", "answer" and "tool_call".

        Regions are told by the tokens that begin and end them. A model for which these are not
        known writes an answer alone.
        """
        return {
            name: KindCounts.sum(
                counts for kind, counts in self.kinds.items() if kind.region == name
            )
            for name in REGIONS
        }

    @property
    def context_lengths(self) -> dict[str, KindCounts]:
        """The counters by the length of the context at the start of a decode call.

        The names are the largest lengths in tokens: "256", "1024" and so on, and "more".
        """
        return {
            name: KindCounts.sum(
                counts for kind, counts in self.kinds.items() if kind.context == name
            )
            for name in CONTEXTS
        }


def copies_of(stats: Stats) -> Any:
    """Return ``stats`` with writable copies of its arrays on the host."""
    return Stats(*map(np.array, vars(stats).values()))  # pyright: ignore[reportArgumentType]


def difference(stats: Any, before: Any, rows: Sequence[int]) -> Any:
    """Return by how much ``stats`` grew in ``rows`` since ``before``."""
    return Stats(
        *(
            now[rows] - earlier[rows]
            for now, earlier in zip(vars(stats).values(), vars(before).values(), strict=True)
        )
    )
