"""The messages of the client protocol. A frame is one message, a struct in msgpack.

The key ``type`` names the struct. Decoding refuses fields that are not declared here. Every field
has a bound, so a message that `decode_up` or `decode_down` returns has numbers within their ranges
and arrays whose sizes fit each other. `specjax.serving.sessions` explains what each message means.

Messages of a client go up, messages of a server come down.
"""

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from specjax.wire.arrays import ArrayBytes, Precision, unpack

VERSION = 1
"""The version of the protocol. A server refuses any other version."""

PATH = "/v1/drafts"
"""The path of a server's URL at which clients connect."""

MOST_NODES = 255
"""The maximum number of nodes of a draft, with the root. A parent is one byte; 255 means none."""

MOST_UP = 2**20
"""The maximum size in bytes of a frame from a client."""

MOST_DOWN = 2**25
"""The maximum size in bytes of a frame from a server, which may hold hidden states."""

MOST_ARRAYS = 16
"""The maximum number of arrays of a message."""

MOST_GRAMMAR = 2**18
"""The maximum number of characters of a grammar."""

NO_PARENT = 255
"""The value that stands for the parent of the root, which has none."""

_Count = Annotated[int, Meta(ge=0, le=2**20)]
_Token = Annotated[int, Meta(ge=0, lt=2**31)]
# An epoch or a sequence, as far as JavaScript counts exactly.
_Number = Annotated[int, Meta(ge=0, lt=2**53)]
_Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
_Name = Annotated[str, Meta(max_length=128)]
_Arrays = Annotated[dict[_Name, ArrayBytes], Meta(max_length=MOST_ARRAYS)]


class FrameError(Exception):
    """An error for which the connection is closed.

    Attributes:
        code: the WebSocket close code: 4400 if a frame cannot be decoded or a field is out of
            bounds, 1009 if a frame is too large, 4408 if the client does not read what it is sent,
            1011 if the engine has failed.
        message: the reason.

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
    """The base of all messages."""


class OpenMessage(_WireMessage, frozen=True, kw_only=True, tag="open"):
    """The client's request to start a text, or to continue one that the server does not have.

    Attributes:
        version: `VERSION`.
        nonce: 16 bytes that are unique to this message. A message that is sent again keeps its
            nonce, so the server starts only one text.
        tokens: ``[T]`` int32 token ids of the prompt and of the output that is committed already.
        prompt: how many of the tokens are the prompt.
        limit: the maximum number of tokens that follow the prompt.
        temperature: the sampling temperature; 0 is greedy.
        top_k: the top-k limit; 0 turns it off.
        top_p: the top-p limit; 1 turns it off.
        min_p: the min-p limit; 0 turns it off.
        seed: the random seed. It fixes the text.
        eos: the token ids that end the text; None for those of the target.
        target: the fingerprint of the expected target; empty for any.
        drafter: the fingerprint of the expected drafter; empty for any.
        precision: the format of the hidden states that the server sends.
        known: the client has the hidden states of this many tokens, counted from the first.
        grammar: the grammar that the text must satisfy, as `specjax.grammars.Grammar.source`. Not
            sent without a grammar.

    Examples:
        >>> from specjax.wire import OpenMessage, decode_up, encode, pack
        >>> tokens = pack([5, 6, 7], "int32")
        >>> message = OpenMessage(nonce=bytes(16), tokens=tokens, prompt=3, limit=64)
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
    grammar: Annotated[str, Meta(max_length=MOST_GRAMMAR)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        _check(self.tokens, "tokens", "int32", axes=1)
        if not 1 <= self.prompt <= self.tokens.shape[0]:
            raise ValueError(f"prompt={self.prompt}: there are {self.tokens.shape[0]} tokens")
        if not all(map(math.isfinite, (self.temperature, self.top_p, self.min_p))):
            raise ValueError("temperature, top_p, min_p: they must be finite")


class DraftMessage(_WireMessage, frozen=True, kw_only=True, tag="draft"):
    """The client's draft: a tree of tokens for the target to verify.

    Attributes:
        session: the id of the session.
        epoch: the newest epoch of the session.
        sequence: the number of the draft, counted from 1 in each session. A draft that is sent
            again keeps its number.
        base: the number of committed tokens, with the root.
        digest: the `specjax.wire.digest` of the committed tokens.
        tokens: ``[n]`` int32 token ids. The first is the root, which is the newest committed token;
            the others are drafted.
        parents: ``[n]`` uint8 index of each node's parent, which comes before the node. The root
            has `NO_PARENT`.

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
        """Raise ValueError if the nodes are not a tree."""
        _check(self.tokens, "tokens", "int32", axes=1, maximum=MOST_NODES)
        _check(self.parents, "parents", "uint8", axes=1, maximum=MOST_NODES)
        if self.tokens.shape != self.parents.shape:
            raise ValueError(
                f"parents: there are {self.parents.shape[0]}, for {self.tokens.shape[0]} tokens"
            )
        root, *below_root = self.parents.data
        if root != NO_PARENT or any(parent >= node for node, parent in enumerate(below_root, 1)):
            raise ValueError(
                "parents: a parent must come before its children, and the root must have none"
            )


class ResumeMessage(_WireMessage, frozen=True, kw_only=True, tag="resume"):
    """The client's request to continue a session over this connection.

    Attributes:
        session: the id of the session.
        epoch: the session's newest epoch plus one. A message that is sent again keeps its epoch.
        base: how many committed tokens the client has.
        digest: the `specjax.wire.digest` of these tokens.
        known: the client has the hidden states of this many tokens, counted from the first.

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
    """The client's message that it does not want the text any more.

    Attributes:
        session: the id of the session.

    Examples:
        >>> from specjax.wire import CloseMessage, encode
        >>> encode(CloseMessage(session=bytes(16)))[:12]
        b'\\x82\\xa4type\\xa5close'
    """

    session: _Id


class OpenedMessage(_WireMessage, frozen=True, kw_only=True, tag="opened"):
    """The server's answer that a text has been accepted.

    Attributes:
        session: the id of the new session.
        epoch: 0 for a new session. A greater epoch acknowledges a `ResumeMessage` whose session is
            still being prefilled.
        nodes: the maximum number of nodes of a draft, with the root.
        depth: the maximum depth of a draft; the root has depth 0.
        capacity: the maximum number of tokens of a text, prompt and output.
        tells: the arrays of hidden states that the server sends: name and shape of one token.

    Examples:
        >>> from specjax.wire import OpenedMessage
        >>> bounds = {"nodes": 64, "depth": 16, "capacity": 4096}
        >>> OpenedMessage(session=bytes(16), epoch=0, tells={}, **bounds).nodes
        64
    """

    session: _Id
    epoch: _Number
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)]
    depth: Annotated[int, Meta(ge=0, lt=MOST_NODES)]
    capacity: _Count
    tells: Annotated[
        dict[_Name, Annotated[list[_Count], Meta(max_length=3)]], Meta(max_length=MOST_ARRAYS)
    ]


class ToldMessage(_WireMessage, frozen=True, kw_only=True, tag="told"):
    """The server's hidden states of tokens that the target has read, for the drafter.

    Attributes:
        session: the id of the session.
        epoch: the epoch of the session.
        start: the position of the first token.
        count: the number of tokens.
        arrays: the hidden states by name, each ``[count, ...]``.

    Examples:
        >>> from specjax.wire import ToldMessage, pack
        >>> arrays = {"hidden": pack(np.zeros((2, 4)), "float16")}
        >>> message = ToldMessage(session=bytes(16), epoch=0, start=0, count=2, arrays=arrays)
        >>> message.arrays["hidden"].shape
        (2, 4)
    """

    session: _Id
    epoch: _Number
    start: _Count
    count: _Count
    arrays: _Arrays

    def __post_init__(self) -> None:
        """Raise ValueError if an array has another number of tokens."""
        _check_arrays(self.arrays, self.count)


class ReadyMessage(_WireMessage, frozen=True, kw_only=True, tag="ready"):
    """The server's message that it is ready to verify a draft.

    Attributes:
        session: the id of the session.
        epoch: the epoch of the session.
        length: the number of committed tokens, which the draft must follow.

    Examples:
        >>> from specjax.wire import ReadyMessage
        >>> ReadyMessage(session=bytes(16), epoch=0, length=3).length
        3
    """

    session: _Id
    epoch: _Number
    length: _Count


class VerdictMessage(_WireMessage, frozen=True, kw_only=True, tag="verdict"):
    """The server's verdict on a draft.

    Attributes:
        session: the id of the session.
        epoch: the epoch of the session.
        sequence: the number of the draft.
        accepted: the accepted nodes below the root, from the top of the tree down.
        token: the bonus token, which follows the accepted ones.
        arrays: the hidden states by name, each ``[1 + len(accepted), ...]``: of the root and of the
            accepted tokens.
        over: "stop" or "length" if the text ends with this token, else empty.
        seconds: the duration of the verification.
        grammar_completed: whether the text satisfies its grammar as a whole. Only sent when a text
            with a grammar ends.

    Examples:
        >>> from specjax.wire import VerdictMessage
        >>> draft = {"session": bytes(16), "epoch": 0, "sequence": 1}
        >>> verdict = VerdictMessage(**draft, accepted=[1, 3], token=9)
        >>> 1 + len(verdict.accepted)  # tokens
        3
    """

    session: _Id
    epoch: _Number
    sequence: _Number
    accepted: Annotated[
        list[Annotated[int, Meta(ge=1, lt=MOST_NODES)]], Meta(max_length=MOST_NODES)
    ]
    token: _Token
    arrays: _Arrays = {}
    over: Literal["", "stop", "length"] = ""
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    grammar_completed: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Raise ValueError if an array has another number of tokens."""
        _check_arrays(self.arrays, 1 + len(self.accepted))


class ResyncMessage(_WireMessage, frozen=True, kw_only=True, tag="resync"):
    """The server's answer to a draft that does not follow the server's text.

    Attributes:
        session: the id of the session.
        epoch: the epoch of the session.
        length: the number of committed tokens of the server's text.
        tail: ``[t]`` int32 ids of the last tokens of that text. They replace all that the client
            has from position ``length - t`` on.

    Examples:
        >>> from specjax.wire import ResyncMessage, pack
        >>> resync = ResyncMessage(session=bytes(16), epoch=0, length=5, tail=pack([8, 9], "int32"))
        >>> resync.length - resync.tail.shape[0]  # the client keeps this many tokens
        3
    """

    session: _Id
    epoch: _Number
    length: _Count
    tail: ArrayBytes

    def __post_init__(self) -> None:
        """Raise ValueError if the tail is not a tail of the text."""
        _check(self.tail, "tail", "int32", axes=1, minimum=0)
        if self.tail.shape[0] > self.length:
            raise ValueError(f"tail: it has {self.tail.shape[0]} tokens, the text {self.length}")


class ForgottenMessage(_WireMessage, frozen=True, kw_only=True, tag="forgotten"):
    """The server's answer that it does not have the session, or not any more.

    The client then opens the text again, with all that is committed.

    Attributes:
        session: the id of the session.

    Examples:
        >>> from specjax.wire import ForgottenMessage
        >>> len(ForgottenMessage(session=bytes(16)).session)
        16
    """

    session: _Id


class RefusedMessage(_WireMessage, frozen=True, kw_only=True, tag="refused"):
    """The server's refusal of a message. The connection stays open.

    Attributes:
        code: the reason as one word, for programs.
        message: the reason as a sentence.
        session: the id of the session; empty if the message had none.

    Examples:
        >>> from specjax.wire import RefusedMessage
        >>> RefusedMessage(code="old_epoch", message="epoch=0: this session is at 1").code
        'old_epoch'
    """

    code: Annotated[str, Meta(max_length=32)]
    message: Annotated[str, Meta(max_length=1000)]
    session: Annotated[bytes, Meta(max_length=16)] = b""


UpMessage = OpenMessage | DraftMessage | ResumeMessage | CloseMessage
"""A message from a client."""

DownMessage = (
    OpenedMessage
    | ToldMessage
    | ReadyMessage
    | VerdictMessage
    | ResyncMessage
    | ForgottenMessage
    | RefusedMessage
)
"""A message from a server."""

_encoder = msgspec.msgpack.Encoder()
_up, _down = msgspec.msgpack.Decoder(UpMessage), msgspec.msgpack.Decoder(DownMessage)
_Decoded = TypeVar("_Decoded")


def encode(message: UpMessage | DownMessage) -> bytes:
    """Encode a message as a frame.

    Examples:
        >>> from specjax.wire import ForgottenMessage, decode_down, encode
        >>> decode_down(encode(ForgottenMessage(session=bytes(16)))).session == bytes(16)
        True
    """
    return _encoder.encode(message)


def decode_up(frame: bytes, most: int = MOST_UP) -> UpMessage:
    """Decode a frame from a client.

    Args:
        frame: the bytes of the frame.
        most: the maximum number of bytes.

    Raises:
        FrameError: The frame is too large (code 1009), it cannot be decoded, or a field is out of
            bounds (code 4400).

    Examples:
        >>> from specjax.wire import CloseMessage, decode_up, encode
        >>> decode_up(encode(CloseMessage(session=bytes(16))))
        CloseMessage(session=b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00')
    """
    return _decode(_up, frame, most)


def decode_down(frame: bytes, most: int = MOST_DOWN) -> DownMessage:
    """Decode a frame from a server. See `decode_up` for arguments and errors.

    Examples:
        >>> from specjax.wire import RefusedMessage, decode_down, encode
        >>> decode_down(encode(RefusedMessage(code="busy", message=""))).code
        'busy'
    """
    return _decode(_down, frame, most)


def _decode(decoder: "msgspec.msgpack.Decoder[_Decoded]", frame: bytes, most: int) -> _Decoded:
    if len(frame) > most:
        raise FrameError(1009, f"the frame has {len(frame)} bytes; at most {most} are allowed")
    try:
        return decoder.decode(frame)
    # ValueError: invalid UTF-8.
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(4400, str(error)) from None


def _check(
    packed: ArrayBytes, name: str, dtype: str, *, axes: int, minimum: int = 1, maximum: int = 2**18
) -> None:
    """Raise ValueError unless an array of token ids or parents has this type and size.

    Token ids must not be negative.
    """
    if (
        packed.dtype != dtype
        or len(packed.shape) != axes
        or not minimum <= packed.shape[0] <= maximum
    ):
        raise ValueError(
            f"{name}: {packed.dtype} {list(packed.shape)}; it must be {minimum} to {maximum} of"
            f" {dtype}"
        )
    if dtype == "int32" and bool(np.any(unpack(packed) < 0)):
        raise ValueError(f"{name}: it has a negative number")


def _check_arrays(arrays: dict[str, Any], count: int) -> None:
    """Raise ValueError unless each array holds hidden states of ``count`` tokens."""
    for name, packed in arrays.items():
        if packed.dtype not in ("float32", "float16", "int8") or packed.shape[0] != count:
            raise ValueError(
                f"{name}: {packed.dtype} {list(packed.shape)}; it must be floats of {count} tokens"
            )
