"""Texts in which every pair of settings occurs: the array, the comparison, and 200 of the texts.

``python -m tests.grammars.pairs`` generates all of them.
"""

import jax
import numpy as np
import pytest

from specjax.grammars import Matcher
from tests.decoding.test_constrained import END, GRAMMARS, NEW, PROMPTS, compiler, models
from tests.grammars import pairs
from tests.grammars.covering import all_pairs, counted, covering_array, pairs_of
from tests.grammars.oracle import Oracle, Reader, Text
from tests.grammars.published_tokenizers import UnavailableError
from tests.grammars.random_grammars import EACH, KINDS, random_grammars

CALLS = pairs.order(80)


def test_every_pair_that_is_possible_occurs() -> None:
    factors = {"a": "123", "b": "xyz", "c": "pq", "d": "+-"}

    def allowed(a: str, x: str, b: str, y: str) -> bool:
        # b=z needs c=p, which a=3 excludes: so a=3 and b=z never meet.
        return (a, x, b, y) not in {("b", "z", "c", "q"), ("a", "3", "c", "p")}

    choices, impossible = covering_array(factors, allowed)
    counts = counted(choices)
    assert set(impossible) == {
        (("a", "3"), ("b", "z")),
        (("b", "z"), ("c", "q")),
        (("a", "3"), ("c", "p")),
    }
    assert set(counts) == set(all_pairs(factors)) - set(impossible)
    assert len(choices) < 18  # all choices would be 36
    for choice in choices:
        assert list(choice) == list(factors)
        for (a, x), (b, y) in pairs_of(choice):
            assert allowed(a, x, b, y)


@pytest.mark.full
def test_the_plan_has_every_pair_of_settings_in_more_than_3000_texts() -> None:
    choices = [choice for call in pairs.plan() for choice in call]
    assert len(choices) > 3_000
    counts = counted([{name: choice[name] for name in pairs.FACTORS} for choice in choices])
    excluded = set(pairs.impossible_pairs())
    assert not set(counts) & excluded
    assert set(counts) == set(all_pairs(pairs.FACTORS)) - excluded
    used = {(choice["grammar"], choice["number"]) for choice in choices}
    assert len(used) == len(KINDS) * EACH == 300
    assert len({sample.grammar for kind in KINDS for sample in random_grammars(kind)}) == 300


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_comparison_finds_each_changed_token(temperature) -> None:
    """Compare a text of the oracle's, the same with another legal token, and one that is cut."""
    target, grammar = models()[0], GRAMMARS["anything"]
    setting, prompt = {"temperature": temperature, "top_k": 5}, PROMPTS[0].tolist()
    oracle, key = Oracle(target, compiler(), grammar, (END,), **setting), jax.random.key(4)
    output = oracle.text(prompt, key, NEW)
    changed = [[*output[:i], (output[i] + 1) % END, *output[i + 1 :]] for i in range(3)]
    texts = [output, *changed, output[:2]]
    by_text = Reader(target, compiler(), len(prompt) + NEW).deviations(
        [Text(prompt, text, key, grammar, (END,), setting, NEW) for text in texts]
    )
    assert not by_text[0]
    for index, deviations in enumerate(by_text[1:4]):
        first = deviations[0]
        assert (first.position, first.expected) == (index, output[index])
        assert first.slack > 1e-3
    assert [it.position for it in by_text[4]] == [2]


@pytest.mark.full
@pytest.mark.thorough_except("128", "58")
@pytest.mark.parametrize("number", CALLS)
def test_every_text_is_the_oracles(number) -> None:
    """Check 80 of the texts; see `pairs.summary` for what is checked."""
    try:
        result = pairs.run_call(number, pairs.plan()[number])
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED: {error}")
    assert len(result["rows"]) == pairs.texts_of_call(pairs.calls()[number])
    for row in result["rows"]:
        assert row["problem"] is None, row
        assert all(it["slack"] <= result["rounding"] for it in row["deviations"]), row


@pytest.mark.thorough
def test_masks_of_a_wrong_position_are_found(monkeypatch) -> None:
    write_masks = Matcher.write_masks

    def late(self, masks, tokens, parents, drafted):
        illegal = write_masks(self, masks, tokens, parents, drafted)
        masks[:] = masks[np.maximum(parents, 0)]
        return illegal

    monkeypatch.setattr(Matcher, "write_masks", late)
    simple = {"tokenizer": "embedded", "target": "windows", "rule": "coupled", "batch": "mixed"}
    number = next(
        number
        for number, call in enumerate(pairs.calls())
        if simple.items() <= call.items()
        and call["runs in"] == "generate"
        and call["drafter"] != "none"
    )
    try:
        rows = pairs.run_call(number, pairs.plan()[number])["rows"]
    except RuntimeError as error:
        assert "is not legal" in str(error)
    else:
        assert any(row["deviations"] for row in rows)
