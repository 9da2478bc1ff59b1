"""Tests of clients whose texts have grammars: the server masks, whatever a client drafts."""

import queue
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

import specjax
from specjax import DraftModel, SamplingParams, wire
from specjax.client import connect
from specjax.client.exchange import Exchange, ExchangeRequest, check_params
from specjax.client.journal import Journal
from specjax.errors import InputError
from specjax.grammars import Grammar
from specjax.grammars import matcher as matcher_module
from specjax.sampling import make_key
from specjax.serving import ClientDrafts, DraftVerified, Engine, RowDropped, RowReady, sessions
from specjax.serving.http.drafts import Drafts
from specjax.serving.sessions import Sessions, Terms
from tests.client.simulation import Faults, SlowDevice, reference, run
from tests.client.test_faults import CAPACITY, SHAPES, drawn_request
from tests.conftest import compilations, tiny_target
from tests.decoding.test_constrained import END, GRAMMARS, VOCABULARY, compiler
from tests.grammars.oracle import Oracle
from tests.grammars.tokenizers_for_tests import small_tokenizer
from tests.serving.http.made_up import MadeUpEngine

NODES, DEPTH, NEW, PATIENCE = 8, 4, 16, 120
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@cache
def models() -> tuple[Any, DraftModel]:
    target = tiny_target(num_layers=2, vocab_size=VOCABULARY)
    return target, DraftModel.init(target, jax.random.key(5), num_layers=1)


def engine(**options: Any) -> Engine:
    sizes = {"rows": 1, "widths": (1,), "capacity": CAPACITY, "page": 8, "chunk": 8}
    return Engine(
        models()[0],
        drafts=(None,),
        clients=ClientDrafts(models()[1], nodes=NODES, depth=DEPTH),
        tokenizer=small_tokenizer(),
        client_idle_seconds=1e9,
        **sizes | {"grammars": True} | options,
    )


@pytest.fixture(scope="module")
def served() -> Iterator[Engine]:
    with engine() as running_engine:
        yield running_engine


def expected(grammar: Grammar, setting: dict[str, Any], seed: int) -> list[int]:
    """Return the text of the slow oracle."""
    key = jax.random.fold_in(make_key(seed), np.uint32(0))
    oracle = Oracle(models()[0], compiler(), grammar, (END,), **setting)
    return oracle.text(PROMPT, key, NEW)


def drafted(rng: random.Random, root: int, right: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw a tree in which half of the nodes have the right token, and others any."""
    tokens, parents, depths = [root], [-1], [0]
    for node in range(1, rng.randint(1, NODES)):
        parent = node - 1 if rng.random() < 0.7 else rng.randrange(node)
        parent = 0 if depths[parent] == DEPTH else parent
        depths.append(depths[parent] + 1)
        place = depths[node] - 1
        is_right = place < len(right) and rng.random() < 0.6
        tokens.append(right[place] if is_right else rng.randrange(VOCABULARY))
        parents.append(parent)
    return np.array(tokens), np.array(parents)


def next_event(events: "queue.SimpleQueue[Any]") -> Any:
    """Return the next event that is not a prompt's hidden states."""
    while True:
        event = events.get(timeout=PATIENCE)
        if not isinstance(event, specjax.serving.RowFeatures):
            return event


@pytest.mark.full
def test_every_text_is_the_oracles_whatever_is_drafted(served) -> None:
    settings = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.7}] * len(GRAMMARS)
    cases = [
        (seed, grammar, settings[seed], expected(grammar, settings[seed], seed))
        for seed, grammar in enumerate([*GRAMMARS.values()] * 2)
    ]
    rng, before, accepted = random.Random(0), compilations(), 0
    for seed, grammar, setting, right in cases:
        start = rng.randrange(len(right))  # the output so far, as after a lost session
        text: list[int] = right[:start]
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        row = served.open_row(
            [*PROMPT, *text],
            prompt_length=len(PROMPT),
            max_new_tokens=NEW,
            seed=seed,
            grammar=grammar,
            eos_token_ids=(END,),
            listener=events.put,
            **setting,
        )
        assert isinstance(next_event(events), RowReady)
        over = ""
        while not over:
            tokens, parents = drafted(rng, row.tokens[-1], right[len(text) :])
            row.verify(tokens, parents)
            verdict = next_event(events)
            assert isinstance(verdict, DraftVerified)
            accepted += len(verdict.accepted)
            text += [*(int(tokens[node]) for node in verdict.accepted), verdict.token]
            over = verdict.over
        assert text == right
        matcher = compiler().compile(grammar).matcher((END,))
        matcher.append(text)
        assert verdict.grammar_completed == matcher.is_complete
        assert over == ("stop" if text[-1] == END else "length")
        row.close()
    assert accepted > 20 and compilations() == before


@pytest.mark.full
def test_a_text_that_no_token_ends_ends_with_its_grammar(served) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    options = {"max_new_tokens": 20, "eos_token_ids": (), "grammar": GRAMMARS["choice"]}
    row = served.open_row(PROMPT, listener=events.put, **options)
    assert isinstance(next_event(events), RowReady)
    text, over = [], ""
    while not over:
        row.verify(np.array([row.tokens[-1]]), np.array([-1]))
        verdict = next_event(events)
        text.append(verdict.token)
        over = verdict.over
    assert small_tokenizer().decode(text) in ("abcabcde", "abdeabde", "d01d01")
    assert (over, verdict.grammar_completed) == ("stop", True)
    with pytest.raises(InputError, match="no token can follow the"):
        served.open_row([*PROMPT, *text], prompt_length=8, listener=events.put, **options)
    with pytest.raises(InputError, match="2 tokens after the prompt do not satisfy the grammar"):
        served.open_row([*PROMPT, 7, 7], prompt_length=8, listener=events.put, **options)
    nothing = options | {"grammar": specjax.Regex("")}
    with pytest.raises(InputError, match="no token can follow the 0 tokens"):
        served.open_row(PROMPT, listener=events.put, **nothing)
    # "abc" is forced after "ab", and its letters alone are not the engine's tokens.
    letters = [compiler()._tokenizer.tokenize_str(letter)[0] for letter in "abc"]
    with pytest.raises(InputError, match="3 tokens after the prompt do not satisfy the grammar"):
        served.open_row(
            [*PROMPT, *letters],
            prompt_length=8,
            listener=events.put,
            **options | {"grammar": specjax.Choice(["abcab"])},
        )


@pytest.mark.full
def test_a_text_that_cannot_go_on_is_dropped_with_the_reason(served) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    row = served.open_row(
        PROMPT,
        listener=events.put,
        max_new_tokens=9,
        grammar=specjax.Choice(["df"]),
        eos_token_ids=(5, END),
    )
    assert isinstance(next_event(events), RowReady)
    event = None
    while not isinstance(event, RowDropped):
        row.verify(np.array([row.tokens[-1]]), np.array([-1]))
        event = next_event(events)
    assert "cannot go on: the next token must be a stop token" in event.reason


@pytest.mark.full
def test_a_row_whose_grammar_meets_a_limit_is_dropped_with_its_name(served, monkeypatch) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    options = {"grammar": specjax.Regex("a+"), "max_new_tokens": 9, "eos_token_ids": (END,)}
    row = served.open_row(PROMPT, listener=events.put, **options)
    assert isinstance(next_event(events), RowReady)
    monkeypatch.setattr(matcher_module, "STEP_SECONDS", -1.0)
    row.verify(np.array([row.tokens[-1]]), np.array([-1]))
    event = next_event(events)
    assert isinstance(event, RowDropped) and "its masks take too long" in event.reason


# --- over the wire --------------------------------------------------------------------------------


def constrained(seed: int) -> ExchangeRequest:
    request = drawn_request(seed)
    grammars = [*GRAMMARS.values(), specjax.After("a", specjax.Choice(["bcabc", "def"]))]
    grammar = grammars[seed % len(grammars)]
    ends = () if seed % 3 == 0 and grammar != GRAMMARS["anything"] else (END,)
    return replace(request, params=replace(request.params, grammar=grammar, eos_token_ids=ends))


@pytest.mark.thorough
def test_what_is_committed_is_the_servers_text_whatever_goes_wrong(served) -> None:
    """Check texts whose client is killed, and whose connection and server fail."""
    target, drafter = models()
    device = SlowDevice(target, drafter, SHAPES, CAPACITY)
    tells = served.client_drafts.tells(target)
    terms = Terms(nodes=NODES, depth=DEPTH, capacity=CAPACITY, tells=tells)
    for seed in range(30):
        request = constrained(seed)
        right = reference(served, request)
        faults = Faults() if seed < 5 else Faults.drawn(seed)
        outcome = run(served, device, terms, request, seed, faults, right)
        assert outcome.tokens == right, f"seed {seed}"
        matcher = compiler().compile(request.params.grammar).matcher(request.params.eos_token_ids)
        matcher.append(right)
        assert outcome.report.grammar_completed == matcher.is_complete


def test_a_grammar_stays_what_it_is_over_the_wire_and_in_a_journal(tmp_path) -> None:
    journal = Journal(tmp_path / "text.json")
    for grammar in GRAMMARS.values():
        request = ExchangeRequest((5, 6), SamplingParams(grammar=grammar))
        message = wire.decode_up(Exchange(request).hello())
        assert Grammar.of_source(message.grammar).source == grammar.source
        journal.keep(Exchange(request, [7]))
        assert journal.open(request).tokens == [5, 6, 7]
        another_grammar = replace(request, params=SamplingParams(grammar=specjax.Regex("x")))
        with pytest.raises(InputError, match="another prompt or other settings"):
            journal.open(another_grammar)
    # Without a grammar a frame is what it was before there were grammars.
    assert b"grammar" not in Exchange(ExchangeRequest((5, 6))).hello()
    check_params(SamplingParams(grammar=specjax.Regex("x")))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "[]",
        '{"grammars": []}',
        '{"grammars": [{"lark_grammar": 3}]}',
        '{"grammars": [{"lark_grammar": "%llguidance {}\\nstart: /a/"}]}',
        '{"grammars": [{"json_schema": {"type": "object"}}]}',
        '{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}',
        '{"grammars": [{"lark_grammar": "start: /a/", "name": "x"}]}',
        '{"grammars": [{"structag": {}}]}',
        "[" * 100_000,
    ],
)
def test_what_no_grammar_makes_is_no_source(source) -> None:
    with pytest.raises(InputError, match=r"grammar=|text"):
        Grammar.of_source(source)


class Opening:
    """A client that opens one session, and a thread's queue that the test empties."""

    def __init__(self, sessions_of: Any) -> None:
        self.work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.frames: list[bytes] = []
        self.sessions: Sessions = sessions_of(self.work.put)
        self.connection = self.sessions.connect("me", self.frames.append, print)

    def ask(self, grammar: str, nonce: bytes = bytes(16)) -> None:
        tokens = wire.pack(PROMPT, "int32")
        message = wire.OpenMessage(
            nonce=nonce, tokens=tokens, prompt=len(PROMPT), limit=8, grammar=grammar
        )
        self.connection.receive(wire.encode(message))

    @property
    def answers(self) -> list[str]:
        answers = [wire.decode_down(frame) for frame in self.frames]
        return [f"{getattr(a, 'code', 'opened')} {getattr(a, 'message', '')}" for a in answers]


@pytest.mark.full
def test_a_grammar_that_cannot_be_used_is_refused_by_name(served) -> None:
    terms = Terms(nodes=NODES, depth=DEPTH, capacity=CAPACITY)
    client = Opening(lambda post: Sessions(served, terms, post=post))
    client.ask(specjax.Regex("(").source)
    client.ask("{}")
    assert "invalid grammar=" in client.answers[0] and "regex parse error" in client.answers[0]
    assert "invalid grammar='{}': it is not the source" in client.answers[1]
    with engine(grammars=False, warm=False) as without:
        client = Opening(lambda post: Sessions(without, terms, post=post))
        client.ask(specjax.Regex("a").source)
    assert client.answers == [
        "invalid grammar: this engine has no grammars; give Engine(grammars=True)"
    ]


def test_a_session_waits_for_its_grammar_and_is_opened_once() -> None:
    """Check what happens between an Open and the end of its compilation."""
    jobs: list[tuple[Grammar, Any]] = []

    class Rows:
        """An engine that notes the parameters of its rows."""

        def __init__(self) -> None:
            self.opened: list[tuple[SamplingParams, Any]] = []

        def open_row(self, tokens, params, *, listener, compiled_grammar, **options):
            self.opened.append((params, compiled_grammar))

    rows, terms = Rows(), Terms(sessions_per_owner=2)
    client = Opening(
        lambda post: Sessions(rows, terms, post=post, compile_grammar=lambda *job: jobs.append(job))
    )
    grammar = specjax.Regex("a")
    client.ask(grammar.source)
    client.ask(grammar.source)  # repeated
    assert len(jobs) == 1 and not client.frames and not rows.opened
    client.connection.lost()
    client.connection = client.sessions.connect("me", client.frames.append, print)
    client.ask(grammar.source)  # the answer goes to this connection
    client.ask(grammar.source, nonce=b"2" * 16)
    client.ask(grammar.source, nonce=b"3" * 16)
    assert client.answers == ["full 2 grammars wait to be compiled; try again later"]
    compiled = compiler().compile(grammar)
    jobs[0][1](compiled)
    jobs[1][1](InputError("grammar: no"))
    client.work.get()()
    client.work.get()()
    assert client.answers[1:] == ["opened ", "invalid grammar: no"]
    assert [params.grammar.source for params, _ in rows.opened] == [grammar.source]
    client.ask(grammar.source)
    assert len(jobs) == 2 and client.answers[3:] == ["opened "]
    # Whenever the text is read again, its compiled grammar is there, whatever was forgotten.
    client.connection.lost()
    client.connection = client.sessions.connect("me", client.frames.append, print)
    client.ask(grammar.source)  # the answer was lost, and another session begins
    assert len(jobs) == 2 and client.answers[4:] == ["opened "]
    opened = wire.decode_down(client.frames[-1])
    assert isinstance(opened, wire.OpenedMessage)
    resume = wire.ResumeMessage(
        session=opened.session, epoch=1, base=len(PROMPT), digest=wire.digest(PROMPT), known=0
    )
    client.sessions.terms = replace(terms, tells={"hidden": (2,)})
    (session,) = client.sessions._sessions.values()
    session.sent_tokens = 4  # they were lost on the way
    client.connection.receive(wire.encode(resume))
    assert [read_with for _, read_with in rows.opened] == [compiled] * 3


def test_a_grammar_takes_no_more_characters_on_the_wire_than_its_author_wrote() -> None:
    """Check a text that the server's own limit of 256,000 characters allows, and a longer one."""
    for letters in ("ä" * 250_000, "\U0001f642" * 200_000, "\ud800", 'a"\\d\n'):
        grammar = specjax.Regex(letters)
        params = SamplingParams(grammar=grammar)
        check_params(params)
        frame = Exchange(ExchangeRequest((5, 6), params)).hello()
        assert len(frame) < wire.MOST_UP
        message = wire.decode_up(frame)
        assert isinstance(message, wire.OpenMessage) and isinstance(message.grammar, str)
        assert Grammar.of_source(message.grammar).source == grammar.source
    engine_of_server: Any = MadeUpEngine()
    engine_of_server.client_drafts = SimpleNamespace(
        tells=lambda target: {}, nodes=4, depth=2, drafter=None
    )
    engine_of_server.target.fingerprint = lambda: ""
    engine_of_server.has_grammars = True
    assert Drafts(engine_of_server).max_frame_bytes >= 4 * 250_000
    with pytest.raises(InputError, match="the client protocol allows 262144; give a shorter"):
        check_params(SamplingParams(grammar=specjax.Choice(["a" * 300_000])))


def test_a_refusal_that_quotes_half_a_character_can_be_sent() -> None:
    refused = sessions._refused("invalid", "it has \ud800" + "x" * 2000)
    answer = wire.decode_down(wire.encode(refused))
    assert isinstance(answer, wire.RefusedMessage)
    assert answer.message.startswith("it has ?xx") and len(answer.message) == 1000


def test_waiting_grammars_count_as_sessions_do() -> None:
    """Check that the waiting grammars of one address do not stop another's, without API keys."""
    jobs: list[Any] = []
    client = Opening(
        lambda post: Sessions(
            cast(Any, None),
            Terms(sessions=4, sessions_per_owner=1),
            post=post,
            compile_grammar=lambda *job: jobs.append(job),
        )
    )
    refusals = []
    for number, address in enumerate(["1.2.3.4", "1.2.3.4", "5.6.7.8", "", "", ""]):
        client.connection = client.sessions.connect("", client.frames.append, print, address)
        client.ask(specjax.Regex("a" * (number + 1)).source, nonce=bytes([number]) * 16)
        refusals.append(len(client.answers))
    # The second of an address is refused. Those without a name do not count, up to all sessions.
    assert refusals == [0, 1, 1, 1, 1, 2] and len(jobs) == 4
    assert client.answers[1] == "full 4 grammars wait to be compiled; try again later"


def test_a_grammar_and_what_is_not_verified_are_refused() -> None:
    target, drafter = models()
    client = connect("ws://localhost:1", drafter, target, capacity=32)
    for option in ({"is_offline": True}, {"private": ["x"]}):
        with pytest.raises(InputError, match="grammar: the server applies it"):
            client.stream([1, 2], max_new_tokens=4, grammar=specjax.Regex("a"), **option)
