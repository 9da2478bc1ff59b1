"""Texts with a thinking budget: those of a slow oracle, for every drafter and rule."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.decoding import GenerationOptions, constrained
from specjax.errors import InputError, ThinkingBudgetError
from specjax.evaluation.conformance import FALSE_ALARM, g_test
from specjax.grammars import BudgetMatcher, ThinkingBudget, ThoughtTokens
from tests.conftest import compilations
from tests.decoding.test_constrained import DRAFTERS, END, VOCABULARY, compiler, models
from tests.grammars.thinking_oracle import ThinkingOracle, forced_token, thought_of

NEW = 28
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "nucleus": {"temperature": 1.2, "top_p": 0.7},
}
_STARTS = np.random.default_rng(0).integers(0, VOCABULARY - 1, (10, 6)).tolist()
# What ends the prompt, what begins and ends a thought, and the budget.
LAWS: tuple[tuple[list[int], tuple[int, ...], tuple[int, ...], int | None], ...] = (
    ([], (0,), (12,), 0),
    ([], (18,), (12, 18), 1),
    ([], (0, 0), (18, 0), 2),
    ([], (0, 0), (0, 0, 18), 5),  # a beginning of the end is often written before
    ([], (8,), (12,), 1000),
    ([], (0, 12), (18, 0), 5),
    ([7], (7,), (3, 4), 3),  # the prompt opens the thought
    ([7, 3], (7,), (3, 4), 0),  # and has half of its end
    ([7, 3, 4], (7,), (3, 4), 0),  # and all of it
    ([], (0,), (0,), 2),  # the same token begins and ends a thought
    ([], (0,), (12,), None),
)
PROMPTS = [[*_STARTS[row % 10], *law[0]] for row, law in enumerate(LAWS)]
BUDGETS = [
    None if budget is None else ThinkingBudget(budget, ThoughtTokens(begin, end))
    for _, begin, end, budget in LAWS
]


def row_keys() -> jax.Array:
    return jax.random.split(jax.random.key(3), len(LAWS))


def outputs(drafter: str, setting: str, **options: Any) -> list[list[int]]:
    target, model = models()
    tokens, lengths = specjax.text.pad(PROMPTS)
    result = specjax.generate(
        target,
        DRAFTERS[drafter](target, model),
        tokens,
        lengths,
        **{
            "max_new_tokens": NEW,
            "eos_token_ids": (),
            "key": row_keys(),
            "sampling": specjax.Sampling(**SETTINGS[setting]),
            "thinking_budget": BUDGETS,
        }
        | options,
    )
    ends = zip(result.tokens, lengths.tolist(), result.lengths, strict=True)
    return [row[start:end].tolist() for row, start, end in ends]


@cache
def expected(setting: str) -> list[list[int]]:
    """Return the oracle's output for each law."""
    oracle = ThinkingOracle(models()[0], (), (), None, (), **SETTINGS[setting])
    texts = []
    for prompt, key, (_, begin, end, budget) in zip(PROMPTS, row_keys(), LAWS, strict=True):
        oracle.law = (begin, end, budget)
        texts.append(oracle.text(prompt, key, NEW))
    return texts


@pytest.mark.full
@pytest.mark.thorough_except("dynamic tree-plain")
@pytest.mark.parametrize(("drafter", "setting"), list(product(DRAFTERS, SETTINGS)))
def test_every_text_is_the_oracles(drafter, setting) -> None:
    assert outputs(drafter, setting) == expected(setting)


def test_the_laws_cover_what_a_budget_does() -> None:
    """Check that thoughts end by force, by themselves, after half an end, and come again."""
    forced = half = by_themselves = several = 0
    for row, (_, begin, end, budget) in enumerate(LAWS):
        ends = 0
        for count, token in enumerate(expected("plain")[row]):
            before = expected("plain")[row][:count]
            law = PROMPTS[row], before, begin, end
            was_inside, since, _ = thought_of(*law)
            is_inside = thought_of(PROMPTS[row], [*before, token], begin, end)[0]
            is_forced = forced_token(*law, budget) is not None
            forced += is_forced
            half += is_forced and len(end) > 1 and budget not in (0, None) and since[-1] == end[0]
            ends += was_inside and not is_inside
            by_themselves += was_inside and not is_inside and not is_forced
        several += ends > 1
    assert min(forced, half, by_themselves, several) > 2


@pytest.mark.thorough
def test_a_budget_that_cannot_be_used_up_takes_no_masked_step_and_compiles_nothing_again(
    monkeypatch,
) -> None:
    free = outputs("chain", "plain", thinking_budget=None, rule="coupled")

    def budgets(tokens: int) -> list[ThinkingBudget]:
        return [ThinkingBudget(tokens, ThoughtTokens((0,), (12,)))] * len(LAWS)

    with monkeypatch.context() as patch:
        patch.setattr(constrained, "legal_tokens", None)  # an error where it is called
        assert outputs("chain", "plain", thinking_budget=budgets(1000)) == free
    outputs("chain", "plain", thinking_budget=budgets(3))
    before = compilations()
    outputs("chain", "plain", thinking_budget=budgets(8))
    outputs("chain", "plain")
    assert compilations() == before


@pytest.mark.thorough
def test_a_stream_gives_the_same_text() -> None:
    target, model = models()
    options = {"max_new_tokens": NEW, "eos_token_ids": (), "thinking_budget": BUDGETS[3]}
    drafter = DRAFTERS["chain"](target, model)
    whole = specjax.generate(target, drafter, _STARTS, **options)
    parts = list(specjax.stream(target, drafter, _STARTS, steps=2, **options))
    assert np.array_equal(parts[-1].tokens, whole.tokens)
    assert whole.grammar_completed is None
    assert all(part.lengths.max() <= 6 + 2 * (at + 1) * 9 for at, part in enumerate(parts))


# --- with a grammar -------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except("dynamic tree-nucleus")
@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("drafter", ["none", "chain", "dynamic tree"])
def test_a_grammar_after_the_thought_and_a_budget_hold_together(drafter, setting) -> None:
    """Check a grammar that begins where the thought has ended, by force or by itself."""
    target, model = models()
    grammar = specjax.After("f", specjax.Regex("(ab|de){1,3}"))
    oracle = ThinkingOracle(target, (7,), (5,), 4, (END,), compiler(), grammar, **SETTINGS[setting])
    prompts = [[*start, 7] for start in _STARTS]
    result = specjax.generate(
        target,
        DRAFTERS[drafter](target, model),
        prompts,
        max_new_tokens=NEW,
        eos_token_ids=(END,),
        key=jax.random.split(jax.random.key(3), len(prompts)),
        sampling=specjax.Sampling(**SETTINGS[setting]),
        grammar=compiler().compile(grammar),
        thinking_budget=ThinkingBudget(4, ThoughtTokens((7,), (5,))),
    )
    keys = jax.random.split(jax.random.key(3), len(prompts))
    for row, end in enumerate(result.lengths.tolist()):
        assert result.tokens[row, 7:end].tolist() == oracle.text(prompts[row], keys[row], NEW)
    assert result.grammar_completed.any()


@pytest.mark.full
def test_a_grammar_that_does_not_allow_the_end_is_an_error_that_names_both() -> None:
    target, _ = models()
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "eos_token_ids": (END,),
        "grammar": [compiler().compile(specjax.Regex("(ab|de){3,9}")), None],
        "thinking_budget": ThinkingBudget(2, ThoughtTokens((7,), (5,))),
    }
    with pytest.raises(
        ThinkingBudgetError, match=r"row 0 cannot go on: token 5.*grammar"
    ) as caught:
        specjax.generate(target, None, [[*start, 7] for start in _STARTS[:2]], **options)
    assert caught.value.rows == (0,)
    free = options | {"grammar": None}
    whole = specjax.generate(target, None, [[*start, 7] for start in _STARTS[:2]], **free)
    assert np.array_equal(caught.value.result.tokens[1], whole.tokens[1])


# --- the distribution -----------------------------------------------------------------------------


def p_value(drafter: str, rule: str, draws: int = 5_000) -> float:
    """Return the p-value of a G-test of whole texts against all texts of the oracle."""
    target, model = models()
    prompt, length, budget = [*_STARTS[1], 7], 4, 1
    oracle = ThinkingOracle(target, (7,), (0, 8), budget, (END,), temperature=1.0, top_k=4)
    language = dict(oracle.language(prompt, length))
    texts = list(language)
    result = specjax.generate(
        target,
        DRAFTERS[drafter](target, model),
        np.tile(prompt, (draws, 1)),
        max_new_tokens=length,
        sampling=specjax.Sampling(top_k=4),
        eos_token_ids=(END,),
        key=jax.random.key(8),
        rule=rule,
        thinking_budget=ThinkingBudget(budget, ThoughtTokens((7,), (0, 8))),
    )
    counts = np.zeros(len(texts) + 1)
    order = {text: index for index, text in enumerate(texts)}
    for row, end in zip(result.tokens[:, 7:], result.lengths - 7, strict=True):
        counts[order.get(tuple(row[:end].tolist()), len(texts))] += 1
    return g_test(counts, np.array([*language.values(), 0.0]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("chain", "coupled"),
        ("chain", "block"),
        ("sampled tree", "independent"),
        ("dynamic tree", "independent"),
    ],
)
def test_the_distribution_is_that_of_the_law(drafter, rule) -> None:
    assert p_value(drafter, rule) >= FALSE_ALARM


# --- broken on purpose ----------------------------------------------------------------------------


def _one_more(forced: Callable) -> Callable:
    def late(self, state):
        return forced(self, state._replace(count=state.count - 1))

    return late


def _of_siblings(write_masks: Callable) -> Callable:
    def chain(self, masks, tokens, parents, drafted):
        return write_masks(self, masks, tokens, list(range(-1, len(tokens) - 1)), drafted)

    return chain


def _shared(step: Callable) -> Callable:
    def keeps(self, state, token):
        after = step(self, state, token)
        return after._replace(count=state.count + state.is_inside)

    return keeps


def _from_its_first_token(forced: Callable) -> Callable:
    def whole(self, state):
        is_new = state.count == self.budget
        return forced(self, state._replace(matched=0) if is_new else state)

    return whole


BREAKS: dict[str, tuple[Any, str, Callable]] = {
    "a count off by one": (BudgetMatcher, "_forced_token", _one_more),
    "a count over the siblings' path": (BudgetMatcher, "write_masks", _of_siblings),
    "a budget that all thoughts share": (ThoughtTokens, "step", _shared),
    "an end that begins anew": (BudgetMatcher, "_forced_token", _from_its_first_token),
}


@pytest.mark.full
@pytest.mark.thorough_except("a count off by one", "a count over the siblings' path")
@pytest.mark.parametrize("name", list(BREAKS))
def test_a_broken_law_is_noticed(name, monkeypatch) -> None:
    owner, attribute, broken = BREAKS[name]
    right = expected("plain")
    monkeypatch.setattr(owner, attribute, broken(getattr(owner, attribute)))
    try:
        assert outputs("dynamic tree", "plain") != right
    except RuntimeError as error:  # the matcher meets a token that is not legal
        assert "is not legal" in str(error)


# --- arguments ------------------------------------------------------------------------------------


def test_wrong_budgets_are_refused_by_name() -> None:
    target, _ = models()
    thought = ThoughtTokens((7,), (8,))
    for wrong, message in (
        (5, "thinking_budget=5: give specjax.ThinkingBudget"),
        ([ThinkingBudget(1, thought)], "thinking_budget: 1 budgets; give one, or one for each"),
        (ThinkingBudget(1), "give it token ids"),
        (ThinkingBudget(1, ThoughtTokens((7,), (20,))), r"end_ids=\[20\]: outside the vocabulary"),
    ):
        with pytest.raises(InputError, match=message):
            specjax.generate(target, None, _STARTS[:2], max_new_tokens=2, thinking_budget=wrong)
    for wrong_tokens in (-1, 2.5, "3", True):
        with pytest.raises(InputError, match=r"thinking_budget=.*: must be a whole number"):
            ThinkingBudget(wrong_tokens, thought)
    with pytest.raises(InputError, match="trial decodes free text; leave out thinking_budget"):
        GenerationOptions(thinking_budget=ThinkingBudget(1, thought)).check_has_no_grammar("trial")


def test_the_default_rule_is_the_coupled_one() -> None:
    budget = ThinkingBudget(1, ThoughtTokens((7,), (8,)))
    shape = specjax.Chain(3)
    assert GenerationOptions(thinking_budget=budget).rule_for(shape) == "coupled"
    assert GenerationOptions().rule_for(shape) == "independent"
