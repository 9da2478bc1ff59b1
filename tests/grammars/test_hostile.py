"""Hostile grammars: each is refused or makes a text within bounds, and other texts go on."""

import itertools

import pytest

import specjax
from specjax.errors import GrammarLimitError, InputError
from specjax.grammars import GrammarChecker, GrammarCompiler, Matcher, matcher
from specjax.serving.handle import EngineError
from tests.grammars.hostile import hostile_grammar
from tests.grammars.hostile_run import VOCABULARY, check_all, make_engine, run_all
from tests.grammars.tokenizers_for_tests import small_tokenizer

AMBIGUOUS = specjax.Lark('start: start start start | start start | "a" | "b" | ""')
SEEDS = range(200)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer(), 20)


def run_until_it_errs(text: Matcher, tokens: int, most: int = 2000) -> int:
    """Append legal letters one by one, and return after how many an error came."""
    for count in range(most):
        try:
            text.begin_step()
            text.mask()
            text.append([tokens])
        except GrammarLimitError:
            return count
    return most


def test_every_seed_gives_the_same_grammar_again() -> None:
    kinds = set()
    for seed in range(36):
        (kind, make), (_, again) = hostile_grammar(seed), hostile_grammar(seed)
        kinds.add(kind)
        try:
            first = make()
        except InputError:
            continue
        assert first == again()
    assert len(kinds) == 18


def test_a_mask_of_an_ambiguous_grammar_has_a_bound_of_work(compiler) -> None:
    """Check that a count of items ends the text, long before its masks take long."""
    a = compiler.compile(specjax.Regex("a")).matcher((19,)).forced(1)[0]
    bounded = compiler.compile(AMBIGUOUS, is_bounded=True).matcher((19,))
    assert 3 < run_until_it_errs(bounded, a) < 200
    assert bounded.seconds < 0.5
    with pytest.raises(GrammarLimitError, match="cannot go on"):
        bounded.mask()
    unlike = compiler.compile(specjax.Lark('start: (start "a")?'), is_bounded=True).matcher((19,))
    assert run_until_it_errs(unlike, a, most=300) == 300


def test_too_many_alternatives_are_refused_where_they_would_end_every_text(compiler) -> None:
    def rules(count: int) -> specjax.Lark:
        words = " | ".join(f'"a{index:b}"' for index in range(count))
        return specjax.Lark(f"start: {words}")

    compiler.compile(rules(150), is_bounded=True)
    compiler.compile(rules(300))
    with pytest.raises(InputError, match="301 items; max is 200"):
        compiler.compile(rules(300), is_bounded=True)
    words = [f"a{index:b}" for index in range(3000)]
    text = compiler.compile(specjax.Choice(words), is_bounded=True).matcher((19,))
    text.append(compiler._tokenizer.tokenize_str(words[-1]))
    assert text.is_complete


def test_a_text_whose_masks_take_too_long_ends(compiler, monkeypatch) -> None:
    """Check the bound of one step and of the whole text, with masks that count as slow."""
    text = compiler.compile(specjax.Regex("a*")).matcher((19,))
    pause = 0.02
    clock = itertools.count(0.0, pause)
    monkeypatch.setattr(matcher.time, "thread_time", lambda: next(clock))
    text.mask()  # nothing is limited before the first step
    text.mask()
    text.mask()
    text.begin_step()
    text.mask()
    with pytest.raises(GrammarLimitError, match="s for 0 tokens"):
        for _ in range(3):
            text.mask()
    text.begin_step()  # a new step
    steps = run_until_it_errs(text, 0, most=200)
    spent = matcher.EXTRA_SECONDS + matcher.TOKEN_SECONDS * steps
    assert text.seconds == pytest.approx(spent, abs=4 * pause)
    assert steps < 200


@pytest.mark.thorough
def test_a_row_that_ends_by_a_limit_ends_alone() -> None:
    tokenizer = specjax.load("embedded").tokenizer
    with make_engine(tokenizer) as engine:
        free = engine.submit("free = ", max_new_tokens=64, seed=1, eos_token_ids=())
        alone = free.result(timeout=300).tokens
        free = engine.submit("free = ", max_new_tokens=64, seed=1, eos_token_ids=())
        bounded = engine.submit("x = ", max_new_tokens=64, grammar=AMBIGUOUS, temperature=3.0)
        with pytest.raises(EngineError, match="this text failed: grammar: the text cannot go on"):
            bounded.result(timeout=300)
        assert free.result(timeout=300).tokens == alone
        free_text = engine.submit("x = ", max_new_tokens=8, grammar=specjax.Choice(["yes", "no"]))
        assert free_text.result(timeout=300).text in ("yes", "no")


@pytest.mark.full
def test_hostile_grammars_are_refused_or_make_a_text() -> None:
    """Check that nothing fails in another way, and the bounds of memory and of a step's masks.

    The time of masks is CPU time, in which other processes do not count.
    """
    tokenizer = specjax.load("embedded").tokenizer
    with GrammarChecker(GrammarCompiler(tokenizer, VOCABULARY)) as checker:
        checks = check_all(checker, SEEDS)
        assert checks.largest < 2 * checker.limits.megabytes
    refused = sum(sum(counts.values()) for counts in checks.outcomes.values()) - len(
        checks.accepted
    )
    assert refused > 40 and len(checks.accepted) > 60  # the grammars are of both sorts
    with make_engine(tokenizer) as engine:
        texts = run_all(engine, checks.accepted)
        assert engine.state == "running"
    assert texts.unexpected == []
    ended = sum(counts["GrammarLimitError"] for counts in texts.outcomes.values())
    assert 5 < ended < len(checks.accepted) / 2
    assert texts.gaps  # the free text went on
    # A step ends a row at 40 ms, after the mask that exceeds them.
    assert max(texts.step_seconds) < matcher.STEP_SECONDS + 0.05
