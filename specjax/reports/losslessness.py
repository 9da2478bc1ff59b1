"""The report of a test of losslessness: as one line, in detail, as JSON and as Markdown."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from specjax.evaluation.drawn_texts import FALSE_ALARM, DistributionResult
from specjax.evaluation.losslessness import LosslessnessVerdict
from specjax.evaluation.same_texts import SameTexts

Verdicts = Mapping[str, LosslessnessVerdict]
"""The verdicts by the names of the drafters."""


def line(verdict: LosslessnessVerdict) -> str:
    """Return the verdict and the result of each test in one line."""
    parts = [
        f"greedy {_same(verdict.greedy)}",
        f"distribution {_distribution(verdict.distribution)}",
        f"coupled {_same(verdict.coupled)}",
    ]
    return f"{'lossless' if verdict.lossless else 'NOT LOSSLESS'}: {' · '.join(parts)}"


def _same(result: SameTexts) -> str:
    equal = result.texts - len(result.partings)
    if not result.passes:
        worst = max((result.lag, *(parting.margin for parting in result.partings)))
        return (
            f"FAILS: {equal} of {result.texts} texts equal, and a token is {worst:.3g} from the"
            " target's choice where " + f"rounding reaches {result.rounding:.2g}"
        )
    if not result.partings:
        return f"{equal} of {result.texts} texts equal"
    margin = max(parting.margin for parting in result.partings)
    return (
        f"{equal} of {result.texts} texts equal, {len(result.partings)} part at near-ties (margin"
        f" {margin:.2g} where rounding reaches {result.rounding:.2g})"
    )


def _distribution(result: DistributionResult) -> str:
    summary = f"p = {_p(result.p_value)} ({result.draws:,} draws, rule {result.rule})"
    return summary if result.passes else f"FAILS: {summary}"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"


def details(verdict: LosslessnessVerdict) -> list[str]:
    """Return details: the rate of false alarms, the power of the test, and where texts differ."""
    distribution, rounding = verdict.distribution, verdict.greedy.rounding
    p_values = ", ".join(f"{name} {_p(value)}" for name, value in distribution.p_values.items())
    lines = [
        f"A right pair fails the distribution once in {1 / FALSE_ALARM:,.0f} tests. "
        f"p is {len(distribution.p_values)} times the smallest of: {p_values}."
    ]
    if distribution.detectable is None:
        lines.append(
            "The drafter proposed too few tokens for the distribution to show an error of its"
            " verification."
        )
    else:
        lines.append(
            f"{distribution.draws:,} tokens were drawn in {distribution.texts:,} texts. They show a"
            f" rule that favours drafted tokens by {distribution.detectable:.1%}, 95 times of 100."
            " Smaller faults need more --draws."
        )
    if distribution.outside:
        lines.append(
            f"{distribution.outside} drawn tokens are ones that top-k, top-p or min-p exclude."
        )
    lines.append(
        f"Rounding, as measured here: two logits move by up to {rounding:.2g} against each other"
        " between passes of one and of several tokens."
    )
    for name, result in (("greedy", verdict.greedy), ("coupled", verdict.coupled)):
        lines += [
            f"{name} text {parting.prompt} parts at token {parting.position}: {parting.plain}"
            f" without the drafter, {parting.drafted} with it, margin {parting.margin:.3g}"
            for parting in result.partings
        ]
    return lines


def as_json(verdicts: Verdicts) -> dict[str, Any]:
    """Return all results by drafter, for JSON."""
    return {
        name: {
            "lossless": verdict.lossless,
            "line": line(verdict),
            "false_alarm": FALSE_ALARM,
            "greedy": _texts_as_json(verdict.greedy),
            "distribution": {"passes": verdict.distribution.passes, **asdict(verdict.distribution)},
            "coupled": _texts_as_json(verdict.coupled),
        }
        for name, verdict in verdicts.items()
    }


def _texts_as_json(result: SameTexts) -> dict[str, Any]:
    """Return a comparison for JSON, which has no infinity: an infinite margin becomes null."""
    partings = [
        asdict(parting) | ({} if isfinite(parting.margin) else {"margin": None})
        for parting in result.partings
    ]
    return {"passes": result.passes, **asdict(result), "partings": partings}


def markdown(verdicts: Verdicts, device: str) -> str:
    """Return the report as Markdown."""
    parts = [f"# Is it lossless?\n\nMeasured on {device}.\n"]
    for name, verdict in verdicts.items():
        parts.append(
            f"## {name}\n\n{line(verdict)}\n\n"
            + "\n".join(f"- {detail}" for detail in details(verdict))
            + "\n"
        )
    return "\n".join(parts)
