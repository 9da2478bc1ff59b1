"""Tests of clients' rows: every text equals `specjax.generate`, and each token is sent once.

This holds for all drafts, and whatever happens in between. All engines of one kind have the same
sizes, and so the same compiled programs.
"""

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import sharding
from specjax.drafters import MTP, MixtureOfAttentions, NoDraft, PromptLookup
from specjax.errors import InputError
from specjax.models import params
from specjax.serving.clients import (
    ClientRow,
    DraftVerified,
    RowDropped,
    RowEvent,
    RowFeatures,
    RowReady,
)
from specjax.serving.device import ClientDrafts
from specjax.serving.engine import Engine
from specjax.serving.handle import EngineError
from specjax.serving.scheduler import QueueFullError
from tests.conftest import compilations, tiny_target
from tests.serving.test_engine import (
    CAPACITY,
    CHUNK,
    PATIENCE,
    SIZES,
    VOCABULARY,
    Request,
    check_at_rest,
    check_tokens,
    expected,
    wait_until,
)

NODES, DEPTH = 8, 4
WARM = {"temperature": 0.8, "top_p": 0.9}
PROMPT = (5, 6, 7, 8, 9, 5)


@pytest.fixture(scope="module")
def remote_drafter(target) -> MixtureOfAttentions:
    return MixtureOfAttentions.init(target, jax.random.key(5), tli=1)


@pytest.fixture(scope="module")
def drafting(target, remote_drafter) -> Iterator[Engine]:
    """Yield an engine that drafts itself, too, with another drafter than the clients'.

    Two texts of full length fill its pages.
    """
    with drafting_engine(target, remote_drafter, "chain:3") as engine:
        yield engine


def drafting_engine(target, remote_drafter, *drafts: str | None, **options) -> Engine:
    drafter = specjax.Eagle3.init(target, jax.random.key(5))
    clients = ClientDrafts(remote_drafter, nodes=NODES, depth=DEPTH)
    return Engine(
        target,
        drafter,
        drafts=drafts,
        rows=4,
        widths=(2, 4),
        pages=16,
        clients=clients,
        **SIZES,
        **options,
    )


def plain_engine(target, **options) -> Engine:
    clients = ClientDrafts(nodes=NODES, depth=DEPTH)
    return Engine(
        target,
        **{
            "rows": 2,
            "widths": (2,),
            "pages": 16,
            "steps": 4,
            "clients": clients,
            **SIZES,
            **options,
        },
    )


@pytest.fixture
def plain(target) -> Iterator[Engine]:
    """Yield a plain engine. All engines of this kind share their compiled programs."""
    with plain_engine(target) as engine:
        yield engine


Draft = tuple[list[int], list[int]]


class Client:
    """A client that drafts below the text it has, and records what it receives."""

    def __init__(
        self, engine: Engine, request: Request, tokens: Sequence[int] = (), owner: str = ""
    ) -> None:
        self.engine, self.request, self.owner = engine, request, owner
        self.tokens = list(tokens or request.prompt)
        self.told: list[dict[str, np.ndarray]] = []
        self.over, self.opened, self.drafts = "", 0, 0
        self.open()

    def open(self) -> None:
        self.events: queue.SimpleQueue[RowEvent] = queue.SimpleQueue()
        self.row: ClientRow = self.engine.open_row(
            self.tokens,
            prompt_length=len(self.request.prompt),
            max_new_tokens=self.request.max_new_tokens,
            known=len(self.told),
            listener=self.events.put,
            seed=self.request.seed,
            eos_token_ids=self.request.eos_token_ids,
            owner=self.owner,
            **self.request.settings,
        )
        self.opened, self.draft, self.is_ready = self.opened + 1, None, False

    def hear(self, timeout: float = PATIENCE) -> RowEvent:
        """Receive the next event, and record it."""
        event = self.events.get(timeout=timeout)
        match event:
            case RowFeatures(start, count, arrays):
                assert start == len(self.told) and count > 0
                self.note(arrays, count)
            case RowReady(length):
                assert length == len(self.tokens) == self.row.length
                assert not self.is_ready, "it is sent once, though the text may be prefilled again"
                self.is_ready = True
            case DraftVerified(accepted, token, arrays):
                assert self.draft is not None
                emitted = [*(self.draft[0][node] for node in accepted), token]
                assert [self.draft[1][node] for node in accepted] == [0, *accepted][: len(accepted)]
                self.tokens += emitted
                self.note(arrays, len(emitted))
                self.draft, self.over = None, event.over
                assert self.row.tokens == self.tokens
            case RowDropped():
                self.is_ready, self.draft = False, None
        return event

    def note(self, arrays: dict[str, np.ndarray], count: int) -> None:
        assert all(len(array) == count for array in arrays.values())
        self.told += [
            {name: array[place] for name, array in arrays.items()} for place in range(count)
        ]

    def ready(self) -> "Client":
        while not self.is_ready:
            assert not isinstance(self.hear(), RowDropped)
        return self

    def send(self, draft: Draft) -> None:
        self.draft, self.drafts = draft, self.drafts + 1
        self.row.verify(np.array(draft[0]), np.array(draft[1]))

    def ask(self, draft: Draft) -> DraftVerified:
        self.send(draft)
        event = self.hear()
        assert isinstance(event, DraftVerified)
        return event

    def root(self) -> Draft:
        return [self.tokens[-1]], [-1]

    @property
    def text(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


def drafts_below(rng: random.Random, client: Client, right: Sequence[int]) -> Draft:
    """Draw a tree of any shape in which about half of the nodes have the right token."""
    tokens, parents, depths = [client.tokens[-1]], [-1], [0]
    after, share = len(client.text), rng.choice([0.0, 0.5, 1.0])
    for node in range(1, rng.randint(1, NODES)):
        parent = node - 1 if rng.random() < 0.6 else rng.randrange(node)
        if depths[parent] == DEPTH:
            parent = 0
        depths.append(depths[parent] + 1)
        place = after + depths[node] - 1
        is_right = place < len(right) and rng.random() < share
        tokens.append(right[place] if is_right else rng.randrange(VOCABULARY))
        parents.append(parent)
    return tokens, parents


def accepted_of(draft: Draft, right: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a draft that the target accepts.

    ``right`` is the text after the root. Of siblings with the same token the last one is accepted.
    The token that ends the text is emitted, but not accepted.
    """
    tokens, parents = draft
    path = [0]
    for token in right[:-1]:
        below = [
            node
            for node in range(1, len(tokens))
            if parents[node] == path[-1] and tokens[node] == token
        ]
        if not below:
            break
        path.append(below[-1])
    return tuple(path[1:])


def check_told(target, drafter, client: Client) -> None:
    """Check that the client received the hidden states of a pass over its whole text.

    It has received those of all tokens but the newest.
    """
    output, entries = target.read(jnp.array([client.tokens]), taps=drafter.taps(target.config))
    whole = drafter.remote_inputs(target, output, entries)
    assert len(client.told) == len(client.tokens) - 1
    for name, array in whole.items():
        received = np.stack([arrays[name] for arrays in client.told])
        np.testing.assert_allclose(received, array[0, :-1], atol=1e-3, rtol=1e-3)


def some_request(rng: random.Random, number: int) -> Request:
    length, most = rng.choice([1, 2, 9, 16, 17, 18, 33, 40]), rng.choice([1, 5, 16, 24])
    return Request(
        prompt=tuple(rng.randrange(VOCABULARY) for _ in range(length)),
        max_new_tokens=most,
        settings=rng.choice([{}, WARM]),
        eos_token_ids=rng.choice([(), (3,)]),
        seed=number,
    )


def run(engine: Engine, target, clients: list[Client], rng: random.Random) -> None:
    """Draft for all clients until their texts are finished.

    Clients go away and come back. A client whose row was dropped opens a new one.
    """
    rights = {id(client): expected(target, client.request) for client in clients}
    while unfinished := [client for client in clients if not client.over]:
        client = rng.choice(unfinished)
        right = rights[id(client)]
        if rng.random() < 0.1:
            client.row.is_away = not client.row.is_away
        elif rng.random() < 0.02:
            client.row.close()
            client.open()
        elif client.is_ready and client.draft is None:
            draft = drafts_below(rng, client, right)
            rest = right[len(client.text) :]
            client.send(draft)
            event = client.hear()
            if isinstance(event, DraftVerified) and tuple(client.text) == right[: len(client.text)]:
                assert event.accepted == accepted_of(draft, rest)
            elif isinstance(event, RowDropped):
                client.open()
        else:
            with suppress(queue.Empty):  # another client may have its row
                if isinstance(client.hear(timeout=0.01), RowDropped):
                    client.open()


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 9))]
)
def test_every_text_is_that_of_its_request_and_each_token_is_sent_once(
    drafting, target, remote_drafter, seed
) -> None:
    """Check clients beside requests that the engine drafts for, with too few pages for all.

    Nothing may be compiled meanwhile.
    """
    rng = random.Random(seed)
    requests = [some_request(rng, number) for number in range(14)]
    rights = [expected(target, request) for request in requests]
    before, drafts_before = compilations(), drafting.statistics.clients.drafts
    handles = [request.submit(drafting) for request in requests[:6]]
    clients = [Client(drafting, request) for request in requests[6:]]
    run(drafting, target, clients, rng)
    for request, right, handle in zip(requests, rights, handles, strict=False):
        check_tokens(target, request, handle.result(PATIENCE).tokens, is_whole=True)
        assert len(handle.result().tokens) == len(right)
    assert compilations() == before
    for client in clients:
        check_tokens(target, client.request, client.text, is_whole=True)
        assert client.over == (
            "stop" if client.text[-1] in client.request.eos_token_ids else "length"
        )
        check_told(target, remote_drafter, client)
    statistics = drafting.statistics.clients
    # Drafts whose rows were dropped are not counted.
    assert 0 < statistics.drafts - drafts_before <= sum(client.drafts for client in clients)
    assert statistics.calls <= statistics.drafts
    assert 0 < statistics.accepted < statistics.drafted
    assert (statistics.rows, statistics.away) == (0, 0)
    check_at_rest(drafting)


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 5))]
)
def test_texts_of_clients_that_lose_their_rows_and_come_back_are_those_of_their_requests(
    target, remote_drafter, seed
) -> None:
    """Check also that tokens that are prefilled again are not sent again."""
    rng = random.Random(seed)
    requests = [some_request(rng, number) for number in range(20)]
    with drafting_engine(target, remote_drafter, "chain:3", client_idle_seconds=0.0) as engine:
        handles = [request.submit(engine) for request in requests[:8]]
        clients = [
            Client(engine, request, owner=rng.choice(["", "me"])) for request in requests[8:]
        ]
        run(engine, target, clients, rng)
        for request, handle in zip(requests, handles, strict=False):
            check_tokens(target, request, handle.result(PATIENCE).tokens, is_whole=True)
        assert engine.statistics.clients.preempted > 0
        check_at_rest(engine)
    for client in clients:
        check_tokens(target, client.request, client.text, is_whole=True)
        check_told(target, remote_drafter, client)


@pytest.mark.thorough
def test_a_drafter_that_is_paused_and_catches_up_leaves_clients_rows_alone(
    target, remote_drafter
) -> None:
    requests = [some_request(random.Random(seed), seed) for seed in range(16)]
    with drafting_engine(target, remote_drafter, None, "chain:3") as engine:
        handles = [request.submit(engine) for request in requests[:8]]
        clients = [Client(engine, request) for request in requests[8:]]
        run(engine, target, clients, random.Random(0))
        for request, handle in zip(requests, handles, strict=False):
            check_tokens(target, request, handle.result(PATIENCE).tokens, is_whole=True)
    for client in clients:
        check_tokens(target, client.request, client.text, is_whole=True)
        check_told(target, remote_drafter, client)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, WARM], ids=["greedy", "drawn"])
def test_a_text_is_the_one_of_submit(plain, target, settings) -> None:
    request = Request(PROMPT, 16, settings, seed=3)
    submitted = request.submit(plain).result(PATIENCE).tokens
    client = Client(plain, request).ready()
    while not client.over:
        client.ask(client.root())  # the client decodes plainly
    assert tuple(client.text) == submitted == expected(target, request)
    assert client.told == [{}] * len(client.told)


@pytest.mark.full
def test_a_right_draft_is_accepted_to_its_end(plain, target) -> None:
    request = Request(PROMPT, 16, WARM)
    right, client = expected(target, request), Client(plain, request).ready()
    checked = client.ask(([client.tokens[-1], *right[:DEPTH]], [-1, 0, 1, 2, 3]))
    assert (checked.accepted, checked.token, checked.over) == ((1, 2, 3, 4), right[DEPTH], "")
    assert checked.seconds > 0
    statistics = plain.statistics.clients
    assert (statistics.rows, statistics.calls, statistics.drafts) == (1, 1, 1)
    assert (statistics.drafted, statistics.accepted) == (DEPTH, DEPTH)
    assert statistics.generated == DEPTH + 1


@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_end_in_the_middle_of_an_accepted_path(plain, target, place) -> None:
    """Check a limit and an end-of-sequence token: nothing after them is emitted."""
    request = Request(PROMPT, 16, {"temperature": 1.0}, seed=7)
    right = expected(target, request)
    draft = [PROMPT[-1], *right[:DEPTH]], [-1, 0, 1, 2, 3]
    first = right.index(right[place])  # the same token may occur earlier
    for changed, end, over in (
        (replace(request, max_new_tokens=place + 1), place, "length"),
        (replace(request, eos_token_ids=(right[place],)), first, "stop"),
    ):
        client = Client(plain, changed).ready()
        checked = client.ask(draft)
        assert (tuple(client.text), checked.over) == (right[: end + 1], over)
        assert len(checked.accepted) == end
        with pytest.raises(InputError, match="the text is over"):
            client.send(client.root())
    check_at_rest(plain)


def test_a_text_as_long_as_there_is_room_for(plain, target) -> None:
    request = Request((1, 2) * 20, CAPACITY - 40, WARM, seed=2)
    right, client = expected(target, request), Client(plain, request).ready()
    while not client.over:
        after = list(right[len(client.text) :][:DEPTH])
        client.ask(([client.tokens[-1], *after], list(range(-1, len(after)))))
    assert (client.row.length, client.row.max_length) == (CAPACITY, CAPACITY)
    assert tuple(client.text) == right


@pytest.mark.full
def test_a_text_that_is_opened_in_its_middle_goes_on(drafting, target, remote_drafter) -> None:
    """Check that it receives what it lacks, and that chunks it knows are not computed again."""
    request = Request(tuple(range(VOCABULARY)) * 3, 16, WARM, seed=11)
    right, first = expected(target, request), Client(drafting, request).ready()
    check_told(target, remote_drafter, first)
    first.row.close()
    before = drafting.statistics
    second = Client(drafting, request, tokens=[*request.prompt, *right[:5]])
    second.row.close()
    second.told = first.told[:20]
    second.open()
    second.ready()
    # Of the 20 tokens that it knows only whole chunks are shared.
    shared = drafting.statistics.prompt_tokens_shared - before.prompt_tokens_shared
    assert shared == CHUNK
    check_told(target, remote_drafter, second)
    while not second.over:
        second.ask(second.root())
    check_tokens(target, request, second.text, is_whole=True)


@pytest.mark.full
def test_what_a_client_is_told_is_computed_whoever_read_it_before(
    drafting, target, remote_drafter
) -> None:
    request = Request((1, 2, 3, 4) * 8, 4)
    request.submit(drafting).result(PATIENCE)
    before = drafting.statistics
    client = Client(drafting, request).ready()
    check_told(target, remote_drafter, client)
    after = drafting.statistics
    assert after.prompt_tokens_shared == before.prompt_tokens_shared
    assert after.prompt_tokens_read - before.prompt_tokens_read == len(request.prompt) - 1
    client.row.close()
    # Other requests may continue from what was prefilled for a client.
    request.submit(drafting).result(PATIENCE)
    assert drafting.statistics.prompt_tokens_shared > after.prompt_tokens_shared


# --- rows -----------------------------------------------------------------------------------------


def test_all_drafts_that_wait_are_verified_in_one_call(plain) -> None:
    clients = [Client(plain, Request(PROMPT, 8, WARM, seed=seed)).ready() for seed in range(2)]
    before = plain.statistics.clients
    with plain._loop.wake:  # the engine sees both at once
        for client in clients:
            client.send(client.root())
    for client in clients:
        client.hear()
    after = plain.statistics.clients
    assert (after.calls - before.calls, after.drafts - before.drafts) == (1, 2)


def test_who_waits_has_the_row_of_who_is_away_for_the_longest(plain, target) -> None:
    first, second = (Client(plain, Request(PROMPT, 8, seed=seed)).ready() for seed in range(2))
    request = Request((3, 1), 4)
    waiting = request.submit(plain)
    wait_until(lambda: plain.statistics.waiting == 1)
    assert plain.statistics.clients.rows == 2  # both are connected
    with plain._loop.wake:
        second.row.is_away = True
        first.row.is_away = True
    assert isinstance(second.hear(), RowDropped)
    second.row.verify(np.array([1]), np.array([-1]))  # ignored
    assert waiting.result(PATIENCE).tokens == expected(target, request)
    statistics = plain.statistics.clients
    assert (statistics.rows, statistics.away, statistics.dropped) == (1, 1, 1)
    first.row.is_away = False
    first.ask(first.root())
    assert second.events.empty()


@pytest.mark.parametrize("settings", [{}, WARM], ids=["greedy", "drawn"])
def test_a_completion_does_not_wait_for_clients_that_do_nothing(target, settings) -> None:
    """Check also that the clients continue afterwards as if nothing had happened."""
    requests = [Request(tuple(range(VOCABULARY)) * 2, 16, settings, seed=seed) for seed in range(2)]
    rights = [expected(target, request) for request in requests]
    with plain_engine(target, client_idle_seconds=0.0) as engine:
        clients = [Client(engine, request).ready() for request in requests]
        for client in clients:
            client.ask(client.root())
        completions = [Request((3, 1), 4, seed=seed) for seed in range(2)]
        handles = [completion.submit(engine) for completion in completions]
        for completion, handle in zip(completions, handles, strict=True):
            assert handle.result(PATIENCE).tokens == expected(target, completion)
        assert 1 <= engine.statistics.clients.preempted <= 2
        before = engine.statistics
        while not all(client.over for client in clients):
            for client in (client for client in clients if not client.over):
                client.ask(client.root())
        after = engine.statistics
        # The clients' prompts were not computed again.
        assert after.prompt_tokens_shared > before.prompt_tokens_shared
        assert (after.clients.dropped, after.clients.rows) == (0, 0)
        check_at_rest(engine)
    assert [tuple(client.text) for client in clients] == rights
    assert [client.opened for client in clients] == [1, 1]


def test_the_engine_wakes_up_by_itself_when_a_client_becomes_idle(target) -> None:
    """Check it while nothing else wakes the engine."""
    with plain_engine(target, client_idle_seconds=0.05) as engine:
        clients = [Client(engine, Request(PROMPT, 8, seed=seed)).ready() for seed in range(2)]
        request = Request((3, 1), 4)
        assert request.submit(engine).result(PATIENCE).tokens == expected(target, request)
        assert engine.statistics.clients.preempted == 1
        assert all(client.events.empty() for client in clients)  # they are not notified


def test_clients_and_requests_take_turns(target) -> None:
    """Check that each client gets its verdict, although others have its row meanwhile."""
    requests = [Request(PROMPT, 6, WARM, seed=seed) for seed in range(5)]
    with plain_engine(target, client_idle_seconds=0.0) as engine:
        handles = [Request((3, 1), 12, seed=seed).submit(engine) for seed in range(3)]
        clients = [Client(engine, request).ready() for request in requests]
        while not all(client.over for client in clients):
            drafting = [client for client in clients if not client.over]
            for client in drafting:
                client.send(client.root())
            for client in drafting:
                assert isinstance(client.hear(), DraftVerified)
        assert [len(handle.result(PATIENCE).tokens) for handle in handles] == [12] * 3
        assert engine.statistics.clients.preempted >= len(clients) - 2
        check_at_rest(engine)
    assert [tuple(client.text) for client in clients] == [
        expected(target, request) for request in requests
    ]


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 1), (1e6, 4)], ids=["idle", "drafting"])
def test_only_a_client_that_drafts_makes_calls_shorter(target, seconds, share) -> None:
    with plain_engine(target, client_idle_seconds=seconds) as engine:
        steps, decode = [], engine._loop.device.decode

        def noting(number: int, table: Any, free: Any, count: int, *rest: Any) -> Any:
            steps.append(count)
            return decode(number, table, free, count, *rest)

        engine._loop.device.decode = noting
        client = Client(engine, Request(PROMPT, 8)).ready()
        Request((3, 1), 12).submit(engine).result(PATIENCE)
        assert set(steps) == {engine.steps // share}
        client.ask(client.root())


def test_a_client_whose_draft_waits_for_a_row_is_closed(target) -> None:
    with plain_engine(target, client_idle_seconds=0.0) as engine:
        clients = [Client(engine, Request(PROMPT, 8, seed=seed)).ready() for seed in range(2)]
        request = Request((3, 1), 4)
        with engine._loop.wake:
            handle = request.submit(engine)
            engine._loop.scheduler.can_go_on()  # a client's row is given away
            (client,) = (client for client in clients if client.row.request.state == "suspended")
            client.send(client.root())
            assert (client.row.request.state, engine._loop.clients.has_work) == ("waiting", False)
            client.row.close()
        assert handle.result(PATIENCE).tokens == expected(target, request)
        for row in [client.row for client in clients]:
            row.close()
        check_at_rest(engine)
        assert client.events.empty()


def test_clients_of_one_owner_leave_rows_to_others(plain, target) -> None:
    """Check the default limit, which is half of the rows."""
    first = Client(plain, Request(PROMPT, 8), owner="me").ready()
    second = Client(plain, Request(PROMPT, 8, seed=1), owner="me")
    foreign = Client(plain, Request(PROMPT, 8, seed=2), owner="you").ready()
    assert (second.row.request.state, second.events.empty()) == ("waiting", True)
    foreign.row.close()
    request = Request((3, 1), 4)
    assert request.submit(plain).result(PATIENCE).tokens == expected(target, request)
    first.row.close()
    second.ready().ask(second.root())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_rows": 0}, "client_rows=0"),
        ({"client_rows": 3}, "client_rows=3"),
        ({"client_idle_seconds": -1}, "-1: must be"),
    ],
)
def test_limits_of_clients_that_cannot_be_are_refused(target, options, message) -> None:
    with pytest.raises(InputError, match=message):
        plain_engine(target, **options)


def test_who_waits_has_the_row_that_is_closed(plain, target) -> None:
    clients = [Client(plain, Request(PROMPT, 8, seed=seed)).ready() for seed in range(2)]
    request = Request((3, 1), 4)
    waiting = request.submit(plain)
    wait_until(lambda: plain.statistics.waiting == 1)
    clients[0].row.close()
    assert waiting.result(PATIENCE).tokens == expected(target, request)
    clients[0].row.close()  # a second time is ignored
    clients[1].row.close()
    check_at_rest(plain)


@pytest.mark.full
def test_a_running_text_that_needs_pages_has_those_of_a_client(target) -> None:
    with plain_engine(target, pages=8) as engine:
        client = Client(engine, Request((1, 2) * 14, 30)).ready()  # four pages
        request = Request(PROMPT, 50)
        tokens = request.submit(engine).result(PATIENCE).tokens  # seven pages
        assert isinstance(client.hear(), RowDropped)
        assert len(tokens) == 50
        assert engine.statistics.clients.dropped == 1
        client.open()
        client.ready().ask(client.root())
        client.row.close()
        check_at_rest(engine)


def test_a_row_is_closed_while_its_draft_is_verified(plain) -> None:
    client = Client(plain, Request(PROMPT, 8)).ready()
    verify, is_here, goes_on = plain._loop.device.verify, threading.Event(), threading.Event()

    def late(*arguments: Any) -> Any:
        is_here.set()
        goes_on.wait(PATIENCE)
        return verify(*arguments)

    plain._loop.device.verify = late
    client.send(client.root())
    is_here.wait(PATIENCE)
    client.row.close()
    goes_on.set()
    check_at_rest(plain)
    assert client.events.empty()


def test_a_listener_that_fails_loses_its_row_and_nobody_else_does(plain, caplog) -> None:
    def fail(event: RowEvent) -> None:
        raise ValueError(f"not {event}")

    plain.open_row(list(PROMPT), max_new_tokens=8, listener=fail)
    wait_until(
        lambda: not plain.statistics.clients.rows and "not RowReady(length=6)" in caplog.text
    )
    Client(plain, Request(PROMPT, 8)).ready()


@pytest.mark.parametrize("where", ["_take", "_unsent_features"])
def test_a_row_whose_own_state_is_broken_is_dropped_alone(plain, monkeypatch, where) -> None:
    first = Client(plain, Request(PROMPT, 8, seed=1)).ready()
    second = Client(plain, Request(PROMPT, 8, seed=2)).ready()
    method = getattr(plain._loop.clients, where, None)

    def fail_for_the_first(row: ClientRow, *arguments: Any) -> None:
        if row is first.row:
            raise ValueError("no such token")
        assert method is not None
        method(row, *arguments)

    def fail(*_: Any) -> None:
        raise ValueError("no such token")

    with plain._loop.wake:
        if where == "_take":
            monkeypatch.setattr(plain._loop.clients, "_take", fail_for_the_first)
            first.send(first.root())
        else:  # its features cannot be taken from what the device has computed
            monkeypatch.setattr("specjax.serving.clients._unsent_features", fail)
            event: Any = (None, {})
            plain._loop.clients._events.append((first.row, event))
        second.send(second.root())
    assert first.hear() == RowDropped("an error of the server; see its log")
    assert isinstance(second.hear(), DraftVerified)
    second.row.close()
    assert plain.state == "running"
    check_at_rest(plain)


def test_an_engine_that_ends_drops_its_clients(target) -> None:
    with plain_engine(target) as engine:
        clients = [Client(engine, Request(PROMPT, 8)) for _ in range(3)]
        clients[0].ready()
        clients[1].ready()
    assert [client.hear() for client in clients] == [RowDropped("the engine is closed")] * 3
    with pytest.raises(InputError, match="the engine is closed"):
        clients[0].open()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_drops_its_clients(target) -> None:
    with plain_engine(target) as engine:
        client = Client(engine, Request(PROMPT, 8)).ready()

        def fail(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        engine._loop.device.verify = fail
        client.send(client.root())
        assert client.hear() == RowDropped("the engine failed")
        with pytest.raises(EngineError):
            client.open()


def test_a_full_line_refuses_clients_too(target) -> None:
    with plain_engine(target, max_waiting=0) as engine:
        clients = [Client(engine, Request(PROMPT, 8)).ready() for _ in range(2)]
        with pytest.raises(QueueFullError):
            Client(engine, Request(PROMPT, 8))
        clients[1].row.is_away = True
        Client(engine, Request(PROMPT, 8)).ready()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "1 to 8 nodes"),
        ([5] * 9, [-1, *range(8)], "1 to 8 nodes"),
        ([5, 1], [-1], "give both"),
        ([[5]], [[-1]], "give both"),
        ([5, 0.5], [-1, 0], "whole numbers"),
        ([5, VOCABULARY], [-1, 0], "ids must be from 0 to 10"),
        ([5, -1], [-1, 0], "ids must be from 0 to 10"),
        ([5, 1], [0, 0], "the root's must be -1"),
        ([5, 1], [-1, -1], "a node before it"),
        ([5, 1], [-1, 1], "a node before it"),
        ([5, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4], "5 deep, but may be 4"),
        ([6, 1], [-1, 0], "the root is 6, but the text's newest token is 5"),
    ],
)
def test_what_is_no_draft_is_refused(plain, tokens, parents, message) -> None:
    client = Client(plain, Request(PROMPT, 8)).ready()
    with pytest.raises(InputError, match=message):
        client.send((tokens, parents))
    client.draft = None
    client.ask(client.root())  # the row still works


def test_drafts_come_one_at_a_time_and_not_too_soon(plain) -> None:
    with plain._loop.wake:
        client = Client(plain, Request(PROMPT, 8))
        with pytest.raises(InputError, match="wait for RowReady"):
            client.send(client.root())
    client.ready()
    with plain._loop.wake:
        client.send(client.root())
        with pytest.raises(InputError, match="one at a time"):
            client.row.verify(np.array([5]), np.array([-1]))
    assert isinstance(client.hear(), DraftVerified)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 0}, "prompt_length=0"),
        ({"prompt_length": 7}, "from 1 to the 6 tokens"),
        ({"prompt_length": 2, "max_new_tokens": 4}, "has 4 tokens after its prompt already"),
        ({"known": -1}, "known=-1"),
        ({"max_new_tokens": 60}, "make 66 tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"top_p": 0.0}, "top_p=0: "),
        ({"eos_token_ids": range(9)}, "9 ids"),
    ],
)
def test_what_is_no_text_is_refused(plain, changes, message) -> None:
    with pytest.raises(InputError, match=message):
        plain.open_row(list(PROMPT), **{"max_new_tokens": 8, "listener": print, **changes})
    check_at_rest(plain)


@pytest.mark.full
def test_an_engine_without_clients_refuses_them(target) -> None:
    with (
        Engine(target, rows=2, widths=(2,), pages=16, steps=4, **SIZES) as engine,
        pytest.raises(InputError, match="give Engine"),
    ):
        engine.open_row(list(PROMPT), listener=print)


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (ClientDrafts(nodes=4, depth=4), "nodes=4 and depth=4"),
        (ClientDrafts(nodes=4, depth=0), "nodes=4 and depth=0"),
        (
            ClientDrafts(specjax.Eagle3.init(tiny_target(vocab_size=12), jax.random.key(0))),
            "vocabulary of 12",
        ),
        (ClientDrafts(MTP.init(tiny_target(), jax.random.key(0), modules=2)), "a MTP of this kind"),
    ],
)
def test_drafts_that_cannot_be_served_are_refused(target, drafts, message) -> None:
    with pytest.raises(InputError, match=message):
        drafts.check(target)


@pytest.mark.thorough
def test_a_mesh_that_splits_the_model_gives_the_same_texts(target) -> None:
    mesh = sharding.make_mesh(model=2)
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    with plain_engine(
        target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    ) as engine:
        requests = [
            Request(PROMPT, 16, settings, seed=seed) for seed, settings in enumerate(({}, WARM))
        ]
        clients = [Client(engine, request) for request in requests]
        run(engine, target, clients, random.Random(0))
    for client in clients:
        check_tokens(target, client.request, client.text, is_whole=True)


def test_a_mesh_that_splits_rows_is_refused(target) -> None:
    with pytest.raises(InputError, match="2 groups"):
        ClientDrafts().check(target.replace(mesh=sharding.make_mesh(2, 1)))


def test_drafts_that_do_not_fit_a_frame_are_refused(target, remote_drafter, monkeypatch) -> None:
    ClientDrafts(nodes=255).check(target)
    with pytest.raises(InputError, match=r"nodes=256.* 255"):
        ClientDrafts(nodes=256).check(target)
    largest = max(
        4 * int(np.prod(shape)) for shape in ClientDrafts(remote_drafter).tells(target).values()
    )
    monkeypatch.setattr("specjax.wire.MOST_ARRAY", 5 * largest)
    ClientDrafts(remote_drafter, depth=4).check(target)
    with pytest.raises(InputError, match=r"depth=5.*smaller depth"):
        ClientDrafts(remote_drafter, depth=5).check(target)
    monkeypatch.setattr("specjax.wire.MOST_DOWN", 5 * largest)
    with pytest.raises(InputError, match=r"depth=4.*smaller depth"):
        ClientDrafts(remote_drafter, depth=4).check(target)
    monkeypatch.setattr("specjax.wire.MOST_DOWN", 2**25)
    monkeypatch.setattr("specjax.wire.MOST_ARRAYS", 0)
    with pytest.raises(InputError, match="arrays per token"):
        ClientDrafts(remote_drafter, depth=1).check(target)


@pytest.mark.parametrize("drafter", [None, NoDraft(), PromptLookup(draft=2)])
def test_drafters_that_need_tokens_alone_are_told_nothing(target, drafter) -> None:
    drafts = ClientDrafts(drafter)
    drafts.check(target)
    assert drafts.tells(target) == {}
