"""Tests of messages: each is decoded as it was encoded, and invalid frames are refused."""

from typing import Any

import msgspec
import numpy as np
import pytest

from specjax import wire
from specjax.wire import FrameError, pack

ID = bytes(range(16))
OPEN = wire.OpenMessage(
    nonce=ID,
    tokens=pack([5, 6, 7], "int32"),
    prompt=2,
    limit=9,
    seed=2**63 - 1,
    eos=[2],
    precision="int8",
    known=1,
)
DRAFT = wire.DraftMessage(
    session=ID,
    epoch=1,
    sequence=2,
    base=3,
    digest=bytes(8),
    tokens=pack([7, 8, 9], "int32"),
    parents=pack([255, 0, 0], "uint8"),
)
RESUME = wire.ResumeMessage(session=ID, epoch=0, base=3, digest=bytes(8), known=2)
UP = [OPEN, DRAFT, RESUME, wire.CloseMessage(session=ID)]
TOLD = wire.ToldMessage(
    session=ID, epoch=0, start=0, count=2, arrays={"hidden": pack(np.ones((2, 4)), "float16")}
)
VERDICT = wire.VerdictMessage(
    session=ID,
    epoch=0,
    sequence=1,
    accepted=[1, 3],
    token=4,
    arrays={"hidden": pack(np.ones((3, 4)), "int8")},
    seconds=0.5,
)
DOWN = [
    wire.OpenedMessage(
        session=ID, epoch=0, nodes=64, depth=16, capacity=4096, tells={"hidden": [4], "last": []}
    ),
    TOLD,
    wire.ReadyMessage(session=ID, epoch=0, length=3),
    VERDICT,
    wire.ResyncMessage(session=ID, epoch=0, length=3, tail=pack([], "int32")),
    wire.ForgottenMessage(session=ID),
    wire.RefusedMessage(code="busy", message="wait"),
]


@pytest.mark.parametrize("message", UP, ids=lambda message: type(message).__name__)
def test_up_and_back(message: Any):
    assert wire.decode_up(wire.encode(message)) == message
    with pytest.raises(FrameError):
        wire.decode_down(wire.encode(message))


@pytest.mark.parametrize("message", DOWN, ids=lambda message: type(message).__name__)
def test_down_and_back(message: Any):
    assert wire.decode_down(wire.encode(message)) == message
    with pytest.raises(FrameError):
        wire.decode_up(wire.encode(message))


def test_a_draft_is_small():
    nodes = range(62)
    parents = pack([255, *nodes[:-1]], "uint8")
    draft = msgspec.structs.replace(
        DRAFT, tokens=pack([150_000 + node for node in nodes], "int32"), parents=parents
    )
    assert len(wire.encode(draft)) < 450


def changed(message: Any, **values: Any) -> bytes:
    """Return the frame of a message with some values replaced."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(wire.encode(message)) | values)


def raw(array: Any, dtype: Any = "int32") -> Any:
    packed = pack(array, dtype)
    return [packed.dtype, list(packed.shape), packed.data]


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (OPEN, {"more": 1}),
        (OPEN, {"type": "draft"}),
        (OPEN, {"type": 3}),
        (OPEN, {"nonce": bytes(15)}),
        *(
            (OPEN, {"temperature": value})
            for value in (-1.0, float("nan"), float("inf"), "1", None)
        ),
        *((OPEN, {"top_p": value}) for value in (-0.1, 1.1, float("nan"))),
        *((OPEN, {"min_p": value}) for value in (-0.1, 1.1, float("nan"))),
        *((OPEN, {"top_k": value}) for value in (-1, 2**31, 1.5)),
        *((OPEN, {"seed": value}) for value in (-1, 2**63, 2**64 - 1)),
        *((OPEN, {"prompt": value}) for value in (0, 4)),
        *((OPEN, {"limit": value}) for value in (-1, 2**20 + 1)),
        (OPEN, {"eos": [1] * 65}),
        (OPEN, {"eos": [-1]}),
        (OPEN, {"target": "x" * 129}),
        (OPEN, {"precision": "float64"}),
        (OPEN, {"tokens": raw([])}),
        (OPEN, {"tokens": raw([-1, 2, 3])}),
        (OPEN, {"tokens": raw([[1, 2, 3]])}),
        (OPEN, {"tokens": raw([1, 2, 3], "float32")}),
        (OPEN, {"tokens": raw([1, 2, 3], "uint8")}),
        (OPEN, {"tokens": raw(range(3))[:2]}),
        (OPEN, {"tokens": [*raw(range(3)), 0]}),
        (OPEN, {"tokens": ["int32", [4], bytes(12)]}),
        (OPEN, {"tokens": ["int32", [2**20], bytes(12)]}),
        (DRAFT, {"session": bytes(15)}),
        (DRAFT, {"digest": bytes(9)}),
        (DRAFT, {"sequence": 0}),
        (DRAFT, {"epoch": 2**53}),
        (DRAFT, {"base": 0}),
        (DRAFT, {"parents": raw([255, 0], "uint8")}),
        (DRAFT, {"parents": raw([0, 0, 0], "uint8")}),
        (DRAFT, {"parents": raw([255, 1, 0], "uint8")}),
        (DRAFT, {"parents": raw([255, 0, 2], "uint8")}),
        (DRAFT, {"parents": raw([255, 0, 255], "uint8")}),
        (DRAFT, {"parents": raw([255, 0, 0], "int32")}),
        (DRAFT, {"tokens": raw(range(256)), "parents": raw([255] + [0] * 255, "uint8")}),
        (RESUME, {"known": -1}),
    ],
)
def test_what_is_refused_of_clients(message: Any, values: dict[str, Any]):
    with pytest.raises(FrameError) as error:
        wire.decode_up(changed(message, **values))
    assert error.value.code == 4400
    assert error.value.message


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (TOLD, {"count": 3}),
        (TOLD, {"arrays": {"hidden": raw([1, 2])}}),
        (TOLD, {"arrays": {str(number): raw([1, 2], "float32") for number in range(17)}}),
        (VERDICT, {"accepted": [1]}),
        (VERDICT, {"accepted": [0, 1]}),
        (VERDICT, {"token": -1}),
        (VERDICT, {"over": "soon"}),
        (VERDICT, {"seconds": -1.0}),
        (DOWN[0], {"nodes": 256}),
        (DOWN[4], {"tail": raw([1, 2, 3, 4])}),
    ],
)
def test_what_is_refused_of_servers(message: Any, values: dict[str, Any]):
    with pytest.raises(FrameError) as error:
        wire.decode_down(changed(message, **values))
    assert error.value.code == 4400


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x91" * 10_000, b"\x80", wire.encode(OPEN)[:-1], wire.encode(OPEN) + b"\x00"],
)
def test_what_is_no_message(frame: bytes):
    with pytest.raises(FrameError) as error:
        wire.decode_up(frame)
    assert error.value.code == 4400


def test_names_that_are_no_text():
    frame = (
        wire.encode(OPEN)
        .replace(b"\xa4int8", b"\xa4\xff\xff\xff\xff")
        .replace(b"seed", b"\xff\xfe\xfd\xfc")
    )
    with pytest.raises(FrameError):
        wire.decode_up(frame)


def test_a_frame_that_is_too_large():
    with pytest.raises(FrameError) as error:
        wire.decode_up(wire.encode(OPEN), most=50)
    assert error.value.code == 1009


def test_a_value_that_is_missing():
    frame = msgspec.msgpack.decode(wire.encode(DRAFT))
    del frame["digest"]
    with pytest.raises(FrameError, match="digest"):
        wire.decode_up(msgspec.msgpack.encode(frame))
