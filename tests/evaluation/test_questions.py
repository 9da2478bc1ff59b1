"""Read questions in Spec-Bench's format, and plain prompts."""

import json

import pytest

from specjax.errors import InputError
from specjax.evaluation.questions import GENERAL, Question, read_questions


def test_questions_keep_their_turns_and_their_kind(tmp_path) -> None:
    file = tmp_path / "question.jsonl"
    records = [
        {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 2, "category": "coding", "turns": ["Code."]},
        {"question_id": 3, "category": "rag", "turns": ["Look it up."]},
        {"question_id": 4, "category": "novel kind", "turns": ["Try."]},
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert read_questions(str(file)) == [
        Question("mt-bench", ("Write.", "Again.")),
        Question("mt-bench", ("Code.",)),
        Question("retrieval", ("Look it up.",)),
        Question("novel kind", ("Try.",)),
    ]
    assert [question.category for question in read_questions(str(file), 1)] == [
        "mt-bench",
        "retrieval",
        "novel kind",
    ]


def test_prompts_are_questions_of_one_turn(tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"text": "two"}\n')
    for name in ("prompts.txt", "prompts.jsonl"):
        assert read_questions(str(tmp_path / name)) == [
            Question(GENERAL, ("one",)),
            Question(GENERAL, ("two",)),
        ]
    assert len(read_questions(str(tmp_path / "prompts.txt"), 1)) == 1


@pytest.mark.parametrize(
    "line", ['{"turns": []}', '{"turns": "a"}', '{"turns": [1]}', "{", '{"category": "a"}']
)
def test_a_line_that_is_no_question_is_named(line, tmp_path) -> None:
    (tmp_path / "question.jsonl").write_text('{"turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(InputError, match=r"question\.jsonl:2: (it is )?not (a )?JSON"):
        read_questions(str(tmp_path / "question.jsonl"))


def test_messages_of_speed_bench_are_turns(tmp_path) -> None:
    file = tmp_path / "qualitative.jsonl"
    records = [
        {"category": name, "messages": [{"role": "user", "content": turn} for turn in turns]}
        for name, turns in (("coding", ["Sort.", "Faster."]), ("writing", ["Write."]))
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    assert read_questions(str(file), tasks={}) == [
        Question("coding", ("Sort.", "Faster.")),
        Question("writing", ("Write.",)),
    ]
    assert read_questions(str(file), tasks={}, categories=("writing",)) == [
        Question("writing", ("Write.",))
    ]
    with pytest.raises(
        InputError, match=r"categories='rag': .*give one or more of coding, writing"
    ):
        read_questions(str(file), tasks={}, categories=("writing", "rag"))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [{"role": "assistant", "content": "Yes."}]}, "a message is not the user's"),
        (
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING A TOOL"]},
            "SPEED-Bench's own script",
        ),
    ],
)
def test_lines_without_the_users_text_are_refused(record, words, tmp_path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=rf"question\.jsonl:1: .*{words}"):
        read_questions(str(file))
