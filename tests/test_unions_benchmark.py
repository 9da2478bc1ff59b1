"""Check the benchmark of unions: its prompts, its tables, and a small run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import unions
from benchmarks.unions import Prompts, UnionsConfig, chosen, drafters_of, loops, spread
from benchmarks.unions_tables import (
    counts_rows,
    counts_table,
    rules_table,
    speed_rows,
    speed_table,
)
from specjax.drafts.shapes import UnionTree
from specjax.errors import InputError
from tests.conftest import tiny_target


def text_record(category, tokens, steps, by_part=(), only=(), repeated=0.0, text=1):
    return {
        "category": category,
        "tokens": tokens,
        "steps": steps,
        "accepted": tokens - steps,
        "by_part": list(by_part),
        "only_by_part": list(only),
        "repeated": repeated,
        "text": text,
    }


def counts() -> list[dict]:
    """Make three runs of two categories; the second text of "qa" loops."""

    def run(drafter, parts, *texts):
        return {"drafter": drafter, "temperature": 1.0, "parts": parts, "texts": list(texts)}

    plain = [
        text_record("qa", 20, 20),
        text_record("qa", 20, 20, repeated=0.5),
        text_record("rag", 20, 20),
    ]
    model = [
        text_record("qa", 20, 10),
        text_record("qa", 20, 2, repeated=0.5),
        text_record("rag", 20, 5),
    ]
    union = [
        text_record("qa", 20, 8, (9, 6), (6, 3)),
        text_record("qa", 20, 2, (18, 18), repeated=0.5),
        text_record("rag", 20, 8, (12, 0), (12, 0), text=2),
    ]
    return [
        run("plain", [], *plain),
        run("model", [], *model),
        run("union", ["A", "B"], *union),
    ]


def test_counts_are_by_category_and_without_looping_texts() -> None:
    qa, rag, total = counts_rows(counts(), 1.0)
    assert (qa["texts"], qa["looping"]) == (2, 1)
    assert qa["lengths"] == {"plain": 1.0, "model": 2.0, "union": 2.5}
    assert qa["best"] == "model"
    assert qa["against_best"] == {"union": 1.25}
    assert rag["against_best"] == {"union": pytest.approx(20 / 8 / 4)}
    assert total["category"] == "all"
    assert total["lengths"]["model"] == pytest.approx(40 / 15)


def test_shares_are_of_the_accepted_tokens() -> None:
    qa, rag, total = counts_rows(counts(), 1.0)
    assert qa["parts"]["union"] == {
        "A": {"offered": 9 / 12, "only": 6 / 12},
        "B": {"offered": 6 / 12, "only": 3 / 12},
    }
    assert rag["parts"]["union"]["B"] == {"offered": 0.0, "only": 0.0}
    assert total["parts"]["union"]["A"] == {"offered": 21 / 24, "only": 18 / 24}


def test_the_table_of_counts_says_how_many_texts_are_those_of_plain_decoding() -> None:
    table = counts_table(counts())
    assert "T = 1; 5 of 6 texts of drafters are those of plain decoding" in table
    assert "| qa | 2 | 1 | 2.00 | 2.50 (1.25) | A 75%, 50%; B 50%, 25% |" in table


def test_a_category_whose_texts_all_loop_has_no_length() -> None:
    runs = counts()
    for run in runs:
        run["texts"][2]["repeated"] = 0.9
    rag = counts_rows(runs, 1.0)[1]
    assert rag["looping"] == 1
    assert all(np.isnan(length) for length in rag["lengths"].values())


def test_speed_is_compared_text_by_text_within_each_repeat() -> None:
    def run(drafter, seconds, parts=(), texts=(1, 2)):
        base = {"drafter": drafter, "temperature": 0.0, "tokens": 120, "steps": 48, "scored": 240}
        return {**base, "parts": list(parts), "texts": list(texts), "seconds": seconds}

    # The second repeat was three times as slow for the first text.
    runs = [
        run("plain", [[4.0, 8.0], [12.0, 8.0]]),
        run("model", [[2.0, 4.0], [6.0, 4.0]]),
        run("model + suffix", [[1.0, 5.0], [3.0, 4.0]], ("A", "B"), (1, 3)),
    ]
    plain, model, union = speed_rows(runs, 0.0)
    assert (plain["lower"], plain["against_best"], plain["upper"]) == (0.5, 0.5, 0.5)
    assert (model["rate"], model["least"], model["most"]) == (16.0, 12.0, 20.0)
    assert union["against_best"] == 1.5  # the median of 2, 0.8, 2 and 1
    assert (union["lower"], union["upper"]) == (0.95, 2.0)
    assert (union["per_step"], union["nodes"]) == (2.5, 5.0)
    table = speed_table({"parameters": 6e7, "load": 1.0, "runs": runs})
    assert "3 of 4 texts of drafters are those of plain decoding" in table
    assert "nodes a step, with the root" in table
    assert "| model + suffix | 19 (17 to 20) | 1.50 (0.95 to 2.00) | 2.50 | 5.0 |" in table


def test_a_union_is_not_the_best_single_drafter() -> None:
    base = {"temperature": 0.0, "tokens": 1, "steps": 1, "scored": 1}
    runs = [
        {**base, "drafter": "a + b", "parts": [], "seconds": [[2.0]]},
        {**base, "drafter": "union", "parts": ["A", "B"], "seconds": [[1.0]]},
    ]
    assert [row["against_best"] for row in speed_rows(runs, 0.0)] == [1.0, 2.0]


def test_rules_are_ratios_of_totals() -> None:
    table = rules_table([{"name": "chain", "rule": "block", "totals": [[30, 10], [10, 10]]}])
    assert "| chain | 2.000 | 3.000 1.000 |" in table


def test_prompts_are_padded_at_the_right_and_keep_their_last_tokens() -> None:
    prompts = Prompts.of([("qa", [5, 6, 7]), ("rag", [8])], width=2)
    assert prompts.tokens.tolist() == [[6, 7], [8, 0]]
    assert prompts.lengths.tolist() == [2, 1]
    tokens, lengths = prompts.batch([1])
    assert (tokens.tolist(), lengths.tolist()) == ([[8, 0]], [1])


def test_prompts_to_time_are_spread_over_the_categories() -> None:
    assert spread([[1, 2], [3, 4], [5, 6]], most=2) == [1, 5]
    assert spread([[1, 2], [3]], most=5) == [1, 3, 2]
    assert spread([], most=2) == []


def test_a_text_that_repeats_itself_loops() -> None:
    assert loops([1, 2, 3, 4] * 20)
    assert not loops(list(range(80)))
    assert not loops([])


def test_all_drafts_but_two_have_equally_many_nodes() -> None:
    drafters = drafters_of(tiny_target())
    exceptions = {"model": 4, "model + suffix, 16 + 16": 2 * unions.NODES}
    for name, drafter in drafters.items():
        if drafter is not None:
            below_root = exceptions.get(name, unions.NODES)
            assert drafter.draft_shape.nodes == 1 + below_root, name
    limited = drafters["model + suffix, 16 in all"]
    assert limited is not None
    assert isinstance(limited.draft_shape, UnionTree)


def test_unknown_drafters_are_refused() -> None:
    drafters = drafters_of(tiny_target())
    assert list(chosen(drafters, ("suffix",))) == ["plain", "suffix"]
    with pytest.raises(InputError, match=r"drafters='eagle'.*plain, model"):
        chosen(drafters, ("eagle",))


@pytest.mark.thorough
def test_a_run_counts_and_is_continued(tiny_pair, tmp_path: Path) -> None:
    target, draft = tiny_pair
    questions, output = tmp_path / "questions.jsonl", tmp_path / "results.json"
    questions.write_text(
        "\n".join(
            json.dumps({"category": category, "turns": [turn]})
            for category, turn in (("qa", "Who?"), ("rag", "What?"), ("qa", "Why?"))
        )
    )
    arguments = {
        "questions": str(questions),
        "target": target,
        "draft": draft,
        "context": 16,
        "new_tokens": 12,
        "rows": 2,
        "seeds": 1,
        "output": str(output),
    }
    config = UnionsConfig(**arguments, temperature=(1.0,), drafters=("model + suffix, 4 + 12",))
    unions.main(config)
    pair = json.loads(output.read_text())["embedded pair"]
    plain, union = pair["counts"]
    assert [record["category"] for record in plain["texts"]] == ["qa", "qa", "rag"]
    for alone, record in zip(plain["texts"], union["texts"], strict=True):
        assert (alone["text"], alone["tokens"]) == (record["text"], record["tokens"])
        assert max(record["by_part"]) <= record["accepted"] <= sum(record["by_part"])
        assert alone["steps"] == alone["tokens"]
    assert len(pair["rules"]) == 3
    pair["rules"][0]["totals"] = [[1, 1]]
    output.write_text(json.dumps({"embedded pair": pair}))
    unions.main(config)  # nothing is run again
    assert json.loads(output.read_text())["embedded pair"] == pair
    with pytest.raises(InputError, match="give the same ones"):
        unions.main(UnionsConfig(**{**arguments, "new_tokens": 11}))
    questions.write_text(questions.read_text().replace("Who", "How"))
    with pytest.raises(InputError, match="give the same ones"):
        unions.main(config)
    questions.write_text(questions.read_text().replace("How", "Who"))
    with pytest.raises(InputError, match=r"draft=.*give another name"):
        unions.main(dataclasses.replace(config, draft=target))
    quick = {"speed": True, "inflate": (64, 128, 3), "timed": 2, "repeats": 2}
    unions.main(dataclasses.replace(config, **quick))
    pair = json.loads(output.read_text())["embedded pair"]
    assert pair["counts"] == [plain, union]
    alone, both = pair["speed"]["runs"]
    assert alone["categories"] == ["qa", "rag"]
    assert alone["steps"] == alone["tokens"] == alone["scored"] == both["tokens"]
    assert both["steps"] < both["tokens"]
    assert [len(seconds) for seconds in both["seconds"]] == [2, 2]
    assert (alone["parts"], len(both["parts"])) == ([], 2)
    # The timed texts are those that were checked for loops.
    first_of_categories = [plain["texts"][index]["text"] for index in (0, 2)]
    assert alone["texts"] == both["texts"] == first_of_categories
    assert (pair["speed"]["new_tokens"], pair["speed"]["inflate"]) == (12, [64, 128, 3])
    with pytest.raises(InputError, match=r"target=.*give another name"):
        unions.main(dataclasses.replace(config, **quick, target=draft))
