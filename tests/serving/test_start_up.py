"""Tests of an engine that compiles while it answers.

They check which programs it uses at which time, and that no text depends on it.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import specjax
from specjax.serving.device import EngineDevice
from specjax.serving.engine import Engine
from specjax.serving.engine_loop import EngineLoop
from specjax.serving.handle import EngineError
from specjax.serving.programs import EngineProgram, Programs
from tests.conftest import compilations

PATIENCE = 60.0
SIZES: dict[str, Any] = {"page": 8, "chunk": 16, "capacity": 64, "pages": 16}
PROMPT, MOST = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], 12
GREEDY: dict[str, Any] = {}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}


def wait_until(condition: Callable[[], object]) -> None:
    until = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < until, "never came"
        time.sleep(0.001)


class Gate:
    """A replacement of the compiler's thread, which compiles a program when a test asks for it."""

    def __init__(self) -> None:
        self.programs: Programs | None = None
        self.when_ready: Callable[[], None] = lambda: None
        self.start = Programs.start  # starts the real thread

    def compile_until(self, kind: str, *key: object) -> None:
        assert self.programs is not None
        while not self.programs.is_ready(kind, *key):
            self.compile_next()

    def compile_next(self) -> None:
        assert self.programs is not None
        self.programs.compile_next()
        self.when_ready()

    def compile_all(self) -> None:
        assert self.programs is not None
        while not self.programs.are_all_ready:
            self.compile_next()


@pytest.fixture
def gate(monkeypatch) -> Gate:
    gate = Gate()

    def start(programs: Programs, when_ready: Callable[[], None]) -> None:
        gate.programs, gate.when_ready = programs, when_ready

    monkeypatch.setattr(Programs, "start", start)
    return gate


def drafter_of(target) -> specjax.Eagle3:
    return specjax.Eagle3.init(target, jax.random.key(5))


@pytest.fixture(scope="module")
def one_row(target) -> Iterator[Engine]:
    with Engine(
        target, drafter_of(target), drafts=(None, "chain:3"), rows=1, steps=1, **SIZES
    ) as engine:
        yield engine


@pytest.mark.full_except("greedy")
@pytest.mark.represents("texts that begin while programs are compiled")
@pytest.mark.parametrize("settings", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_text_is_the_same_wherever_drafting_becomes_possible(
    one_row, monkeypatch, settings
) -> None:
    engine, programs = one_row, one_row._loop.programs
    chosen: list[tuple[int, ...]] = []

    def longest(width: int, predicted: float, ready: list[int], **_: object) -> int:
        chosen.append(tuple(ready))
        return max(ready)

    monkeypatch.setattr(engine._loop.choice, "choose", longest)
    whole = set(programs._ready)
    monkeypatch.setattr(programs, "_ready", whole)  # restored when the test ends
    first = {program for program in whole if program[:1] != ("decode",) or program[2] == 0}
    warm = engine.submit(PROMPT, max_new_tokens=MOST, **settings).result(PATIENCE).tokens
    monkeypatch.setattr(engine._loop.choice, "choose", lambda *arguments, **_: min(arguments[2]))
    plain = engine.submit(PROMPT, max_new_tokens=MOST, **settings).result(PATIENCE).tokens
    assert plain == warm
    monkeypatch.setattr(engine._loop.choice, "choose", longest)
    rows_and_choice = engine._loop._choose
    for place in range(MOST):
        chosen.clear()

        def choose(place: int = place) -> tuple[int, int, bool]:
            if len(chosen) == place:
                programs._ready = set(whole)
            return rows_and_choice()

        programs._ready = set(first)
        monkeypatch.setattr(engine._loop, "_choose", choose)
        tokens = engine.submit(PROMPT, max_new_tokens=MOST, **settings).result(PATIENCE).tokens
        assert tokens == warm
        assert chosen[:place] == [(0,)] * place
        assert set(chosen[place:]) == {(0, 1)}


@pytest.mark.full
def test_rows_and_drafts_and_logprobs_wait_for_their_programs(target, gate) -> None:
    sizes: dict[str, Any] = {**SIZES, "rows": 2, "widths": (1, 2), "steps": 1, "max_logprobs": 2}
    with Engine(
        target, drafter_of(target), drafts=(None, "chain:3"), warm=False, **sizes
    ) as engine:
        occupied: list[int] = []
        decode = engine._loop.device.decode

        def decode_and_count(number: int, table, free, steps, until, width: int, logprobs: bool):
            with engine._loop.wake:
                occupied.append(engine._loop.scheduler.occupied)
            assert engine._loop.programs.is_ready("decode", width, number, logprobs)
            return decode(number, table, free, steps, until, width, logprobs)

        engine._loop.device.decode = decode_and_count  # pyright: ignore[reportAttributeAccessIssue]
        before = engine.statistics
        assert 0 < before.compiled < before.programs
        with_logprobs = engine.submit(PROMPT, max_new_tokens=MOST, logprobs=1)
        texts = [engine.submit(PROMPT, max_new_tokens=MOST) for _ in range(2)]
        results = [text.result(PATIENCE).tokens for text in texts]
        assert results[0] == results[1]
        assert set(occupied) == {1}  # one after the other
        gate.compile_until("decode", 2, 0, False)
        with engine._loop.wake:
            texts = [engine.submit(PROMPT, max_new_tokens=MOST) for _ in range(2)]
        assert [text.result(PATIENCE).tokens for text in texts] == results
        assert 2 in occupied
        # Times that were measured during compilation are not used.
        assert engine.statistics.drafts == []
        assert engine.statistics.drafted == 0
        gate.compile_until("decode", 1, 1, False)
        assert engine.submit(PROMPT, max_new_tokens=MOST).result(PATIENCE).tokens == results[0]
        assert engine.statistics.drafted > 0  # it is used although other programs are missing
        assert engine.statistics.drafts == []
        assert with_logprobs.finish_reason is None
        gate.compile_until("decode", 2, 1, True)
        assert with_logprobs.result(PATIENCE).tokens == results[0]
        assert engine.statistics.drafts == []
        gate.compile_all()
        # The drafts are timed while the engine is idle.
        wait_until(lambda: len(engine.statistics.drafts) == 4)
        assert engine.statistics.compiled == engine.statistics.programs
        shared = engine.statistics.prompt_tokens_shared
        assert engine.submit(PROMPT, max_new_tokens=MOST).result(PATIENCE).tokens == results[0]
        # Timing has not changed what the pages hold.
        assert engine.statistics.prompt_tokens_shared > shared


@pytest.mark.full
def test_a_client_waits_for_its_programs(target, gate) -> None:
    clients = specjax.serving.ClientDrafts(nodes=4, depth=2)
    with Engine(target, warm=False, clients=clients, rows=1, **SIZES) as engine:
        row = engine.open_row(PROMPT, max_new_tokens=4, listener=lambda event: None)
        tokens = engine.submit(PROMPT, max_new_tokens=4).result(PATIENCE).tokens  # overtakes it
        assert row.request.state == "waiting"
        gate.compile_all()
        wait_until(lambda: row.request.state == "held")
        row.close()
        assert engine.submit(PROMPT, max_new_tokens=4).result(PATIENCE).tokens == tokens


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_compiles_everything_and_its_error_is_the_engines(target, monkeypatch) -> None:
    with Engine(target, rows=2, widths=(1, 2), warm=False, **SIZES) as engine:
        wait_until(lambda: engine.statistics.compiled == engine.statistics.programs)
        assert len(engine.submit(PROMPT, max_new_tokens=2).result(PATIENCE).tokens) == 2

    def fail(device: EngineDevice, *_: object) -> None:
        raise RuntimeError("no memory to compile with")

    monkeypatch.setattr(Programs, "compile_stage", lambda *_: None)
    monkeypatch.setattr(EngineLoop, "_programs_changed", lambda _: None)
    monkeypatch.setattr(EngineDevice, "_lower_decode", fail)
    with Engine(target, rows=2, widths=(1, 2), warm=False, **SIZES) as engine:
        wait_until(lambda: engine._loop.error is not None)
        with pytest.raises(EngineError) as caught:
            engine.submit(PROMPT)
        cause = str(caught.value.__cause__)
        assert "no memory" in cause
        assert re.search(
            r"the program [a-z_]+\(.*\) cannot be compiled .*; start with fewer", cause
        )


def test_who_waits_for_a_program_goes_on_where_it_never_comes() -> None:
    def fail() -> None:
        raise RuntimeError("made up")

    programs = Programs([EngineProgram("decode", (1,), 0, fail)], threading.Condition())
    programs.start(lambda: None)
    assert not programs.wait_for("decode", 1)
    message = "the program decode(1,) cannot be compiled (made up); start with fewer"
    assert message in str(programs.error)
    programs.stop()


@pytest.mark.full
def test_closing_waits_for_no_program(target, gate) -> None:
    with Engine(target, rows=2, widths=(1, 2), warm=False, **SIZES) as engine:
        text = engine.submit(PROMPT, max_new_tokens=MOST)
        has_begun, may_end = threading.Event(), threading.Event()
        program = EngineProgram("made up", (), 9, lambda: has_begun.set() or may_end.wait(PATIENCE))
        engine._loop.programs._uncompiled.insert(0, program)
        gate.start(engine._loop.programs, lambda: None)
        assert has_begun.wait(PATIENCE)
        text.result(PATIENCE)
    assert engine.is_compiling
    may_end.set()
    wait_until(lambda: not engine.is_compiling)


def test_a_program_is_compiled_for_a_state_that_a_call_has_given_away() -> None:
    """Check it, because the engine's thread may donate the state while a program is compiled.

    The compiler's thread reads only the shapes of the state.
    """
    step = jax.jit(lambda state: {"count": state["count"] + 1}, donate_argnums=0)
    given_away, fresh = ({"count": jax.numpy.zeros(3)} for _ in range(2))
    given_away["count"].delete()
    step.lower(given_away).compile()
    before = compilations()
    step(fresh)
    assert compilations() == before
