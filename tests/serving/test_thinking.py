"""Thinking budgets in the engine: the texts of a slow oracle, beside free and constrained rows."""

from functools import cache
from typing import Any, Literal

import jax
import numpy as np
import pytest

import specjax
from specjax.errors import InputError
from specjax.grammars import BudgetMatcher, ThoughtTokens
from specjax.sampling import make_key
from specjax.serving import ClientDrafts, Engine
from specjax.serving.handle import EngineError, Handle
from tests.conftest import compilations
from tests.decoding.test_constrained import DRAFTERS, END, GRAMMARS, VOCABULARY, compiler, models
from tests.grammars.thinking_oracle import ThinkingOracle
from tests.grammars.tokenizers_for_tests import small_tokenizer
from tests.serving.test_constrained import SIZES

NEW = 26
BEGIN, FINISH = (0,), (12, 0)
TEXTS = "a", "1a"
"""The texts of the tokens that begin and end a thought."""

BUDGETS = (0, 1, 2, 5, 1000, None)
PROMPTS = np.random.default_rng(1).integers(0, VOCABULARY - 2, (12, 9)).tolist()
PROMPTS[3], PROMPTS[8] = [*PROMPTS[3][:8], 0], [*PROMPTS[8][:7], 0, 12]  # inside a thought
Case = tuple[list[int], int | None, Any, int, float]


def cases() -> list[Case]:
    """Return prompts with budgets, grammars, seeds and temperatures."""
    grammars = {4: GRAMMARS["anything"], 7: GRAMMARS["anything"]}
    return [
        (prompt, BUDGETS[index % 6], grammars.get(index), index, float(index % 5 > 0))
        for index, prompt in enumerate(PROMPTS)
    ]


@cache
def expected() -> list[list[int]]:
    """Return the oracle's output for each case."""
    texts = []
    free = ThinkingOracle(models()[0], BEGIN, FINISH, None, ())
    for prompt, budget, grammar, seed, temperature in cases():
        oracle = free
        if grammar is not None:
            law = models()[0], BEGIN, FINISH, budget, (), compiler(), grammar
            oracle = ThinkingOracle(*law)
        oracle.law, oracle._setting = (BEGIN, FINISH, budget), {"temperature": temperature}
        key = jax.random.fold_in(make_key(seed), np.uint32(0))
        texts.append(oracle.text(prompt, key, NEW))
    return texts


def engine(drafter: str = "chain", **options: Any) -> Engine:
    target, model = models()
    return Engine(
        target,
        DRAFTERS[drafter](target, model),
        **SIZES
        | {"tokenizer": small_tokenizer(), "grammars": True, "thought_tokens": TEXTS}
        | options,
    )


def submitted(served: Engine) -> list[Handle]:
    return [
        served.submit(
            prompt,
            max_new_tokens=NEW,
            temperature=temperature,
            seed=seed,
            eos_token_ids=(),
            grammar=grammar,
            thinking_budget=budget,
        )
        for prompt, budget, grammar, seed, temperature in cases()
    ]


def outputs(served: Engine) -> list[list[int]]:
    return [list(handle.result(timeout=300).tokens) for handle in submitted(served)]


@pytest.mark.parametrize(
    ("drafter", "kinds"),
    [
        *(
            pytest.param(drafter, kinds, marks=pytest.mark.full)
            for drafter, kinds in (
                ("chain", "chosen"),
                ("chain", "masked"),
                ("dynamic tree", "free"),
            )
        ),
        *(
            pytest.param(drafter, kinds, marks=pytest.mark.thorough)
            for drafter, kinds in (
                ("none", "chosen"),
                ("dynamic tree", "chosen"),
                ("chain", "free"),
                ("EAGLE-3 of few tokens", "chosen"),
                ("prompt lookup", "masked"),
            )
        ),
    ],
)
def test_every_text_is_the_oracles(
    drafter: str, kinds: Literal["chosen", "masked", "free"]
) -> None:
    """Check twelve requests in four rows, with so few pages that texts are preempted."""
    with engine(drafter) as served:
        served._loop._constrained.kinds = kinds
        served.submit(PROMPTS[0], max_new_tokens=2).result(timeout=300)
        before = compilations()
        handles = submitted(served)
        texts = [list(handle.result(timeout=300).tokens) for handle in handles]
        assert served.statistics.preemptions > 0
        assert compilations() == before
    assert texts == expected()
    has_grammar = [grammar is not None for _, _, grammar, _, _ in cases()]
    assert [handle.grammar_completed is not None for handle in handles] == has_grammar


@pytest.mark.full
def test_a_count_that_is_lost_at_a_preemption_is_noticed(monkeypatch) -> None:
    """Break it on purpose: whoever gets a row again begins to count anew."""
    admitted = Handle.admitted

    def forgets(self) -> None:
        matcher = self.output_options.matcher
        if isinstance(matcher, BudgetMatcher) and matcher.state.is_inside:
            matcher.state = matcher.state._replace(count=0)
        admitted(self)

    monkeypatch.setattr(Handle, "admitted", forgets)
    with engine() as served:
        try:
            assert outputs(served) != expected()
        except EngineError as error:  # the matcher meets a token that is not legal
            assert "is not legal" in str(error.__cause__)
        assert served.statistics.preemptions > 0


@pytest.mark.full
def test_a_budget_far_from_its_end_makes_no_masked_step() -> None:
    with engine() as served:
        handle = served.submit(
            PROMPTS[3], max_new_tokens=NEW, eos_token_ids=(), thinking_budget=1000
        )
        handle.result(timeout=300)
        counts = served._loop._constrained.counts
        assert counts.free_calls == counts.forced_tokens == 0 and not counts.mask_seconds
        handle = served.submit(PROMPTS[3], max_new_tokens=NEW, eos_token_ids=(), thinking_budget=3)
        handle.result(timeout=300)
        assert counts.mask_seconds > 0 and counts.forced_tokens >= 2


@pytest.mark.full
def test_log_probabilities_penalties_and_predictions_beside_a_budget() -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": (), "thinking_budget": 5}
    # Each request is alone in the engine, and so in its first row.
    alone_in_it = {"rows": 1, "widths": (1,)}
    with engine(max_logprobs=2, max_prediction=4, penalties=True, **alone_in_it) as served:
        plain = served.submit(PROMPTS[3], **options).result(timeout=300)
        reported = served.submit(PROMPTS[3], logprobs=1, **options).result(timeout=300)
        predicted = served.submit(PROMPTS[3], prediction=list(plain.tokens), **options).result(
            timeout=300
        )
        assert plain.tokens == reported.tokens == predicted.tokens
        adjusted = served.submit(PROMPTS[3], presence_penalty=1.5, **options).result(timeout=300)
    alone = specjax.generate(
        models()[0],
        None,
        [PROMPTS[3]],
        max_new_tokens=NEW,
        eos_token_ids=(),
        sampling=specjax.Sampling(temperature=0.0, presence_penalty=1.5),
        thinking_budget=specjax.ThinkingBudget(5, ThoughtTokens(BEGIN, FINISH)),
    )
    assert list(adjusted.tokens) == alone.tokens[0, 9:].tolist()


@pytest.mark.full
def test_a_text_whose_grammar_forbids_the_end_fails_alone() -> None:
    with engine() as served:
        handle = served.submit(
            [1, 0],
            max_new_tokens=NEW,
            eos_token_ids=(END,),
            grammar=specjax.Regex("(ab|de){3,9}"),
            thinking_budget=1,
        )
        beside = served.submit([1, 0], max_new_tokens=4)
        with pytest.raises(EngineError, match=r"thinking_budget: row \d cannot go on.*grammar"):
            handle.result(timeout=300)
        assert len(beside.result(timeout=300).tokens) == 4


@pytest.mark.full
def test_what_cannot_be_done_is_refused_by_name() -> None:
    target, _ = models()
    with engine("none", penalties=True, clients=ClientDrafts(), warm=False) as served:
        for options, message in (
            ({"thinking_budget": -1}, "thinking_budget=-1: must be a whole number"),
            ({"thinking_budget": 1, "allowed_token_ids": [1, 2]}, "which ends a thought, may be"),
        ):
            with pytest.raises(InputError, match=message):
                served.submit([1, 2], max_new_tokens=2, **options)
        with pytest.raises(InputError, match="thinking_budget=1: not supported for clients that"):
            served.open_row([1, 2], thinking_budget=1, listener=print)
    sizes: dict[str, Any] = {"rows": 1, "capacity": 32, "page": 8, "chunk": 16, "warm": False}
    with (
        Engine(target, drafts=(None,), tokenizer=small_tokenizer(), **sizes) as served,
        pytest.raises(InputError, match="thinking_budget: this engine does not support it"),
    ):
        served.submit([1, 2], max_new_tokens=2, thinking_budget=1)
    for options, message in (
        ({"thought_tokens": "ab", "grammars": True}, "thought_tokens='ab': give the two texts"),
        ({"thought_tokens": ("a", "b")}, r"they are for thinking budgets, which need Engine\("),
    ):
        with pytest.raises(InputError, match=message):
            Engine(target, tokenizer=small_tokenizer(), **options, **sizes)
    with (
        engine("none", thought_tokens=None, warm=False) as served,
        pytest.raises(InputError, match="thinking_budget: the tokenizer does not state"),
    ):
        served.submit([1, 2], max_new_tokens=2, thinking_budget=1)
