"""Questions for evaluations: those of Spec-Bench, with categories and turns, or plain prompts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import text
from specjax.errors import InputError

GENERAL = "prompts"
"""The category of questions without a category."""


@dataclass(frozen=True)
class Question:
    """A question of one or several turns.

    Attributes:
        category: the kind of question.
        turns: the user's messages, in order. Each is sent after the answer to the one before.
    """

    category: str
    turns: tuple[str, ...]


_MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
# The category of a question -> its task in the tables of Xia et al. 2024, arXiv 2401.07851.
SPEC_BENCH = {
    **dict.fromkeys(_MT_BENCH, "mt-bench"),
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "question answering",
    "math_reasoning": "mathematics",
    "rag": "retrieval",
}


_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""The beginning of a SPEED-Bench turn whose text has to be collected from its source."""


def read_questions(
    name: str,
    per_category: int = 0,
    *,
    tasks: Mapping[str, str] = SPEC_BENCH,
    categories: Collection[str] = (),
) -> list[Question]:
    """Read the questions of a file.

    The file has JSON lines with an optional ``category`` and either ``turns``, a list of text, or
    ``messages`` of the user, as SPEED-Bench's files have. Or it has prompts as in
    `specjax.text.read_prompts`.

    Args:
        name: the name of the file.
        per_category: how many questions of each category to return, the first ones; 0 for all.
        tasks: the task that a category belongs to, which replaces it.
        categories: the categories, or tasks, whose questions to return; empty: all.

    Raises:
        InputError: The file cannot be read, a line is not a question, or no question has one of
            the categories.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.evaluation.questions import read_questions
        >>> line = '{"category": "coding", "messages": [{"role": "user", "content": "Sort."}]}'
        >>> _ = Path("questions.jsonl").write_text(line)
        >>> read_questions("questions.jsonl")
        [Question(category='mt-bench', turns=('Sort.',))]
        >>> read_questions("questions.jsonl", tasks={}, categories=["coding"])
        [Question(category='coding', turns=('Sort.',))]
    """
    path = Path(name)
    records = list(text.read_json_lines(path)) if path.suffix == ".jsonl" and path.is_file() else []
    if any(isinstance(record, dict) and record.keys() & _TURNS for _, record in records):
        questions = [_question(record, f"{path}:{line}", tasks) for line, record in records]
    else:
        questions = [
            Question(GENERAL, (prompt,)) for prompt in text.read_prompts("questions", name)
        ]
    present = sorted({question.category for question in questions})
    for category in categories:
        if category not in present:
            raise InputError(
                f"categories={category!r}: no question of {name} has it; give one or more of"
                f" {', '.join(present)}"
            )
    counts: dict[str, int] = {}
    selected = []
    for question in questions:
        if categories and question.category not in categories:
            continue
        counts[question.category] = counts.get(question.category, 0) + 1
        if not per_category or counts[question.category] <= per_category:
            selected.append(question)
    return selected


_TURNS = {"turns", "messages"}


def _question(record: Any, where: str, tasks: Mapping[str, str]) -> Question:
    """Return the question of one line of a file."""
    try:
        turns, category = record.get("turns"), record.get("category", GENERAL)
        if turns is None:
            messages = record["messages"]
            turns = [message["content"] for message in messages if message["role"] == "user"]
            if len(turns) < len(messages):
                raise InputError(
                    f"{where}: a message is not the user's; give the user's messages alone, which"
                    " the model answers"
                )
        is_valid = (
            isinstance(turns, list)
            and turns
            and all(isinstance(turn, str) and turn for turn in turns)
        )
        if not is_valid or not isinstance(category, str):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            f'{where}: not a JSON object with "turns", a list of text, or "messages" of the user'
        ) from None
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        raise InputError(
            f"{where}: a turn has no text but SPEED-Bench's note that it must be collected from its"
            " source; prepare the file with SPEED-Bench's own script"
        )
    return Question(tasks.get(category, category), tuple(turns))
