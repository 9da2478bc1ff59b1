"""Tests of sessions over a real engine: every text is the engine's own.

This holds whatever a client drafts, and however its connection fails.
"""

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from specjax import wire
from specjax.drafters import Eagle3
from specjax.serving import ClientDrafts, Engine
from specjax.serving.sessions import Sessions, Terms
from tests.conftest import tiny_target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LIMIT = 20


@dataclass
class Served:
    """An engine and its sessions.

    Attributes:
        engine: the engine.
        sessions: the sessions over it.
        work: calls that the thread of the test has to make.
    """

    engine: Engine
    sessions: Sessions
    work: "queue.SimpleQueue[Any]"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as world:
        yield world


@contextmanager
def serving(**options: Any) -> Iterator[Served]:
    target = tiny_target()
    clients = ClientDrafts(Eagle3.init(target, jax.random.key(1)), nodes=6, depth=4)
    work: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sizes = {"rows": 2, "widths": (2,), "capacity": 48, "page": 8, "chunk": 8}
    with Engine(target, drafts=(None,), clients=clients, **sizes, **options) as engine:
        tells = clients.tells(engine.target)
        sessions = Sessions(
            engine, Terms(nodes=6, depth=4, capacity=48, tells=tells), post=work.put
        )
        yield Served(engine, sessions, work)
        sessions.close()


class Client:
    """A client that drafts any tokens."""

    def __init__(self, served: Served, **sampling: Any) -> None:
        self.served, self.sampling = served, sampling
        self.text, self.told, self.session, self.epoch, self.sequence = list(PROMPT), [], b"", 0, 0
        self.connect()

    def connect(self) -> None:
        self.frames: list[bytes] = []
        self.connection = self.served.sessions.connect("me", self.frames.append, print)

    def say(self, message: wire.UpMessage) -> None:
        self.connection.receive(wire.encode(message))

    def hear(self) -> Any:
        """Return the next message."""
        while not self.frames:
            self.served.work.get(timeout=60)()
        message = wire.decode_down(self.frames.pop(0))
        self.epoch = getattr(message, "epoch", self.epoch)
        return message

    def until_ready(self) -> int:
        """Receive messages until a draft may be sent, and return the text's length then."""
        while True:
            message = self.hear()
            if isinstance(message, wire.OpenedMessage):
                self.session = message.session
            elif isinstance(message, wire.ReadyMessage):
                return message.length
            else:
                assert message.start == len(self.told)
                self.told += list(wire.unpack(message.arrays["features"]))

    def open(self) -> None:
        tokens = wire.pack(self.text, "int32")
        received = len(self.told)
        self.say(
            wire.OpenMessage(
                nonce=os.urandom(16),
                tokens=tokens,
                prompt=len(PROMPT),
                limit=LIMIT,
                known=received,
                eos=[],
                **self.sampling,
            )
        )
        assert self.until_ready() == len(self.text)

    def resume(self) -> int:
        received, digest = len(self.told), wire.digest(self.text)
        self.epoch += 1
        self.say(
            wire.ResumeMessage(
                session=self.session,
                epoch=self.epoch,
                base=len(self.text),
                digest=digest,
                known=received,
            )
        )
        return self.until_ready()

    def draft(self, ahead: list[int]) -> wire.DraftMessage:
        """Return a draft of a chain ``ahead``, with one more token beside its first."""
        self.sequence += 1
        tokens = [self.text[-1], *ahead, (ahead[0] + 1) % 11]
        return wire.DraftMessage(
            session=self.session,
            epoch=self.epoch,
            sequence=self.sequence,
            base=len(self.text),
            digest=wire.digest(self.text),
            tokens=wire.pack(tokens, "int32"),
            parents=wire.pack([255, *range(len(ahead)), 0], "uint8"),
        )

    def verdict(self) -> wire.VerdictMessage:
        """Wait for the verdict.

        A draft that is repeated while it is verified is acknowledged by another message.
        """
        while isinstance(message := self.hear(), wire.OpenedMessage):
            pass
        assert isinstance(message, wire.VerdictMessage)
        return message

    def follow(self, draft: wire.DraftMessage, verdict: wire.VerdictMessage) -> None:
        tokens = wire.unpack(draft.tokens).tolist()
        self.text += [*(tokens[node] for node in verdict.accepted), verdict.token]
        self.told += list(wire.unpack(verdict.arrays["features"]))


@pytest.mark.full
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 6, "seed": 2**62 + 3}])
def test_a_text_is_the_engines_own(served: Served, sampling: dict[str, Any]):
    handle = served.engine.submit(PROMPT, max_new_tokens=LIMIT, eos_token_ids=(), **sampling)
    expected = [*PROMPT, *handle.result().tokens]
    client, rng, over = Client(served, **sampling), np.random.default_rng(0), ""
    client.open()
    while not over:
        at = len(client.text)
        ahead = [
            token if rng.random() < 0.7 else (token + 1) % 11
            for token in [*expected[at : at + 3], 0][:3]
        ]
        draft = client.draft(ahead)
        client.say(draft)
        how = rng.random()
        if how < 0.3:  # the answer is lost
            client.connection.lost()
            client.connect()
            if client.resume() == len(client.text):
                client.say(msgspec.structs.replace(draft, epoch=client.epoch))
        verdict = client.verdict()
        client.follow(draft, verdict)
        over = verdict.over
        if 0.3 < how < 0.5 and not over:  # the client forgets something
            del client.told[len(client.told) // 2 :]
            client.connect()
            assert client.resume() == len(client.text)
    assert (client.text, over) == (expected, "length")
    assert len(client.told) == len(client.text) - 1

    again = Client(served, **sampling)  # its text is prefilled at once, with the same features
    again.text = expected[:-1]
    again.open()
    np.testing.assert_allclose(
        np.stack(client.told)[: len(again.told)], np.stack(again.told), atol=1e-4
    )
    again.say(wire.CloseMessage(session=again.session))


@pytest.mark.full
def test_sessions_that_take_each_others_row_hear_nothing_of_it_and_have_their_texts():
    """Check two sessions of one key, which may have one of the two rows.

    Each draft takes the row from the other session, which is idle.
    """
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]
    with serving(client_idle_seconds=0.0) as served:
        handles = [
            served.engine.submit(PROMPT, max_new_tokens=LIMIT, eos_token_ids=(), **sampling)
            for sampling in samplings
        ]
        expected = [[*PROMPT, *handle.result().tokens] for handle in handles]
        clients = [Client(served, **sampling) for sampling in samplings]
        for client in clients:
            client.open()
        under_way = list(zip(clients, expected, strict=True))
        while under_way:
            for client, text in list(under_way):
                draft = client.draft([*text[len(client.text) : len(client.text) + 1], 0])
                client.say(draft)
                verdict = client.verdict()
                client.follow(draft, verdict)
                if verdict.over:
                    under_way.remove((client, text))
        statistics = served.engine.statistics.clients
        assert statistics.preempted > 10
        assert statistics.dropped == 0
        assert [client.text for client in clients] == expected
        assert [len(client.told) for client in clients] == [len(text) - 1 for text in expected]
