"""The engine: whatever comes when, a text is what `specjax.generate` gives for its request alone.

All engines of one drafter have the same sizes where they can, and so the same compiled programs.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import sharding
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.pipeline import TextGenerator
from specjax.sampling import Sampling, make_key, perturbed, position_keys, position_noise
from specjax.serving.engine import Engine
from specjax.serving.handle import CancelledError, EngineError, Handle
from specjax.serving.scheduler import QueueFullError
from tests.conftest import compilations, tiny_target
from tests.test_text import of_bytes_and_spaces

VOCABULARY, PAGE, CHUNK, CAPACITY = 11, 8, 16, 64
LONGEST_PROMPT, MOST = 40, 24  # together the capacity
SIZES = {"page": PAGE, "chunk": CHUNK, "capacity": CAPACITY}
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1)))
PATIENCE = 120.0
"""Seconds after which a test fails in place of waiting for good."""


# --- what a request's text must be -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What `Engine.submit` is given."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    settings: dict = field(default_factory=dict)
    """Of `specjax.Sampling`, those that are not the engine's own."""
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0

    def submit(self, engine: Engine) -> Handle:
        named = {name: getattr(self, name) for name in ("max_new_tokens", "eos_token_ids", "seed", "choice")}
        return engine.submit(list(self.prompt), **named, **self.settings)

    @property
    def key(self) -> jax.Array:
        return jax.random.fold_in(make_key(self.seed), self.choice)

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{"temperature": 0.0, **self.settings})


def expected(target, request: Request) -> tuple[int, ...]:
    """The request's text, alone, in one contiguous cache. Padded: all requests share one program."""
    prompt = np.zeros((1, LONGEST_PROMPT), np.int32)
    prompt[0, : len(request.prompt)] = request.prompt
    options = {"max_new_tokens": MOST, "rule": "coupled", "eos_token_ids": ()}
    result = specjax.generate(
        target, None, prompt, [len(request.prompt)], sampling=request.sampling, key=request.key[None], **options
    )
    text = result.tokens[0, len(request.prompt) :][: request.max_new_tokens].tolist()
    ends = [place for place, token in enumerate(text) if token in request.eos_token_ids]
    return tuple(text[: ends[0] + 1] if ends else text)


def is_near_tie(target, request: Request, text: Sequence[int], place: int) -> bool:
    """Whether moving the logits by 1e-4 may change the token that ``text`` has at ``place``. Two ways of computing may then
    differ there."""
    tokens = [*request.prompt, *text[:place]]
    output, _ = target.forward(jnp.array([tokens]))
    logits = output.logits[0, -1]
    moved = logits + np.random.default_rng(0).uniform(-1e-4, 1e-4, (512, VOCABULARY))
    noise = position_noise(position_keys(request.key[None], jnp.array([[len(tokens)]])), VOCABULARY)[0, 0]
    drawn = jnp.argmax(perturbed(moved, request.sampling.rows(512, "coupled"), jnp.tile(noise, (512, 1))), axis=-1)
    return len(np.unique(drawn)) > 1


def check_tokens(target, request: Request, tokens: Sequence[int], is_whole: bool) -> None:
    """``tokens`` are the request's text, or its beginning. Where they part from it, two tokens were nearly equally likely."""
    right = expected(target, request)
    place = next((i for i, (one, other) in enumerate(zip(tokens, right, strict=False)) if one != other), None)
    if place is not None:
        assert is_near_tie(target, request, right, place), f"{request}: {tokens} is not {right}"
    else:
        assert len(tokens) == len(right) if is_whole else len(tokens) <= len(right), f"{request}: {tokens} is not {right}"


def check_text(target, request: Request, handle: Handle) -> None:
    """A text that is finished is right, and so is what its handle says of it."""
    tokens = handle.result(PATIENCE).tokens
    check_tokens(target, request, tokens, is_whole=True)
    assert handle.finish_reason == ("stop" if tokens[-1] in request.eos_token_ids else "length")
    acceptance = handle.acceptance
    assert acceptance is not None
    # Also of one that was put back. The last step has no bonus token where an accepted one ends the text.
    assert len(tokens) == acceptance.emitted
    assert acceptance.emitted <= acceptance.steps + acceptance.accepted <= acceptance.emitted + 1
    times = handle.times
    assert times.first_token is not None and times.finished is not None
    assert times.submitted <= times.first_token <= times.finished


def check_at_rest(engine: Engine) -> None:
    """Nobody has a row or a page, and no page is lost or there twice."""
    wait_until(lambda: engine._scheduler.idle)
    with engine._wake:
        assert not engine._handles
        statistics, scheduler = engine.statistics, engine._scheduler
        assert (statistics.waiting, statistics.running) == (0, 0)
        assert statistics.free_pages == statistics.pages
        assert (scheduler.table == scheduler._pools[0].total).all()
        for pool in scheduler._pools:
            shared = [page for prefix in pool._prefixes for page in prefix.pages]
            assert sorted(pool._free + shared) == list(range(pool.total))
            assert all(prefix.holders == 0 for prefix in pool._prefixes)


def wait_until(condition: Callable[[], object]) -> None:
    until = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < until, "never came"
        time.sleep(0.001)


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(target) -> Iterator[Engine]:
    """An engine whose drafts change, with too few pages: two texts of full length fill them."""
    drafter = specjax.Eagle3.init(target, jax.random.key(5))
    with Engine(target, drafter, drafts=(None, "chain:3", TREE), rows=4, widths=(2, 4), pages=16, **SIZES) as engine:
        yield engine


def plain_engine(target, **options) -> Engine:
    return Engine(target, **{"rows": 2, "widths": (2,), "pages": 16, "steps": 4, **SIZES, **options})


@pytest.fixture
def plain(target) -> Iterator[Engine]:
    """Engines of this kind compile their programs once."""
    with plain_engine(target) as engine:
        yield engine


class Gate:
    """Stands before an engine's decode calls, and lets them through one by one, or all."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._decode, self._allowed, self._is_open = engine, engine._decode, threading.Semaphore(0), False
        self.arrived = 0  # how often the engine came to it
        engine._decode = self._pass

    def _pass(self) -> None:
        self.arrived += 1
        if not self._is_open:
            self._allowed.acquire()
        self._decode()

    def let_through(self) -> None:
        """One decode call; returns when the engine is at the gate again, or has nothing to do."""
        arrived = self.arrived
        self._allowed.release()
        wait_until(lambda: self.arrived > arrived or self._engine._scheduler.idle)

    def wait(self) -> None:
        """Until the engine is at the gate."""
        arrived = self.arrived
        wait_until(lambda: self.arrived > arrived)

    def open(self) -> None:
        self._is_open = True
        self._allowed.release()


@contextmanager
def gated(engine: Engine) -> Iterator[Gate]:
    gate = Gate(engine)
    try:
        yield gate
    finally:
        gate.open()


# --- random schedules ------------------------------------------------------------------------------------------------


def random_request(random: np.random.Generator, beginnings: Sequence[Sequence[int]]) -> Request:
    begun = beginnings[random.integers(len(beginnings))][: random.integers(LONGEST_PROMPT)]
    prompt = [*begun, *random.integers(0, VOCABULARY, random.integers(0, 6))][:LONGEST_PROMPT] or [3]
    if random.random() < 0.4:
        settings = {}
    else:
        settings = {"temperature": float(random.choice([0.7, 1.0, 1.5])), "top_p": float(random.choice([0.8, 1.0]))}
    ends = random.choice(VOCABULARY, random.integers(1, 4), replace=False).tolist() if random.random() < 0.3 else []
    most = int(random.integers(1, MOST + 1))
    return Request(tuple(map(int, prompt)), most, settings, tuple(ends), int(random.integers(5)), int(random.integers(3)))


def run_schedule(engine: Engine, seed: int, count: int = 8, clients: int = 3) -> list[tuple[Request, Handle, bool]]:
    """Requests of several threads, some of which are cancelled at random moments: each with its handle, and whether it was
    cancelled. All are over."""
    whole = np.random.default_rng(seed)
    beginnings = whole.integers(0, VOCABULARY, (2, LONGEST_PROMPT)).tolist()
    seen: list[tuple[Request, Handle, bool]] = []

    def client(number: int) -> None:
        random = np.random.default_rng((seed, number))
        own = []
        for _ in range(-(-count // clients)):
            time.sleep(random.choice([0.0, 0.0, 0.002, 0.01]))
            request = random_request(random, beginnings)
            handle = request.submit(engine)
            is_cancelled = random.random() < 0.2
            own.append((request, handle, is_cancelled))
            if is_cancelled:
                time.sleep(random.choice([0.0, 0.003, 0.01]))
                handle.cancel()
        for _, handle, _ in own:
            wait_until(lambda handle=handle: handle.finish_reason is not None)
        seen.extend(own)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return seen


def check_schedules(target, engine: Engine, seeds: Sequence[int], count: int, monkeypatch) -> None:
    before, ended = compilations(), []
    for seed in seeds:
        random = np.random.default_rng((seed, 99))
        monkeypatch.setattr(engine, "steps", int(random.choice([1, 3, 8])))
        monkeypatch.setattr(engine._choice, "choose", lambda width, random=random: int(random.integers(3)))
        ended += run_schedule(engine, seed, count)
        check_at_rest(engine)
    assert compilations() == before
    for request, handle, is_cancelled in ended:
        if is_cancelled and handle.finish_reason == "cancelled":
            check_tokens(target, request, handle.tokens, is_whole=False)
            with pytest.raises(CancelledError):
                handle.result()
        else:
            check_text(target, request, handle)
    assert len(ended) >= count * len(seeds)


def test_every_text_of_random_schedules_is_that_of_its_request_alone(target, drafting, monkeypatch) -> None:
    before = drafting.statistics
    check_schedules(target, drafting, range(36), 8, monkeypatch)
    after = drafting.statistics
    assert after.put_back - before.put_back > 10
    assert after.prompt_tokens_shared > before.prompt_tokens_shared


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_every_text_of_thousands(target, drafting, monkeypatch, part) -> None:
    check_schedules(target, drafting, range(1000 * part + 1000, 1000 * part + 1050), 24, monkeypatch)
