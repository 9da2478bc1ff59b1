"""Tests of the client's side of the protocol: late, doubled, lost and foreign messages."""

import itertools
import json

import numpy as np
import pytest

from specjax import SamplingParams, wire
from specjax.client.exchange import (
    Exchange,
    ExchangeRequest,
    FeaturesReceived,
    SendFrame,
    ServerBusyError,
    ServerRefusedError,
    TextOpened,
    TokensEmitted,
)
from specjax.client.trees import Tree

SESSION, OTHER = bytes(16), b"o" * 16
PROMPT = (5, 6, 7)
REQUEST = ExchangeRequest(PROMPT, SamplingParams(max_new_tokens=20))
TELLS = {"hidden": [2]}


def opened(session: bytes = SESSION, tells=TELLS) -> bytes:
    return wire.encode(
        wire.OpenedMessage(session=session, epoch=0, nodes=8, depth=4, capacity=64, tells=tells)
    )


def told(start: int, count: int, session: bytes = SESSION, epoch: int = 0) -> bytes:
    """Return a frame whose array holds each token's position."""
    numbers = np.repeat(np.arange(start, start + count, dtype=np.float32)[:, None], 2, axis=1)
    packed = {"hidden": wire.pack(numbers, "float32")}
    return wire.encode(
        wire.ToldMessage(session=session, epoch=epoch, start=start, count=count, arrays=packed)
    )


def ready(length: int, session: bytes = SESSION, epoch: int = 0) -> bytes:
    return wire.encode(wire.ReadyMessage(session=session, epoch=epoch, length=length))


def verdict(
    sequence: int,
    accepted=(1,),
    token: int = 9,
    over: str = "",
    session: bytes = SESSION,
    epoch: int = 0,
) -> bytes:
    packed = {"hidden": wire.pack(np.zeros((1 + len(accepted), 2)), "float32")}
    return wire.encode(
        wire.VerdictMessage(
            session=session,
            epoch=epoch,
            sequence=sequence,
            accepted=list(accepted),
            token=token,
            arrays=packed,
            over=over,
            seconds=0.5,
        )
    )


def forgotten(session: bytes = SESSION) -> bytes:
    return wire.encode(wire.ForgottenMessage(session=session))


def refused(code: str, session: bytes = b"") -> bytes:
    return wire.encode(wire.RefusedMessage(code=code, message="so it is", session=session))


def sent(events) -> list:
    """Return the messages to send."""
    return [wire.decode_up(event.frame) for event in events if isinstance(event, SendFrame)]


def begun() -> Exchange:
    """Return an exchange that may draft."""
    numbers = itertools.count()
    exchange = Exchange(REQUEST, make_nonce=lambda: next(numbers).to_bytes(16, "big"))
    exchange.hello()
    assert exchange.receive(opened()) == [TextOpened()]
    assert isinstance(exchange.receive(told(0, 2))[0], FeaturesReceived)
    assert exchange.receive(ready(3)) == []
    assert exchange.phase == "ready"
    return exchange


def waiting() -> Exchange:
    exchange = begun()
    exchange.draft(Tree.chain(7, (1, 2)))
    return exchange


def state(exchange: Exchange) -> tuple:
    return exchange.phase, exchange.known, list(exchange.tokens), exchange.over, exchange.again()


def test_a_round() -> None:
    exchange = waiting()
    draft = wire.decode_up(exchange.again())
    assert (draft.base, draft.sequence, draft.digest) == (3, 1, wire.digest(PROMPT))
    emitted, features = exchange.receive(verdict(1))
    assert emitted == TokensEmitted([1, 9], drafted=2, seconds=0.5)
    assert (features.tokens, features.following) == ([7, 1], [1, 9])
    assert (exchange.tokens, exchange.known, exchange.phase) == ([5, 6, 7, 1, 9], 4, "ready")


def test_nothing_is_committed_twice() -> None:
    exchange = waiting()
    assert exchange.receive(verdict(1))
    for frame in (verdict(1), verdict(1, token=8), verdict(2), verdict(0)):
        before = state(exchange)
        assert exchange.receive(frame) == []
        assert state(exchange) == before
    exchange.draft(Tree.chain(9, (3,)))
    assert exchange.receive(verdict(1)) == []
    assert exchange.receive(verdict(2, accepted=()))[0].tokens == [9]
    assert exchange.tokens == [5, 6, 7, 1, 9, 9]


@pytest.mark.parametrize("make", [begun, waiting])
@pytest.mark.parametrize(
    "frame",
    [
        told(0, 2),
        told(0, 1),
        told(2, 1),  # of the root, whose hidden state comes only with the verdict
        told(7, 3),
        ready(3),
        ready(9),
        verdict(1, session=OTHER),
        verdict(7),
        told(0, 2, session=OTHER),
        ready(3, session=OTHER),
        forgotten(OTHER),
        opened(),
        refused("old_epoch"),
        refused("busy"),
        refused("not_ready"),
        refused("over"),
        refused("unknown_thing", session=OTHER),
        wire.encode(
            wire.ResyncMessage(session=OTHER, epoch=0, length=3, tail=wire.pack([], "int32"))
        ),
    ],
)
def test_what_is_late_doubled_or_of_another_text_changes_nothing(make, frame) -> None:
    exchange = make()
    before = state(exchange)
    assert exchange.receive(frame) == []
    assert state(exchange) == before


def test_what_was_told_may_come_in_pieces_that_overlap() -> None:
    exchange = Exchange(ExchangeRequest(tuple(range(1, 9)), SamplingParams(max_new_tokens=4)))
    exchange.hello()
    exchange.receive(opened())
    positions = []
    for start, count in ((0, 3), (1, 1), (5, 2), (2, 3), (0, 2), (4, 4)):
        for event in exchange.receive(told(start, count)):
            positions += event.arrays["hidden"][:, 0].tolist()
            assert len(event.tokens) == len(event.following) == len(event.arrays["hidden"])
    assert positions == list(range(7))  # each once, in order, without the root


def test_what_was_told_and_is_lost_is_asked_for_again() -> None:
    exchange = Exchange(REQUEST)
    exchange.hello()
    exchange.receive(opened())
    exchange.receive(told(0, 1))
    assert exchange.receive(told(2, 1)) == []  # token 1 is missing
    (again,) = sent(exchange.receive(ready(3)))
    assert (again.base, again.known, again.epoch) == (3, 1, 1)
    assert exchange.phase == "opening"
    exchange.receive(told(1, 1, epoch=1))
    assert exchange.receive(ready(3)) == []  # of the old epoch
    assert exchange.phase == "opening"
    assert exchange.receive(ready(3, epoch=1)) == []
    assert exchange.phase == "ready"


def test_a_lost_verdict_comes_over_the_next_connection() -> None:
    exchange = waiting()
    exchange.lost()
    assert exchange.receive(verdict(1)) == []  # over the lost connection
    resume = wire.decode_up(exchange.hello())
    assert (resume.session, resume.epoch, resume.base, resume.known) == (SESSION, 1, 3, 2)
    assert exchange.receive(verdict(1)) == []
    (draft,) = sent(exchange.receive(ready(3, epoch=1)))
    assert (draft.sequence, draft.epoch, draft.base) == (1, 1, 3)
    assert exchange.receive(verdict(1, epoch=1))[0].tokens == [1, 9]
    assert exchange.resumes == 1


def test_a_session_that_is_forgotten_is_opened_anew_with_all_that_is_committed() -> None:
    exchange = waiting()
    exchange.receive(verdict(1))
    (again,) = sent(exchange.receive(forgotten()))
    assert wire.unpack(again.tokens).tolist() == [5, 6, 7, 1, 9]
    assert (again.prompt, again.known, again.limit) == (3, 4, 20)
    assert exchange.receive(forgotten()) == []  # a duplicate
    assert exchange.receive(opened(OTHER)) == [TextOpened()]
    exchange.receive(ready(5, session=OTHER))
    assert wire.decode_up(exchange.draft(Tree.chain(9, ()))).sequence == 1
    assert exchange.receive(verdict(1)) == []  # of the forgotten session
    assert exchange.receive(verdict(1, accepted=(), session=OTHER))[0].tokens == [9]


def test_each_open_has_a_nonce_of_its_own_and_comes_again_with_the_same() -> None:
    exchange = Exchange(REQUEST)
    first = exchange.hello()
    assert exchange.again() == first
    exchange.lost()
    assert wire.decode_up(exchange.hello()).nonce != wire.decode_up(first).nonce


def test_a_second_answer_to_an_open_ends_what_nobody_wants() -> None:
    exchange = begun()
    (close,) = sent(exchange.receive(opened(OTHER)))
    assert close == wire.CloseMessage(session=OTHER)
    assert exchange.phase == "ready"


def test_texts_that_differ_are_settled_by_the_clients() -> None:
    exchange = waiting()
    tail = wire.pack([3], "int32")
    resync = wire.encode(wire.ResyncMessage(session=SESSION, epoch=0, length=4, tail=tail))
    (resume,) = sent(exchange.receive(resync))
    assert (resume.base, resume.digest) == (3, wire.digest(PROMPT))
    assert exchange.tokens == [5, 6, 7]


def test_a_sequence_that_does_not_fit_is_settled_once() -> None:
    exchange = waiting()
    assert isinstance(sent(exchange.receive(refused("sequence", SESSION)))[0], wire.ResumeMessage)
    assert exchange.receive(refused("sequence", SESSION)) == []


def test_who_is_refused_is_told_why() -> None:
    with pytest.raises(ServerRefusedError, match="target: so it is"):
        waiting().receive(refused("target"))
    with pytest.raises(ServerBusyError, match="so it is"):
        waiting().receive(refused("draining"))


def test_frames_that_cannot_be_true() -> None:
    for frame in (b"", b"nothing", verdict(1, accepted=(3,))):
        exchange = waiting()
        before = state(exchange)
        with pytest.raises(wire.FrameError):
            exchange.receive(frame)
        assert state(exchange) == before


def test_after_the_end_nothing_is_heard() -> None:
    exchange = waiting()
    exchange.receive(verdict(1, over="stop"))
    assert (exchange.phase, exchange.over) == ("over", "stop")
    exchange.lost()
    for frame in (verdict(2), forgotten(), refused("target"), ready(5)):
        assert exchange.receive(frame) == []
    assert exchange.phase == "over"
    assert wire.decode_up(exchange.close()) == wire.CloseMessage(session=SESSION)
    assert Exchange(REQUEST).close() is None


def test_where_the_tokens_say_all_nothing_is_told() -> None:
    exchange = Exchange(REQUEST)
    exchange.hello()
    exchange.receive(opened(tells={}))
    (features,) = exchange.receive(ready(3))
    assert (features.tokens, features.following, features.arrays) == ([5, 6], [6, 7], {})
    assert exchange.phase == "ready"


def test_another_process_goes_on_from_a_snapshot() -> None:
    exchange = waiting()
    exchange.receive(verdict(1))
    snapshot = json.loads(json.dumps(exchange.snapshot()))
    restored = Exchange.restored(snapshot)
    assert (restored.request, restored.tokens, restored.known) == (REQUEST, [5, 6, 7, 1, 9], 0)
    hello = wire.decode_up(restored.hello())
    assert wire.unpack(hello.tokens).tolist() == [5, 6, 7, 1, 9]
    assert (hello.prompt, hello.known) == (3, 0)
    restored.end_if_whole({2})
    assert restored.phase == "opening"
    restored.end_if_whole({9})
    assert (restored.phase, restored.over) == ("over", "stop")
    full = Exchange(REQUEST, committed=range(20))
    full.end_if_whole(())
    assert (full.phase, full.over) == ("over", "length")
