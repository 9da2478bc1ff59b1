"""Questions for evaluations: those of Spec-Bench, with categories and turns, or plain prompts."""

from dataclasses import dataclass
from pathlib import Path

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


def read_questions(name: str, per_category: int = 0) -> list[Question]:
    """Read the questions of a file.

    The file has JSON lines with ``turns`` and an optional ``category``, or prompts as in
    `specjax.text.read_prompts`.

    Args:
        name: the name of the file.
        per_category: how many questions of each category to return, the first ones; 0 for all.

    Raises:
        InputError: The file cannot be read, or a line is not a question.
    """
    path = Path(name)
    records = list(text.read_json_lines(path)) if path.suffix == ".jsonl" and path.is_file() else []
    if not any(isinstance(record, dict) and "turns" in record for _, record in records):
        questions = [
            Question(GENERAL, (prompt,)) for prompt in text.read_prompts("questions", name)
        ]
        return questions[: per_category or None]
    questions = []
    for line, record in records:
        try:
            turns, category = record["turns"], record.get("category", GENERAL)
            is_valid = (
                isinstance(turns, list)
                and turns
                and all(isinstance(turn, str) and turn for turn in turns)
            )
            if not is_valid or not isinstance(category, str):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise InputError(
                f'{path}:{line}: not a JSON object with "turns", a list of text'
            ) from None
        questions.append(Question(SPEC_BENCH.get(category, category), tuple(turns)))
    counts: dict[str, int] = {}
    selected = []
    for question in questions:
        counts[question.category] = counts.get(question.category, 0) + 1
        if not per_category or counts[question.category] <= per_category:
            selected.append(question)
    return selected
