"""The verdict of a test of losslessness: in a line, in full, as JSON and as Markdown."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from specjax.evaluation.drawn_texts import FALSE_ALARM, Distribution
from specjax.evaluation.losslessness import LosslessnessVerdict
from specjax.evaluation.same_texts import SameTexts

Verdicts = Mapping[str, LosslessnessVerdict]
"""By the drafters' names."""


def line(verdict: LosslessnessVerdict) -> str:
    """The verdict, and what each check came to."""
    parts = [
        f"greedy {_same(verdict.greedy)}",
        f"distribution {_distribution(verdict.distribution)}",
        f"coupled {_same(verdict.coupled)}",
    ]
    return f"{'lossless' if verdict.lossless else 'NOT LOSSLESS'}: {' · '.join(parts)}"


def _same(found: SameTexts) -> str:
    equal = found.texts - len(found.partings)
    if not found.passes:
        worst = max((found.lag, *(parting.margin for parting in found.partings)))
        return f"FAILS: {equal} of {found.texts} texts equal, and a token is {worst:.3g} from the target's choice where " + (
            f"rounding reaches {found.rounding:.2g}"
        )
    if not found.partings:
        return f"{equal} of {found.texts} texts equal"
    margin = max(parting.margin for parting in found.partings)
    return (
        f"{equal} of {found.texts} texts equal, {len(found.partings)} part at near-ties (margin {margin:.2g} where rounding "
        f"reaches {found.rounding:.2g})"
    )


def _distribution(found: Distribution) -> str:
    said = f"p = {_p(found.p_value)} ({found.draws:,} draws, rule {found.rule})"
    return said if found.passes else f"FAILS: {said}"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"


def details(verdict: LosslessnessVerdict) -> list[str]:
    """What a reader asks next: how often a right pair fails, what would have been found, and where texts part."""
    drawn, rounding = verdict.distribution, verdict.greedy.rounding
    each = ", ".join(f"{name} {_p(value)}" for name, value in drawn.p_values.items())
    lines = [
        f"A right pair fails the distribution once in {1 / FALSE_ALARM:,.0f} tests. "
        f"p is {len(drawn.p_values)} times the smallest of: {each}."
    ]
    if drawn.detectable is None:
        lines.append("The drafter proposed too little for a fault in how it is verified to show in the distribution.")
    else:
        lines.append(
            f"{drawn.draws:,} tokens were drawn in {drawn.texts:,} texts. They show a rule that favours drafted tokens by "
            f"{drawn.detectable:.1%}, 95 times of 100. Smaller faults need more --draws."
        )
    if drawn.outside:
        lines.append(f"{drawn.outside} drawn tokens lie outside what top-k, top-p or min-p leave.")
    lines.append(
        f"Rounding, as measured here: two logits move by up to {rounding:.2g} against each other between passes of one and of "
        "several tokens."
    )
    for name, found in (("greedy", verdict.greedy), ("coupled", verdict.coupled)):
        lines += [
            f"{name} text {parting.prompt} parts at token {parting.position}: {parting.plain} without the drafter, "
            f"{parting.drafted} with it, margin {parting.margin:.3g}"
            for parting in found.partings
        ]
    return lines


def as_json(verdicts: Verdicts) -> dict[str, Any]:
    """All that was found, by drafter."""
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


def _texts_as_json(found: SameTexts) -> dict[str, Any]:
    """JSON has no infinity: null is the margin where one text has ended."""
    partings = [asdict(parting) | ({} if isfinite(parting.margin) else {"margin": None}) for parting in found.partings]
    return {"passes": found.passes, **asdict(found), "partings": partings}


def markdown(verdicts: Verdicts, device: str) -> str:
    """For a file."""
    parts = [f"# Is it lossless?\n\nMeasured on {device}.\n"]
    for name, verdict in verdicts.items():
        parts.append(f"## {name}\n\n{line(verdict)}\n\n" + "\n".join(f"- {each}" for each in details(verdict)) + "\n")
    return "\n".join(parts)
