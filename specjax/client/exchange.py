"""The client's side of the protocol: what to send, and what an answer means. It has no socket, no clock and no drafter.

`specjax.serving.sessions` has the messages in a table. What goes wrong on the way has three remedies, and each may be used at
any time, for the server answers the same thing twice with the same answer: a draft without a verdict is sent again
(`Exchange.again`), a session is resumed over a new connection (`Exchange.hello`), and where the server has forgotten the text,
or the client has missed what it was told, the text is opened anew as far as it is committed.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from specjax import wire
from specjax.client.trees import Tree
from specjax.errors import InputError
from specjax.sampling import SAMPLING_NAMES
from specjax.sampling_params import SamplingParams
from specjax.wire.arrays import Precision
from specjax.wire.messages import NO_PARENT

Phase = Literal["away", "opening", "ready", "waiting", "over"]
"""Not connected; connected, and the server reads the text; a draft may be sent; a verdict is awaited; the text has ended."""


class ServerRefusedError(RuntimeError):
    """The server does not take this text; says why."""


class ServerBusyError(RuntimeError):
    """The server has no room for this text now."""


@dataclass(frozen=True)
class ExchangeRequest:
    """What is asked for.

    Attributes:
        prompt: token ids.
        params: the sampling parameters, whose seed fixes the text.
        target: fingerprint of the target that is meant; empty: any.
        drafter: likewise of the drafter.
        precision: of what comes down.

    Examples:
        >>> from specjax.client.exchange import ExchangeRequest
        >>> ExchangeRequest((5, 6, 7), specjax.SamplingParams(max_new_tokens=64, seed=3)).params.temperature
        0.0
    """

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    target: str = ""
    drafter: str = ""
    precision: Precision = "float16"


_WIRE_NAMES = {
    "limit": "max_new_tokens",
    **{name: name for name in SAMPLING_NAMES if name in wire.OpenMessage.__struct_fields__},
    "seed": "seed",
    "eos": "eos_token_ids",
}
"""The sampling parameters that a server can be asked for, by their names in `specjax.wire.OpenMessage`."""


def check_params(params: SamplingParams) -> None:
    """Refuse, with an InputError, parameters that the protocol has no field for: the text would be another one.

    Examples:
        >>> from specjax.client.exchange import check_params
        >>> check_params(specjax.SamplingParams(min_new_tokens=3))
        Traceback (most recent call last):
        specjax.errors.InputError: min_new_tokens=3: a client cannot ask its server for this; leave it out
    """
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _WIRE_NAMES.values() and value != field.default:
            raise InputError(f"{field.name}={value!r}: a client cannot ask its server for this; leave it out")


def _on_the_wire(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters by the names that `specjax.wire.OpenMessage` has for them."""
    values = {theirs: getattr(params, ours) for theirs, ours in _WIRE_NAMES.items()}
    return values | {"eos": None if params.eos_token_ids is None else list(params.eos_token_ids)}


@dataclass(frozen=True)
class TextOpened:
    """The server takes the text: ``bounds`` of the `Exchange` are known."""


@dataclass(frozen=True)
class FeaturesReceived:
    """What was told of tokens, in order.

    Attributes:
        tokens: T of them.
        following: the token after each.
        arrays: ``[T, …]`` each.
    """

    tokens: Sequence[int]
    following: Sequence[int]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TokensEmitted:
    """Tokens were committed.

    Attributes:
        tokens: they.
        drafted: tokens that the draft had on its longest path.
        seconds: that the server took.
    """

    tokens: Sequence[int]
    drafted: int
    seconds: float


@dataclass(frozen=True)
class SendFrame:
    """A frame that is to be sent now."""

    frame: bytes


ExchangeEvent = TextOpened | FeaturesReceived | TokensEmitted | SendFrame


@dataclass(frozen=True)
class ServerLimits:
    """What the server takes.

    Attributes:
        nodes: most nodes of a draft, the root among them.
        depth: most drafted tokens on a path.
        capacity: most tokens of a text.
        tells: arrays that are told of each token, with the shape of one token.
    """

    nodes: int
    depth: int
    capacity: int
    tells: dict[str, tuple[int, ...]]


class Exchange:
    """One text, as far as the two sides have come with it.

    Attributes:
        request: what is asked for.
        tokens: the prompt and what is committed: the target's text for these settings, at all times.
        known: how many tokens the client has been told of. When it is told of all but the last, it can draft.
        phase: where the conversation is.
        bounds: of drafts, once the server has said them.
        over: why the text has ended.
        resumes: how often the text was gone on with over another connection, or opened anew.

    Examples:
        >>> from specjax import wire
        >>> from specjax.client.exchange import Exchange, ExchangeRequest
        >>> exchange = Exchange(ExchangeRequest((5, 6), specjax.SamplingParams(max_new_tokens=8)))
        >>> wire.decode_up(exchange.hello()).prompt
        2
    """

    def __init__(
        self,
        request: ExchangeRequest,
        committed: Sequence[int] = (),
        make_nonce: Callable[[], bytes] = partial(secrets.token_bytes, 16),
    ) -> None:
        """Of a text of which, beside the prompt, some tokens are ``committed`` already. ``make_nonce`` gives 16 bytes that are
        not given twice."""
        self.request = request
        self.tokens = [*request.prompt, *committed]
        self.known = 0
        self.phase: Phase = "away"
        self.bounds: ServerLimits | None = None
        self.over: Literal["", "stop", "length"] = ""
        self.resumes = 0
        self._session: bytes | None = None
        self._epoch = self._sequence = 0
        self._sent: wire.DraftMessage | None = None  # without a verdict
        self._depth = 0
        self._hello = b""
        self._make_nonce = make_nonce

    # --- what is sent --------------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """The first frame over a connection; or over the same one, to begin anew."""
        self.resumes += bool(self._hello)
        self.phase, self._hello = "opening", self._make_hello()
        return self._hello

    def _make_hello(self) -> bytes:
        if self._session is not None:
            self._epoch += 1
            base, known = len(self.tokens), self.known
            digest = wire.digest(self.tokens)
            return wire.encode(
                wire.ResumeMessage(session=self._session, epoch=self._epoch, base=base, digest=digest, known=known)
            )
        asked = self.request
        return wire.encode(
            wire.OpenMessage(
                nonce=self._make_nonce(),
                tokens=wire.pack(self.tokens, "int32"),
                prompt=len(asked.prompt),
                **_on_the_wire(asked.params),
                target=asked.target,
                drafter=asked.drafter,
                precision=asked.precision,
                known=self.known,
            )
        )

    def draft(self, tree: Tree) -> bytes:
        """A draft below the newest token. Where the phase is "ready"."""
        assert self.phase == "ready" and self._session is not None and tree.root == self.tokens[-1]
        self._sequence += 1
        self._depth = tree.depth
        self._sent = wire.DraftMessage(
            session=self._session,
            epoch=self._epoch,
            sequence=self._sequence,
            base=len(self.tokens),
            digest=wire.digest(self.tokens),
            tokens=wire.pack(tree.tokens, "int32"),
            parents=wire.pack(np.where(tree.parents < 0, NO_PARENT, tree.parents), "uint8"),
        )
        self.phase = "waiting"
        return wire.encode(self._sent)

    def again(self) -> bytes:
        """What to send when no answer has come."""
        return wire.encode(self._sent) if self.phase == "waiting" and self._sent is not None else self._hello

    def close(self) -> bytes | None:
        """That the text is not wanted any more; None where the server does not know it."""
        return None if self._session is None else wire.encode(wire.CloseMessage(session=self._session))

    def end_if_whole(self, ends: Collection[int]) -> None:
        """Where the text was whole already when another process left it: at one of the ids that are its ``ends``, or its
        limit."""
        committed = self.tokens[len(self.request.prompt) :]
        if committed and committed[-1] in ends:
            self.phase, self.over = "over", "stop"
        elif len(committed) >= self.request.params.max_new_tokens:
            self.phase, self.over = "over", "length"

    def lost(self) -> None:
        """The connection is gone."""
        if self.phase != "over":
            self.phase = "away"

    # --- what comes ----------------------------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> list[ExchangeEvent]:
        """What a frame means.

        Raises:
            FrameError: it is no message.
            ServerRefusedError: the server will not take this text.
            ServerBusyError: it has no room now.
        """
        message = wire.decode_down(frame)
        if self.phase in ("away", "over"):
            return []
        if isinstance(message, wire.RefusedMessage):
            return self._refused(message)
        if isinstance(message, wire.OpenedMessage):
            return self._opened(message)
        if message.session != self._session:
            return []
        if isinstance(message, wire.ForgottenMessage):
            self._session, self._sent, self._epoch, self._sequence = None, None, 0, 0
            return [SendFrame(self.hello())]
        if isinstance(message, wire.ToldMessage):  # whenever it was sent: it follows from the tokens
            return self._told(message)
        if message.epoch < self._epoch:  # of a connection that is gone
            return []
        if isinstance(message, wire.ReadyMessage):
            return self._ready(message)
        if isinstance(message, wire.VerdictMessage):
            return self._verdict(message)
        return [SendFrame(self.hello())]  # ResyncMessage: the texts differ, and ours is what was committed

    def _opened(self, message: wire.OpenedMessage) -> list[ExchangeEvent]:
        if message.session == self._session or message.epoch:  # a sign of life: the text is still being read
            return []
        if self._session is not None or self.phase != "opening":  # of an OpenMessage over a connection that is gone
            return [SendFrame(wire.encode(wire.CloseMessage(session=message.session)))]
        self._session, self._epoch, self._sequence, self._sent = message.session, message.epoch, 0, None
        tells = {name: tuple(shape) for name, shape in message.tells.items()}
        self.bounds = ServerLimits(message.nodes, message.depth, message.capacity, tells)
        return [TextOpened()]

    def _told(self, message: wire.ToldMessage) -> list[ExchangeEvent]:
        end = min(message.start + message.count, len(self.tokens) - 1)
        if message.start > self.known or end <= self.known:  # something before it was lost, or all of it is known
            return []
        piece = slice(self.known - message.start, end - message.start)
        return [self._hear(end, {name: array[piece] for name, array in self._unpacked(message.arrays).items()})]

    def _unpacked(self, arrays: Mapping[str, wire.ArrayBytes]) -> dict[str, np.ndarray]:
        """What was told, as the server has said that it would be."""
        tells = {} if self.bounds is None else self.bounds.tells
        if {name: tuple(packed.shape[1:]) for name, packed in arrays.items()} != tells:
            raise wire.FrameError(4400, f"arrays: {sorted(arrays)}; must be {sorted(tells)}, of the shapes that Opened names")
        return {name: wire.unpack(packed) for name, packed in arrays.items()}

    def _hear(self, end: int, arrays: dict[str, np.ndarray]) -> FeaturesReceived:
        start, self.known = self.known, end
        return FeaturesReceived(self.tokens[start:end], self.tokens[start + 1 : end + 1], arrays)

    def _ready(self, message: wire.ReadyMessage) -> list[ExchangeEvent]:
        if self.phase != "opening" or message.epoch != self._epoch:
            return []
        news: list[ExchangeEvent] = []
        last = len(self.tokens) - 1
        if self.bounds is not None and not self.bounds.tells and self.known < last:  # the tokens say it all
            news.append(self._hear(last, {}))
        if message.length != len(self.tokens) or self.known < last:  # a part of what was told has been lost
            return [*news, SendFrame(self.hello())]
        if self._sent is None:
            self.phase = "ready"
            return news
        self.phase, self._sent = "waiting", msgspec.structs.replace(self._sent, epoch=self._epoch)
        return [*news, SendFrame(self.again())]

    def _verdict(self, message: wire.VerdictMessage) -> list[ExchangeEvent]:
        sent = self._sent
        if self.phase != "waiting" or sent is None or message.sequence != sent.sequence:
            return []
        drafted, parents = wire.unpack(sent.tokens), wire.unpack(sent.parents)
        above = [0, *message.accepted]
        is_path = all(node < len(drafted) and parents[node] == above[i] for i, node in enumerate(message.accepted))
        room = len(self.request.prompt) + self.request.params.max_new_tokens - len(self.tokens)
        if not is_path or len(message.accepted) >= room:
            raise wire.FrameError(4400, f"accepted={message.accepted}: no path of the draft, or longer than the text may be")
        arrays = self._unpacked(message.arrays)
        emitted = [*(int(drafted[node]) for node in message.accepted), message.token]
        self.tokens += emitted
        self._sent = None
        self.phase = "over" if message.over else "ready"
        self.over = message.over
        heard = self._hear(len(self.tokens) - 1, arrays)
        return [TokensEmitted(emitted, self._depth, message.seconds), heard]

    def _refused(self, message: wire.RefusedMessage) -> list[ExchangeEvent]:
        if message.session and message.session != self._session:
            return []
        if message.code == "sequence":
            return [SendFrame(self.hello())] if self.phase != "opening" else []
        if message.code in ("old_epoch", "not_ready", "busy", "over"):  # to something late, or it will be asked again
            return []
        if message.code in ("draining", "full"):
            raise ServerBusyError(message.message)
        raise ServerRefusedError(f"{message.code}: {message.message}")

    def snapshot(self) -> dict[str, Any]:
        """What is needed to go on with the text in another process."""
        request = {name: value for name, value in vars(self.request).items() if name != "params"}
        request |= _on_the_wire(self.request.params)
        return {"request": request, "committed": self.tokens[len(self.request.prompt) :]}

    @classmethod
    def restored(cls, snapshot: Mapping[str, Any]) -> "Exchange":
        """From `snapshot`. Raises `msgspec.ValidationError` where it is none."""
        stored = msgspec.convert(snapshot["request"], dict[str, Any])
        names = {theirs: ours for theirs, ours in _WIRE_NAMES.items() if theirs in stored or theirs == "limit"}
        params = {ours: stored.pop(theirs) for theirs, ours in names.items()}
        request = msgspec.convert({**stored, "params": params}, ExchangeRequest)
        return cls(request, msgspec.convert(snapshot["committed"], list[int]))
