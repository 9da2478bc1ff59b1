"""Send hostile grammars through the checker, and those that pass into an engine beside a free text.

    python -m tests.grammars.hostile_run 1000

prints what became of each kind, the memory of the processes, and the times of steps.
"""

import argparse
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

import specjax
from specjax.drafters import DraftModel
from specjax.drafts.shapes import Chain
from specjax.errors import GrammarLimitError, InputError
from specjax.grammars import Grammar, GrammarChecker, GrammarCompiler, Matcher
from specjax.serving import Engine
from specjax.serving.handle import EngineError
from tests.conftest import tiny_target
from tests.grammars.hostile import hostile_grammar

VOCABULARY, TOKENS = 3072, 48
STALL_SECONDS = 0.05
"""The longest that a text with a grammar may keep others waiting."""


@dataclass
class Checks:
    """The verdicts of a checker.

    Attributes:
        accepted: the grammars that passed, each with its kind.
        outcomes: for each kind, how many were refused at once, by the checker, or passed.
        seconds: the wall time of each check.
        largest: the largest resident memory of the process and all that it forked, in MB, beyond
            the process's own at the beginning.
    """

    accepted: list[tuple[str, Grammar]] = field(default_factory=list)
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: list[float] = field(default_factory=list)
    largest: float = 0.0


def check_all(checker: GrammarChecker, seeds: Sequence[int]) -> Checks:
    """Make and check the grammars of these seeds. Any error but an InputError is raised."""
    checks = Checks()
    checker.check(specjax.Regex("a"))  # the process is ready
    with _watched(checker, checks):
        for seed in seeds:
            kind, make = hostile_grammar(seed)
            try:
                grammar = make()
            except InputError:
                checks.outcomes[kind]["refused at once"] += 1
                continue
            started = time.perf_counter()
            try:
                checker.check(grammar)
            except InputError as error:
                checks.outcomes[kind][_class_of(str(error))] += 1
            else:
                checks.outcomes[kind]["passed"] += 1
                checks.accepted.append((kind, grammar))
            checks.seconds.append(time.perf_counter() - started)
    return checks


def _class_of(message: str) -> str:
    for words in ("to compile", "nested", "characters;"):
        if words in message:
            return {"to compile": "time or memory", "nested": "depth"}.get(words, "length")
    return "wrong or not supported"


@contextmanager
def _watched(checker: GrammarChecker, checks: Checks) -> Iterator[None]:
    """Store the largest memory of the checker's processes while the body runs."""
    is_over, process = threading.Event(), psutil.Process(checker._process._process.pid)
    base = process.memory_info().rss

    def watch() -> None:
        while not is_over.wait(0.01):
            total = 0
            for child in process.children():
                try:
                    memory = child.memory_info()
                except psutil.Error:
                    continue
                total += memory.rss - base  # what it has copied or added
            checks.largest = max(checks.largest, total / 1e6)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


@dataclass
class Texts:
    """Texts of an engine.

    Attributes:
        outcomes: for each kind, how their texts ended.
        unexpected: the errors that are no `InputError`.
        step_seconds: the CPU time of each row's masks in each step.
        gaps: the seconds between two pieces of a free text.
        megabytes: what the process has grown by.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unexpected: list[str] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    megabytes: float = 0.0


@contextmanager
def timed_steps(seconds: list[float]) -> Iterator[None]:
    """Append the CPU time of each row's masks in each step, while the body runs."""
    begin = Matcher.begin_step
    before: dict[int, tuple[Matcher, float]] = {}

    def begin_step(matcher: Matcher) -> None:
        if id(matcher) in before:
            seconds.append(matcher.seconds - before[id(matcher)][1])
        before[id(matcher)] = matcher, matcher.seconds
        begin(matcher)

    Matcher.begin_step = begin_step
    try:
        yield
    finally:
        Matcher.begin_step = begin
        seconds += [matcher.seconds - start for matcher, start in before.values()]


def make_engine(tokenizer: Any) -> Engine:
    """Return an engine of a small model of random weights, with a drafter."""
    target = tiny_target(vocab_size=VOCABULARY)
    drafter = DraftModel(tiny_target(seed=5, num_layers=1, vocab_size=VOCABULARY), draft=Chain(3))
    return Engine(target, drafter, grammars=True, rows=4, capacity=96, tokenizer=tokenizer)


def run_all(
    engine: Engine, grammars: Sequence[tuple[str, Grammar]], *, at_a_time: int = 2
) -> Texts:
    """Generate a text with each grammar, some at a time, beside a free text."""
    texts, is_over = Texts(), threading.Event()
    process = psutil.Process()
    before = process.memory_info().rss

    def write_freely() -> None:
        seed = 0
        while not is_over.is_set():
            handle = engine.submit("free = ", max_new_tokens=TOKENS, seed=seed, eos_token_ids=())
            last = None
            for _ in handle:
                now = time.perf_counter()
                if last is not None:
                    texts.gaps.append(now - last)
                last = now
            seed += 1

    free = threading.Thread(target=write_freely)
    free.start()
    slots = threading.Semaphore(at_a_time)
    threads = []
    with timed_steps(texts.step_seconds):
        for seed, (kind, grammar) in enumerate(grammars):
            slots.acquire()
            arguments = (engine, kind, grammar, seed, texts, slots)
            threads.append(threading.Thread(target=_write, args=arguments))
            threads[-1].start()
        for thread in threads:
            thread.join()
    is_over.set()
    free.join()
    texts.megabytes = (process.memory_info().rss - before) / 1e6
    return texts


def _write(
    engine: Engine, kind: str, grammar: Grammar, seed: int, texts: Texts, slots: Any
) -> None:
    """Generate one text, hot, so that it goes wherever its grammar allows."""
    try:
        engine.submit(
            "x = ", max_new_tokens=TOKENS, grammar=grammar, temperature=3.0, seed=seed
        ).result(timeout=300)
        outcome = "a text"
    except EngineError as error:
        outcome = type(error.__cause__).__name__
        if not isinstance(error.__cause__, InputError):
            texts.unexpected.append(f"{kind}: {error!r}, {error.__cause__!r}")
    except InputError:
        outcome = "refused"
    except Exception as error:
        outcome = "failed"
        texts.unexpected.append(f"{kind}: {error!r}")
    finally:
        slots.release()
    texts.outcomes[kind][outcome] += 1


def main() -> None:
    """Run as many grammars as the command line says, and print a report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--at-a-time", type=int, default=2)
    arguments = parser.parse_args()
    seeds = range(arguments.start, arguments.start + arguments.count)
    tokenizer = specjax.load("embedded").tokenizer
    with GrammarChecker(GrammarCompiler(tokenizer, VOCABULARY)) as checker:
        checks = check_all(checker, seeds)
    print(f"checks: {sum(checks.seconds):.1f} s in all, {max(checks.seconds):.2f} s the longest,")
    print(f"  {checks.largest:.0f} MB the largest memory of the forked processes")
    with make_engine(tokenizer) as engine:
        harmless = [("harmless", specjax.Regex("(?s).*"))] * 60
        run_all(engine, harmless)  # the first texts find out what calls cost
        alone = run_all(engine, harmless)
        texts = run_all(engine, checks.accepted, at_a_time=arguments.at_a_time)
    for kind in sorted(checks.outcomes):
        print(f"{kind:22} {dict(checks.outcomes[kind])}; then {dict(texts.outcomes[kind])}")
    for name, values in (
        ("CPU time of a row's masks in a step", texts.step_seconds),
        ("gaps of the free text beside harmless texts", alone.gaps),
        ("gaps of the free text beside hostile texts", texts.gaps),
    ):
        median, high, most = 1e3 * np.quantile(values, [0.5, 0.99, 1.0])
        long = sum(value > STALL_SECONDS for value in values)
        print(f"{name}: median {median:.2f} ms, 99% {high:.2f} ms, longest {most:.2f} ms;")
        print(f"  {long} of {len(values)} above {1e3 * STALL_SECONDS:.0f} ms")
    print(f"growth of the engine's process: {texts.megabytes:.0f} MB")
    limits = sum(count[GrammarLimitError.__name__] for count in texts.outcomes.values())
    print(f"ended by a limit: {limits}; unexpected: {texts.unexpected or 'nothing'}")


if __name__ == "__main__":
    main()
