"""Run replicas behind nginx with the configuration of deploy/.

It does not matter which replica answers, and one may go.
"""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.conftest import save_tiny
from tests.deploy.replicas import Clients, Outcome, Replica, ask, complete, has_nginx, nginx
from tests.serving.http import test_drafts
from tests.serving.http.made_up import MadeUpEngine, running, serving, wait_until
from tests.serving.http.test_soak import TIES

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not has_nginx(),
        reason="REPLICAS WERE NOT TESTED: there is no nginx; apt-get install nginx-light",
    ),
]

SEEDS, TOKENS = 40, 160
AWAY = 2.5
"""Seconds after which nginx tries a server again that did not answer: above ``fail_timeout``."""
PASSED_ON = 10
"""Seconds within which the request of a lost server goes to another one.

This is ``proxy_next_upstream_timeout``."""


# --- with engines that are made up ----------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path: Path) -> Iterator[tuple[list[MadeUpEngine], int]]:
    """Yield two engines, and the port of nginx before their servers."""
    engines = [MadeUpEngine("ab", pause=0.05), MadeUpEngine("ab", pause=0.05)]
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(engine)) for engine in engines]
        yield engines, stack.enter_context(nginx(tmp_path, [port for _, port in addresses]))


def test_the_server_with_the_fewest_requests_is_next(made_up) -> None:
    engines, port = made_up
    with Clients(port, 4, 1, max_tokens=40) as clients:
        time.sleep(1.0)  # the first texts take two seconds
        assert [len(engine.submitted) for engine in engines] == [2, 2]
        assert all(outcome.text == "ab" * 20 for outcome in clients.stop())


def test_a_stream_comes_piece_by_piece(made_up) -> None:
    _, port = made_up
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 20, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    times = []
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    connection.close()
    assert len(times) >= 20
    assert times[-1] - times[0] > 0.05 * 20 / 2  # a single piece would arrive at once


def test_what_is_long_is_refused_by_the_server_and_by_nobody_before(made_up) -> None:
    _, port = made_up
    status, content = ask(port, "/v1/completions", {"model": "tiny", "prompt": "a" * (3 * 2**20)})
    assert (status, json.loads(content)["error"]["code"]) == (400, "context_length_exceeded")


def test_the_numbers_of_one_server_are_not_shown(made_up) -> None:
    _, port = made_up
    assert ask(port, "/metrics")[0] == 404
    assert ask(port, "/health")[0] == ask(port, "/v1/models")[0] == 200


def test_a_full_queue_is_not_passed_on_and_does_not_shut_a_server_out(made_up) -> None:
    engines, port = made_up
    engines[0].room = engines[1].room = 0
    assert [complete(port, 0, False, max_tokens=2).status for _ in range(4)] == [429] * 4
    engines[0].room = engines[1].room = None
    assert complete(port, 0, False, max_tokens=2).text == "ab"


def test_one_that_drains_is_asked_by_nobody(tmp_path: Path) -> None:
    engines = [MadeUpEngine("ab"), MadeUpEngine("ab")]
    with (
        running(engines[0], drain_seconds=60) as (first, (_, port_of_first)),
        serving(engines[1]) as (_, port_of_second),
        nginx(tmp_path, [port_of_first, port_of_second]) as port,
    ):
        first._service.drain()  # it goes on listening
        outcomes = [complete(port, 0, number % 2 == 0, max_tokens=4) for number in range(20)]
        assert {outcome.text for outcome in outcomes} == {"abab"}
        assert [len(engine.submitted) for engine in engines] == [0, 20]
        assert ask(port_of_first, "/health")[0] == 503
        assert ask(port, "/health")[0] == 200


def test_clients_that_draft_reach_a_server_over_a_websocket(tmp_path: Path) -> None:
    with (
        test_drafts.serving() as (_, (_, port_of_server)),
        nginx(tmp_path, [port_of_server, port_of_server]) as port,
        connect(f"ws://127.0.0.1:{port}/v1/drafts", compression=None, proxy=None) as line,
    ):
        assert test_drafts.open_session(line)


# --- with two servers of a small model ------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> Iterator[tuple[list[Replica], int, list[str]]]:
    """Yield two servers, the port of nginx before them, and the text of every seed."""
    root = tmp_path_factory.mktemp("replicas")
    target = save_tiny(root / "target")
    options = ("--target", str(target), "--served-model-name", "tiny")
    options += ("--rows", "2", "--capacity", "256", "--page", "16")
    options += ("--drafter", "prompt-lookup", "--drafts", "chain:2")
    options += ("--max-logprobs", "0", "--max-prediction", "0")
    servers = [Replica(root / f"{number}.log", *options) for number in range(2)]
    try:
        for replica in servers:
            replica.start()
        for replica in servers:
            replica.wait_until_ready()
        texts = [
            complete(servers[0].port, seed, False, max_tokens=TOKENS).text for seed in range(SEEDS)
        ]
        assert None not in texts and len(set(texts)) == SEEDS
        with nginx(root, [replica.port for replica in servers]) as port:
            yield servers, port, texts
    finally:
        for replica in servers:
            replica.end()


def check_texts(outcomes: list[Outcome], texts: list[str]) -> None:
    """Check that each text is the one of its seed, except for ties (see `TIES`)."""
    differing = [outcome for outcome in outcomes if outcome.text != texts[outcome.seed]]
    assert len(differing) <= len(outcomes) / TIES, differing[:3]


def test_a_seed_has_one_text_whichever_server_answers(replicas) -> None:
    (_, second), port, texts = replicas
    check_texts(
        [complete(second.port, seed, True, max_tokens=TOKENS) for seed in range(SEEDS)], texts
    )
    with Clients(port, 6, SEEDS, max_tokens=TOKENS) as clients:
        wait_until(lambda: len(clients.outcomes) >= 200, 120)
        check_texts(clients.stop(), texts)


def test_one_is_killed_and_the_other_goes_on(replicas) -> None:
    (first, second), port, texts = replicas
    with (
        Clients(port, 4, SEEDS, kinds=(True,), max_tokens=TOKENS) as streams,
        Clients(port, 2, SEEDS, kinds=(False,), max_tokens=TOKENS) as wholes,
    ):
        wait_until(lambda: first.running() == second.running() == 2, 60)
        killed = time.monotonic()
        first.kill()
        dead = time.monotonic()
        time.sleep(8)
        outcomes = streams.stop() + wholes.stop()

    hurt = [outcome for outcome in outcomes if outcome.text is None]
    # Only requests that were under way are hurt.
    assert all(outcome.begun < dead and outcome.ended > killed for outcome in hurt), hurt
    assert any(outcome.was_stream for outcome in hurt)
    for outcome in hurt:
        assert outcome.status in (200, 502)  # a stream that was cut, or a bad gateway
        assert outcome.was_stream or killed - outcome.begun > PASSED_ON
    assert sum(outcome.begun >= dead for outcome in outcomes) > 20
    check_texts([outcome for outcome in outcomes if outcome.text is not None], texts)

    first.start()
    first.wait_until_ready()
    time.sleep(AWAY)
    with Clients(port, 6, SEEDS, max_tokens=TOKENS) as clients:
        wait_until(first.running, 60)  # it has requests again
        check_texts(clients.stop(), texts)


def test_a_rolling_restart_fails_no_request(replicas) -> None:
    servers, port, texts = replicas
    with Clients(port, 6, SEEDS, max_tokens=TOKENS) as clients:
        time.sleep(2)
        for server in servers:
            assert server.terminate() == 0
            server.start()
            server.wait_until_ready()
            time.sleep(AWAY)
        outcomes = clients.stop()
    assert [outcome for outcome in outcomes if outcome.status != 200 or outcome.text is None] == []
    check_texts(outcomes, texts)
