"""The client's side of the protocol: the frames to send, and what a received frame means.

This module has no socket, no clock and no drafter. `specjax.serving.sessions` has a table of the
messages. There are three remedies for lost messages. Each is safe at any time, because the server
gives the same answer to a message that it receives twice:

- A draft without a verdict is sent again (`Exchange.again`).
- A session is resumed over a new connection (`Exchange.hello`).
- If the server does not have the session any more, or the client lacks hidden states, the text is
  opened again with all committed tokens.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from specjax import wire
from specjax.client.trees import Tree
from specjax.errors import InputError
from specjax.grammars import Grammar
from specjax.sampling import SAMPLING_NAMES
from specjax.sampling_params import SamplingParams
from specjax.wire.arrays import Precision
from specjax.wire.messages import MOST_GRAMMAR, NO_PARENT

Phase = Literal["away", "opening", "ready", "waiting", "over"]
"""The phase of a text.

away: there is no connection. opening: the server prefills the text. ready: the client may send a
draft. waiting: the client waits for the verdict. over: the text has ended.
"""


class ServerRefusedError(RuntimeError):
    """The error that the server refuses this text. The message has the server's reason."""


class ServerBusyError(RuntimeError):
    """The error that the server has no room for this text now."""


@dataclass(frozen=True)
class ExchangeRequest:
    """A request for a text.

    Attributes:
        prompt: the token ids of the prompt.
        params: the sampling parameters; the seed fixes the text.
        target: the fingerprint of the expected target; empty for any.
        drafter: the fingerprint of the expected drafter; empty for any.
        precision: the format of the hidden states that the server sends.

    Examples:
        >>> from specjax.client.exchange import ExchangeRequest
        >>> params = specjax.SamplingParams(max_new_tokens=64, seed=3)
        >>> ExchangeRequest((5, 6, 7), params).params.temperature
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
    "grammar": "grammar",
}
"""The parameters that the protocol supports, by their names in `specjax.wire.OpenMessage`."""


def check_params(params: SamplingParams) -> None:
    """Raise InputError for parameters without a field in the protocol.

    Without them, the server would generate a different text.

    Examples:
        >>> from specjax.client.exchange import check_params
        >>> check_params(specjax.SamplingParams(min_new_tokens=3))
        Traceback (most recent call last):
        specjax.errors.InputError: min_new_tokens=3: the client protocol does not support it; ...
    """
    if params.grammar is not None and len(source := _unescaped(params.grammar.source)) > (
        MOST_GRAMMAR
    ):
        raise InputError(
            f"grammar={params.grammar!r}: it has {len(source)} characters, and the client protocol"
            f" allows {MOST_GRAMMAR}; give a shorter one"
        )
    if params.grammar is not None and len(source := _unescaped(params.grammar.source)) > (
        MOST_GRAMMAR
    ):
        raise InputError(
            f"grammar={params.grammar!r}: it has {len(source)} characters, and the client protocol"
            f" allows {MOST_GRAMMAR}; give a shorter one"
        )
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _WIRE_NAMES.values() and value != field.default:
            raise InputError(
                f"{field.name}={value!r}: the client protocol does not support it; leave it out"
            )


def _on_the_wire(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters by their names in `specjax.wire.OpenMessage`."""
    values = {wire_name: getattr(params, name) for wire_name, name in _WIRE_NAMES.items()}
    grammar = values.pop("grammar")
    values |= {"eos": None if params.eos_token_ids is None else list(params.eos_token_ids)}
    # A server that does not know grammars refuses the field, so that it is left out without one.
    return values if grammar is None else values | {"grammar": _unescaped(grammar.source)}


def _unescaped(source: str) -> str:
    """Return JSON text with its characters as they are: an escape takes six in place of each."""
    text = json.dumps(json.loads(source), ensure_ascii=False)
    # Half of a pair of surrogates is only an escape.
    return source if any("\ud800" <= character <= "\udfff" for character in text) else text


@dataclass(frozen=True)
class TextOpened:
    """The event that the server accepts the text. ``bounds`` of the `Exchange` is set."""


@dataclass(frozen=True)
class FeaturesReceived:
    """The event that the hidden states of the next tokens have arrived.

    Attributes:
        tokens: the T token ids.
        following: the token after each.
        arrays: the hidden states by name, ``[T, …]`` each.
    """

    tokens: Sequence[int]
    following: Sequence[int]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TokensEmitted:
    """The event that a verdict has committed tokens.

    Attributes:
        tokens: the accepted tokens and the bonus token.
        drafted: the number of tokens on the longest path of the draft.
        seconds: the duration of the verification.
    """

    tokens: Sequence[int]
    drafted: int
    seconds: float


@dataclass(frozen=True)
class SendFrame:
    """The event that a frame must be sent now."""

    frame: bytes


ExchangeEvent = TextOpened | FeaturesReceived | TokensEmitted | SendFrame


@dataclass(frozen=True)
class ServerLimits:
    """The limits of the server.

    Attributes:
        nodes: the maximum number of nodes of a draft, with the root.
        depth: the maximum number of drafted tokens on a path.
        capacity: the maximum number of tokens of a text, prompt and output.
        tells: the arrays of hidden states that the server sends: name and shape of one token.
    """

    nodes: int
    depth: int
    capacity: int
    tells: dict[str, tuple[int, ...]]


class Exchange:
    """The state of one text on the client.

    Attributes:
        request: the request.
        tokens: the prompt and the committed tokens. At all times they are the beginning of the
            target's text.
        known: the client has the hidden states of this many tokens, counted from the first. It can
            draft when it has those of all tokens but the last.
        phase: the phase of the text.
        bounds: the limits of the server; None until the server has sent them.
        over: the reason why the text has ended; empty before.
        grammar_completed: whether the text satisfies its grammar as a whole; None without one, and
            before the end.
        resumes: how often the text was resumed over a new connection or opened again.

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
        """Start a text.

        Args:
            request: the request.
            committed: output tokens that are committed already.
            make_nonce: returns 16 bytes that are different at each call.
        """
        self.request = request
        self.tokens = [*request.prompt, *committed]
        self.known = 0
        self.phase: Phase = "away"
        self.bounds: ServerLimits | None = None
        self.over: Literal["", "stop", "length"] = ""
        self.grammar_completed: bool | None = None
        self.resumes = 0
        self._session: bytes | None = None
        self._epoch = self._sequence = 0
        self._sent: wire.DraftMessage | None = None  # the draft that has no verdict yet
        self._depth = 0
        self._hello = b""
        self._make_nonce = make_nonce

    # --- what is sent -----------------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return the first frame of a connection. It may be sent again, to start over."""
        self.resumes += bool(self._hello)
        self.phase, self._hello = "opening", self._make_hello()
        return self._hello

    def _make_hello(self) -> bytes:
        if self._session is not None:
            self._epoch += 1
            base, digest = len(self.tokens), wire.digest(self.tokens)
            return wire.encode(
                wire.ResumeMessage(
                    session=self._session,
                    epoch=self._epoch,
                    base=base,
                    digest=digest,
                    known=self.known,
                )
            )
        request = self.request
        return wire.encode(
            wire.OpenMessage(
                nonce=self._make_nonce(),
                tokens=wire.pack(self.tokens, "int32"),
                prompt=len(request.prompt),
                **_on_the_wire(request.params),
                target=request.target,
                drafter=request.drafter,
                precision=request.precision,
                known=self.known,
            )
        )

    def draft(self, tree: Tree) -> bytes:
        """Return the frame of a draft that follows the newest token. The phase must be "ready"."""
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
        """Return the frame to send again when no answer comes."""
        if self.phase == "waiting" and self._sent is not None:
            return wire.encode(self._sent)
        # The very same frame: with another nonce the server would open a second session.
        return self._hello

    def close(self) -> bytes | None:
        """Return the frame that ends the session; None if the server does not have the text."""
        return (
            None if self._session is None else wire.encode(wire.CloseMessage(session=self._session))
        )

    def end_if_whole(self, stop_token_ids: Collection[int]) -> None:
        """Set the phase to "over" if the committed tokens are the whole text.

        This happens when another process has stored a finished text. A text ends with one of the
        ``stop_token_ids``, when it has ``max_new_tokens`` tokens, or where its grammar allows no
        token. The last of these is stored.
        """
        if self.over:
            self.phase = "over"
            return
        committed = self.tokens[len(self.request.prompt) :]
        if committed and committed[-1] in stop_token_ids:
            self.phase, self.over = "over", "stop"
        elif len(committed) >= self.request.params.max_new_tokens:
            self.phase, self.over = "over", "length"

    def lost(self) -> None:
        """Record that the connection is lost."""
        if self.phase != "over":
            self.phase = "away"

    # --- what comes -------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> list[ExchangeEvent]:
        """Process a frame from the server, and return the events that it causes.

        Raises:
            FrameError: The frame is not a valid message.
            ServerRefusedError: The server refuses this text.
            ServerBusyError: The server has no room now.
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
        # Hidden states are valid whatever the epoch, because they follow from the tokens alone.
        if isinstance(message, wire.ToldMessage):
            return self._take_features(message)
        if message.epoch < self._epoch:  # it was sent over an earlier connection
            return []
        if isinstance(message, wire.ReadyMessage):
            return self._ready(message)
        if isinstance(message, wire.VerdictMessage):
            return self._verdict(message)
        # ResyncMessage: the texts differ, and the client's is the committed one.
        return [SendFrame(self.hello())]

    def _opened(self, message: wire.OpenedMessage) -> list[ExchangeEvent]:
        # It acknowledges a ResumeMessage during the prefill.
        if message.session == self._session or message.epoch:
            return []
        # It answers an OpenMessage of an earlier connection, whose session nobody uses.
        if self._session is not None or self.phase != "opening":
            return [SendFrame(wire.encode(wire.CloseMessage(session=message.session)))]
        self._session, self._epoch = message.session, message.epoch
        self._sequence, self._sent = 0, None
        tells = {name: tuple(shape) for name, shape in message.tells.items()}
        self.bounds = ServerLimits(message.nodes, message.depth, message.capacity, tells)
        return [TextOpened()]

    def _take_features(self, message: wire.ToldMessage) -> list[ExchangeEvent]:
        end = min(message.start + message.count, len(self.tokens) - 1)
        # An earlier message was lost, so that these would leave a gap; or nothing here is new.
        if message.start > self.known or end <= self.known:
            return []
        piece = slice(self.known - message.start, end - message.start)
        return [
            self._advance(
                end, {name: array[piece] for name, array in self._unpacked(message.arrays).items()}
            )
        ]

    def _unpacked(self, arrays: Mapping[str, wire.ArrayBytes]) -> dict[str, np.ndarray]:
        """Unpack hidden states, or raise FrameError if the server has not announced these."""
        tells = {} if self.bounds is None else self.bounds.tells
        if {name: tuple(packed.shape[1:]) for name, packed in arrays.items()} != tells:
            raise wire.FrameError(
                4400,
                f"arrays: {sorted(arrays)}; they must be {sorted(tells)}, with the shapes of"
                " Opened",
            )
        return {name: wire.unpack(packed) for name, packed in arrays.items()}

    def _advance(self, end: int, arrays: dict[str, np.ndarray]) -> FeaturesReceived:
        """Advance the ``known`` tokens to ``end``, and return the event for those in between."""
        start, self.known = self.known, end
        return FeaturesReceived(self.tokens[start:end], self.tokens[start + 1 : end + 1], arrays)

    def _ready(self, message: wire.ReadyMessage) -> list[ExchangeEvent]:
        if self.phase != "opening" or message.epoch != self._epoch:
            return []
        events: list[ExchangeEvent] = []
        last = len(self.tokens) - 1
        # The drafter needs tokens alone, and the client has them all.
        if self.bounds is not None and not self.bounds.tells and self.known < last:
            events.append(self._advance(last, {}))
        # Hidden states were lost on the way: the hello says which ones are missing.
        if message.length != len(self.tokens) or self.known < last:
            return [*events, SendFrame(self.hello())]
        if self._sent is None:
            self.phase = "ready"
            return events
        # The draft whose verdict was lost with the old connection is sent again over this one.
        self.phase, self._sent = "waiting", msgspec.structs.replace(self._sent, epoch=self._epoch)
        return [*events, SendFrame(self.again())]

    def _verdict(self, message: wire.VerdictMessage) -> list[ExchangeEvent]:
        sent = self._sent
        if self.phase != "waiting" or sent is None or message.sequence != sent.sequence:
            return []
        drafted, parents = wire.unpack(sent.tokens), wire.unpack(sent.parents)
        path = [0, *message.accepted]
        is_path = all(
            node < len(drafted) and parents[node] == path[i]
            for i, node in enumerate(message.accepted)
        )
        # What comes from the network is checked: a wrong index would commit other tokens.
        room = len(self.request.prompt) + self.request.params.max_new_tokens - len(self.tokens)
        if not is_path or len(message.accepted) >= room:
            raise wire.FrameError(
                4400,
                f"accepted={message.accepted}: it is no path of the draft, or exceeds"
                " max_new_tokens",
            )
        arrays = self._unpacked(message.arrays)
        emitted = [*(int(drafted[node]) for node in message.accepted), message.token]
        self.tokens += emitted
        self._sent = None
        self.phase = "over" if message.over else "ready"
        self.over = message.over
        if message.grammar_completed is not msgspec.UNSET:
            self.grammar_completed = message.grammar_completed
        features = self._advance(len(self.tokens) - 1, arrays)
        return [TokensEmitted(emitted, self._depth, message.seconds), features]

    def _refused(self, message: wire.RefusedMessage) -> list[ExchangeEvent]:
        if message.session and message.session != self._session:
            return []
        if message.code == "sequence":
            return [SendFrame(self.hello())] if self.phase != "opening" else []
        # These answer a late message, or one that the client will send again anyway.
        if message.code in ("old_epoch", "not_ready", "busy", "over"):
            return []
        if message.code in ("draining", "full"):
            raise ServerBusyError(message.message)
        raise ServerRefusedError(f"{message.code}: {message.message}")

    def snapshot(self) -> dict[str, Any]:
        """Return the data with which another process can continue the text, for JSON."""
        request = {name: value for name, value in vars(self.request).items() if name != "params"}
        request |= _on_the_wire(self.request.params)
        stored = {"request": request, "committed": self.tokens[len(self.request.prompt) :]}
        if self.grammar_completed is not None:
            stored |= {"over": self.over, "grammar_completed": self.grammar_completed}
        return stored

    @classmethod
    def restored(cls, snapshot: Mapping[str, Any]) -> "Exchange":
        """Restore a text from a `snapshot`, or raise `msgspec.ValidationError` or KeyError."""
        stored = msgspec.convert(snapshot["request"], dict[str, Any])
        names = {
            wire_name: name
            for wire_name, name in _WIRE_NAMES.items()
            if wire_name in stored or wire_name == "limit"
        }
        params = {name: stored.pop(wire_name) for wire_name, name in names.items()}
        grammar = msgspec.convert(params.pop("grammar", None), str | None)
        request = msgspec.convert({**stored, "params": params}, ExchangeRequest)
        if grammar is not None:
            grammar_of_params = Grammar.of_source(grammar)
            request = replace(request, params=replace(request.params, grammar=grammar_of_params))
        exchange = cls(request, msgspec.convert(snapshot["committed"], list[int]))
        if "grammar_completed" in snapshot:
            exchange.over = msgspec.convert(snapshot["over"], Literal["stop", "length"])
            exchange.grammar_completed = msgspec.convert(snapshot["grammar_completed"], bool)
        return exchange
