"""The counters of acceptance that a server reports in its ``/metrics``, as text for Prometheus.

Two families of names are read. They are those of the sources:

- vLLM's, in ``vllm/v1/spec_decode/metrics.py`` of github.com/vllm-project/vllm, which
  ``specjax serve`` reports too;
- SGLang's, in ``python/sglang/srt/observability/metrics_collector.py`` of
  github.com/sgl-project/sglang.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from specjax.errors import InputError
from specjax.evaluation.lengths import StepCounts

Names = Literal["vllm", "sglang"]

_VLLM_DRAFTS = "vllm:spec_decode_num_drafts_total"
_VLLM_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_SGLANG_PASSES = "sglang:spec_verify_calls_total"
_SGLANG_STEPS = "sglang:spec_num_steps"
_SGLANG_GAUGE = "sglang:spec_accept_length"

_SHORTER_AT_MOST = 0.2
"""How much shorter than the longest drafts the mean draft of a chain may be, in tokens."""


@dataclass(frozen=True)
class Counters:
    """A server's counters at one moment, or what they grew by between two.

    Attributes:
        names: whose names they have.
        generated: the number of generated tokens.
        drafts: the number of drafts that were verified.
        drafted: the number of drafted tokens; None with SGLang's names, which have no such counter.
        accepted: the number of accepted drafted tokens; None with SGLang's names.
        accepted_at: for each position of a draft, how many tokens of it were accepted; empty with
            SGLang's names.
        stated_length: the number of tokens of a draft as the server states it now; None: it does
            not.

    Examples:
        >>> from specjax.evaluation.counters import Counters
        >>> before = Counters("sglang", 10, 4, None, None, (), 3)
        >>> growth = Counters("sglang", 16, 6, None, None, (), 3).since(before)
        >>> growth.generated, growth.drafts, growth.steps.length("passes")
        (6, 2, 3.0)
    """

    names: Names
    generated: int
    drafts: int
    drafted: int | None
    accepted: int | None
    accepted_at: tuple[int, ...]
    stated_length: int | None

    @property
    def steps(self) -> StepCounts:
        """The counts from which acceptance lengths are computed.

        vLLM does not count the passes without a draft. SGLang counts every pass that verifies, and
        no accepted tokens.
        """
        passes = self.drafts if self.names == "sglang" else None
        return StepCounts(self.generated, passes, self.drafts, self.accepted)

    @property
    def draft_length(self) -> int | None:
        """The number of tokens of a draft; None if it is not reported, or if it varied.

        A few drafts may be shorter, those at the end of an answer.

        Examples:
            >>> from specjax.evaluation.counters import Counters
            >>> Counters("vllm", 90, 20, 59, 40, (18, 13, 9, 0), None).draft_length
            3
        """
        if self.drafted is None or not self.drafts:
            return self.stated_length
        mean = self.drafted / self.drafts
        length = math.ceil(mean)
        return length if length - mean <= _SHORTER_AT_MOST else None

    def by_position(self) -> list[float]:
        """Return the accepted share of the drafts for each position of a draft.

        Positions that no draft reached are left out; if the drafts varied in length, those without
        an accepted token.

        Examples:
            >>> from specjax.evaluation.counters import Counters
            >>> Counters("vllm", 30, 10, 30, 16, (9, 7, 0, 0, 0), None).by_position()
            [0.9, 0.7, 0.0]
        """
        if not self.drafts:
            return []
        reached = max((i for i, count in enumerate(self.accepted_at, 1) if count), default=0)
        return [count / self.drafts for count in self.accepted_at[: self.draft_length or reached]]

    def plus(self, more: "Counters") -> "Counters":
        """Return what they grew by together with what they grew by later.

        Examples:
            >>> from specjax.evaluation.counters import Counters
            >>> first = Counters("vllm", 5, 2, 4, 3, (2, 1), None)
            >>> first.plus(Counters("vllm", 4, 1, 2, 2, (1, 1), None)).accepted_at
            (3, 2)
        """
        at = zip_longest(self.accepted_at, more.accepted_at, fillvalue=0)
        return Counters(
            self.names,
            self.generated + more.generated,
            self.drafts + more.drafts,
            _sum(self.drafted, more.drafted),
            _sum(self.accepted, more.accepted),
            tuple(first + second for first, second in at),
            more.stated_length,
        )

    def since(self, before: "Counters") -> "Counters":
        """Return what the counters grew by.

        Raises:
            InputError: a counter is smaller than before.
        """
        at = zip_longest(self.accepted_at, before.accepted_at, fillvalue=0)
        growth = Counters(
            self.names,
            self.generated - before.generated,
            self.drafts - before.drafts,
            _difference(self.drafted, before.drafted),
            _difference(self.accepted, before.accepted),
            tuple(now - then for now, then in at),
            self.stated_length,
        )
        values = (growth.generated, growth.drafts, growth.drafted or 0, growth.accepted or 0)
        if self.names != before.names or min(values + growth.accepted_at) < 0:
            raise InputError(
                "server: its counters went back during the measurement, so it was restarted, or"
                " several servers answer at its address; name one server and repeat"
            )
        return growth


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def _difference(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else now - then


def read_counters(metrics: str) -> Counters:
    """Return the counters in the text of ``/metrics``, summed over all labels.

    Raises:
        InputError: the text is not Prometheus' format, or has neither family of counters.

    Examples:
        >>> from specjax.evaluation.counters import read_counters
        >>> counters = read_counters(
        ...     '''
        ... vllm:generation_tokens_total{engine="0"} 30
        ... vllm:spec_decode_num_drafts_total{engine="0"} 10
        ... vllm:spec_decode_num_draft_tokens_total{engine="0"} 20
        ... vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12
        ... vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8
        ... vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
        ... '''
        ... )
        >>> counters.steps.length("drafts"), counters.accepted_at
        (2.2, (8, 4))
    """
    totals: defaultdict[str, float] = defaultdict(float)
    positions: Counter[int] = Counter()
    # Every process of a server reports its gauges, which have the same value.
    gauges = dict.fromkeys((_SGLANG_STEPS, _SGLANG_GAUGE), 0.0)
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == _VLLM_BY_POSITION:
                    positions[int(sample.labels["position"])] += int(sample.value)
                elif sample.name in gauges:
                    gauges[sample.name] = max(gauges[sample.name], sample.value)
                elif sample.name.startswith(("vllm:", "sglang:")) and math.isfinite(sample.value):
                    totals[sample.name] += sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"server: its /metrics is not text in Prometheus' format ({error}); name the address"
            " of vLLM, SGLang or specjax serve itself"
        ) from None

    def count(name: str) -> int:
        return round(totals[name])

    if _VLLM_DRAFTS in totals:
        width = 1 + max(positions, default=-1)
        return Counters(
            names="vllm",
            generated=count("vllm:generation_tokens_total"),
            drafts=count(_VLLM_DRAFTS),
            drafted=count("vllm:spec_decode_num_draft_tokens_total"),
            accepted=count("vllm:spec_decode_num_accepted_tokens_total"),
            accepted_at=tuple(positions[position] for position in range(width)),
            stated_length=None,
        )
    if _SGLANG_PASSES in totals:
        return Counters(
            names="sglang",
            generated=count("sglang:generation_tokens_total"),
            drafts=count(_SGLANG_PASSES),
            drafted=None,
            accepted=None,
            accepted_at=(),
            stated_length=round(gauges[_SGLANG_STEPS]) or None,
        )
    older = (
        f" It has {_SGLANG_GAUGE}, a gauge of the newest steps, from which nothing can be"
        " summed: use a newer SGLang."
        if gauges[_SGLANG_GAUGE]
        else ""
    )
    raise InputError(
        f"server: its /metrics has neither {_VLLM_DRAFTS} nor {_SGLANG_PASSES}; start it with a"
        f" drafter (SGLang also with --enable-metrics).{older}"
    )
