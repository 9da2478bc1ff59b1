"""Tests of sessions without sockets: each rule of the protocol, and texts over a bad link."""

import random
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from specjax import wire
from specjax.serving.handle import EngineError
from specjax.serving.scheduler import QueueFullError
from specjax.serving.sessions import Sessions, Terms
from specjax.wire import FrameError
from tests.serving.made_up_rows import DEPTH, NODES, MadeUpRows, next_token, told_of, whole

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TERMS = Terms(
    nodes=NODES,
    depth=DEPTH,
    capacity=512,
    tells={"hidden": (2,)},
    sessions=4,
    sessions_per_owner=4,
    target="t",
    drafter="d",
)


class World:
    """Sessions, the rows behind them, and a clock."""

    def __init__(self, terms: Terms = TERMS, **rows: Any) -> None:
        self.rows, self.now, self.work, ids = MadeUpRows(**rows), 0.0, deque(), iter(range(10**9))
        self.sessions = Sessions(
            self.rows,  # pyright: ignore[reportArgumentType]
            terms,
            post=self.work.append,
            clock=lambda: self.now,
            make_id=lambda: next(ids).to_bytes(16, "big"),
        )

    def settle(self, count: int = 10**9) -> None:
        """Send the engine's events, and run the work that follows."""
        self.rows.speak(count)
        while self.work:
            self.work.popleft()()


class Wire:
    """A connection, and the frames that came over it."""

    def __init__(self, world: World, owner: str = "me", counted_as: str | None = None) -> None:
        self.world, self.frames, self.error = world, [], None
        self.connection = world.sessions.connect(owner, self.frames.append, self._close, counted_as)

    def _close(self, error: FrameError) -> None:
        self.error = error

    def say(self, message: wire.UpMessage) -> None:
        self.connection.receive(wire.encode(message))

    def heard(self) -> list[Any]:
        """Return the messages that came since the last call."""
        self.world.settle()
        frames = list(self.frames)
        self.frames.clear()
        for frame in frames:
            self.connection.sent(len(frame))
        return [wire.decode_down(frame) for frame in frames]

    def open(
        self, tokens: Any = PROMPT, prompt: int = len(PROMPT), limit: int = 40, **more: Any
    ) -> bytes:
        """Open a session, wait until it is ready, and return its id."""
        self.say(opening(tokens=wire.pack(tokens, "int32"), prompt=prompt, limit=limit, **more))
        opened, *_, ready = self.heard()
        assert ready == wire.ReadyMessage(session=opened.session, epoch=0, length=len(tokens))
        return opened.session


def chain(text: list[int], right: int, wrong: int = 0) -> tuple[list[int], list[int]]:
    """Return a chain below a text: ``right`` right tokens, and then ``wrong`` wrong ones."""
    tokens = [text[-1]]
    for _ in range(right):
        tokens.append(next_token([*text, *tokens[1:]]))
    tokens += [(next_token([*text, *tokens[1:]]) + 1) % 49 for _ in range(wrong)]
    return tokens, [255, *range(len(tokens) - 1)]


def draft(
    session: bytes, text: list[int], sequence: int = 1, epoch: int = 0, right: int = 2, **more: Any
) -> wire.DraftMessage:
    tokens, parents = chain(text, right, 1)
    return wire.DraftMessage(
        **{
            "session": session,
            "epoch": epoch,
            "sequence": sequence,
            "base": len(text),
            "digest": wire.digest(text),
            "tokens": wire.pack(tokens, "int32"),
            "parents": wire.pack(parents, "uint8"),
        }
        | more
    )


def opening(**fields: Any) -> wire.OpenMessage:
    """Return an Open message with a new nonce."""
    return wire.OpenMessage(nonce=random.randbytes(16), **fields)


def resume(
    session: bytes, text: list[int], received: int | None = None, epoch: int = 0
) -> wire.ResumeMessage:
    """Return the Resume message of a client whose last epoch was ``epoch``."""
    received = len(text) - 1 if received is None else received
    return wire.ResumeMessage(
        session=session, epoch=epoch + 1, base=len(text), digest=wire.digest(text), known=received
    )


TEXT = whole(PROMPT, 40)
AFTER = TEXT[: len(PROMPT) + 3]  # after a draft with two right tokens


# --- a session ------------------------------------------------------------------------------------


def test_a_text_is_opened_told_and_ready():
    world = World()
    line = Wire(world)
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40))
    opened, *features, ready = line.heard()
    assert opened == wire.OpenedMessage(
        session=bytes(16), epoch=0, nodes=NODES, depth=DEPTH, capacity=512, tells={"hidden": [2]}
    )
    assert [(message.start, message.count) for message in features] == [(0, 3), (3, 3), (6, 1)]
    rows = np.concatenate([wire.unpack(message.arrays["hidden"]) for message in features])
    assert rows.tolist() == [told_of(PROMPT[: i + 1]) for i in range(len(PROMPT) - 1)]
    assert ready.length == len(PROMPT)


def test_what_a_client_knows_is_not_told_again():
    line = Wire(World())
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40, known=4))
    _, *features, _ = line.heard()
    assert [(message.start, message.count) for message in features] == [(4, 2), (6, 1)]


def test_a_verdict():
    line = Wire(World())
    session = line.open()
    line.say(draft(session, PROMPT))
    (verdict,) = line.heard()
    assert (verdict.sequence, verdict.accepted) == (1, [1, 2])
    assert (verdict.token, verdict.over) == (AFTER[-1], "")
    features = wire.unpack(verdict.arrays["hidden"])
    assert features.tolist() == [told_of(TEXT[:count]) for count in range(len(PROMPT), len(AFTER))]
    line.say(draft(session, AFTER, 2))
    assert line.heard()[0].sequence == 2


def test_a_text_that_ends_needs_no_row_and_its_last_verdict_is_kept():
    world = World()
    line = Wire(world)
    session = line.open(limit=3)
    last = draft(session, PROMPT, right=4)
    line.say(last)
    (verdict,) = line.heard()
    assert (verdict.over, verdict.accepted, verdict.token) == ("length", [1, 2], AFTER[-1])
    assert world.rows.rows[0].is_closed
    assert not world.sessions.is_busy
    line.say(last)
    assert line.heard() == [verdict]
    line.say(draft(session, AFTER, 2))
    assert line.heard()[0].code == "over"
    line.say(resume(session, AFTER))
    assert line.heard() == [wire.ReadyMessage(session=session, epoch=1, length=len(AFTER))]
    assert len(world.rows.rows) == 1


# --- again, or not at all -------------------------------------------------------------------------


def test_the_same_draft_again_has_the_same_verdict_byte_for_byte():
    world = World()
    line = Wire(world)
    session = line.open()
    line.say(draft(session, PROMPT))
    # A repeat while the draft is verified is acknowledged, and the verdict comes once.
    line.say(draft(session, PROMPT))
    world.settle()
    opened, first = line.frames
    assert isinstance(wire.decode_down(opened), wire.OpenedMessage)
    line.say(draft(session, PROMPT))
    assert line.frames == [opened, first, first]
    assert world.rows.verified == 1


def test_another_draft_under_the_same_number_is_a_mistake():
    world = World()
    line = Wire(world)
    session = line.open()
    line.say(draft(session, PROMPT))
    for _ in range(2):
        with pytest.raises(FrameError, match="same one"):
            line.say(draft(session, PROMPT, right=1))
        world.settle()


def test_a_draft_before_the_answer_to_the_one_before():
    line = Wire(World())
    session = line.open()
    line.say(draft(session, PROMPT))
    line.say(draft(session, AFTER, 2))
    assert [getattr(answer, "code", "verdict") for answer in line.heard()] == ["busy", "verdict"]
    line.say(draft(session, AFTER, 3))
    assert line.heard()[0].code == "sequence"
    line.say(draft(session, AFTER, 2))
    line.heard()
    line.say(draft(session, PROMPT, 1))  # late: nobody waits for its verdict
    assert line.heard() == []


def test_a_draft_before_the_text_is_read():
    world = World()
    line = Wire(world)
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40))
    line.say(draft(bytes(16), PROMPT))
    assert [getattr(answer, "code", "") for answer in line.heard()][1] == "not_ready"
    line.say(draft(bytes(16), PROMPT))
    assert isinstance(line.heard()[0], wire.VerdictMessage)


@pytest.mark.parametrize("is_earlier", [True, False])
def test_a_draft_below_another_text(is_earlier: bool):
    line = Wire(World())
    session = line.open()
    line.say(draft(session, PROMPT))
    line.heard()
    line.say(draft(session, PROMPT if is_earlier else [*PROMPT[:-1], 0], 2))
    (resync,) = line.heard()
    assert resync.length == len(AFTER)
    assert wire.unpack(resync.tail).tolist() == AFTER[len(PROMPT) :]
    line.say(draft(session, AFTER, 2))
    assert line.heard()[0].sequence == 2


def test_drafts_that_cannot_be():
    line = Wire(World())
    session = line.open()
    tokens, parents = chain(PROMPT, NODES)
    for wrong in (
        {"tokens": wire.pack(tokens, "int32"), "parents": wire.pack(parents, "uint8")},
        {"tokens": wire.pack([7], "int32"), "parents": wire.pack([255], "uint8")},
    ):
        with pytest.raises(FrameError) as error:
            line.say(draft(session, PROMPT, **wrong))
        assert error.value.code == 4400
    line.say(draft(session, PROMPT))
    assert isinstance(line.heard()[0], wire.VerdictMessage)


# --- connections come and go ----------------------------------------------------------------------


def test_a_session_goes_on_over_another_connection():
    world = World()
    first, second = Wire(world), Wire(world)
    session = first.open()
    first.connection.lost()
    assert world.rows.rows[0].is_away
    assert world.sessions.statistics.away == 1
    second.say(resume(session, PROMPT))
    assert second.heard() == [wire.ReadyMessage(session=session, epoch=1, length=len(PROMPT))]
    assert not world.rows.rows[0].is_away
    assert (world.sessions.statistics.away, world.sessions.statistics.resumes) == (0, 1)
    second.say(draft(session, PROMPT, epoch=0))
    assert second.heard()[0].code == "old_epoch"
    second.say(draft(session, PROMPT, epoch=1))
    assert second.heard()[0].epoch == 1
    first.connection.lost()  # an old connection: nothing changes
    assert world.sessions.statistics.away == 0


def test_an_old_connection_has_no_say_any_more():
    world = World()
    first, second = Wire(world), Wire(world)
    session = first.open()
    second.say(resume(session, PROMPT))
    first.say(draft(session, PROMPT))
    first.say(draft(session, PROMPT, epoch=1))
    assert [refusal.code for refusal in first.heard()] == ["old_epoch", "old_epoch"]
    second.heard()
    second.say(draft(session, PROMPT, epoch=1))
    first.say(resume(session, PROMPT))  # a late message
    assert [refusal.code for refusal in first.heard()] == ["old_epoch"]
    assert isinstance(second.heard()[0], wire.VerdictMessage)


def test_an_answer_that_was_lost_is_had_for_the_same_draft():
    world = World()
    first, second = Wire(world), Wire(world)
    session = first.open()
    first.say(draft(session, PROMPT))
    first.connection.lost()
    world.settle()  # the verdict comes without a connection
    second.say(resume(session, PROMPT))
    assert second.heard() == [wire.ReadyMessage(session=session, epoch=1, length=len(PROMPT))]
    second.say(draft(session, PROMPT, epoch=1))
    (verdict,) = second.heard()
    assert (verdict.epoch, verdict.sequence, verdict.token) == (1, 1, AFTER[-1])
    assert (world.rows.verified, len(world.rows.rows)) == (1, 1)


def test_an_answer_comes_over_the_connection_that_there_is():
    world = World()
    first, second = Wire(world), Wire(world)
    session = first.open()
    first.say(draft(session, PROMPT))
    second.say(resume(session, PROMPT))
    second.say(draft(session, PROMPT, epoch=1))
    assert [type(message) for message in second.heard()] == [
        wire.ReadyMessage,
        wire.OpenedMessage,
        wire.VerdictMessage,
    ]
    assert first.heard() == []


def test_what_a_client_was_not_told_is_told_in_another_row():
    world = World()
    first, second = Wire(world), Wire(world)
    session = first.open()
    first.say(draft(session, PROMPT))
    first.heard()
    second.say(resume(session, AFTER, received=5))
    *features, ready = second.heard()
    assert [(message.start, message.count, message.epoch) for message in features] == [
        (5, 1, 1),
        (6, 3, 1),
        (9, 1, 1),
    ]
    assert ready.length == len(AFTER)
    assert [row.is_closed for row in world.rows.rows] == [True, False]
    second.say(draft(session, AFTER, 2, epoch=1))
    assert isinstance(second.heard()[0], wire.VerdictMessage)


def test_a_client_that_has_less_of_the_text_has_it_again():
    world = World()
    first, second = Wire(world), Wire(world)
    session = first.open()
    text = list(PROMPT)
    for sequence in (1, 2):
        first.say(draft(session, text, sequence))
        text = TEXT[: len(text) + 3]
        first.heard()
    # The client is one draft behind, and the session still has the verdict that it lacks.
    second.say(resume(session, AFTER))
    assert second.heard() == [wire.ReadyMessage(session=session, epoch=1, length=len(AFTER))]
    second.say(resume(session, PROMPT, epoch=1))
    assert second.heard()[-1] == wire.ReadyMessage(session=session, epoch=2, length=len(PROMPT))
    second.say(draft(session, PROMPT, 1, epoch=2))
    assert second.heard()[0].token == AFTER[-1]
    assert [row.is_closed for row in world.rows.rows] == [True, False]


def test_where_nothing_is_told_nothing_is_read_again():
    world = World(Terms(nodes=NODES, depth=DEPTH), tells=False)
    first, second = Wire(world), Wire(world)
    session = first.open()
    second.say(resume(session, PROMPT, received=0))
    assert second.heard() == [wire.ReadyMessage(session=session, epoch=1, length=len(PROMPT))]
    assert len(world.rows.rows) == 1


def test_an_open_and_a_resume_that_come_twice():
    world = World()
    line, second = Wire(world), Wire(world)
    message = opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40)
    line.say(message)
    first = line.heard()
    line.say(message)
    assert line.heard() == [first[0], first[-1]]
    for _ in range(2):
        second.say(resume(bytes(16), PROMPT))
        assert second.heard() == [wire.ReadyMessage(session=bytes(16), epoch=1, length=len(PROMPT))]
    statistics = world.sessions.statistics
    assert (len(world.rows.rows), statistics.opened, statistics.resumes) == (1, 1, 1)


def test_who_asks_again_while_the_text_is_read_hears_so():
    world = World()
    first, second = Wire(world), Wire(world)
    message = opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40)
    first.say(message)
    first.say(message)
    opened: Any = wire.decode_down(first.frames[0])
    assert [wire.decode_down(frame) for frame in first.frames] == [opened, opened]
    second.say(resume(bytes(16), PROMPT, received=0))
    assert second.frames == []
    second.say(resume(bytes(16), PROMPT, received=0))
    assert [wire.decode_down(frame) for frame in second.frames] == [
        msgspec.structs.replace(opened, epoch=1)
    ]
    assert second.heard()[-1] == wire.ReadyMessage(session=bytes(16), epoch=1, length=len(PROMPT))
    assert len(world.rows.rows) == 1


def test_while_a_prompt_is_read_the_connection_changes():
    world = World()
    first, second = Wire(world), Wire(world)
    first.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40))
    world.settle(1)
    second.say(resume(bytes(16), PROMPT, received=3))
    messages = second.heard()
    assert [(getattr(message, "start", None), message.epoch) for message in messages] == [
        (3, 1),
        (6, 1),
        (None, 1),
    ]
    assert len(world.rows.rows) == 1


@pytest.mark.parametrize("text", [[*PROMPT, 0], PROMPT[:-1], [*PROMPT[:-1], 0], TEXT])
def test_another_text_than_any_of_ours_is_forgotten(text: list[int]):
    line = Wire(World())
    session = line.open()
    line.say(resume(session, text))
    assert line.heard() == [wire.ForgottenMessage(session=session)]
    assert line.world.rows.rows[0].is_closed
    line.say(draft(session, PROMPT))
    assert line.heard() == [wire.ForgottenMessage(session=session)]


def test_a_row_that_was_given_to_others():
    world = World()
    line, second = Wire(world), Wire(world)
    session = line.open()
    world.rows.drop(world.rows.rows[0])
    assert line.heard() == [wire.ForgottenMessage(session=session)]
    assert world.sessions.statistics.dropped == 1
    away = second.open()
    second.connection.lost()
    world.rows.drop(world.rows.rows[1])
    world.settle()
    line.say(resume(away, PROMPT))
    assert line.heard() == [wire.ForgottenMessage(session=away)]
    again = line.open(AFTER, len(PROMPT), known=4)
    line.say(draft(again, AFTER))
    assert line.heard()[0].token == TEXT[len(AFTER) + 2]


def test_who_is_away_for_too_long_is_forgotten():
    world = World()
    line = Wire(world)
    session = line.open()
    world.now = 1000.0
    world.sessions.tick()
    assert world.sessions.statistics.sessions == 1  # its client is connected
    line.connection.lost()
    world.now += 119
    world.sessions.tick()
    assert world.sessions.statistics.sessions == 1
    world.now += 1
    world.sessions.tick()
    assert world.sessions.statistics.sessions == 0
    assert world.rows.rows[0].is_closed
    line = Wire(world)
    line.say(resume(session, PROMPT))
    assert line.heard() == [wire.ForgottenMessage(session=session)]


def test_who_is_connected_and_sends_no_draft_keeps_its_session():
    """Check a client that is silent for 1,000 seconds.

    The scheduler may give its row to others meanwhile, but the session remains.
    """
    world = World()
    line = Wire(world)
    session = line.open()
    line.say(draft(session, PROMPT))
    line.heard()
    world.now = 1000.0
    world.sessions.tick()
    assert (world.rows.rows[0].is_away, world.sessions.statistics.sessions) == (False, 1)
    line.say(draft(session, AFTER, 2))
    assert isinstance(line.heard()[0], wire.VerdictMessage)
    assert len(world.rows.rows) == 1


# --- who may, and how much ------------------------------------------------------------------------


def test_a_session_of_somebody_else_does_not_exist():
    world = World()
    mine, foreign = Wire(world), Wire(world, "somebody else")
    session = mine.open()
    for message in (resume(session, PROMPT), draft(session, PROMPT)):
        foreign.say(message)
        assert foreign.heard() == [wire.ForgottenMessage(session=session)]
    foreign.say(wire.CloseMessage(session=session))
    assert foreign.heard() == []
    mine.say(draft(session, PROMPT))
    assert isinstance(mine.heard()[0], wire.VerdictMessage)


def test_close():
    world = World()
    line = Wire(world)
    session = line.open()
    line.say(wire.CloseMessage(session=session))
    line.say(wire.CloseMessage(session=session))
    assert line.heard() == []
    assert world.rows.rows[0].is_closed
    line.say(resume(session, PROMPT))
    assert line.heard() == [wire.ForgottenMessage(session=session)]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"version": 2}, "version"),
        ({"target": "another"}, "target"),
        ({"drafter": "x"}, "drafter"),
        ({"tokens": [99]}, "invalid"),
    ],
)
def test_texts_that_are_not_taken(more: dict[str, Any], code: str):
    line = Wire(World())
    tokens = more.pop("tokens", PROMPT)
    line.say(opening(tokens=wire.pack(tokens, "int32"), prompt=1, limit=4, **more))
    (refused,) = line.heard()
    assert refused.code == code
    assert line.open(target="t", drafter="d")


def test_no_new_texts_while_draining():
    world = World()
    line = Wire(world)
    message = opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40)
    line.say(message)
    session = line.heard()[0].session
    world.sessions.is_draining = True
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    assert line.heard()[0].code == "draining"
    line.say(message)  # a repeat: its session exists
    assert [type(answer) for answer in line.heard()] == [wire.OpenedMessage, wire.ReadyMessage]
    assert world.sessions.is_busy
    line.say(draft(session, PROMPT))
    assert isinstance(line.heard()[0], wire.VerdictMessage)


def test_an_engine_that_has_failed():
    world = World()
    line = Wire(world)
    world.rows.error = EngineError("it has failed")
    with pytest.raises(FrameError) as raised:
        line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    assert raised.value.code == 1011
    assert world.sessions.statistics.sessions == 0


def test_an_engine_that_is_full_and_the_other_texts_of_the_connection_go_on():
    world = World()
    line = Wire(world)
    first, second = line.open(), line.open()
    world.rows.error = QueueFullError("no row")
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    assert line.heard() == [wire.RefusedMessage(code="full", message="no row")]
    line.say(resume(second, PROMPT, received=3))  # needs another prefill
    assert line.heard() == [wire.RefusedMessage(code="full", message="no row", session=second)]
    line.say(resume(second, PROMPT, received=3))
    assert line.heard() == [wire.ForgottenMessage(session=second)]
    line.say(draft(first, PROMPT))
    assert isinstance(line.heard()[0], wire.VerdictMessage)
    assert world.sessions.statistics.sessions == 1


def test_who_is_away_makes_room():
    world = World()
    lines = [Wire(world) for _ in range(5)]
    sessions = [line.open() for line in lines[:4]]
    lines[4].say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    assert lines[4].heard()[0].code == "full"
    for number in (2, 1):
        world.now += 1
        lines[number].connection.lost()
    lines[4].open()
    lines[4].say(resume(sessions[2], PROMPT))
    assert lines[4].heard() == [wire.ForgottenMessage(session=sessions[2])]
    lines[4].say(resume(sessions[1], PROMPT))
    assert isinstance(lines[4].heard()[0], wire.ReadyMessage)


def test_a_text_that_has_ended_makes_room():
    world = World()
    lines = [Wire(world) for _ in range(5)]
    sessions = [line.open(limit=3) for line in lines[:4]]
    lines[0].connection.lost()
    lines[3].say(draft(sessions[3], PROMPT, right=4))
    assert lines[3].heard()[0].over == "length"
    lines[4].open()
    lines[3].say(resume(sessions[3], AFTER))
    assert lines[3].heard() == [wire.ForgottenMessage(session=sessions[3])]
    lines[3].say(resume(sessions[0], PROMPT))
    assert isinstance(lines[3].heard()[0], wire.ReadyMessage)


def test_one_owner_has_so_many_sessions_and_another_one_has_room():
    world = World(replace(TERMS, sessions=8, sessions_per_owner=None))
    lines = [Wire(world) for _ in range(5)]
    sessions = [line.open() for line in lines[:4]]  # half of all sessions
    lines[4].say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    (refused,) = lines[4].heard()
    assert refused.code == "full"
    assert refused.message.startswith("there are 4 sessions of this API key or address")
    foreign = Wire(world, owner="you")
    foreign_session = foreign.open()
    foreign.connection.lost()  # makes room only for the same owner
    lines[4].say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    assert lines[4].heard()[0].code == "full"
    lines[1].connection.lost()
    lines[4].open()
    lines[4].say(resume(sessions[1], PROMPT))
    assert lines[4].heard() == [wire.ForgottenMessage(session=sessions[1])]
    back = Wire(world, owner="you")
    back.say(resume(foreign_session, PROMPT))
    assert isinstance(back.heard()[0], wire.ReadyMessage)
    assert [row.owner for row in world.rows.rows] == ["me"] * 4 + ["you", "me"]


@pytest.mark.parametrize(("share_prefixes", "tenants"), [(False, ["me", "you"]), (True, ["", ""])])
def test_each_owner_is_a_tenant_unless_all_share_prefixes(share_prefixes, tenants):
    world = World(replace(TERMS, share_prefixes=share_prefixes))
    for owner in ("me", "you"):
        Wire(world, owner=owner, counted_as="the same address").open()
    assert [row.tenant for row in world.rows.rows] == tenants


def test_who_has_no_key_is_counted_by_the_address_and_a_trusted_proxy_is_not():
    world = World(replace(TERMS, sessions=9, sessions_per_owner=1))
    by_address = [
        Wire(world, owner="", counted_as=address)
        for address in ("10.0.0.1/32", "10.0.0.2/32", "", "")
    ]
    for line in by_address:
        line.open()
    again = Wire(world, owner="", counted_as="10.0.0.1/32")
    again.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=1, limit=4))
    assert again.heard()[0].code == "full"


def test_a_text_that_is_not_taken_needs_no_room():
    world = World()
    lines = [Wire(world) for _ in range(5)]
    sessions = [line.open() for line in lines[:4]]
    lines[0].connection.lost()
    lines[4].say(opening(tokens=wire.pack([99], "int32"), prompt=1, limit=4))
    assert lines[4].heard()[0].code == "invalid"
    lines[4].say(resume(sessions[0], PROMPT))
    assert isinstance(lines[4].heard()[0], wire.ReadyMessage)


def test_who_does_not_read_is_cut_off():
    world = World(Terms(nodes=NODES, depth=DEPTH, unsent_bytes=1000))
    line = Wire(world)
    session = line.open()
    line.say(draft(session, PROMPT))
    world.settle()
    for _ in range(100):
        line.say(draft(session, PROMPT))
    assert line.error is not None
    assert line.error.code == 4408
    assert 500 < sum(map(len, line.frames)) <= 1000
    assert world.sessions.statistics.away == 1


def test_what_is_told_comes_in_small_frames(monkeypatch):
    monkeypatch.setattr("specjax.serving.sessions.TOLD_BYTES", 16)
    line = Wire(World())
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40))
    _, *features, _ = line.heard()
    assert [(message.start, message.count) for message in features] == [
        (0, 2),
        (2, 1),
        (3, 2),
        (5, 1),
        (6, 1),
    ]


def test_between_two_frames_of_what_is_told_others_are_served(monkeypatch):
    monkeypatch.setattr("specjax.serving.sessions.TOLD_BYTES", 8)
    world = World(chunk=100)
    line, second = Wire(world), Wire(world)
    line.say(opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40))
    world.rows.speak()
    for _ in range(4):
        world.work.popleft()()
    messages: list[Any] = [wire.decode_down(frame) for frame in line.frames]
    features = messages[1:]
    assert 1 <= len(features) < len(PROMPT) - 1
    line.say(draft(bytes(16), PROMPT))  # before Ready
    assert getattr(wire.decode_down(line.frames[-1]), "code", "") == "not_ready"
    received = features[-1].start + 1
    # The rest comes over another connection.
    second.say(resume(bytes(16), PROMPT, received=received))
    *rest, ready = second.heard()
    assert [(message.start, message.count, message.epoch) for message in rest] == [
        (i, 1, 1) for i in range(received, len(PROMPT) - 1)
    ]
    assert ready == wire.ReadyMessage(session=bytes(16), epoch=1, length=len(PROMPT))
    assert len(world.rows.rows) == 1


def test_what_may_wait_is_bounded_whatever_is_told():
    assert Terms(capacity=4096, tells={"entries": (64, 1024)}).max_unsent_bytes == 2**28


# --- whole texts over a bad link ------------------------------------------------------------------


class Client:
    """A client that follows the protocol, drafts badly, and checks what it receives."""

    def __init__(self, rng: random.Random, prompt: list[int], limit: int) -> None:
        self.rng, self.prompt, self.limit = rng, prompt, limit
        self.text, self.told, self.over = list(prompt), [], False
        self.session: bytes | None = None
        self.epoch = self.sequence = self.silent = 0
        self.waiting: wire.DraftMessage | None = None
        self.nonce = rng.randbytes(16)

    def begin(self) -> wire.UpMessage:
        """Return the first message over a connection, or after a silence."""
        if self.session is None:
            tokens, received = wire.pack(self.text, "int32"), len(self.told)
            return wire.OpenMessage(
                nonce=self.nonce,
                tokens=tokens,
                prompt=len(self.prompt),
                limit=self.limit,
                known=received,
            )
        self.epoch += 1
        return resume(self.session, self.text, len(self.told), self.epoch - 1)

    def _draft(self) -> wire.UpMessage:
        if len(self.told) < len(self.text) - 1:  # a frame was lost
            return self.begin()
        if self.waiting is None:
            self.sequence += 1
            right = self.rng.randrange(4)
            self.waiting = draft(self.session or b"", self.text, self.sequence, right=right)
        self.waiting = msgspec.structs.replace(self.waiting, epoch=self.epoch)
        return self.waiting

    def hear(self, message: wire.DownMessage) -> wire.UpMessage | None:
        """Return the answer to a message."""
        if isinstance(message, wire.OpenedMessage):
            if self.session is None:
                self.session, self.epoch, self.sequence, self.waiting = message.session, 0, 0, None
            return None
        if isinstance(message, wire.RefusedMessage) or message.session != self.session:
            return None
        if isinstance(message, wire.ForgottenMessage):
            self.session, self.nonce = None, self.rng.randbytes(16)
            return self.begin()
        if message.epoch < self.epoch:
            return None
        self.epoch = message.epoch
        if isinstance(message, wire.ToldMessage):
            self._tell(message.start, message.arrays)
        elif isinstance(message, wire.ReadyMessage):
            if message.length == len(self.text):
                return self._draft()
            return self.begin()
        elif isinstance(message, wire.ResyncMessage):
            raise AssertionError(
                "a client that follows the protocol has the server's text, or less"
            )
        elif self.waiting is not None and message.sequence == self.sequence:
            return self._follow(message)
        return None

    def _tell(self, start: int, arrays: Any) -> None:
        if start <= len(self.told):  # otherwise an earlier frame was lost
            self.told += wire.unpack(arrays["hidden"]).tolist()[len(self.told) - start :]

    def _follow(self, verdict: wire.VerdictMessage) -> wire.UpMessage | None:
        assert self.waiting is not None
        tokens = wire.unpack(self.waiting.tokens).tolist()
        self._tell(len(self.text) - 1, verdict.arrays)
        self.text += [*(tokens[node] for node in verdict.accepted), verdict.token]
        self.waiting, self.over = None, bool(verdict.over)
        return None if self.over else self._draft()


class Link:
    """Frames in transit. Some are lost, doubled or late."""

    def __init__(self, rng: random.Random, badness: float) -> None:
        self.rng, self.badness = rng, badness
        self.frames: list[tuple[int, int, Any]] = []

    def put(self, now: int, item: Any) -> None:
        weights = (1 - self.badness, self.badness / 2, self.badness / 2)
        (copies,) = self.rng.choices((1, 0, 2), weights)
        for _ in range(copies):
            late = self.rng.randrange(8) if self.rng.random() < self.badness else 1
            self.frames.append((now + late, len(self.frames), item))

    def take(self, now: int) -> list[Any]:
        arrived = [frame for frame in self.frames if frame[0] <= now]
        arrived.sort(key=lambda frame: frame[:2])
        self.frames = [frame for frame in self.frames if frame[0] > now]
        return [item for _, _, item in arrived]


def play(seed: int, badness: float) -> tuple[list[int], list[int], World]:
    """Run a client over a bad link, and return its text, the expected text and the world."""
    rng = random.Random(seed)
    # There are many sessions, because the server does not notice every lost connection.
    world = World(replace(TERMS, sessions=1000))
    prompt = [rng.randrange(49) for _ in range(rng.randrange(1, 9))]
    client = Client(rng, prompt, rng.randrange(1, 60))
    up, down = Link(rng, badness), Link(rng, badness)

    def connect() -> Any:
        connections: list[Any] = []

        def send(frame: bytes) -> None:
            down.put(now, (connections[0], frame))

        connections.append(world.sessions.connect("me", send, lambda error: None))
        return connections[0]

    now, line = 0, None
    while not client.over:
        now += 1
        assert now < 20_000, "it does not end"
        if line is None:
            line = connect()
            up.put(now, (line, wire.encode(client.begin())))
            client.silent = 0
        for connection, frame in up.take(now):
            connection.receive(frame)
        if rng.random() < 0.7:
            world.settle(rng.randrange(3))
        answers = [
            client.hear(wire.decode_down(frame))
            for connection, frame in down.take(now)
            if connection is line
        ]
        client.silent = 0 if answers else client.silent + 1
        for answer in filter(None, answers):
            up.put(now, (line, wire.encode(answer)))
        if rng.random() < badness / 20 or client.silent > 30:
            if rng.random() < 0.8:  # otherwise the server does not notice
                line.lost()
            line = None
        if world.rows.rows and rng.random() < badness / 50:
            world.rows.drop(rng.choice(world.rows.rows))
        world.now += 1
        world.sessions.tick()
    assert client.told == [told_of(client.text[: i + 1]) for i in range(len(client.text) - 1)]
    return client.text, whole(prompt, client.limit), world


@pytest.mark.full
@pytest.mark.parametrize("badness", [0.0, 0.1, 0.4])
def test_texts_over_a_bad_link_are_the_targets_own(badness: float):
    resumes = 0
    for seed in range(60):
        text, expected, world = play(seed, badness)
        assert text == expected, seed
        resumes += world.sessions.statistics.resumes
    assert resumes > 60 if badness else resumes == 0


@pytest.mark.thorough
def test_thousands_of_them():
    for seed in range(1000, 5000):
        text, expected, _ = play(seed, (seed % 10) / 12)
        assert text == expected, seed
