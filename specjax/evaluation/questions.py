"""Questions to evaluate with: Spec-Bench's, by category and of several turns, or plain prompts."""

from dataclasses import dataclass
from pathlib import Path

from specjax import text
from specjax.errors import InputError

GENERAL = "prompts"
"""The category of questions that name none."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        category: what kind of question it is.
        turns: what the user says, one after the other; each is asked when the one before is answered.
    """

    category: str
    turns: tuple[str, ...]


SPEC_BENCH = {  # the category of a question -> the task that its paper reports it under (Xia et al. 2024, arXiv 2401.07851)
    **dict.fromkeys(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "mt-bench"),
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "question answering",
    "math_reasoning": "mathematics",
    "rag": "retrieval",
}


def read_questions(argument: str, name: str, per_category: int = 0) -> list[Question]:
    """The questions of a file: JSON lines with ``turns`` and, where there is one, a ``category``; or prompts (`read_prompts`).

    Args:
        argument: that named the file, for errors.
        name: of the file.
        per_category: the first so many of each category; 0 is all.

    Raises:
        InputError: the file cannot be read, or a line is no question.
    """
    path = Path(name)
    records = list(text.read_json_lines(path)) if path.suffix == ".jsonl" and path.is_file() else []
    if not any(isinstance(record, dict) and "turns" in record for _, record in records):
        questions = [Question(GENERAL, (prompt,)) for prompt in text.read_prompts(argument, name)]
        return questions[: per_category or None]
    questions = []
    for number, record in records:
        try:
            turns, category = record["turns"], record.get("category", GENERAL)
            said = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)
            if not said or not isinstance(category, str):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise InputError(f'{path}:{number}: not a JSON object with "turns", a list of text') from None
        questions.append(Question(SPEC_BENCH.get(category, category), tuple(turns)))
    taken: dict[str, int] = {}
    chosen = []
    for question in questions:
        taken[question.category] = taken.get(question.category, 0) + 1
        if not per_category or taken[question.category] <= per_category:
            chosen.append(question)
    return chosen
