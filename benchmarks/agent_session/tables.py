"""Print the tables of docs/results/agent-session.md from the results.

python -m benchmarks.agent_session.tables
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

RESULTS = Path(__file__).parents[1] / "results" / "agent_session.json"


@dataclass(frozen=True)
class TablesConfig:
    """Print the tables.

    Attributes:
        results: the file that ``python -m benchmarks.agent_session`` has written.
    """

    results: str = str(RESULTS)


def totals(answers: list[dict[str, Any]], kind: str | None = None) -> tuple[int, int]:
    """Return the tokens and the steps of the answers of a kind; None for all."""
    chosen = [answer for answer in answers if kind in (None, answer["kind"])]
    return sum(answer["tokens"] for answer in chosen), sum(answer["steps"] for answer in chosen)


def per_step(answers: list[dict[str, Any]], kind: str | None = None) -> float:
    """Return the mean number of tokens of a step; NaN without answers."""
    tokens, steps = totals(answers, kind)
    return tokens / steps if steps else float("nan")


def shares_of(drafter: dict[str, Any], kind: str | None = None) -> dict[str, dict[str, float]]:
    """Return the shares of each part in the accepted tokens of the answers of a kind; None: all.

    They are the tokens that it offered, and those that no other part offered.
    """
    answers = [answer for answer in drafter["answers"] if kind in (None, answer["kind"])]
    tokens, steps = totals(answers)
    accepted = tokens - steps
    return {
        part: {
            label: sum(answer[key][place] for answer in answers) / max(accepted, 1)
            for label, key in (("offered", "by_part"), ("only", "only_by_part"))
        }
        for place, part in enumerate(drafter["parts"])
    }


def rows_of(session: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the tables state about each drafter of a session.

    Unions are compared with the best of the single drafters, which has all slots.
    """
    drafters = session["drafters"]
    single = {name: it["answers"] for name, it in drafters.items() if not it["parts"]}
    best = max(single, key=lambda name: per_step(single[name]))
    rows = []
    for name, drafter in drafters.items():
        answers = drafter["answers"]
        pairs = list(zip(answers, single[best], strict=True))
        rows.append(
            {
                "name": name,
                "per_step": per_step(answers),
                "edits": per_step(answers, "edits"),
                "shown": per_step(answers, "shown"),
                "best": best,
                "against_best": per_step(answers) / per_step(single[best]),
                "better": sum(here["steps"] < there["steps"] for here, there in pairs),
                "worse": sum(here["steps"] > there["steps"] for here, there in pairs),
                "steps": totals(answers)[1],
                "worse_steps": sum(answer["worse_steps"] for answer in answers),
                "parts": shares_of(drafter),
            }
        )
    return rows


def table_of(session: dict[str, Any]) -> str:
    """Return the table of a session in Markdown."""
    lines = [
        "| drafter | tokens a step | edits | shown | against the best single one | texts better,"
        " worse | accepted: offered by, only by |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows_of(session):
        parts = "; ".join(
            f"{part} {shares['offered']:.0%}, {shares['only']:.0%}"
            for part, shares in row["parts"].items()
        )
        lines.append(
            f"| {row['name']} | {row['per_step']:.2f} | {row['edits']:.2f} | {row['shown']:.2f} |"
            f" {row['against_best']:.2f} | {row['better']}, {row['worse']} | {parts} |"
        )
    return "\n".join(lines)


def table_by_category(sessions: dict[str, dict[str, Any]]) -> str:
    """Return the table of what each part of each union contributed, by kind of answer."""
    lines = [
        "| session | union | part | edits: offered by, only by | shown: offered by, only by |",
        "|---|---|---|---:|---:|",
    ]
    for session, results in sessions.items():
        for union, drafter in results["drafters"].items():
            edits, shown = (shares_of(drafter, kind) for kind in ("edits", "shown"))
            for part in drafter["parts"]:
                cells = (
                    f"{it[part]['offered']:.1%}, {it[part]['only']:.1%}" for it in (edits, shown)
                )
                lines.append(f"| {session} | {union} | {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(config: TablesConfig) -> None:
    """Print a table for each session, and one of the parts of all unions."""
    results = json.loads(Path(config.results).read_text())
    for name, session in results["sessions"].items():
        facts = {key: value for key, value in session["facts"].items() if key != "commits"}
        print(f"{name}: {facts}\n\n{table_of(session)}\n")
        unions = [row for row in rows_of(session) if row["parts"]]
        for row in unions:
            print(
                f"{row['name']}: a part alone was better in {row['worse_steps']} of"
                f" {row['steps']} steps"
            )
        print()
    print(table_by_category(results["sessions"]))


if __name__ == "__main__":
    main(tyro.cli(TablesConfig))
