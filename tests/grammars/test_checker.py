"""The process that compiles a server's grammars first: its bounds, and its end in the middle."""

import os
import signal
import threading
import time

import psutil
import pytest

import specjax
from specjax.errors import InputError
from specjax.grammars import (
    CheckerBusyError,
    GrammarChecker,
    GrammarCompiler,
    GrammarLimits,
    checker,
)
from specjax.grammars.checker import nesting
from tests.grammars.tokenizers_for_tests import small_tokenizer

LIMITS = GrammarLimits(characters=200_000, megabytes=200, seconds=1.0)


def products(first: int, second: int) -> specjax.JsonSchema:
    """Return numbers that two primes divide. Compiling them takes time and memory as the product.

    It takes more than a minute for primes near 10,000.
    """
    multiples = [{"multipleOf": first}, {"multipleOf": second}]
    return specjax.JsonSchema({"type": "integer", "allOf": multiples})


ENDLESS = products(9973, 10007)
LARGE = products(911, 919)
CHAIN = specjax.Lark(
    "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}?" for i in range(8000)) + '\nr8000: "x"'
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer(), 20)


@pytest.fixture(scope="module")
def bounded(compiler):
    with GrammarChecker(compiler, LIMITS) as checker:
        yield checker


def reason(checker: GrammarChecker, grammar: specjax.grammars.Grammar) -> str:
    """Return why a checker refuses a grammar; "" if it does not."""
    try:
        checker.check(grammar)
    except InputError as error:
        return str(error).removeprefix(f"grammar={grammar!r}: ")
    return ""


def workers(checker: GrammarChecker) -> list[psutil.Process]:
    """Return the processes that compile a grammar at this moment."""
    return psutil.Process(checker._process._process.pid).children()


def wait_for_worker(checker: GrammarChecker) -> psutil.Process:
    """Return the process of a grammar that takes long, once it is there."""
    for _ in range(3000):
        if process_ids := workers(checker):
            return process_ids[0]
        time.sleep(0.01)
    raise AssertionError("no grammar is compiled")


def test_a_grammar_passes_or_is_refused_with_the_compilers_own_words(bounded, compiler) -> None:
    for grammar in (specjax.Regex("(ab)+"), specjax.Choice(["a", "ab"])):
        assert reason(bounded, grammar) == ""
        compiler.compile(grammar, is_bounded=True)
    for grammar in (specjax.Regex("(ab"), specjax.JsonSchema({"uniqueItems": True})):
        with pytest.raises(InputError) as refused:
            compiler.compile(grammar, is_bounded=True)
        with pytest.raises(InputError) as checked:
            bounded.check(grammar)
        assert str(checked.value) == str(refused.value)


def test_bounds_of_the_text_need_no_process(bounded) -> None:
    long = specjax.Choice(["ab" * 120_000])
    assert "at most 200000 are allowed; give a shorter one" in reason(bounded, long)
    text = {"const": 0, "description": "ä" * 150_000}  # not counted as it is escaped
    assert reason(bounded, specjax.JsonSchema(text)) == ""
    deep = specjax.Regex("(" * 65 + "a" + ")" * 65)
    assert reason(bounded, deep).startswith("its brackets are nested 65 deep; at most 64")
    assert reason(bounded, specjax.Regex("(" * 64 + "a" + ")" * 64)) == ""


@pytest.mark.parametrize(
    ("text", "depth"),
    [("", 0), ("(a)(b)", 1), ("[[{(", 4), ('"(((" (', 1), (r"/[((]\(\(()/ ((a))", 2), ("))(", 0)],
)
def test_nesting_counts_brackets_outside_quotes_and_classes(text, depth) -> None:
    assert nesting(text) == max(depth, 0)


def test_time_memory_and_crashes_are_bounded(bounded) -> None:
    assert "more than 1 s to compile" in reason(bounded, ENDLESS)
    assert reason(bounded, CHAIN).startswith("its rules are nested too deeply")
    assert reason(bounded, specjax.Regex("a")) == ""
    started = time.monotonic()
    assert "more than 1 s to compile" in reason(bounded, ENDLESS)  # it is remembered
    assert time.monotonic() - started < 0.5


def test_memory_is_bounded(compiler) -> None:
    few = GrammarLimits(megabytes=30, seconds=20)
    with GrammarChecker(compiler, few) as checker:
        assert "more than 30 MB to compile" in reason(checker, LARGE)
        assert reason(checker, specjax.JsonObject()) == ""
    more = GrammarLimits(megabytes=60, seconds=20)
    with GrammarChecker(compiler, more) as checker:
        assert "more than 7.5 MB once it is compiled" in reason(checker, products(307, 311))


def test_the_size_of_a_compiled_grammar_is_known(bounded) -> None:
    small, large = bounded.check(specjax.Regex("ab")), bounded.check(products(101, 103))
    assert 0 <= small < 1 < large < 25
    assert bounded.check(products(101, 103)) == large  # it is remembered


def test_another_grammar_does_not_wait_for_a_slow_one(compiler) -> None:
    with GrammarChecker(compiler, GrammarLimits(seconds=30)) as checker:
        slow = threading.Thread(target=reason, args=(checker, ENDLESS))
        same = threading.Thread(target=reason, args=(checker, ENDLESS))
        slow.start()
        worker = wait_for_worker(checker)
        same.start()
        for index in range(5):
            assert reason(checker, specjax.Choice(["a" * (index + 1)])) == ""
        assert worker.is_running() and workers(checker) == [worker]  # one for both
        worker.kill()
        slow.join(20)
        same.join(20)
        assert not slow.is_alive() and not same.is_alive()


def test_too_many_grammars_are_refused(compiler, monkeypatch) -> None:
    monkeypatch.setattr(checker, "MAX_WAITING", 1)
    with GrammarChecker(compiler, GrammarLimits(seconds=30)) as full_checker:
        endless = [products(9973, prime) for prime in (10007, 10009, 10037)]

        def check(grammar: specjax.JsonSchema) -> None:
            with pytest.raises((InputError, CheckerBusyError)):
                full_checker.check(grammar)

        threads = [threading.Thread(target=check, args=(grammar,)) for grammar in endless]
        for thread in threads:
            thread.start()
        while len(full_checker._running) < 3:
            time.sleep(0.01)
        with pytest.raises(CheckerBusyError, match="3 grammars are being checked"):
            full_checker.check(specjax.Regex("ab"))
        full_checker.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        with pytest.raises(CheckerBusyError, match="closing"):
            full_checker.check(specjax.Regex("abc"))


@pytest.mark.full
def test_the_process_may_be_killed_in_the_middle_of_a_check(compiler) -> None:
    """Check that the grammar is tried again, others work, and nothing is left running."""
    with GrammarChecker(compiler, GrammarLimits(seconds=1)) as checker:
        outcomes: list[str] = []
        thread = threading.Thread(target=lambda: outcomes.append(reason(checker, ENDLESS)))
        thread.start()
        worker, first = wait_for_worker(checker), checker._process._process.pid
        os.kill(first, signal.SIGKILL)
        assert reason(checker, specjax.Choice(["ab", "de"])) == ""
        assert checker._process._process.pid != first
        worker.wait(20)  # it ends with the process that forked it
        thread.join(60)
        assert outcomes == ["it takes more than 1 s to compile; simplify it"]
        last = psutil.Process(checker._process._process.pid)
    last.wait(20)


def test_a_grammar_whose_process_is_killed_is_refused_but_not_for_ever(compiler) -> None:
    with GrammarChecker(compiler, GrammarLimits(seconds=30)) as checker:
        outcomes: list[str] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: outcomes.append(reason(checker, ENDLESS)))
            thread.start()
            wait_for_worker(checker).kill()
            thread.join(20)
        assert outcomes == ["the process that compiled it was ended; simplify it"] * 2


def test_what_cannot_be_checked_is_refused(compiler) -> None:
    with pytest.raises(InputError, match="seconds=0: must be more than 0"):
        GrammarLimits(seconds=0)
    tokens = GrammarCompiler.of_tokens([b"a", b""], end_id=1)
    with pytest.raises(InputError, match="compiler: it has no tokenizer"):
        GrammarChecker(tokens)


def test_the_process_imports_neither_jax_nor_specjax(bounded) -> None:
    """Check it by the files that the process has mapped, and its size."""
    bounded.check(specjax.Regex("[ab]"))
    process = psutil.Process(bounded._process._process.pid)
    mapped = [part.path for part in process.memory_maps()]
    assert any("llguidance" in path for path in mapped)
    assert not any("jaxlib" in path or "numpy" in path for path in mapped)
