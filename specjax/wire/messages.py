"""The messages, each a frame: msgpack of a struct whose key ``type`` says which it is.

Nothing is taken that is not declared here, and everything has a bound: what comes out of `decode_up` and `decode_down` has
sizes that fit each other and numbers within their ranges. What a message means is told in `specjax.serving.sessions`.
"""

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from specjax.wire.arrays import ArrayBytes, Precision, unpack

VERSION = 1
"""Of the protocol. A server refuses another one."""

PATH = "/v1/drafts"
"""Where a server takes drafts of clients."""

MOST_NODES = 255
"""Nodes of a draft, the root among them: a parent is written in a byte, and 255 says that there is none."""

MOST_UP = 2**20
"""Bytes of a frame that goes up."""

MOST_DOWN = 2**25
"""Bytes of a frame that comes down: what is told of the tokens of a verdict."""

MOST_ARRAYS = 16
"""Arrays of a message."""

NO_PARENT = 255
"""The parent of the root."""

_Count = Annotated[int, Meta(ge=0, le=2**20)]
_Token = Annotated[int, Meta(ge=0, lt=2**31)]
_Number = Annotated[int, Meta(ge=0, lt=2**53)]  # epochs and sequences: what JavaScript counts exactly
_Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
_Name = Annotated[str, Meta(max_length=128)]
_Arrays = Annotated[dict[_Name, ArrayBytes], Meta(max_length=MOST_ARRAYS)]


class FrameError(Exception):
    """A frame for which a connection is closed.

    Attributes:
        code: with which: 4400 what was sent cannot be read or is out of bounds, 1009 it is too large, 4408 what is sent is not
            taken, 1011 the engine has failed.
        message: why.

    Examples:
        >>> from specjax.wire import FrameError, decode_up
        >>> try:
        ...     decode_up(b"hello")
        ... except FrameError as error:
        ...     print(error.code)
        4400
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class _WireMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """What all messages are."""


class OpenMessage(_WireMessage, frozen=True, kw_only=True, tag="open"):
    """Up: begin a text, or go on with one that the server does not have.

    Attributes:
        version: `VERSION`.
        nonce: 16 bytes that no other Open has: so one that comes twice begins one text.
        tokens: ``[T]`` int32 the prompt, and whatever of the text is committed already.
        prompt: tokens of it that are the prompt.
        limit: most tokens that follow the prompt.
        temperature: 0 is greedy.
        top_k: 0: off.
        top_p: 1: off.
        min_p: 0: off.
        seed: that fixes the text.
        eos: token ids that end it; None: the target's own.
        target: fingerprint of the target that is meant; empty: any.
        drafter: likewise of the drafter.
        precision: of what comes down.
        known: how many tokens, from the first on, the client has been told of.

    Examples:
        >>> from specjax.wire import OpenMessage, decode_up, encode, pack
        >>> message = OpenMessage(nonce=bytes(16), tokens=pack([5, 6, 7], "int32"), prompt=3, limit=64)
        >>> decode_up(encode(message)) == message
        True
    """

    version: _Count = VERSION
    nonce: _Id
    tokens: ArrayBytes
    prompt: _Count
    limit: _Count
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_k: _Token = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    eos: Annotated[list[_Token], Meta(max_length=64)] | None = None
    target: _Name = ""
    drafter: _Name = ""
    precision: Precision = "float32"
    known: _Count = 0

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        _check(self.tokens, "tokens", "int32", axes=1)
        if not 1 <= self.prompt <= self.tokens.shape[0]:
            raise ValueError(f"prompt={self.prompt}: of {self.tokens.shape[0]} tokens")
        if not all(map(math.isfinite, (self.temperature, self.top_p, self.min_p))):
            raise ValueError("temperature, top_p, min_p: must be finite")


class DraftMessage(_WireMessage, frozen=True, kw_only=True, tag="draft"):
    """Up: a tree of tokens to verify.

    Attributes:
        session: which text.
        epoch: the newest.
        sequence: 1 for the session's first draft, and one more for every other. A draft that is sent again keeps its number.
        base: committed tokens, the root among them.
        digest: of those, `specjax.wire.digest`.
        tokens: ``[n]`` int32 the root, which is the newest committed token, and what is drafted below it.
        parents: ``[n]`` uint8 each node's parent, which comes before it. The root's is `NO_PARENT`.

    Examples:
        >>> from specjax.wire import DraftMessage, digest, encode, pack
        >>> tokens, parents = range(62), [255, *range(61)]
        >>> draft = DraftMessage(
        ...     session=bytes(16),
        ...     epoch=0,
        ...     sequence=1,
        ...     base=1,
        ...     digest=digest([0]),
        ...     tokens=pack(tokens, "int32"),
        ...     parents=pack(parents, "uint8"),
        ... )
        >>> len(encode(draft))
        425
    """

    session: _Id
    epoch: _Number
    sequence: Annotated[int, Meta(ge=1, lt=2**53)]
    base: Annotated[int, Meta(ge=1, le=2**20)]
    digest: _Digest
    tokens: ArrayBytes
    parents: ArrayBytes

    def __post_init__(self) -> None:
        """Refuse what is no tree."""
        _check(self.tokens, "tokens", "int32", axes=1, most=MOST_NODES)
        _check(self.parents, "parents", "uint8", axes=1, most=MOST_NODES)
        if self.tokens.shape != self.parents.shape:
            raise ValueError(f"parents: {self.parents.shape[0]} of {self.tokens.shape[0]} tokens")
        root, *others = self.parents.data
        if root != NO_PARENT or any(parent >= node for node, parent in enumerate(others, 1)):
            raise ValueError("parents: a parent comes before its children, and the root has none")


class ResumeMessage(_WireMessage, frozen=True, kw_only=True, tag="resume"):
    """Up: go on with a text over this connection.

    Attributes:
        session: which text.
        epoch: one more than the newest before. Sent again, it keeps its number.
        base: committed tokens that the client has.
        digest: of those.
        known: how many of them it has been told of, from the first on.

    Examples:
        >>> from specjax.wire import ResumeMessage, digest
        >>> ResumeMessage(session=bytes(16), epoch=1, base=2, digest=digest([5, 6]), known=1).base
        2
    """

    session: _Id
    epoch: _Number
    base: Annotated[int, Meta(ge=1, le=2**20)]
    digest: _Digest
    known: _Count


class CloseMessage(_WireMessage, frozen=True, kw_only=True, tag="close"):
    """Up: the text is not wanted any more.

    Attributes:
        session: which.

    Examples:
        >>> from specjax.wire import CloseMessage, encode
        >>> encode(CloseMessage(session=bytes(16)))[:12]
        b'\\x82\\xa4type\\xa5close'
    """

    session: _Id


class OpenedMessage(_WireMessage, frozen=True, kw_only=True, tag="opened"):
    """Down: a text has begun.

    Attributes:
        session: what it is called from now on.
        epoch: 0. Greater where it says that a Resume was heard, and the text is still read; then nothing begins.
        nodes: most of a draft, the root among them.
        depth: most of a draft, the root's being 0.
        capacity: most tokens of a text.
        tells: arrays that the server tells of each token, with the shape of one token.

    Examples:
        >>> from specjax.wire import OpenedMessage
        >>> OpenedMessage(session=bytes(16), epoch=0, nodes=64, depth=16, capacity=4096, tells={}).nodes
        64
    """

    session: _Id
    epoch: _Number
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)]
    depth: Annotated[int, Meta(ge=0, lt=MOST_NODES)]
    capacity: _Count
    tells: Annotated[dict[_Name, Annotated[list[_Count], Meta(max_length=3)]], Meta(max_length=MOST_ARRAYS)]


class ToldMessage(_WireMessage, frozen=True, kw_only=True, tag="told"):
    """Down: what the drafter must be told of tokens that the target has read.

    Attributes:
        session: of which text.
        epoch: of the session.
        start: the first token.
        count: how many.
        arrays: ``[count, ...]`` each.

    Examples:
        >>> from specjax.wire import ToldMessage, pack
        >>> arrays = {"hidden": pack(np.zeros((2, 4)), "float16")}
        >>> ToldMessage(session=bytes(16), epoch=0, start=0, count=2, arrays=arrays).arrays["hidden"].shape
        (2, 4)
    """

    session: _Id
    epoch: _Number
    start: _Count
    count: _Count
    arrays: _Arrays

    def __post_init__(self) -> None:
        """Refuse arrays of another length."""
        _check_arrays(self.arrays, self.count)


class ReadyMessage(_WireMessage, frozen=True, kw_only=True, tag="ready"):
    """Down: a draft may come.

    Attributes:
        session: of which text.
        epoch: of the session.
        length: committed tokens below which it is expected.

    Examples:
        >>> from specjax.wire import ReadyMessage
        >>> ReadyMessage(session=bytes(16), epoch=0, length=3).length
        3
    """

    session: _Id
    epoch: _Number
    length: _Count


class VerdictMessage(_WireMessage, frozen=True, kw_only=True, tag="verdict"):
    """Down: what was accepted of a draft.

    Attributes:
        session: of which text.
        epoch: of the session.
        sequence: of the draft.
        accepted: nodes below the root on the accepted path.
        token: the one that follows them.
        arrays: ``[1 + len(accepted), ...]`` what is told of the root and the accepted tokens.
        over: "stop" or "length" where the text has ended with this token.
        seconds: that verification took.

    Examples:
        >>> from specjax.wire import VerdictMessage
        >>> verdict = VerdictMessage(session=bytes(16), epoch=0, sequence=1, accepted=[1, 3], token=9)
        >>> 1 + len(verdict.accepted)  # tokens
        3
    """

    session: _Id
    epoch: _Number
    sequence: _Number
    accepted: Annotated[list[Annotated[int, Meta(ge=1, lt=MOST_NODES)]], Meta(max_length=MOST_NODES)]
    token: _Token
    arrays: _Arrays = {}
    over: Literal["", "stop", "length"] = ""
    seconds: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        """Refuse arrays of another length."""
        _check_arrays(self.arrays, 1 + len(self.accepted))


class ResyncMessage(_WireMessage, frozen=True, kw_only=True, tag="resync"):
    """Down: a draft was below another text than the server's.

    Attributes:
        session: of which text.
        epoch: of the session.
        length: committed tokens of the server's text.
        tail: ``[t]`` int32 the last of them. They replace whatever the client has from ``length - t`` on.

    Examples:
        >>> from specjax.wire import ResyncMessage, pack
        >>> resync = ResyncMessage(session=bytes(16), epoch=0, length=5, tail=pack([8, 9], "int32"))
        >>> resync.length - resync.tail.shape[0]  # so many tokens stay
        3
    """

    session: _Id
    epoch: _Number
    length: _Count
    tail: ArrayBytes

    def __post_init__(self) -> None:
        """Refuse what are no tokens."""
        _check(self.tail, "tail", "int32", axes=1, least=0)
        if self.tail.shape[0] > self.length:
            raise ValueError(f"tail: {self.tail.shape[0]} of {self.length} tokens")


class ForgottenMessage(_WireMessage, frozen=True, kw_only=True, tag="forgotten"):
    """Down: the server does not have the text (any more). Open it with all that is committed.

    Attributes:
        session: which.

    Examples:
        >>> from specjax.wire import ForgottenMessage
        >>> len(ForgottenMessage(session=bytes(16)).session)
        16
    """

    session: _Id


class RefusedMessage(_WireMessage, frozen=True, kw_only=True, tag="refused"):
    """Down: a message that was not followed. The connection stays.

    Attributes:
        code: a word for programs.
        message: what is wrong.
        session: of which text it was; empty: of none.

    Examples:
        >>> from specjax.wire import RefusedMessage
        >>> RefusedMessage(code="old_epoch", message="epoch=0: this session is at 1").code
        'old_epoch'
    """

    code: Annotated[str, Meta(max_length=32)]
    message: Annotated[str, Meta(max_length=1000)]
    session: Annotated[bytes, Meta(max_length=16)] = b""


UpMessage = OpenMessage | DraftMessage | ResumeMessage | CloseMessage
"""What a client sends."""

DownMessage = OpenedMessage | ToldMessage | ReadyMessage | VerdictMessage | ResyncMessage | ForgottenMessage | RefusedMessage
"""What a server sends."""

_encoder = msgspec.msgpack.Encoder()
_up, _down = msgspec.msgpack.Decoder(UpMessage), msgspec.msgpack.Decoder(DownMessage)
_Decoded = TypeVar("_Decoded")


def encode(message: UpMessage | DownMessage) -> bytes:
    """A message as a frame.

    Examples:
        >>> from specjax.wire import ForgottenMessage, decode_down, encode
        >>> decode_down(encode(ForgottenMessage(session=bytes(16)))).session == bytes(16)
        True
    """
    return _encoder.encode(message)


def decode_up(frame: bytes, most: int = MOST_UP) -> UpMessage:
    """The message that a client has sent.

    Args:
        frame: it.
        most: bytes that it may have.

    Raises:
        FrameError: 1009 it has more; 4400 it cannot be read, or something in it is out of bounds.

    Examples:
        >>> from specjax.wire import CloseMessage, decode_up, encode
        >>> decode_up(encode(CloseMessage(session=bytes(16))))
        CloseMessage(session=b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00')
    """
    return _decode(_up, frame, most)


def decode_down(frame: bytes, most: int = MOST_DOWN) -> DownMessage:
    """The message that a server has sent; otherwise as `decode_up`.

    Examples:
        >>> from specjax.wire import RefusedMessage, decode_down, encode
        >>> decode_down(encode(RefusedMessage(code="busy", message=""))).code
        'busy'
    """
    return _decode(_down, frame, most)


def _decode(decoder: "msgspec.msgpack.Decoder[_Decoded]", frame: bytes, most: int) -> _Decoded:
    if len(frame) > most:
        raise FrameError(1009, f"a frame of {len(frame)} bytes; at most {most} are taken")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise FrameError(4400, str(error)) from None


def _check(packed: ArrayBytes, name: str, dtype: str, *, axes: int, least: int = 1, most: int = 2**18) -> None:
    """Token ids, or parents: of that kind, and none of them negative."""
    if packed.dtype != dtype or len(packed.shape) != axes or not least <= packed.shape[0] <= most:
        raise ValueError(f"{name}: {packed.dtype} {list(packed.shape)}; must be {least} to {most} of {dtype}")
    if dtype == "int32" and bool(np.any(unpack(packed) < 0)):
        raise ValueError(f"{name}: has a negative number")


def _check_arrays(arrays: dict[str, Any], count: int) -> None:
    """Numbers of so many tokens."""
    for name, packed in arrays.items():
        if packed.dtype not in ("float32", "float16", "int8") or packed.shape[0] != count:
            raise ValueError(f"{name}: {packed.dtype} {list(packed.shape)}; must be numbers of {count} tokens")
