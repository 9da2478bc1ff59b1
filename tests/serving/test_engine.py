"""Tests of the engine: every text equals that of `specjax.generate` for its request alone.

This holds for every order of events. All engines of one drafter have the same sizes where possible,
and so the same compiled programs.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import pipeline, sharding, text
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.models import params
from specjax.pipeline import TextGenerator
from specjax.sampling import Sampling, make_key, perturbed, position_keys, position_noise
from specjax.sampling_params import SamplingParams
from specjax.serving.config import EngineConfig
from specjax.serving.engine import Engine
from specjax.serving.handle import (
    EngineError,
    Handle,
    RowProgress,
    TextCancelledError,
    waking_once,
)
from specjax.serving.scheduler import QueueFullError
from specjax.serving.scheduler import Request as Scheduled
from tests.conftest import HYBRID, SPARSE, compilations, tiny_target
from tests.test_text import of_bytes_and_spaces

VOCABULARY, PAGE, CHUNK, CAPACITY = 11, 8, 16, 64
LONGEST_PROMPT, MOST = 40, 24  # together the capacity
SIZES = {"page": PAGE, "chunk": CHUNK, "capacity": CAPACITY}
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1)))
PATIENCE = 60.0
"""Seconds after which a test fails, so that it does not wait for ever."""


# --- what a request's text must be ----------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The arguments of `Engine.submit`."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    settings: dict = field(default_factory=dict)
    """The fields of `specjax.Sampling` that differ from the engine's defaults."""
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0

    def submit(self, engine: Engine) -> Handle:
        named = {
            name: getattr(self, name)
            for name in ("max_new_tokens", "eos_token_ids", "seed", "choice")
        }
        return engine.submit(list(self.prompt), **named, **self.settings)

    @property
    def key(self) -> jax.Array:
        return jax.random.fold_in(make_key(self.seed), self.choice)

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{"temperature": 0.0, **self.settings})


def expected(target, request: Request) -> tuple[int, ...]:
    """Return the request's text, generated alone in one contiguous cache.

    Prompts are padded, so that all requests share one program.
    """
    prompt = np.zeros((1, LONGEST_PROMPT), np.int32)
    prompt[0, : len(request.prompt)] = request.prompt
    options = {"max_new_tokens": MOST, "rule": "coupled", "eos_token_ids": ()}
    result = specjax.generate(
        target,
        None,
        prompt,
        [len(request.prompt)],
        sampling=request.sampling,
        key=request.key[None],
        **options,
    )
    text = result.tokens[0, len(request.prompt) :][: request.max_new_tokens].tolist()
    ends = [place for place, token in enumerate(text) if token in request.eos_token_ids]
    return tuple(text[: ends[0] + 1] if ends else text)


def is_near_tie(target, request: Request, text: Sequence[int], place: int) -> bool:
    """Return whether the token at ``place`` of ``text`` may change if the logits move by 1e-4.

    Two ways of computing may then give different tokens there.
    """
    tokens = [*request.prompt, *text[:place]]
    output, _ = target.forward(jnp.array([tokens]))
    logits = output.logits[0, -1]
    moved = logits + np.random.default_rng(0).uniform(-1e-4, 1e-4, (512, VOCABULARY))
    noise = position_noise(
        position_keys(request.key[None], jnp.array([[len(tokens)]])), VOCABULARY
    )[0, 0]
    sampled = jnp.argmax(
        perturbed(moved, request.sampling.rows(512, "coupled"), jnp.tile(noise, (512, 1))), axis=-1
    )
    return len(np.unique(sampled)) > 1


def check_tokens(target, request: Request, tokens: Sequence[int], is_whole: bool) -> None:
    """Check that ``tokens`` are the request's text, or its beginning.

    They may differ from it after a near-tie.
    """
    right = expected(target, request)
    pairs = zip(tokens, right, strict=False)
    places = (place for place, (token, right_token) in enumerate(pairs) if token != right_token)
    place = next(places, None)
    if place is not None:
        assert is_near_tie(target, request, right, place), f"{request}: {tokens} is not {right}"
    else:
        assert len(tokens) == len(right) if is_whole else len(tokens) <= len(right), (
            f"{request}: {tokens} is not {right}"
        )


def check_text(target, request: Request, handle: Handle) -> None:
    """Check a finished text, and what its handle reports about it."""
    tokens = handle.result(PATIENCE).tokens
    check_tokens(target, request, tokens, is_whole=True)
    assert handle.finish_reason == ("stop" if tokens[-1] in request.eos_token_ids else "length")
    acceptance = handle.acceptance
    assert acceptance is not None
    # The counts include the steps before a preemption. The last step has no bonus token if an
    # accepted token ends the text.
    assert len(tokens) == acceptance.emitted
    assert acceptance.emitted <= acceptance.steps + acceptance.accepted <= acceptance.emitted + 1
    times = handle.times
    assert times.first_token is not None and times.finished is not None
    assert times.submitted <= times.first_token <= times.finished


def check_at_rest(engine: Engine) -> None:
    """Check that no request has a row or a page, and that each page exists once."""
    with idle(engine):
        assert not engine._loop.handles
        statistics, scheduler = engine.statistics, engine._loop.scheduler
        assert (statistics.waiting, statistics.running) == (0, 0)
        assert statistics.free_pages == statistics.pages
        assert (scheduler.table == scheduler._pools[0].total).all()
        for pool in scheduler._pools:
            shared = [page for prefix in pool._prefixes for page in prefix.pages]
            assert sorted(pool._free + shared) == list(range(pool.total))
            assert all(prefix.holders == 0 for prefix in pool._prefixes)


@contextmanager
def idle(engine: Engine) -> Iterator[None]:
    """Wait until the engine has no work, and hold its lock."""
    while True:
        wait_until(lambda: is_idle(engine))
        with engine._loop.wake:
            if engine._loop.scheduler.idle:  # no ended text is being read once more
                yield
                return


def is_idle(engine: Engine) -> bool:
    """Return whether the engine has no work."""
    with engine._loop.wake:
        return engine._loop.scheduler.idle


def wait_until(condition: Callable[[], object]) -> None:
    until = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < until, "never came"
        time.sleep(0.001)


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(target) -> Iterator[Engine]:
    """Yield an engine that changes its drafts, and whose pages hold two texts of full length."""
    drafter = specjax.Eagle3.init(target, jax.random.key(5))
    with Engine(
        target, drafter, drafts=(None, "chain:3", TREE), rows=4, widths=(2, 4), pages=16, **SIZES
    ) as engine:
        yield engine


def plain_engine(target, **options) -> Engine:
    return Engine(
        target, **{"rows": 2, "widths": (2,), "pages": 16, "steps": 4, **SIZES, **options}
    )


@pytest.fixture
def plain(target) -> Iterator[Engine]:
    """Yield a plain engine. All engines of this kind share their compiled programs."""
    with plain_engine(target) as engine:
        yield engine


class Gate:
    """A gate before an engine's decode calls, which lets through one call at a time, or all."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._decode = engine, engine._loop._decode
        self._allowed = threading.Semaphore(0)
        self._is_open, self._is_here, self._passed = False, False, 0
        engine._loop._decode = self._pass

    def _pass(self) -> None:
        with self._engine._loop.wake:
            runs = bool(self._engine._loop.scheduler.running)
        if not runs:  # there is nothing to decode
            self._decode()
            return
        self._is_here = True
        if not self._is_open:
            self._allowed.acquire()
        self._is_here = False
        self._decode()
        self._passed += 1

    def wait(self) -> None:
        """Wait until the engine is at the gate, or idle."""
        wait_until(lambda: self._is_here or is_idle(self._engine))

    def let_through(self) -> None:
        """Let one decode call through, and wait until the engine is at the gate again, or idle."""
        self.wait()
        if self._is_here:
            passed = self._passed
            self._allowed.release()
            wait_until(lambda: self._passed > passed)
            self.wait()

    def open(self) -> None:
        self._is_open = True
        self._allowed.release()


def submit_together(engine: Engine, requests: Sequence[Request]) -> list[Handle]:
    """Submit requests so that the engine sees all of them at once."""
    with engine._loop.wake:
        return [request.submit(engine) for request in requests]


@contextmanager
def gated(engine: Engine) -> Iterator[Gate]:
    gate = Gate(engine)
    try:
        yield gate
    finally:
        gate.open()


# --- random schedules -----------------------------------------------------------------------------


def random_request(random: np.random.Generator, beginnings: Sequence[Sequence[int]]) -> Request:
    beginning = beginnings[random.integers(len(beginnings))][: random.integers(LONGEST_PROMPT)]
    prompt = [*beginning, *random.integers(0, VOCABULARY, random.integers(0, 6))][
        :LONGEST_PROMPT
    ] or [3]
    if random.random() < 0.4:
        settings = {}
    else:
        settings = {
            "temperature": float(random.choice([0.7, 1.0, 1.5])),
            "top_p": float(random.choice([0.8, 1.0])),
        }
    ends = (
        random.choice(VOCABULARY, random.integers(1, 4), replace=False).tolist()
        if random.random() < 0.3
        else []
    )
    most = int(random.integers(1, MOST + 1))
    return Request(
        tuple(map(int, prompt)),
        most,
        settings,
        tuple(ends),
        int(random.integers(5)),
        int(random.integers(3)),
    )


def run_schedule(
    engine: Engine, seed: int, count: int = 8, clients: int = 3
) -> list[tuple[Request, Handle, bool]]:
    """Submit requests from several threads, and cancel some of them at random moments.

    Return each with its handle, and whether it was cancelled. All of them have ended.
    """
    whole = np.random.default_rng(seed)
    beginnings = whole.integers(0, VOCABULARY, (2, LONGEST_PROMPT)).tolist()
    ended: list[tuple[Request, Handle, bool]] = []

    def client(number: int) -> None:
        random = np.random.default_rng((seed, number))
        submitted = []
        for _ in range(-(-count // clients)):
            time.sleep(random.choice([0.0, 0.0, 0.002, 0.01]))
            request = random_request(random, beginnings)
            handle = request.submit(engine)
            is_cancelled = random.random() < 0.2
            submitted.append((request, handle, is_cancelled))
            if is_cancelled:
                time.sleep(random.choice([0.0, 0.003, 0.01]))
                handle.cancel()
        for _, handle, _ in submitted:
            wait_until(lambda handle=handle: handle.finish_reason is not None)
        ended.extend(submitted)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return ended


def counted(engine: Engine) -> tuple[int, int, int]:
    """Return how many tokens were generated, drafted and accepted."""
    statistics = engine.statistics
    return statistics.generated, statistics.drafted, statistics.accepted


def check_schedules(target, engine: Engine, seeds: Sequence[int], count: int, monkeypatch) -> None:
    # Compile the programs that make keys: they may have been freed for other tests' programs.
    GREEDY.submit(engine).result(PATIENCE)
    before, ended, totals = compilations(), [], counted(engine)
    for seed in seeds:
        random = np.random.default_rng((seed, 99))
        monkeypatch.setattr(engine, "steps", int(random.choice([1, 3, 8])))
        monkeypatch.setattr(
            engine._loop.choice, "choose", lambda *_, random=random, **__: int(random.integers(3))
        )
        ended += run_schedule(engine, seed, count)
        check_at_rest(engine)
    assert compilations() == before
    # The engine's totals equal the sums over all texts, although texts move between rows and are
    # preempted.
    of_texts = [handle.acceptance for _, handle, _ in ended if handle.acceptance is not None]
    counts = [(text.emitted, text.drafted, text.accepted) for text in of_texts]
    sums = [sum(numbers) for numbers in zip(*counts, strict=True)]
    assert [after - first for after, first in zip(counted(engine), totals, strict=True)] == sums
    for request, handle, is_cancelled in ended:
        if is_cancelled and handle.finish_reason == "cancelled":
            check_tokens(target, request, handle.tokens, is_whole=False)
            with pytest.raises(TextCancelledError):
                handle.result()
        else:
            check_text(target, request, handle)
    assert len(ended) >= count * len(seeds)


@pytest.mark.full
def test_every_text_of_random_schedules_is_that_of_its_request_alone(
    target, drafting, monkeypatch
) -> None:
    before = drafting.statistics
    check_schedules(target, drafting, range(24), 8, monkeypatch)
    after = drafting.statistics
    assert after.preemptions - before.preemptions > 10
    assert after.prompt_tokens_shared > before.prompt_tokens_shared


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_every_text_of_thousands(target, drafting, monkeypatch, part) -> None:
    check_schedules(
        target, drafting, range(1000 * part + 1000, 1000 * part + 1050), 24, monkeypatch
    )


# --- the handle -----------------------------------------------------------------------------------

GREEDY = Request((1, 2, 3))
DRAWN = Request((4, 5), settings={"temperature": 1.0}, seed=7)


@pytest.mark.full
def test_it_is_iterated_over_in_a_thread_and_again(target, plain) -> None:
    for request in (GREEDY, DRAWN):
        handle = request.submit(plain)
        pieces = list(handle)
        assert len(pieces) >= 4  # 16 tokens, at most 4 in a call
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        assert tokens == expected(target, request) == handle.tokens
        assert list(handle) == pieces
        assert handle.finish_reason == "length" and handle.text == ""


@pytest.mark.full
def test_more_coroutines_read_than_a_pool_has_threads(target, plain) -> None:
    requests = [
        Request((1 + i % 10, i % 7), settings={"temperature": 1.0}, seed=i) for i in range(60)
    ]

    async def read(handle: Handle) -> tuple[int, ...]:
        return tuple([token async for piece in handle for token in piece.tokens])

    async def read_all() -> list[tuple[int, ...]]:
        handles = [request.submit(plain) for request in requests]
        readers = [read(handle) for handle in handles]
        twice = read(handles[0])
        texts = await asyncio.wait_for(asyncio.gather(*readers, twice), PATIENCE)
        assert texts.pop() == texts[0]
        assert [await read(handle) for handle in handles] == texts
        assert all(not handle._listeners for handle in handles)
        return texts

    assert asyncio.run(read_all()) == [expected(target, request) for request in requests]


@pytest.mark.full
def test_a_reader_that_goes_away_harms_nobody(target, plain) -> None:
    """Check a coroutine that stops reading, and a reader whose event loop is closed."""
    with gated(plain) as gate:
        abandoned, orphan = submit_together(plain, [GREEDY, DRAWN])

        async def read_a_piece() -> None:
            reader = aiter(abandoned)
            task = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)
            await asyncio.to_thread(gate.let_through)
            await asyncio.wait_for(task, PATIENCE)
            await reader.aclose()

        asyncio.run(read_a_piece())
        assert not abandoned._listeners
        loop = asyncio.new_event_loop()
        orphan._listeners.append((loop, asyncio.Event()))
        loop.close()
        gate.open()
        check_text(target, GREEDY, abandoned)
        check_text(target, DRAWN, orphan)


def test_texts_that_are_delivered_together_wake_an_event_loop_once() -> None:
    options = {"stop_token_ids": ()}
    requests = [Scheduled(i, [1], 1, 2) for i in range(3)]
    handles = [Handle(lambda _: None, request, options, None) for request in requests]

    async def read(handle: Handle) -> list[tuple[int, ...]]:
        return [piece.tokens async for piece in handle]

    async def read_all() -> tuple[list[Any], int]:
        loop = asyncio.get_running_loop()
        readers = [asyncio.ensure_future(read(handle)) for handle in handles]
        await asyncio.sleep(0)
        with patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as wake:
            for number in range(2):
                with waking_once():
                    for handle in handles:
                        handle.deliver(RowProgress([number], [False], done=number == 1))
            return await asyncio.wait_for(asyncio.gather(*readers), PATIENCE), wake.call_count

    begin = time.perf_counter()
    assert asyncio.run(read_all()) == ([[(0,), (1,)]] * 3, 2)
    news, is_over = handles[0].news(1)
    assert is_over and [piece.tokens for _, piece in news] == [(1,)]
    assert begin < handles[0].news(0)[0][0][0] <= news[0][0] < time.perf_counter()


@pytest.mark.full
def test_its_result_may_take_longer_than_one_waits(target, plain) -> None:
    with gated(plain) as gate:
        handle = GREEDY.submit(plain)
        with pytest.raises(TimeoutError, match=r"not finished after 0\.05 seconds"):
            handle.result(0.05)
        assert handle.acceptance is None and handle.finish_reason is None and handle.tokens == ()
        gate.open()
        result = handle.result(PATIENCE)
    assert result.tokens == expected(target, GREEDY) and result.statistics == handle.acceptance
    assert result.statistics.steps == 16


def check_cancelled(target, request: Request, handle: Handle, read: Sequence = ()) -> None:
    assert handle.finish_reason == "cancelled" and handle.times.finished is not None
    for wait in (handle.result, lambda: list(handle)):
        with pytest.raises(TextCancelledError):
            wait()
    check_tokens(target, request, handle.tokens, is_whole=False)


def test_it_is_cancelled_before_it_has_a_row(target, plain) -> None:
    with gated(plain) as gate:
        running = submit_together(plain, [GREEDY, DRAWN])
        gate.wait()
        waiting = GREEDY.submit(plain)
        assert plain.statistics.waiting == 1
        waiting.cancel()
        assert plain.statistics.waiting == 0
        check_cancelled(target, GREEDY, waiting)
        assert waiting.tokens == ()
        gate.open()
        for request, handle in zip([GREEDY, DRAWN], running, strict=True):
            check_text(target, request, handle)
    check_at_rest(plain)


def test_it_is_cancelled_while_it_is_read(target, plain) -> None:
    """Check also a cancellation between the scheduler's decision and the device's call."""
    long = Request(tuple([3, 4] * 20), 8)
    with gated(plain) as gate:
        running = GREEDY.submit(plain)
        gate.wait()
        reading = long.submit(plain)
        gate.let_through()
        assert reading.request.state == "reading"
        reading.cancel()
        check_cancelled(target, long, reading)
        gate.open()
        check_text(target, GREEDY, running)
    check_at_rest(plain)
    read, handles = plain._loop._read, []

    def cancelled_first(*arguments, **options):
        handles[-1].cancel()
        return read(*arguments, **options)

    plain._loop._read = cancelled_first
    with plain._loop.wake:
        handles.append(long.submit(plain))
    wait_until(lambda: handles[0].finish_reason is not None)
    check_cancelled(target, long, handles[0])
    plain._loop._read = read
    check_at_rest(plain)
    check_text(target, long, long.submit(plain))


def test_a_cancelled_prompt_keeps_the_device_for_no_more_than_it_is_at(
    target, plain, monkeypatch
) -> None:
    """Check it with a device that finishes its work only when this test lets it."""
    is_done, engine_waits, starts = threading.Semaphore(0), threading.Event(), []
    read = plain._loop._read

    class Mark:
        def block_until_ready(self) -> None:
            engine_waits.set()
            assert is_done.acquire(timeout=PATIENCE)

    def note_and_read(reads, *arguments, **options):
        starts.extend(chunk.start for chunk in reads)
        return read(reads, *arguments, **options)

    monkeypatch.setattr(plain._loop, "_read", note_and_read)
    monkeypatch.setattr(plain._loop.device, "_mark", lambda lengths: Mark())
    whole = Request(tuple([3, 4] * 31), 2)
    handle = whole.submit(plain)
    assert engine_waits.wait(PATIENCE)
    assert starts == [0, CHUNK]  # two of four chunks
    handle.cancel()
    is_done.release(100)
    check_at_rest(plain)
    assert starts == [0, CHUNK]
    check_text(target, GREEDY, GREEDY.submit(plain))


def test_it_is_cancelled_while_it_runs_and_after_the_end(target, plain) -> None:
    with gated(plain) as gate:
        running, finished = submit_together(plain, [GREEDY, DRAWN])
        gate.wait()
        gate.let_through()
        assert len(running.tokens) == 4
        running.cancel()
        running.cancel()
        check_cancelled(target, GREEDY, running)
        gate.open()
        check_text(target, DRAWN, finished)
    decode_rows, late = specjax.decoding.rows.decode_rows, []

    def cancelled_meanwhile(*arguments, **options):
        late[0].cancel()
        return decode_rows(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        with plain._loop.wake:
            late.append(GREEDY.submit(plain))
            patch.setattr(specjax.decoding.rows, "decode_rows", cancelled_meanwhile)
        wait_until(lambda: late[0].finish_reason is not None)
        check_cancelled(target, GREEDY, late[0])
        check_at_rest(plain)
    finished.cancel()
    check_text(target, DRAWN, finished)


def test_it_ends_at_a_token_or_at_its_limit(target, plain) -> None:
    text = expected(target, GREEDY)
    ends = Request(GREEDY.prompt, eos_token_ids=(text[5], 0))
    first = text.index(next(token for token in text if token in ends.eos_token_ids))
    handle = ends.submit(plain)
    assert handle.result(PATIENCE).tokens == text[: first + 1] and handle.finish_reason == "stop"
    both = Request(GREEDY.prompt, max_new_tokens=first + 1, eos_token_ids=ends.eos_token_ids)
    handle = both.submit(plain)
    assert handle.result(PATIENCE).tokens == text[: first + 1] and handle.finish_reason == "stop"
    handle = Request(GREEDY.prompt, max_new_tokens=1).submit(plain)
    assert handle.result(PATIENCE).tokens == text[:1] and handle.finish_reason == "length"


# --- text -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_words() -> Iterator[tuple[TextGenerator, Engine]]:
    """Yield a generator whose vocabulary has words and single bytes, and an engine of it."""
    tokenizer = of_bytes_and_spaces("llama")
    generator = TextGenerator(tiny_target(vocab_size=len(tokenizer), eos_token_ids=(0,)), tokenizer)
    with Engine(generator, rows=2, widths=(2,), pages=16, steps=4, **SIZES) as engine:
        yield generator, engine


@pytest.mark.full
def test_texts_and_stop_strings_are_the_generators(of_words) -> None:
    generator, engine = of_words
    for seed in range(12):
        options = {"temperature": 1.5, "seed": seed, "max_new_tokens": 24}
        whole = generator("a the", **options, rule="coupled")
        handle = engine.submit("a the", **options)
        pieces = list(handle)
        assert (handle.text, handle.tokens) == (whole.text, whole.tokens)
        assert "".join(piece.text for piece in pieces) == whole.text
        stops = [[whole.text[i : i + 2]] for i in range(0, len(whole.text) - 2, 3)]
        for stop in stops:
            cut = generator("a the", **options, rule="coupled", stop=stop)
            handle = engine.submit("a the", **options, stop=stop)
            result = handle.result(PATIENCE)
            assert (result.text, result.tokens) == (cut.text, cut.tokens), (seed, stop)
            assert handle.finish_reason == "stop" and stop[0] not in result.text
    check_at_rest(engine)


@pytest.mark.full_except("the <0xE8> <0xAA>-\\u8a9e-<0x9E> <0x20> b a-1")
@pytest.mark.parametrize(
    ("prompt", "stop", "tokens", "count"),
    [
        ("the", "\n\n", "a <0x0A> <0x0A> <0x20> b a", 3),
        ("the <0xE8> <0xAA>", "語", "<0x9E> <0x20> b a", 1),  # the prompt ends within a character
    ],
)
def test_what_was_held_back_ends_where_the_stop_string_was_complete(
    of_words, prompt, stop, tokens, count
) -> None:
    """Check a stop string that is complete before a run of bytes ends.

    Bytes become text when their run ends. The tokens end where the stop string is complete.
    """
    generator, engine = of_words
    prompt, tokens = (
        generator.tokenizer.convert_tokens_to_ids(words.split()) for words in (prompt, tokens)
    )
    with gated(engine) as gate:
        handle = engine.submit(prompt, max_new_tokens=24, stop=[stop])
        gate.wait()
        handle.cancel()
    handle.finish_reason = None  # the engine has forgotten the handle: deliver made-up tokens
    for token in tokens:
        handle.request.tokens.append(token)  # the scheduler records it first
        if not handle.deliver(RowProgress([token], [False])):
            break
    assert handle.tokens == tuple(tokens[:count]) and handle.finish_reason == "stop"


@pytest.mark.full
def test_of_a_chat_of_a_model_with_channels_the_final_one_is_the_text(
    of_words, monkeypatch
) -> None:
    generator, engine = of_words
    chat_flags: list[bool] = []
    make = text.GrowingText

    def see(*arguments: Any, is_chat: bool = False, **options: Any) -> Any:
        chat_flags.append(is_chat)
        return make(*arguments, is_chat=is_chat, **options)

    monkeypatch.setattr(text, "GrowingText", see)
    monkeypatch.setattr(pipeline, "GrowingText", see)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ more }}"
    monkeypatch.setattr(generator.tokenizer, "chat_template", template)
    chat = [{"role": "user", "content": "a the"}]
    for prompt, is_chat in (("a the", None), (chat, None), ("a the", True), (chat, False)):
        engine.submit(prompt, max_new_tokens=1, is_chat=is_chat).result(PATIENCE)
    generator("a the", max_new_tokens=1)
    generator([chat, "a the"], max_new_tokens=1)
    list(generator.stream(chat, max_new_tokens=1))
    assert chat_flags == [False, True, True, False, False, True, False, True]
    assert engine.encode(chat, {"more": "b"}) == [
        *engine.encode(chat),
        *generator.tokenizer.convert_tokens_to_ids(["b"]),
    ]


# --- several choices, errors ----------------------------------------------------------------------


@pytest.mark.full
def test_choices_of_one_seed_are_the_rows_of_a_batch(target, plain) -> None:
    prompt, seed = (5, 6, 7), 11
    settings = {"temperature": 1.0}
    handles = [
        Request(prompt, settings=settings, seed=seed, choice=choice).submit(plain)
        for choice in range(4)
    ]
    texts = [handle.result(PATIENCE).tokens for handle in handles]
    batch = specjax.generate(
        target,
        None,
        [prompt] * 4,
        max_new_tokens=16,
        sampling=Sampling(1.0),
        key=make_key(seed),
        rule="coupled",
    )
    assert texts == [tuple(row[3:].tolist()) for row in batch.tokens]
    assert len(set(texts)) == 4
    key = jax.random.fold_in(make_key(seed), 2)
    by_key = plain.submit(prompt, max_new_tokens=16, temperature=1.0, key=key, eos_token_ids=())
    assert by_key.result(PATIENCE).tokens == texts[2]


def test_prompts_may_be_arrays(target, plain) -> None:
    for prompt in (
        GREEDY.prompt,
        list(GREEDY.prompt),
        np.array(GREEDY.prompt),
        jnp.array(GREEDY.prompt),
    ):
        handle = plain.submit(prompt, max_new_tokens=16, eos_token_ids=())
        assert handle.result(PATIENCE).tokens == expected(target, GREEDY)


BAD_ENGINES = {
    r"rows=0: must be at least 1": {"rows": 0},
    r"page=12: must be a power of two": {"page": 12},
    r"page=4: must be a power of two, at least 8": {"page": 4},
    r"chunk=12: must be a multiple of page=8": {"chunk": 12},
    r"capacity=1: must be from 2 to 512": {"capacity": 1},
    r"capacity=513: must be from 2 to 512": {"capacity": 513},
    r"pages=0: must be at least 1": {"pages": 0},
    r"steps=0: must be from 1 to 64": {"steps": 0},
    r"steps=65: must be from 1 to 64": {"steps": 65},
    r"widths=\(1,\): give numbers from 1 to rows=2, including 2": {"widths": (1,)},
    r"widths=\(0, 2\): give numbers": {"widths": (0, 2)},
    r"widths=\(\): give numbers": {"widths": ()},
    r"drafts=\(\): give a sequence of shapes": {"drafts": ()},
    r"drafts='chain:3': give a sequence of shapes": {"drafts": "chain:3"},
    r"drafts=\('chain:3',\): this engine has no drafter": {"drafts": ("chain:3",)},
    r"draft=5\.5: give a shape": {"drafts": (5.5,)},
}


@pytest.mark.parametrize("message", BAD_ENGINES)
def test_what_no_engine_can_be_made_of_is_named(target, message) -> None:
    with pytest.raises(InputError, match=message):
        plain_engine(target, **BAD_ENGINES[message])


def test_a_generator_has_its_own_drafter_and_a_mesh_no_widths(target, of_words) -> None:
    generator, _ = of_words
    with pytest.raises(InputError, match="drafter: the generator brings its own drafter"):
        Engine(generator, specjax.PromptLookup())
    on_mesh = target.replace(mesh=sharding.make_mesh(2, 1))
    with pytest.raises(
        InputError,
        match=r"rows=3: must be at least 1, and a multiple of the mesh's data axis \(2\)",
    ):
        plain_engine(on_mesh, rows=3)
    with pytest.raises(
        InputError, match=r"widths=\(1, 2\): on a mesh that splits rows, give \(2,\)"
    ):
        plain_engine(on_mesh, widths=(1, 2))


BAD_REQUESTS = {
    r"empty prompt": {"prompt": []},
    r"id 99 is outside the vocabulary": {"prompt": [99]},
    r"prompt: an engine without a tokenizer takes token ids": {"prompt": "words"},
    r"prompt=None: give text, a chat, or token ids": {"prompt": None},
    r"no stop strings; give tokenizer": {"stop": ["x"]},
    r"prompt \(60 tokens\) plus max_new_tokens=8 make 68 tokens, but there is room for 64": {
        "prompt": [1] * 60
    },
    r"max_new_tokens=0: must be at least 1": {"max_new_tokens": 0},
    r"max_new_tokens=\[5\]: give one number": {"max_new_tokens": [5]},
    r"temperature=-1: must be at least 0": {"temperature": -1},
    r"top_p=0: must be in \(0, 1\]": {"top_p": 0},
    r"top_k=-1: must be a whole number": {"top_k": -1},
    r"min_p=2: must be in \[0, 1\]": {"min_p": 2},
    r"seed=-1: must be a whole number": {"seed": -1},
    r"choice=-1: must be a whole number, at least 0": {"choice": -1},
    r"key=5: give a random key": {"key": 5},
    r"key has shape \(2,\): give one key": {"key": jax.random.split(jax.random.key(0))},
    r"speculation=.chain:4.: give auto, off, a largest depth such as 2, chain:3$": {
        "speculation": "chain:4"
    },
    r"speculation=-1: a depth is at least 0": {"speculation": -1},
    r"eos_token_ids: 9 ids; give at most 8": {"eos_token_ids": range(9)},
    r"eos_token_ids=\[99\]: outside the vocabulary": {"eos_token_ids": (99,)},
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_what_cannot_be_asked_for_is_named(drafting, message) -> None:
    with pytest.raises(InputError, match=message):
        drafting.submit(**{"prompt": [1, 2], "max_new_tokens": 8, **BAD_REQUESTS[message]})
    check_at_rest(drafting)


def test_requests_of_one_call_may_speculate_differently(target, drafting) -> None:
    wishes = ["off", 1, "chain:3", None]
    requests = [Request((1, 2, number), 24) for number in range(len(wishes))]
    with drafting._loop.wake:
        handles = [
            drafting.submit(
                list(request.prompt), max_new_tokens=24, eos_token_ids=(), speculation=wish
            )
            for request, wish in zip(requests, wishes, strict=True)
        ]
    for request, handle in zip(requests, handles, strict=True):
        check_text(target, request, handle)
    off, short, named, _ = (handle.acceptance for handle in handles)
    assert (off.drafted, off.steps) == (0, 24)
    # Every call drafts what the third request names, and the second one only its first token.
    assert 0 < short.drafted <= short.steps
    assert named.drafted > 2 * named.steps


def test_the_engine_decodes_plainly_while_all_requests_are_off(drafting) -> None:
    def calls_by_draft() -> dict[str, int]:
        table = drafting.statistics.drafts
        names = {str(row["draft"]) for row in table}
        return {
            name: sum(int(row["taken"]) for row in table if row["draft"] == name) for name in names
        }

    def submit(speculation: str) -> None:
        options = {"max_new_tokens": 24, "eos_token_ids": (), "speculation": speculation}
        drafting.submit([1, 2, 3], **options).result(PATIENCE)

    before = calls_by_draft()
    submit("off")
    assert drafting.statistics.draft == "none"
    assert calls_by_draft() == before  # the rule that chooses a draft was not asked
    submit("chain:3")
    changed = {name for name, count in calls_by_draft().items() if count != before[name]}
    assert changed == {"chain of 3"}


def test_stop_strings_are_strings_and_not_empty(of_words) -> None:
    _, engine = of_words
    for stop in ("", [""], [3]):
        with pytest.raises(
            InputError, match="give a string or a sequence of strings, none of them empty"
        ):
            engine.submit("the", stop=stop)


@pytest.mark.full
def test_a_text_that_needs_more_pages_than_there_are_is_refused(target) -> None:
    with (
        plain_engine(target, pages=7) as engine,  # another test has compiled for this size
        pytest.raises(
            InputError, match=r"need 8 pages of 8 tokens, but there are 7; shorten the prompt"
        ),
    ):
        engine.submit([1] * LONGEST_PROMPT, max_new_tokens=MOST)


def test_a_full_line_is_refused(target) -> None:
    with plain_engine(target, max_waiting=1) as engine, gated(engine) as gate:
        handles = submit_together(engine, [GREEDY, GREEDY])
        gate.wait()
        handles.append(GREEDY.submit(engine))
        with pytest.raises(QueueFullError, match="1 requests wait, and the queue is full"):
            GREEDY.submit(engine)
        gate.open()
        for handle in handles:
            check_text(target, GREEDY, handle)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["_read", "_decode", "_record_call"])
def test_whoever_waits_learns_of_a_failure(target, where) -> None:
    with plain_engine(target) as engine:

        def fail(*_, **named):
            raise ValueError("the device is gone")

        setattr(engine._loop, where, fail)
        handles = submit_together(engine, [GREEDY] * 3)

        async def read() -> None:
            async for _ in handles[0]:
                pass

        for wait in (
            lambda: handles[1].result(PATIENCE),
            lambda: list(handles[2]),
            lambda: asyncio.run(read()),
        ):
            with pytest.raises(EngineError) as caught:
                wait()
            assert str(caught.value.__cause__) == "the device is gone"
        assert {handle.finish_reason for handle in handles} == {"error"}
        with pytest.raises(EngineError) as caught:
            GREEDY.submit(engine)
        assert str(caught.value.__cause__) == "the device is gone"
        engine._loop._thread.join(PATIENCE)
        assert not engine._loop._thread.is_alive()
        handles[0].cancel()
        assert handles[0].finish_reason == "error"
        assert (engine.statistics.running, engine.statistics.waiting) == (0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_while_nobody_waits_says_so(target) -> None:
    with plain_engine(target) as engine:
        check_text(target, GREEDY, GREEDY.submit(engine))
        assert (engine.state, engine.error) == ("running", None)

        def fail() -> bool:
            raise ValueError("the device is gone")

        with engine._loop.wake:
            engine._loop.scheduler.can_go_on = fail
            engine._loop.wake.notify_all()
        engine._loop._thread.join(PATIENCE)
        assert (engine.state, str(engine.error)) == ("failed", "the device is gone")
        with pytest.raises(EngineError):
            GREEDY.submit(engine)
    assert engine.state == "failed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_learns_of_a_failure_that_left_rows_and_pages_in_disorder(target) -> None:
    with plain_engine(target) as engine:

        def fail(*_) -> None:
            engine._loop.scheduler._pools[0]._free.clear()
            engine._loop.scheduler._rows[0].prefixes = [None]
            raise ValueError("the device is gone")

        engine._loop._record_call = fail
        handles = submit_together(engine, [GREEDY] * 3)
        for handle in handles:
            with pytest.raises(EngineError):
                handle.result(PATIENCE)
        engine._loop._thread.join(PATIENCE)
        check_at_rest(engine)


def test_what_it_has_counted_goes_beyond_32_bits(target, plain) -> None:
    with plain._loop.wake:
        for name in ("generated", "drafted", "accepted"):
            setattr(plain._loop._total, name, 2**31 - 1)
    check_text(target, GREEDY, GREEDY.submit(plain))
    assert plain.statistics.generated == 2**31 - 1 + 16
    assert (plain.statistics.drafted, plain.statistics.accepted) == (2**31 - 1, 2**31 - 1)


def test_a_use_of_the_scheduler_without_the_lock_is_found_out(plain, unguarded_uses) -> None:
    for name in ("cancel", "running", "table", "dropped"):
        with plain._loop.wake:
            getattr(plain._loop.scheduler, name)
        with pytest.raises(
            AssertionError, match=f"Scheduler.{name} is used without the engine's lock"
        ):
            getattr(plain._loop.scheduler, name)
    assert unguarded_uses == [
        f"Scheduler.{name} by MainThread" for name in ("cancel", "running", "table", "dropped")
    ]
    unguarded_uses.clear()


# --- the error of one text ------------------------------------------------------------------------


def fail(*_, **named):
    raise ValueError("no such token")


def failing_for(request, method, place: int):
    """Return ``method``, which fails for the ``request`` or its handle as argument ``place``."""

    def fails_for_one(*arguments, **options):
        if getattr(arguments[place], "request", arguments[place]) is request:
            fail()
        return method(*arguments, **options)

    return fails_for_one


def make_a_method_fail(name: str, place: int):
    def make(engine: Engine, handle: Handle, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            engine._loop, name, failing_for(handle.request, getattr(engine._loop, name), place)
        )

    return make


def make_the_handle_fail(name: str):
    return lambda engine, handle, patch: patch.setattr(handle, name, fail)


def make_the_device_lose_tokens(engine: Engine, handle: Handle, patch: pytest.MonkeyPatch) -> None:
    decode = engine._loop.device.decode

    def lose(*arguments, **options):
        progress = decode(*arguments, **options)
        if handle.request.row is None:
            return progress
        return progress.replace(lengths=progress.lengths.at[handle.request.row].set(1))

    patch.setattr(engine._loop.device, "decode", lose)


def forget_who_asked(engine: Engine, handle: Handle, patch: pytest.MonkeyPatch) -> None:
    engine._loop.handles.pop(handle.request)
    # The engine cannot notify a handle that it has lost.
    handle.end("error", ValueError("no such token"))


def forget_who_asked_once_it_runs(
    engine: Engine, handle: Handle, patch: pytest.MonkeyPatch
) -> None:
    give_up = engine._loop._give_up_orphans

    def forget_first() -> None:
        if engine._loop.handles.pop(handle.request, None):
            handle.end("error", ValueError("no such token"))
        give_up()

    patch.setattr(engine._loop, "_give_up_orphans", forget_first)


FAULTS_OF_ONE_TEXT = {
    "before it has a row": make_a_method_fail("_row_text", 0),
    "while it is read": make_a_method_fail("_chunk_queued", 0),
    "nobody has asked for it": forget_who_asked,
    "nobody has asked for it, and it runs": forget_who_asked_once_it_runs,
    "the device has lost tokens": make_the_device_lose_tokens,
    "its statistics": make_the_handle_fail("take_stats"),
    "its row": make_a_method_fail("_record_row", 2),
    "its tokens": make_the_handle_fail("deliver"),
}


@pytest.mark.full
@pytest.mark.thorough_except(
    "before it has a row",
    "while it is read",
    "nobody has asked for it",
    "nobody has asked for it, and it runs",
)
@pytest.mark.parametrize("fault", FAULTS_OF_ONE_TEXT)
def test_a_text_whose_own_state_is_broken_ends_alone(target, plain, monkeypatch, fault) -> None:
    with plain._loop.wake:
        first, second, third = submit_together(plain, [GREEDY, DRAWN, GREEDY])
        FAULTS_OF_ONE_TEXT[fault](plain, first, monkeypatch)
    with pytest.raises(EngineError) as caught:
        first.result(PATIENCE)
    assert str(caught.value.__cause__).startswith(
        ("no such token", "row 0: the device has 1 tokens; the text had 3")
    )
    check_text(target, DRAWN, second)
    check_text(target, GREEDY, third)
    assert plain.state == "running"
    check_at_rest(plain)
    monkeypatch.undo()
    check_text(target, GREEDY, GREEDY.submit(plain))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_error_of_one_text_is_everybodys_where_pages_are_in_disorder(
    target, monkeypatch
) -> None:
    with plain_engine(target) as engine:
        with engine._loop.wake:
            first, second = submit_together(engine, [GREEDY, DRAWN])

            def fail_and_break(*_) -> None:
                engine._loop.scheduler._pools[0]._free.append(0)
                fail()

            monkeypatch.setattr(first, "take_stats", fail_and_break)
        for handle, message in ((first, "this text failed"), (second, "the engine failed")):
            with pytest.raises(EngineError, match=message):
                handle.result(PATIENCE)
        engine._loop._thread.join(PATIENCE)
        assert engine.state == "failed"
        assert "pages: " in str(engine.error)
        check_at_rest(engine)


@pytest.mark.parametrize("choice", [0, 1, 2**31, 2**32 - 1])
def test_a_choice_has_the_key_that_is_folded_from_its_number(target, choice) -> None:
    sizes: dict[str, Any] = dict.fromkeys(
        ("drafts", "capacity", "pages", "page", "chunk", "tokenizer", "widths", "clients")
    )
    setup = EngineConfig.of(
        target, None, rows=1, steps=8, max_logprobs=0, max_prediction=0, **sizes
    )
    key = setup.settings(SamplingParams(seed=7), prompt=2, choice=choice)["key"]
    expected = jax.random.fold_in(jax.random.key(7), np.uint32(choice))
    assert key.tolist() == jax.random.key_data(expected).tolist()


def test_a_key_may_lie_anywhere_and_compiles_nothing(target, plain) -> None:
    key = jax.random.key(7)
    request = {"max_new_tokens": 8, "temperature": 1.0, "eos_token_ids": ()}
    first = plain.submit([1, 2, 3], key=key, **request).result(PATIENCE).tokens
    before = compilations()
    moved = jax.device_put(key, jax.devices()[3])
    assert plain.submit([1, 2, 3], key=moved, **request).result(PATIENCE).tokens == first
    assert compilations() == before


def test_an_ended_engine_holds_no_caches(target) -> None:
    with plain_engine(target) as engine:
        handle = GREEDY.submit(engine)
        handle.result(PATIENCE)
    assert engine._loop.device.state is None and engine._loop.device._empty_prefix_state is None
    handle.cancel()
    assert engine.statistics.free_pages == engine.statistics.pages


def test_closing_cancels_what_is_under_way(target) -> None:
    engine = plain_engine(target)
    with gated(engine) as gate:
        handles = submit_together(engine, [Request(GREEDY.prompt, MOST)] * 5)
        gate.wait()
        gate.let_through()
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: engine._loop.closing)
        gate.open()
        closing.join(PATIENCE)
    assert not closing.is_alive() and not engine._loop._thread.is_alive()
    for handle in handles:
        check_cancelled(target, Request(GREEDY.prompt, MOST), handle)
    check_at_rest(engine)
    engine.close()
    with pytest.raises(InputError, match="the engine is closed"):
        GREEDY.submit(engine)


LEFT_OPEN = """
from specjax.serving.engine import Engine
from tests.conftest import tiny_target

sizes = {"rows": 2, "widths": (2,), "steps": 1, "page": 8, "chunk": 16, "capacity": 512}
engine = Engine(tiny_target(), pages=128, **sizes)
handles = [engine.submit([1, 2, 3], max_new_tokens=500) for _ in range(50)]
next(iter(handles[0]))
print(handles[-1].finish_reason)
"""


@pytest.mark.thorough
def test_a_program_ends_that_has_not_closed_its_engine() -> None:
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", LEFT_OPEN],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr


# --- pages, and what is read ----------------------------------------------------------------------


@pytest.mark.full
def test_a_common_beginning_is_read_once_and_lies_once(target) -> None:
    common, count = tuple(np.random.default_rng(3).integers(0, VOCABULARY, 2 * CHUNK).tolist()), 20
    requests = [Request((*common, 5, *divmod(i, 10)), 8) for i in range(count)]
    # The pages hold the common beginning once, and the rests of four texts.
    with plain_engine(target, rows=4, widths=(4,), pages=4 + 4 * 2) as engine:
        most_used = 0
        with gated(engine) as gate:
            handles = submit_together(engine, requests)
            while not all(handle.finish_reason for handle in handles):
                gate.let_through()
                with engine._loop.wake:
                    table = engine._loop.scheduler.table
                    used = {int(page) for line in table for page in line if page < 12}
                    most_used = max(most_used, len(used))
        for request, handle in zip(requests, handles, strict=True):
            check_text(target, request, handle)
        statistics = engine.statistics
    assert statistics.preemptions == 0
    # The last token of a prompt is read by decoding, and not counted here.
    assert statistics.prompt_tokens_read == 2 * CHUNK + count * 2
    assert statistics.prompt_tokens_shared == (count - 1) * 2 * CHUNK
    assert most_used <= 12 and most_used > 4


@pytest.mark.parametrize("length", [1, CHUNK + 1, LONGEST_PROMPT])
def test_the_first_token_comes_soon_where_a_row_is_free(target, length) -> None:
    request = Request(
        tuple(np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()), 4
    )
    with plain_engine(target) as engine, gated(engine) as gate:
        running = Request((1, 2, 3), MOST).submit(engine)
        gate.wait()
        gate.let_through()
        before = engine.statistics.decode_calls
        handle = request.submit(engine)
        while not handle.tokens:
            gate.let_through()
        assert engine.statistics.decode_calls - before <= -(-(length - 1) // CHUNK) + 2
        gate.open()
        check_text(target, request, handle)
        check_text(target, Request((1, 2, 3), MOST), running)


def check_turns(target, engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Submit short prompts while a long one is prefilled, and check that they come next.

    Every text must be its request's.
    """
    random, read, order = np.random.default_rng(6), engine._loop._read, []
    lengths = (LONGEST_PROMPT, 6, CHUNK + 2, 5)
    prompts = [tuple(random.integers(0, VOCABULARY, length).tolist()) for length in lengths]
    long, *shorter = (
        Request(prompt, 12, {"temperature": 0.7 * (i % 2)}, seed=i)
        for i, prompt in enumerate(prompts)
    )
    shorter = shorter[: engine.rows - 1]
    handles: list[Handle] = []

    def note_and_read(reads, *arguments, **options):
        order.extend((len(chunk.request.tokens), chunk.start) for chunk in reads)
        if len(handles) == 1:
            handles.extend(request.submit(engine) for request in shorter)
        return read(reads, *arguments, **options)

    patch.setattr(engine._loop, "_read", note_and_read)
    with engine._loop.wake:
        handles.append(long.submit(engine))
    wait_until(lambda: len(handles) > len(shorter))
    for request, handle in zip([long, *shorter], handles, strict=True):
        check_text(target, request, handle)
    assert order[:2] == [(LONGEST_PROMPT, 0), (6, 0)]
    last = order.index((LONGEST_PROMPT, 2 * CHUNK))
    assert [start for length, start in order if length == LONGEST_PROMPT] == [0, CHUNK, 2 * CHUNK]
    assert order.index((6, 0)) < order.index((LONGEST_PROMPT, CHUNK)) < last
    check_at_rest(engine)


def test_a_short_prompt_does_not_wait_for_a_long_one(target, plain, monkeypatch) -> None:
    check_turns(target, plain, monkeypatch)


@pytest.mark.thorough
def test_prompts_take_turns_also_where_the_target_keeps_states(monkeypatch) -> None:
    hybrid = tiny_target(**HYBRID)
    options = {
        "drafter": specjax.PromptLookup(),
        "drafts": ("chain:3",),
        "rows": 4,
        "widths": (4,),
        "pages": 32,
    }
    with plain_engine(hybrid, **options) as engine:
        check_turns(hybrid, engine, monkeypatch)


@pytest.mark.thorough
def test_texts_of_a_target_with_states_begin_alike_and_go_on_from_each_others_states() -> None:
    hybrid = tiny_target(**HYBRID)
    random = np.random.default_rng(4)
    beginning = random.integers(0, VOCABULARY, 2 * CHUNK).tolist()
    prompts = [(*beginning, 5, i) for i in range(6)] + [
        (*beginning[:CHUNK], 7, i, i) for i in range(4)
    ]
    requests = [
        Request(prompt, 12, {"temperature": 0.7 * (i % 2)}, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    with plain_engine(hybrid, drafter=specjax.PromptLookup(), drafts=("chain:3",)) as engine:
        # In this small model a state is larger than a chunk, so the number of states is limited.
        assert engine._loop.device.most_prefix_states() is not None
        for handle in submit_together(engine, requests):
            handle.result(PATIENCE)
        # The texts have other rows now, and all of them find the prefixes of the first round.
        handles = submit_together(engine, requests)
        for request, handle in zip(requests, handles, strict=True):
            check_text(hybrid, request, handle)
        check_at_rest(engine)
        assert engine.statistics.prompt_tokens_shared >= 6 * 2 * CHUNK + 4 * CHUNK


@pytest.mark.full
def test_texts_of_a_target_with_sparse_attention_share_pages_of_index_keys() -> None:
    sparse = tiny_target(**SPARSE)
    beginning = np.random.default_rng(4).integers(0, VOCABULARY, CHUNK).tolist()
    requests = [
        Request((*beginning, 5, i), 12, {"temperature": 0.7 * (i % 2)}, seed=i) for i in range(6)
    ]
    with plain_engine(sparse, drafter=specjax.PromptLookup(), drafts=("chain:3",)) as engine:
        for handle in submit_together(engine, requests[:1]):
            handle.result(PATIENCE)
        handles = submit_together(engine, requests)
        for request, handle in zip(requests, handles, strict=True):
            check_text(sparse, request, handle)
        check_at_rest(engine)
        assert engine.statistics.prompt_tokens_shared >= 5 * CHUNK


@pytest.mark.full
def test_who_is_preempted_is_counted_and_goes_on(target) -> None:
    """Check two texts that need all pages each.

    The second one is preempted, and its handle counts what it emitted in both rows.
    """
    requests = [Request((1 + i,) * 20, MOST, {"temperature": 1.0}, seed=i) for i in range(2)]
    with plain_engine(target, pages=7) as engine:
        handles = submit_together(engine, requests)
        for request, handle in zip(requests, handles, strict=True):
            check_text(target, request, handle)
        check_at_rest(engine)
        preemptions = sum(handle.request.preemptions for handle in handles)
        assert engine.statistics.preemptions == preemptions >= 1


# --- meshes, drafters -----------------------------------------------------------------------------


def check_a_few(target, engine: Engine, count: int = 8) -> None:
    random = np.random.default_rng(0)
    beginnings = random.integers(0, VOCABULARY, (2, LONGEST_PROMPT)).tolist()
    requests = [random_request(random, beginnings) for _ in range(count)]
    before = compilations()
    handles = [request.submit(engine) for request in requests]
    for handle in handles:
        handle.result(PATIENCE)
    check_at_rest(engine)
    assert compilations() == before
    for request, handle in zip(requests, handles, strict=True):
        check_text(target, request, handle)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.thorough)])
def test_a_mesh_gives_the_same_texts(target, sizes) -> None:
    mesh = sharding.make_mesh(*sizes)
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    on_mesh = target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    with plain_engine(on_mesh, rows=4, widths=(4,), pages=9) as engine:
        check_a_few(target, engine, 12)


DRAFTERS = {
    "prompt lookup": lambda target, key: (specjax.PromptLookup(), ("chain:3",)),
    "draft model, drafted trees": lambda target, key: (
        specjax.DraftModel.init(target, key, num_layers=1),
        (DynamicTree(top_k=2, depth=2, nodes=4),),
    ),
    "mixture of attentions": lambda target, key: (
        specjax.MixtureOfAttentions.init(target, key, tli=1),
        (None, Chain(2)),
    ),
}


# One drafter of each kind. tests/evaluation/test_conformance.py tests all of them with rows that
# come and go.
@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_same_texts(target, name) -> None:
    drafter, drafts = DRAFTERS[name](target, jax.random.key(5))
    with plain_engine(target, drafter=drafter, drafts=drafts) as engine:
        check_a_few(target, engine)
        assert sum(engine._loop.choice.decisions.values()) >= engine.statistics.decode_calls > 0
